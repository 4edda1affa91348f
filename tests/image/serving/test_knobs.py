"""The table of knobs: sound in itself, read without surprises, documented as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serving import document, knobs, rules
from serving.errors import KnobError
from serving.knobs import DEPLOYMENTS
from serving.resolve import resolve
from serving.table import KNOBS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "image" / "runtime" / "serving"


def problems(**environ: str) -> tuple[str, ...]:
    with pytest.raises(KnobError) as caught:
        resolve({"GLM_DEPLOYMENT": "rtx6000-4x"} | environ)
    return caught.value.problems


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_defaults_of_a_deployment_contradict_nothing(deployment):
    plan = resolve({"GLM_DEPLOYMENT": deployment})
    assert plan.route == plan.profile.route
    assert not plan.notices
    assert rules.contradictions(plan.settings, plan.route, plan.cluster, {}) == []


def test_every_knob_is_used():
    """It becomes a flag or a variable, or some module asks for it by name."""
    code = "\n".join(
        path.read_text() for path in PACKAGE.glob("*.py") if path.stem not in ("table", "sources")
    )
    unused = [
        knob.name
        for knob in KNOBS.values()
        if not (knob.flag or knob.env)
        and f'"{knob.name.removeprefix("GLM_")}"' not in code
        and knob.name not in code
    ]
    assert unused == []


def test_document_equals_the_code():
    found = (ROOT / "docs" / "knobs.md").read_text()
    assert found == document.text(), "write it again: see its first lines"


def test_document_can_be_written_again(tmp_path):
    assert document.main([str(tmp_path / "knobs.md")]) == 0
    assert (tmp_path / "knobs.md").read_text() == document.text()


def test_every_refused_flag_and_knob_is_in_the_document():
    text = document.text()
    assert all(f"| `{name}` |" in text for name in KNOBS)
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == ["0", "2", "3", "4", "5", "130"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GLM_TPP", "GLM_TP"),
        ("GLM_MAX_MODEL_LENGTH", "GLM_MAX_MODEL_LEN"),
        ("GLM_ROUTE", "GLM_ROLE"),
    ],
)
def test_unknown_knob_names_the_nearest(name, meant):
    (sentence,) = problems(**{name: "4"})
    assert sentence == f"{name}='4': there is no such knob; did you mean {meant}?"


def test_a_secret_in_the_wrong_place_is_not_shown():
    (sentence,) = problems(GLM_API_KEY="hunter2")
    assert "hunter2" not in sentence
    assert "GLM_API_KEY_FILE" in sentence


def test_no_deployment_lists_them():
    with pytest.raises(KnobError, match=r"gb10-2x, gb10-4x, rtx6000-4x"):
        resolve({})
    with pytest.raises(KnobError, match=r"GLM_DEPLOYMENT='gb10' is no deployment"):
        resolve({"GLM_DEPLOYMENT": "gb10"})


def test_empty_is_unset_everywhere():
    unset = resolve({"GLM_DEPLOYMENT": "gb10-2x"})
    empty = resolve(dict.fromkeys(KNOBS, "") | {"GLM_DEPLOYMENT": "gb10-2x"})
    assert empty == unset


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("MAX_NUM_SEQS", "0", "a whole number from 1 to 1024"),
        ("MAX_NUM_SEQS", "1_0", "a whole number"),
        ("MAX_NUM_SEQS", "\uff11\uff12", "a whole number"),
        ("MAX_NUM_SEQS", "9" * 6000, "a whole number"),
        ("GPU_MEMORY_UTILIZATION", "nan", "a number from"),
        ("GPU_MEMORY_UTILIZATION", "0.9 ", "a number from"),
        ("PREFIX_CACHING", "true", "0 or 1"),
        ("TOOL_PARSER", "none", "one of glm47_failclosed, glm47"),
        ("MODEL_DIR", "models", "an absolute path"),
        ("MODEL_DIR", "/a\nb", "an absolute path"),
        ("SERVED_NAME", "--port", "letters, digits"),
        ("CLUSTER_SUBNET", "10.0.0.1/24", "subnets"),
        ("PEERS", "a,,b", "different hosts"),
        ("LIMIT_MM", '{"image":1,"image":2}', "a key stands twice"),
        ("LIMIT_MM", '{"image":NaN}', "NaN is no JSON"),
        ("LIMIT_MM", "[" * 90000, "a JSON object"),
        ("LIMIT_MM", "{image:16}", "a shell has taken its quotes"),
        ("LIMIT_MM", "'{\"image\":16}'", "the quotes around it are part of the value"),
        ("EXTRA_ARGS", '{"a":1}', "a JSON list of texts"),
        ("EXTRA_ARGS", '["--seed", 1]', "a JSON list of texts"),
        ("MOE_INPUT_SCALE", "1.0", "CHECKPOINT=SCALE"),
    ],
)
def test_malformed_value_says_what_was_expected(name, text, expected):
    found = problems(**{f"GLM_{name}": text})
    assert len(found) == 1
    assert f"GLM_{name}=" in found[0]
    assert expected in found[0]


def test_all_problems_come_at_once():
    found = problems(GLM_TP="2", GLM_MAX_NUM_SEQS="x", GLM_BLOCK_SIZE="300", GLM_FOO="1",
                     GLM_EXTRA_ARGS='["--api-key","s"]')  # fmt: skip
    assert len(found) == 4
    assert not [sentence for sentence in found if "GLM_TP" in sentence]


def test_the_variable_that_a_knob_becomes_counts_with_a_notice():
    plan = resolve({"GLM_DEPLOYMENT": "gb10-2x", "NCCL_DEBUG": "WARN"})
    assert plan.settings.text("NCCL_DEBUG") == "WARN"
    assert plan.notices == (
        "NCCL_DEBUG='WARN' is read as GLM_NCCL_DEBUG; set GLM_NCCL_DEBUG instead",
    )
    (sentence,) = problems(GLM_NCCL_DEBUG="INFO", NCCL_DEBUG="WARN")
    assert "contradict" in sentence


def test_former_names_are_noticed_and_not_read():
    plan = resolve({"GLM_DEPLOYMENT": "gb10-4x", "SPEC_METHOD": "mtp"})
    assert plan.speculation == "dflash2"
    assert plan.notices == ("SPEC_METHOD='mtp' is not read here; the knob is GLM_SPECULATION",)


def test_written_is_one_text_for_equal_values():
    assert knobs.written({"b": 1, "a": [True]}) == '{"a":[true],"b":1}'
    assert knobs.written(("a",)) == '["a"]'
    assert knobs.written(False) == "0"


class TestRoute:
    def test_former_variable_is_mapped_with_a_notice(self):
        environ = {"GLM_DEPLOYMENT": "gb10-4x", "VLLM_GLM53_CUDA_SPARSE_MLA": "1"}
        plan = resolve(environ)
        assert plan.route == "cuda"
        assert "VLLM_GLM53_CUDA_SPARSE_MLA" in plan.notices[0]
        plan = resolve(environ | {"VLLM_GLM53_CUDA_SPARSE_MLA": "0"})
        assert plan.route == "sm90"

    def test_retired_variable_is_refused(self):
        (sentence,) = problems(VLLM_GLM53_NOPE_PE_PAD="1")
        assert "no route pads the rows" in sentence

    def test_two_variables_that_disagree(self):
        (sentence,) = problems(GLM_MLA_ROUTE="stock", VLLM_GLM53_CUDA_SPARSE_MLA="1")
        assert "contradict" in sentence

    def test_unknown_route_is_one_problem(self):
        (sentence,) = problems(GLM_MLA_ROUTE="fast")
        assert "stock, sm90, cuda, triton" in sentence
