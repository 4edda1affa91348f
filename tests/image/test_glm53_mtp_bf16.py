"""What the MTP module reads from a checkpoint's index, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patches.harness import RUNTIME

spec = importlib.util.spec_from_file_location("glm53_mtp_bf16", RUNTIME / "glm53_mtp_bf16.py")
mtp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mtp)

LAYER = "model.layers.45"
BF16 = [
    "model.language_model.layers.45.mlp.experts.0.up_proj.weight",
    "model.language_model.layers.45.self_attn.o_proj.weight",
]
SCALED = "model.language_model.layers.44.mlp.experts.0.up_proj.weight_scale"


def write(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mtp.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a")})
    )
    return str(folder)


def config(model, exclude=("lm_head",), revision=None, download_dir=None):
    return SimpleNamespace(
        quant_config=SimpleNamespace(exclude_modules=list(exclude)),
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(model=model, revision=revision)
        ),
        load_config=SimpleNamespace(download_dir=download_dir),
    )


def excluded(vllm_config, prefix=LAYER):
    mtp.exclude_unscaled_layer(vllm_config, prefix)
    return vllm_config.quant_config.exclude_modules


def test_a_layer_without_scales_is_excluded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    found = excluded(config(write(tmp_path, [*BF16, SCALED])))
    assert found == ["lm_head", "model.layers.45.*"]
    (line,) = caplog.messages
    assert line.startswith("model.layers.45: ") and "holds its 2 tensors without scales" in line


@pytest.mark.parametrize(
    "more",
    [
        "mlp.experts.7.down_proj.weight_scale",
        "mlp.experts.7.down_proj.weight_scale_2",
        "mlp.shared_experts.up_proj.weight_scale_inv",
        "mlp.experts.7.down_proj.input_scale",
        "self_attn.o_proj.weight_packed",
    ],
)
def test_one_scale_keeps_the_config(tmp_path, more):
    names = [*BF16, f"model.language_model.layers.45.{more}"]
    assert excluded(config(write(tmp_path, names))) == ["lm_head"]


@pytest.mark.parametrize("more", ["self_attn.k_scale", "hc_attn_scale", "mlp.gate.scale.weight"])
def test_scales_of_other_things_do_not_count(tmp_path, more):
    names = [*BF16, f"model.language_model.layers.45.{more}"]
    assert "model.layers.45.*" in excluded(config(write(tmp_path, names)))


@pytest.mark.parametrize(
    "name", ["layers.45.a.weight", "model.layers.45.a.weight", "language_model.model.layers.45.a.w"]
)
def test_any_prefix_of_the_language_model(tmp_path, name):
    assert "model.layers.45.*" in excluded(config(write(tmp_path, [name])))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.a.weight",
        "model.layers.450.a.weight",
        "model.layers.145.a.weight",
        "model.visual.layers.45.a.weight",
        "visual.model.layers.45.a.weight",
    ],
)
def test_no_tensor_of_the_layer_is_said(tmp_path, caplog, name):
    assert excluded(config(write(tmp_path, [name]))) == ["lm_head"]
    assert "holds no tensor of it" in caplog.text


def test_the_number_comes_from_the_prefix(tmp_path):
    names = ["model.layers.61.a.weight", "model.layers.45.a.weight_scale"]
    found = config(write(tmp_path, names))
    assert excluded(found, "draft.model.layers.61") == ["lm_head", "draft.model.layers.61.*"]


def test_asking_twice_adds_once(tmp_path):
    found = config(write(tmp_path, BF16))
    excluded(found)
    assert excluded(found) == ["lm_head", "model.layers.45.*"]


def test_the_list_is_not_changed_in_place(tmp_path):
    found = config(write(tmp_path, BF16))
    before = found.quant_config.exclude_modules
    excluded(found)
    assert before == ["lm_head"]


@pytest.mark.parametrize(
    "quant_config",
    [
        None,
        SimpleNamespace(ignored_layers=["lm_head"]),
        SimpleNamespace(exclude_modules=None),
    ],
)
def test_another_quantisation_is_left_alone(tmp_path, caplog, quant_config):
    found = config(write(tmp_path, BF16))
    found.quant_config = quant_config
    before = dict(vars(quant_config)) if quant_config else None
    mtp.exclude_unscaled_layer(found, LAYER)
    assert (dict(vars(quant_config)) if quant_config else None) == before
    assert not caplog.messages


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[]", "has no table weight_map"),
        (b"{}", "has no table weight_map"),
        (b'{"weight_map": ["model.layers.45.a"]}', "has no table weight_map"),
        (b"[" * 100_000, "recursion"),
        (None, "the folder has no model.safetensors.index.json"),
    ],
    ids=["empty", "bytes", "list", "no table", "table of another kind", "deep", "absent"],
)
def test_an_unreadable_index_is_said(tmp_path, caplog, content, cause):
    if content is not None:
        (tmp_path / mtp.INDEX).write_bytes(content)
    assert excluded(config(str(tmp_path))) == ["lm_head"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name.startswith("vllm.")
    assert "cannot tell whether the checkpoint" in record.getMessage()
    assert cause in record.getMessage()


def test_an_index_that_is_a_folder_is_said(tmp_path, caplog):
    (tmp_path / mtp.INDEX).mkdir()
    assert excluded(config(str(tmp_path))) == ["lm_head"]
    assert "cannot tell" in caplog.text


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache in which two revisions of one id are stored; returns what was asked."""
    asked = []

    def try_to_load_from_cache(repo_id, filename, cache_dir=None, revision=None, repo_type=None):
        asked.append((repo_id, filename, cache_dir, revision))
        if repo_id.count("/") > 1:
            raise ValueError(f"Repo id must be in the form 'name/repo': {repo_id!r}")
        path = tmp_path / (revision or "main") / filename
        return str(path) if path.is_file() else None

    module = SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    write(tmp_path / "main", BF16)
    write(tmp_path / "quantised", [*BF16, SCALED.replace("44", "45")])
    return asked


