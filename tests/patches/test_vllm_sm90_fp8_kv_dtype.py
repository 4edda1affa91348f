"""The SM90 builder plans fp8 caches by their logical type; upstream does from 0.32 on."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from tests.patches.harness import PatchContract, changed, extract, patched, run

PATH = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
NAME = "vllm_sm90_fp8_kv_dtype"
# What 0.31.0 passes, as the third of three positional arguments.
PASSED = r"^            kv_cache_spec\.dtype,$"


class TestKvDtype(PatchContract):
    name = NAME
    versions = ("0.31.0",)
    upstream_fix = (
        (
            PATH,
            PASSED,
            "            torch.float8_e4m3fn if impl.use_fp8_kv_cache else torch.bfloat16,",
        ),
    )


def planned(tree, stored):
    """The type that the builder hands to its state."""

    class Impl:
        num_heads, kv_lora_rank, qk_rope_head_dim, scale = 16, 512, 0, 1.0
        topk_indices_buffer = SimpleNamespace(shape=(8, 2176))
        use_fp8_kv_cache = stored == "uint8"

    state = MagicMock()
    names = {
        "torch": SimpleNamespace(uint8="uint8", float8_e4m3fn="float8_e4m3fn"),
        "_SM90State": state,
        "FlashInferMLASparseSM90Impl": Impl,
    }
    config = MagicMock()
    config.compilation_config.static_forward_context = {"layer": SimpleNamespace(impl=Impl())}
    config.model_config.hf_text_config = SimpleNamespace(index_topk=2048, index_kpool=4)
    builder = extract(tree, PATH, "FlashInferMLASparseSM90Builder.__init__", names)
    builder(SimpleNamespace(dtype=stored), ["layer"], config, "cuda:0")
    return state.call_args.args[2]


@pytest.mark.parametrize(
    ("stored", "logical"), [("uint8", "float8_e4m3fn"), ("bfloat16", "bfloat16")]
)
def test_planned_type(real_tree, stored, logical):
    assert planned(patched(NAME, real_tree("0.31.0")), stored) == logical
    # 0.32 and 0.33 do the same without us.
    assert planned(real_tree("0.32.0"), stored) == logical
    assert planned(real_tree("0.33.0"), stored) == logical


def test_stock_0_31_plans_the_storage_type(real_tree):
    assert planned(real_tree("0.31.0"), "uint8") == "uint8"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_declared_drop_is_proven(real_tree, version):
    (report,) = run(NAME, real_tree(version)).reports
    assert (report.verdict, report.declared, report.exit_code) == (Verdict.ABSORBED, True, 0)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_a_lost_fix_defeats_the_drop(real_tree, version):
    tree = changed(real_tree(version), [(PATH, r"^            kv_plan_dtype,$",
                                         "            kv_cache_spec.dtype,")])  # fmt: skip
    (report,) = run(NAME, tree).reports
    assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)


def test_what_cannot_be_followed_is_unknown(real_tree):
    tree = changed(real_tree("0.31.0"), [(PATH, PASSED, "            plan_type(kv_cache_spec),")])
    assert ask(TestKvDtype().patch.reason, tree).outcome is Outcome.UNKNOWN
