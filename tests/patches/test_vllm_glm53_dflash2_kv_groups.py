"""A DFlash2 drafter is carried beside GLM-5.3: by ours on 0.31, by vLLM itself from 0.32 on.

vLLM's grouping and placement run here, whole modules, with stand-ins for torch.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest

from imagebuild.deep import kv_groups
from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.tree import OverlayTree
from tests.patches.harness import PatchContract, changed, patched, run
from tests.support.upstream import upstream

NAME = "vllm_glm53_dflash2_kv_groups"
UTILS = "vllm/v1/core/kv_cache_utils.py"
PLANNING = "vllm/v1/core/kv_cache_planning.py"
SPECS = "vllm/v1/kv_cache_interface.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
MODEL = "vllm/models/glm5next/common/model.py"
KNOB = "VLLM_GLM5NEXT_DRAFT_BLOCK_SIZE"
REAL = {
    "glm53_draft_kv",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
}
SIZES = {"uint8": 1, "bfloat16": 2, "float32": 4}
STUBS = {
    "torch": {name: name for name in SIZES},
    "vllm.utils.torch_utils": {"get_dtype_size": SIZES.__getitem__},
    "vllm.v1.hisparse.layout": {"get_hisparse_kv_cache_groups": lambda config, specs: None},
}
TARGET, DRAFT_ROW = 13_812_480, 5 * 1024


class TestKvGroups(PatchContract):
    name = NAME
    versions = ("0.31.0",)
    # What 0.32 did: no grouping of its own, and blocks outermost for the k-pool tail.
    upstream_fix = (
        (UTILS, r"^    elif glm5_groups := .*\n        return glm5_groups\n", ""),
        (INDEXER, r"return \(KVCacheLayout\.LBHNC,\)", "return (KVCacheLayout.BLHNC,)"),
    )


@contextlib.contextmanager
def planner(tree):
    with upstream(tree, REAL, STUBS):
        yield kv_groups._planner()


@pytest.fixture
def ours(real_tree):
    return patched(NAME, real_tree("0.31.0"))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_real_grouping_carries_a_drafter(real_tree, version):
    with upstream(real_tree(version), REAL, STUBS):
        assert kv_groups.probe() == (
            "6 groups, the last with the drafter's 5 windows; a block keeps its 13,812,736 bytes"
        )


def test_patched_grouping_carries_a_drafter(ours, monkeypatch):
    # The probe asks for both block sizes itself, whatever the caller has set.
    monkeypatch.setenv(KNOB, "128")
    with upstream(ours, REAL, STUBS):
        assert kv_groups.probe() == (
            "7 groups, the last with the drafter's 5 windows; "
            "drafts in blocks of 2304: 25,608,960 bytes a block, 6 more a request; "
            "drafts in blocks of 576: 16,761,600 bytes a block, 19 more a request"
        )


def test_stock_0_31_cannot(real_tree):
    with (
        upstream(real_tree("0.31.0"), REAL, STUBS),
        pytest.raises(RuntimeError, match=r"cannot group 5 draft layers: .* page size is not"),
    ):
        kv_groups.probe()


def placement(tree, drafts):
    """Everything that the grouping decides, as plain values."""
    with planner(tree) as module:
        plan = kv_groups._plan(module, drafts)
        memory = module._max_memory_usage_bytes_from_groups(plan.config, plan.groups)
        return (
            [(group.layer_names, repr(group.kv_cache_spec)) for group in plan.groups],
            [repr(tensor) for tensor in plan.placed.kv_cache_tensors],
            plan.size,
            memory,
        )


def test_without_a_drafter_all_is_stock(real_tree, ours):
    assert placement(ours, 0) == placement(real_tree("0.31.0"), 0)


def test_the_target_keeps_its_groups_and_regions(ours):
    alone, served = placement(ours, 0), placement(ours, 5)
    assert served[0][:-1] == alone[0]

    def regions(tensors):
        # The pool's size differs, and nothing else.
        return [text.partition("layers=")[2] for text in tensors]

    assert regions(served[1])[:-5] == regions(alone[1])


def test_each_draft_layer_has_its_region_behind_the_target(ours):
    with planner(ours) as module:
        plan = kv_groups._plan(module, 5)
    page, blocks = 2304 * 1024, 7
    drafts = plan.placed.kv_cache_tensors[-5:]
    assert [(t.layers, t.offset, t.layer_stride, t.block_stride) for t in drafts] == [
        ([f"draft.layers.{i}"], blocks * (TARGET + i * page), blocks * page, page) for i in range(5)
    ]
    assert {t.size for t in plan.placed.kv_cache_tensors} == {blocks * (TARGET + 5 * page)}


@pytest.mark.parametrize("size", [64, 1152, 2304])
def test_knob_sets_the_block(ours, monkeypatch, size):
    monkeypatch.setenv(KNOB, f" {size} ")
    with planner(ours) as module:
        plan = kv_groups._plan(module, 5)
    assert plan.groups[-1].kv_cache_spec.block_size == size
    assert plan.size == TARGET + size * DRAFT_ROW


@pytest.mark.parametrize("setting", ["0", "-64", "100", "1024", "4608", "576.0", "big", "٦٤"])
def test_a_bad_knob_stops_the_start(ours, monkeypatch, setting):
    monkeypatch.setenv(KNOB, setting)
    with planner(ours) as module, pytest.raises(ValueError, match=f"^{KNOB}=.* multiple of 64"):
        kv_groups._plan(module, 5)


def grouped(module, **draft):
    """Groups of the target with two draft layers of the given kind."""
    kv = importlib.import_module("vllm.v1.kv_cache_interface")
    owner = getattr(kv, draft.pop("kind"))
    specs = kv_groups._specs(0)
    for index in range(2):
        specs[f"draft.{index}"] = owner(
            **{"num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", **draft}
        )
    return module.get_kv_cache_groups(kv_groups._config(), specs)


def test_full_attention_drafts_take_the_targets_block(ours):
    with planner(ours) as module:
        last = grouped(module, kind="FullAttentionSpec", block_size=64)[-1]
        assert (last.layer_names, last.kv_cache_spec.block_size) == (["draft.0", "draft.1"], 2304)
        assert last.kv_cache_spec.prefix_cacheable
        with pytest.raises(ValueError, match="no multiple of its block of 100"):
            grouped(module, kind="FullAttentionSpec", block_size=100)


def test_padded_drafts_are_refused(ours):
    with planner(ours) as module, pytest.raises(ValueError, match="padded to 4194304 bytes"):
        grouped(module, kind="SlidingWindowSpec", block_size=64, sliding_window=2048,
                page_size_padded=1 << 22)  # fmt: skip


def test_the_draft_group_is_managed_as_a_window(ours):
    with planner(ours) as module:
        last = kv_groups._plan(module, 5).groups[-1]
        registry = importlib.import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
        assert registry.get_manager_class(last.kv_cache_spec).__name__ == "SlidingWindowManager"
        # Workers get it by pickle, so it must be importable by its name.
        owner = type(last.kv_cache_spec)
        assert getattr(importlib.import_module(owner.__module__), owner.__qualname__) is owner


def test_another_hybrid_model_with_plain_attention_is_stock(real_tree, ours):
    """Mamba beside full attention: no MLA, so nothing of ours may act."""

    def groups(tree):
        with planner(tree) as module:
            kv = importlib.import_module("vllm.v1.kv_cache_interface")
            mamba = kv.MambaSpec(block_size=16, shapes=((64, 64),), dtypes=("float32",))
            full = kv.FullAttentionSpec(
                block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16"
            )
            specs = {"a": mamba, "b": full, "c": mamba, "d": full}
            found = module.get_kv_cache_groups(kv_groups._config(), specs)
            return [(group.layer_names, repr(group.kv_cache_spec)) for group in found]

    assert groups(ours) == groups(real_tree("0.31.0"))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_declared_drop_is_proven(real_tree, version):
    (report,) = run(NAME, real_tree(version)).reports
    assert (report.verdict, report.declared, report.exit_code) == (Verdict.ABSORBED, True, 0)


LOST = {
    "a layout that cannot pack": (
        INDEXER, r"(class KpoolTailBackend(?:.*\n)+?.*KVCacheLayout\.)BLHNC,", r"\1LBHNC,",
    ),
    "windows in the bucket of MLA": (
        SPECS, r"^class SlidingWindowSpec\(AttentionSpec\)",
        "class SlidingWindowSpec(FullAttentionSpec)",
    ),
    "any window in one bucket": (
        SPECS, r"(class SlidingWindowSpec(?:.*\n)+?.*isinstance\(spec, )SlidingWindowSpec\)",
        r"\1AttentionSpec)",
    ),
    "a grouping of the model's own": (
        MODEL, r"^class Glm5NextForCausalLM\(\n",
        "class Glm5NextForCausalLM(\n    SupportsKVCacheGrouping,\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_condition_defeats_the_drop(real_tree, version, lost):
    (report,) = run(NAME, changed(real_tree(version), [LOST[lost]])).reports
    assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)


def test_a_lost_packing_defeats_the_drop(real_tree):
    for version, path in (("0.32.0", UTILS), ("0.33.0", PLANNING)):
        pattern = r"^    if packed_groups := _get_packed_kv_cache_groups\(.*\):$"
        tree = changed(real_tree(version), [(path, pattern, "    if packed_groups := []:")])
        assert run(NAME, tree).reports[0].verdict is Verdict.DEFEATED
        # The real code agrees with the verdict.
        with upstream(tree, REAL, STUBS), pytest.raises(RuntimeError, match="cannot group"):
            kv_groups.probe()


def test_effect_needs_the_module_and_every_sum(ours):
    effect = TestKvGroups().patch.effect
    module = ours.read("glm53_draft_kv.py").decode()
    hollow = module.replace("        return False", "        return True")
    assert hollow != module
    broken = [OverlayTree(ours, {"glm53_draft_kv.py": hollow.encode()})]
    added = r"^            \+ glm53_draft_kv\.bytes_per_block\(kv_cache_groups\)\n"
    for pattern in (
        added + r"(?=        \)\n        num_blocks)",
        r"^    kv_cache_groups = glm53_draft_kv\.without_draft\(kv_cache_groups\)\n",
        r"^        total_blocks \+= glm53_draft_kv\.blocks_per_request\(\n.*\n        \)\n",
    ):
        broken.append(changed(ours, [(UTILS, pattern, "")]))
    assert [ask(effect, tree).outcome for tree in broken] == [Outcome.FAILS] * 4
