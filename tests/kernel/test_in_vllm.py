"""The plug-in inside the real vLLM of each release, on a CPU: what is chosen, and what stops it."""

from __future__ import annotations

import json

import pytest

from imagebuild import plugin
from tests.kernel.conftest import ROOT, VERSIONS

STOCK = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend"
SM90 = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend"
CUDA = "glm53_sparse_mla.backend.CudaBackend"
TRITON = "glm53_sparse_mla.backend.TritonBackend"
CLASSES = {"unset": STOCK, "stock": STOCK, "sm90": SM90, "cuda": CUDA, "triton": TRITON}
KINDS = ("auto", "bfloat16", "fp8", "fp8_e4m3")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    plugin.write(plugin.read(ROOT / "kernel"), folder)
    return folder


@pytest.fixture(scope="module")
def answer(  # noqa: PLR0917 - one process takes all of them
    version, installed, vllm_tree, stand_in, run_python, tmp_path_factory
):
    """One process a release: importing vLLM is what takes the time."""
    home = tmp_path_factory.mktemp("job")
    broken = tmp_path_factory.mktemp("broken")
    plugin.write(plugin.read(ROOT / "kernel"), broken)
    (info,) = broken.glob("*.dist-info")
    text = (info / "entry_points.txt").read_text()
    (info / "entry_points.txt").write_text(text.replace(".register:", ".gone:"))
    (home / "text.so").write_text("no library")
    job = {
        "project": str(ROOT),
        "tree": str(vllm_tree(version)),
        "plugin": str(installed),
        "broken_plugin": str(broken),
        "library": str(stand_in("whole")),
        "libraries": {
            "no file": str(home / "absent.so"),
            "no library": str(home / "text.so"),
            "other ABI": str(stand_in("newer", "-DABI=2")),
            "lacks a function": str(stand_in("older", "-DWITHOUT_FORWARD")),
        },
    }
    (home / "job.json").write_text(json.dumps(job))
    run_python(ROOT / "tests" / "kernel" / "inside_vllm.py", home / "job.json")
    return json.loads((home / "job.answer").read_text())


def served(route, kind):
    """The class and KV type of a route; the stock class takes no plain bf16 at all."""
    if CLASSES[route] != STOCK:
        return [CLASSES[route], kind]
    return None if kind == "bfloat16" else [STOCK, "fp8_ds_mla"]


def test_exactly_the_asked_route_serves_with_its_rows(answer):
    found = answer["choices"]
    assert len(found) == 2 * len(KINDS) * (2 * len(CLASSES) - 1)
    for name, choice in found.items():
        _, route, kind, _ = name.split()
        wanted = served(route, kind)
        if wanted is None:
            assert choice.startswith("ValueError: "), name
            assert "kv_cache_dtype not supported" in choice, name
        else:
            assert choice == wanted, name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no file", "absent.so: expected the kernel library, found no file"),
        ("no library", "text.so: "),
        ("other ABI", "expected ABI 1"),
        ("lacks a function", "glm53_sparse_mla_forward"),
        ("unknown release", "expected vLLM 0.31, 0.32, 0.33, found 0.34.1"),
    ],
)
def test_a_server_that_cannot_serve_the_route_does_not_start(answer, case, words):
    said = answer["stops"][case]
    assert said.startswith("RuntimeError: GLM_MLA_ROUTE=cuda: the server must not start")
    assert words in said
    assert said.endswith("Mend that, or set GLM_MLA_ROUTE to sm90 or stock")


def test_a_plugin_that_the_loader_skipped_stops_the_choice(answer):
    for case in ("left out", "does not import"):
        assert answer["stops"][case].startswith(
            "ValueError: GLM_MLA_ROUTE=cuda needs a plug-in that has not registered"
        ), case


def test_other_reasons_to_stop(answer):
    stops = answer["stops"]
    assert "GLM_MLA_ROUTE='nonsense' names no route" in stops["unknown route"]
    assert "needs the patched vLLM" in stops["unpatched cuda"]
    assert stops["unpatched stock"] == ""
    assert "qk_rope_head_dim=0, found 512 and 64" in stops["rope"]
    assert "needs a model with a sparse indexer" in stops["no indexer"]


def test_what_the_planner_is_told(version, answer):
    is_old = version == "0.31.0"
    assert answer["backend"] == {
        "graphs": "UNIFORM_BATCH",
        "layouts": ["LBHNC"] if is_old else None,
        "alignment": None if is_old else 512,
        "blocks": [True, True, False],
        "pcp": False,
        "dcp": False,
    }


def test_operators_are_traced_and_refuse_what_the_library_cannot_see(answer):
    found = answer["operators"]
    assert found["results"] == [
        [[4, 16, 512], "torch.bfloat16", "cuda"], [[4, 16], "torch.float32", "cuda"],
    ]  # fmt: skip
    assert found["nothing"] is None
    assert found["taken"] == ""
    for name, said in found["refused"].items():
        assert said.startswith(f"ValueError: sparse MLA: {name}: expected"), name


def test_a_scale_is_filled_in_only_where_the_checkpoint_has_none(answer):
    scales = answer["scales"]
    assert scales["inert when unset"]
    assert scales["none"] == ["", ["0.003"]]
    for case in ("all", "some"):
        said, seen = scales[case]
        assert said.startswith("Refused: GLM_MOE_INPUT_SCALE: the checkpoint has calibrated scales")
        assert seen == []
    assert "it lacks some" in scales["some"][0]
    assert scales["all"][0].endswith("unset it")
    assert scales["later layer has them"].startswith("Refused: ")
    assert scales["W4A16"] == ""
    assert (
        "is for the checkpoint 'some/where/GLM', and this one is 'GLM'"
        in scales["other checkpoint"]
    )


def test_builder_conversion_and_forward_agree_with_float64(version, vllm_tree, run_python):
    """The script for a GPU, with plain torch in place of what needs one."""
    said = run_python(
        ROOT / "tests" / "gpu" / "sparse_mla_backend.py", "--site", vllm_tree(version),
        "--stubs", "--rehearse", "--heads", "16", "--route", "cuda", "--quick",
    )  # fmt: skip
    last = json.loads(said.splitlines()[-1])
    assert last["vllm"] == version
    assert last["ok"], said
    assert last["cases"] == 2
