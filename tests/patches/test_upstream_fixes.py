"""Each relied-on fix is found on the three releases, and missed where it is damaged or absent."""

from __future__ import annotations

import pytest

from imagebuild.patching.evaluate import ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.tree import OverlayTree
from patches.glm53_flash.upstream_fixes import FIXES
from tests.patches.harness import VERSIONS, Recorder, changed

EXPERTS = "vllm/model_executor/layers/fused_moe/routed_experts.py"
TAIL = "vllm/models/glm5next/common/attention.py"
SAMPLER = "vllm/v1/worker/gpu/sample/sampler.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
MAMBA = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
REGISTRY = "vllm/model_executor/models/registry.py"
DRAFTERS = "vllm/v1/worker/gpu/spec_decode/"
KERNEL = "vllm/config/kernel.py"
ARGS = "vllm/engine/arg_utils.py"
BY_NAME = {fix.name: fix.probe for fix in FIXES}
BUDGET = r"^        self\.thinking_budget_state\.apply\(logits, ctx\)\n"

# name: damages, each one enough to lose the fix.
DAMAGES = {
    "vllm_moe_expert_mapping_index": [
        (EXPERTS, r"mapping_by_expert\.get\(expert_key(, expert_mapping)?\)", "expert_mapping"),
        (EXPERTS, r"= _index_expert_mapping\(expert_mapping\)", "= {}"),
    ],
    "vllm_kpool_tail_ring": [
        (TAIL, r"^        ring = self\._index_kpool .*$", "        ring = self._index_kpool"),
        # Slots for drafts, yet no whole number of pools.
        (TAIL, r"^        ring = self\._index_kpool .*$", "        ring = span"),
    ],
    "vllm_sampler_thinking_budget": [
        (SAMPLER, BUDGET, ""),
        (SAMPLER, r"apply\(logits, ctx\)$", "apply(scratch, ctx)"),
        (SAMPLER, r"self\.thinking_budget_state\.add_request\(", "bool("),
    ],
    "vllm_indexer_slot_buffer": [
        (INDEXER, r"^ +out=slot_mapping_buffer,\n", ""),
        (INDEXER, r"slot_mapping_buffer = self\.slot_mapping_buffer\[",
         "slot_mapping_buffer = torch.empty_like(slot_mapping)["),
    ],
    "vllm_mamba_hybrid_positions": [
        (MAMBA, r"^ +positions=input_batch\.positions,\n", ""),
        (MAMBA, r"positions=input_batch\.positions,", "positions=None,"),
    ],
    "vllm_dflash_drafters": [
        (REGISTRY, r'^    "DFlash2DraftModel": .*\n', ""),
        (REGISTRY, r'^    "DFlashDraftModel": \("qwen3_dflash"', '    "DFlashDraftModel": ("gone"'),
        (f"{DRAFTERS}__init__.py", r"DFlash2Speculator\(", "DFlashSpeculator("),
    ],
    "vllm_indexer_topk_flag": [
        (KERNEL, r'^    "per_row",\n', ""),
        (KERNEL, r"^    sparse_indexer_topk_backend: .*$", "    other: int = 0"),
        (ARGS, r'"--sparse-indexer-topk-backend"', '"--other"'),
        (ARGS, r"kernel_config\.sparse_indexer_topk_backend = ", "unused = "),
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BY_NAME)
def test_it_is_there(real_tree, name, version):
    answer = ask(BY_NAME[name], real_tree(version))
    assert answer.outcome is Outcome.HOLDS, answer.evidence


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, found in DAMAGES.items() for damage in found]
)
def test_damage_is_seen(real_tree, name, damage, version):
    assert ask(BY_NAME[name], changed(real_tree(version), [damage])).outcome is Outcome.FAILS


def test_every_fix_is_damaged_above():
    assert BY_NAME.keys() == DAMAGES.keys()


def test_what_0_30_lacks(real_tree):
    found = {name: ask(probe, real_tree("0.30.0")).outcome for name, probe in BY_NAME.items()}
    assert found.pop("vllm_moe_expert_mapping_index") is Outcome.FAILS
    # The file came with 0.31.
    assert found.pop("vllm_kpool_tail_ring") is Outcome.UNKNOWN
    assert set(found.values()) == {Outcome.HOLDS}
    since = {fix.name for fix in FIXES if fix.since == "0.31"}
    assert since == {"vllm_moe_expert_mapping_index", "vllm_kpool_tail_ring"}


@pytest.mark.parametrize(
    "path",
    [
        "vllm/model_executor/models/qwen3_dflash2.py",
        "vllm/model_executor/models/qwen3_dflash.py",
        f"{DRAFTERS}dflash2/speculator.py",
        f"{DRAFTERS}dflash/speculator.py",
    ],
)
def test_a_missing_drafter_file_is_seen(real_tree, path):
    tree = OverlayTree(real_tree("0.31.0"), {path: None})
    assert ask(BY_NAME["vllm_dflash_drafters"], tree).outcome is Outcome.FAILS


@pytest.mark.parametrize("version", VERSIONS)
def test_probes_name_the_files_that_they_read(real_tree, version):
    for fix in FIXES:
        recorder = Recorder(real_tree(version))
        ask(fix.probe, recorder)
        assert recorder.seen == set(fix.probe.paths), fix.name