@pytest.mark.parametrize(
    ("revision", "pattern"), [(None, ["model.layers.45.*"]), ("quantised", [])]
)
def test_a_hub_id_is_read_from_the_cache_at_its_revision(hub, revision, pattern):
    found = config("example/checkpoint", revision=revision, download_dir="/models")
    assert excluded(found) == ["lm_head", *pattern]
    assert hub == [("example/checkpoint", mtp.INDEX, "/models", revision)]


@pytest.mark.parametrize(
    ("model", "revision", "cause"),
    [
        ("example/checkpoint", "v9", "revision v9 in the local cache"),
        ("/models/absent/here", None, "Repo id must be"),
    ],
)
def test_what_the_cache_lacks_is_said(hub, caplog, model, revision, cause):
    assert excluded(config(model, revision=revision)) == ["lm_head"]
    assert cause in caplog.text


def test_without_huggingface_hub_it_is_said(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert excluded(config("example/checkpoint")) == ["lm_head"]
    assert "cannot tell" in caplog.text


def test_a_prefix_without_a_number_is_said(tmp_path, caplog):
    assert excluded(config(write(tmp_path, BF16)), "model.mtp") == ["lm_head"]
    assert "does not end with the number of a layer" in caplog.text


NAMES = st.lists(
    st.builds(
        "{}layers.{}.{}.{}".format,
        st.sampled_from(["", "model.", "model.language_model.", "visual."]),
        st.integers(0, 120),
        st.sampled_from(["mlp.up_proj", "self_attn.o_proj"]),
        st.sampled_from(["weight", "bias", "weight_scale", "input_scale", "k_scale"]),
    )
)


@given(NAMES, st.integers(0, 120))
def test_only_the_layers_own_names_decide(names, number):
    own = [n for n in names if f"layers.{number}." in n and not n.startswith("visual")]
    assert mtp.layer_tensors(names, f"model.layers.{number}") == own
    scaled = any(n.endswith((".weight_scale", ".input_scale")) for n in own)
    assert mtp.is_unscaled(own) == (bool(own) and not scaled)
