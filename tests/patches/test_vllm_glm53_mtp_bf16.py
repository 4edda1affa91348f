"""The MTP layer joins ModelOpt's exclusions before its block is built; the list then does it."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagebuild.deep import mtp
from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.tree import OverlayTree
from tests.patches.harness import RUNTIME, VERSIONS, PatchContract, changed, extract, patched, run
from tests.support.upstream import Stand, upstream

PATH = "vllm/models/glm5next/common/mtp.py"
QUANT = "vllm/model_executor/layers/quantization/modelopt.py"
NAME = "vllm_glm53_mtp_bf16"
LAYER = "model.layers.45"


class TestMtp(PatchContract):
    name = NAME
    # As vLLM does for other drafters: the block is built from a config of its own.
    upstream_fix = (
        (
            PATH,
            r"(Glm5NextDecoderLayer\(\n +)vllm_config=vllm_config,",
            r"\1vllm_config=draft_config(vllm_config),",
        ),
    )


class QuantConfig:
    """ModelOpt's base, with the real check for exclusion."""

    packed_modules_mapping: dict = {}  # noqa: RUF012 - as upstream has it

    def __init__(self, tree):
        self.exclude_modules = ["model.layers.3.self_attn", "lm_head"]
        names = {
            "fnmatch": fnmatch.fnmatch,
            "is_layer_skipped": lambda prefix, ignored, mapping: prefix in ignored,
        }
        owner = extract(tree, QUANT, "ModelOptQuantConfigBase.is_layer_excluded", names)
        self.is_layer_excluded = owner.is_layer_excluded.__get__(self)


def build(tree, folder, monkeypatch):
    """Builds the MTP layer; returns what its block saw excluded, part by part."""
    monkeypatch.syspath_prepend(str(RUNTIME))
    monkeypatch.delitem(sys.modules, "glm53_mtp_bf16", raising=False)
    seen = []

    def block(*, vllm_config, prefix, **_words):
        check = vllm_config.quant_config.is_layer_excluded
        seen.append({part: check(f"{prefix}.{part}") for part in ("mlp.experts", "self_attn.o")})
        seen.append({name: check(name) for name in ("model.layers.4.mlp", "model.layers.44.mlp")})

    config = SimpleNamespace(
        hidden_size=8, rms_norm_eps=1e-5, index_topk=2048, index_kpool=4, num_hidden_layers=45
    )
    draft = SimpleNamespace(
        model=str(folder), revision=None, hf_config=config, hf_text_config=config
    )
    vllm_config = SimpleNamespace(
        quant_config=QuantConfig(tree),
        speculative_config=SimpleNamespace(draft_model_config=draft),
        load_config=SimpleNamespace(download_dir=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
    )
    names = {
        **dict.fromkeys(("torch", "RMSNorm", "SharedHead", "nn", "current_platform"), Stand()),
        "get_sparse_topk_buffer_width": lambda config: 2176,
        "Glm5NextDecoderLayer": block,
    }
    scope = "Glm5NextMultiTokenPredictorLayer.__init__"
    extract(tree, PATH, scope, names)(vllm_config, LAYER)
    sys.modules.pop("glm53_mtp_bf16", None)
    return seen


def index(folder, *names):
    table = {f"model.language_model.layers.{name}": "a.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


BF16 = ("45.mlp.experts.0.up_proj.weight", "44.mlp.experts.0.up_proj.weight_scale")
NOTHING = {"model.layers.4.mlp": False, "model.layers.44.mlp": False}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bf16_layer_is_built_unquantised(real_tree, tmp_path, monkeypatch, version):
    index(tmp_path, *BF16)
    tree = patched(NAME, real_tree(version))
    assert build(tree, tmp_path, monkeypatch) == [
        {"mlp.experts": True, "self_attn.o": True},
        NOTHING,
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_quantised_layer_stays_quantised(real_tree, tmp_path, monkeypatch, version):
    index(tmp_path, *BF16, "45.mlp.experts.0.up_proj.weight_scale")
    tree = patched(NAME, real_tree(version))
    assert build(tree, tmp_path, monkeypatch) == [
        {"mlp.experts": False, "self_attn.o": False},
        NOTHING,
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_builds_it_for_packed_weights(real_tree, tmp_path, monkeypatch, version):
    index(tmp_path, *BF16)
    first, _others = build(real_tree(version), tmp_path, monkeypatch)
    assert first == {"mlp.experts": False, "self_attn.o": False}


def test_the_module_enters_the_tree(real_tree):
    files = run(NAME, real_tree("0.31.0")).files
    assert files["glm53_mtp_bf16.py"] == (RUNTIME / "glm53_mtp_bf16.py").read_bytes()


def test_effect_needs_the_call_before_the_block_and_a_module_that_adds(real_tree):
    after = patched(NAME, real_tree("0.33.0"))
    call = r"^        glm53_mtp_bf16\.exclude_unscaled_layer\(vllm_config, prefix\)\n"
    late = changed(after, [(PATH, call, ""), (PATH, r"^( +)is_mtp_layer=True,\n        \)\n",
        r"\g<0>        glm53_mtp_bf16.exclude_unscaled_layer(vllm_config, prefix)\n")])  # fmt: skip
    empty = b"def exclude_unscaled_layer(vllm_config, prefix): pass\n"
    hollow = OverlayTree(after, {"glm53_mtp_bf16.py": empty})
    effect = TestMtp().patch.effect
    assert [ask(effect, tree).outcome for tree in (late, hollow)] == [Outcome.FAILS] * 2


def test_a_list_without_wildcards_defeats_it(real_tree):
    tree = changed(
        real_tree("0.33.0"), [(QUANT, r"fnmatch\(prefix, wildcard_pattern\)", "match(prefix)")]
    )
    assert run(NAME, tree).reports[0].verdict is Verdict.DEFEATED


def test_upstream_exclusion_by_more_than_the_list_is_absorbed(real_tree):
    other = (
        QUANT,
        r"^        if len\(self\.exclude_modules\) == 0:",
        "        if not self.unscaled:",
    )
    tree = changed(real_tree("0.33.0"), [other])
    assert run(NAME, tree).reports[0].verdict is Verdict.ABSORBED


def from_cache(repo_id, filename, cache_dir=None, revision=None):
    """The hub's cache as it is laid out on disk."""
    repo = Path(cache_dir, f"models--{repo_id.replace('/', '--')}")
    commit = (repo / "refs" / (revision or "main")).read_text()
    path = repo / "snapshots" / commit / filename
    return str(path) if path.is_file() else None


REAL = {
    "glm53_mtp_bf16",
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_deep_probe_on_the_real_configuration(real_tree, monkeypatch, version):
    hub = SimpleNamespace(try_to_load_from_cache=from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with upstream(patched(NAME, real_tree(version)), REAL):
        assert mtp.probe() == (
            "4 parts of a bf16 MTP layer excluded, folder and hub snapshot; "
            "a quantised layer, other layers and a lost index untouched"
        )


def test_deep_probe_sees_a_list_that_is_not_asked(real_tree, monkeypatch):
    hub = SimpleNamespace(try_to_load_from_cache=from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    wild = (QUANT, r"if fnmatch\(prefix, wildcard_pattern\):", "if prefix == wildcard_pattern:")
    tree = changed(patched(NAME, real_tree("0.33.0")), [wild])
    with upstream(tree, REAL), pytest.raises(RuntimeError, match="without scales in a folder"):
        mtp.probe()
