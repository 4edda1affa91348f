"""fp8 rows on capability 12: the plan check, the kernel's tile and its copies in Python agree."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import pytest

from imagebuild.patching.evaluate import Verdict, ask, evaluate, fingerprint_of
from imagebuild.patching.patch import Edit, Outcome, Symbol
from imagebuild.patching.series import Series
from imagebuild.patching.workspace import State
from tests.patches.harness import (
    RUNTIME,
    VERSIONS,
    PatchContract,
    changed,
    contexts,
    extract,
    patched,
    series_of,
    variant_of,
)

NAME = "flashinfer_mla_fp8_sm12x"
FA = "flashinfer/mla/_batch_mla/_backends/_fa_common.py"
KERNEL = "flashinfer/data/include/flashinfer/attention/mla.cuh"
MODELS = "flashinfer/data/include/flashinfer/attention/sparse_mla_sm120/model/model_type.h"
GATE = (FA, r"^        if major != 9:$", "        if major not in (9, 12):")
TILE = (KERNEL, r"\? 32 : CTA_TILE_KV;$", "? (CTA_TILE_KV < 32 ? CTA_TILE_KV : 32) : CTA_TILE_KV;")
MIRROR = (FA, r"(    if fp8_kv:\n        tile_kv =) 32$", r"\1 min(32, tile_kv)")
CAUSAL = (
    FA,
    r"(torch\.float8_e4m3fn:\n        tile_kv =) 32$",
    r"\1 min(32, 16 if _get_fa_shared_memory_limits(device)[0] < 147968 else 64)",
)
# Capability, bytes of shared memory an SM and a block.
GB10, RTX6000 = ((12, 1), 102400, 101376), ((12, 0), 102400, 101376)
ADA, A100 = ((8, 9), 102400, 101376), ((8, 0), 167936, 166912)
H200, B200 = ((9, 0), 233472, 232448), ((10, 0), 233472, 232448)
BF16, FP8 = "torch.bfloat16", "torch.float8_e4m3fn"


@pytest.fixture
def real_tree(real_base):
    """The contract's trees hold FlashInfer, too."""
    return real_base


class TestOnFlashInfer070(PatchContract):
    name = NAME
    versions = ("0.31.0", "0.32.0")
    upstream_fix = (GATE, TILE)


class TestOnFlashInfer072(PatchContract):
    name = NAME
    versions = ("0.33.0",)
    upstream_fix = (GATE, TILE, MIRROR, CAUSAL)


class Kind(str):
    """Stands for torch.dtype."""


TORCH = SimpleNamespace(
    dtype=Kind,
    int32=Kind("torch.int32"),
    float16=Kind("torch.float16"),
    bfloat16=Kind(BF16),
    float8_e4m3fn=Kind(FP8),
)


class Unsupported(ValueError):  # noqa: N818
    """Stands for FlashInfer's own error."""


def names(device):
    capability, per_sm, per_block = device
    return {
        "torch": TORCH,
        "_BackendPlanUnsupportedError": Unsupported,
        "get_compute_capability": lambda _device: capability,
        "is_sm90a_supported": lambda _device: capability == (9, 0),
        "_get_fa_shared_memory_limits": lambda _device: (per_sm, per_block),
    }


def has_mirror(tree):
    return fingerprint_of(tree, Symbol(FA, "_generated_fa_shared_bytes")) is not None


def plan(tree, device, kv, kpe=0, backend="fa2"):
    """Runs the real check of FlashInfer."""
    also = ("_generated_fa_shared_bytes",) if has_mirror(tree) else ()
    check = extract(tree, FA, "_validate_generated_fa_plan", names(device), also)
    offsets = SimpleNamespace(dtype=TORCH.int32, numel=lambda: 3)
    check(
        backend=backend,
        device="cuda:0",
        qo_indptr=offsets,
        kv_indptr=offsets,
        kv_indices=offsets,
        kv_len_arr=SimpleNamespace(dtype=TORCH.int32, numel=lambda: 2),
        head_dim_ckv=512,
        head_dim_kpe=kpe,
        q_data_type=TORCH.bfloat16,
        kv_data_type=Kind(kv),
        output_dtype=TORCH.bfloat16,
        scale_mode="kv-per-tensor" if kv == FP8 else "default",
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("device", [GB10, RTX6000])
def test_capability_12_plans_both_kinds_of_rows(real_tree, version, device):
    tree = patched(NAME, real_tree(version))
    plan(tree, device, FP8)
    plan(tree, device, BF16)
    plan(tree, device, BF16, kpe=64)


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_refuses_capability_12(real_tree, version):
    with pytest.raises(ValueError, match=r"requires an SM90 \(Hopper\) device, got SM121"):
        plan(real_tree(version), GB10, FP8)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_with_rope_stay_refused_for_they_do_not_fit(real_tree, version):
    with pytest.raises(ValueError, match="requires an SM90"):
        plan(patched(NAME, real_tree(version)), GB10, FP8, kpe=64)
    assert sizes()._shared_bytes(1, 16, 64, fp8=True) > GB10[2]


PLANS = itertools.product([ADA, A100, H200, B200, GB10], ["fa2", "fa3"], [0, 64], [BF16, FP8])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("device", "backend", "kpe", "kv"), [p for p in PLANS if p != (GB10, "fa2", 0, FP8)]
)
def test_all_else_is_answered_as_before(real_tree, *, version, device, backend, kpe, kv):
    def answer(tree):
        try:
            return plan(tree, device, kv, kpe, backend)
        except ValueError as error:
            return type(error).__name__, str(error)

    assert answer(patched(NAME, real_tree(version))) == answer(real_tree(version))


def sizes():
    return importlib.import_module(f"patches.glm53_flash.{NAME}")


@pytest.mark.parametrize(
    ("stages", "tile", "kpe", "fp8", "size"),
    [
        (1, 16, 0, True, 91680),
        (1, 32, 0, True, 117312),
        (1, 16, 64, True, 101888),
        (1, 16, 0, False, 84512),
        (1, 16, 64, False, 92704),
        (2, 32, 0, True, 168576),
    ],
)
def test_sizes_are_those_of_the_compiler(*, stages, tile, kpe, fp8, size):
    # sizeof(SharedStorageQKVO<...>) by nvcc 13.0 for sm_120a on mla.cuh of 0.7.2.post1, 2026-11-29.
    assert sizes()._shared_bytes(stages, tile, kpe, fp8=fp8) == size


@pytest.mark.parametrize("per_sm", [92672, 102400, 147967, 147968, 167936, 221696, 233472])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("kpe", [0, 64])
@pytest.mark.parametrize("fp8", [False, True])
def test_mirror_changes_for_fp8_on_small_parts_only(real_tree, *, per_sm, backend, kpe, fp8):
    def mirror(tree):
        function = extract(tree, FA, "_generated_fa_shared_bytes", names(GB10))
        return function(backend, 512, kpe, fp8, per_sm)

    stock, ours = mirror(real_tree("0.33.0")), mirror(patched(NAME, real_tree("0.33.0")))
    if backend == "fa2" and fp8 and per_sm < 147968:
        assert (stock, ours) == {0: (117312, 91680), 64: (129536, 101888)}[kpe]
    else:
        assert ours == stock


@pytest.mark.parametrize(
    ("device", "kv", "key", "is_lost"),
    [
        (GB10, FP8, 16, True),  # a boundary of tiles of 16, not of 32
        (GB10, FP8, 32, True),
        (GB10, FP8, 24, False),
        (GB10, BF16, 16, True),
        (H200, FP8, 16, False),
        (H200, FP8, 32, True),
        (A100, BF16, 16, False),
    ],
)
def test_causal_check_follows_the_tile(real_tree, *, device, kv, key, is_lost):
    # 24 heads: a cluster of 128 rows ends inside the sixth of 8 queries, which sees `key` last.
    def check(tree):
        bound = extract(tree, FA, "_validate_fa_causal_tile_bound", names(device))
        bound([8], [key + 3], 24, "fa2", Kind(kv), "cuda:0")

    tree = patched(NAME, real_tree("0.33.0"))
    if not is_lost:
        check(tree)
        return
    with pytest.raises(Unsupported, match=f"key={key}, "):
        check(tree)
    if (device, kv, key) == (GB10, FP8, 16):
        check(real_tree("0.33.0"))


def judged(tree, edits):
    """Evaluates the patch with other edits, on a tree whose context is the locked one."""
    patch = series_of(NAME).patch(NAME)
    variant = dataclasses.replace(variant_of(patch, tree), edits=tuple(edits))
    naive = dataclasses.replace(patch, variants=(variant,))
    found = {str(symbol): fingerprint_of(tree, symbol) for symbol in contexts(variant)}
    series = Series((naive,), {}, (), RUNTIME)
    (report,) = evaluate(series, tree, None, lambda _name, _versions: found).reports
    return report


SEED_GATE = Edit(
    label="seed's gate", path=FA, anchor="        if major != 9:\n",
    text="        if major not in (9, 12):\n", scope="_validate_generated_fa_plan",
)  # fmt: skip
SEED_TILE = Edit(
    label="seed's tile", path=KERNEL, scope="BatchMLAPagedAttention",
    anchor="std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 : CTA_TILE_KV;",
    text="std::is_same_v<DTypeKV, __nv_fp8_e4m3> && CTA_TILE_KV >= 32 ? 32 : CTA_TILE_KV;",
)  # fmt: skip


def test_f1_gate_and_tile_alone_are_green_by_text_and_defeated_on_0_33(real_tree):
    tree = real_tree("0.33.0")
    report = judged(tree, [SEED_GATE, SEED_TILE])
    # All that text can say: each anchor matches once, and everything compiles.
    assert [edit.state for edit in report.edits] == [State.PENDING, State.PENDING]
    assert not any(finding.code == "syntax" for finding in report.findings)
    assert report.verdict is Verdict.DEFEATED
    (message,) = [f.message for f in report.findings if f.code == "no-effect"]
    assert "needs {shared_bytes} shared-memory bytes per block" in message
    # What the server would say, after it has loaded the weights.
    gate_and_tile = changed(tree, [GATE, TILE])
    expected = "fa2 MLA needs 117312 shared-memory bytes per block, but this device supports 101376"
    with pytest.raises(Unsupported, match=expected):
        plan(gate_and_tile, GB10, FP8)
    plan(gate_and_tile, GB10, BF16)


def test_f1_the_same_edits_on_flashinfer_0_7_0_plan(real_tree):
    plan(changed(real_tree("0.31.0"), [GATE, TILE]), GB10, FP8)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_edit_is_needed(real_tree, version):
    tree = real_tree(version)
    edits = variant_of(series_of(NAME).patch(NAME), tree).edits
    assert judged(tree, edits).verdict is Verdict.OK
    for left_out in edits:
        report = judged(tree, [edit for edit in edits if edit is not left_out])
        assert report.verdict is Verdict.DEFEATED, left_out.label


@pytest.mark.parametrize(
    ("expression", "outcome"),
    [
        ("std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? std::min(CTA_TILE_KV, 32u) : CTA_TILE_KV",
         Outcome.HOLDS),
        ("std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 16 : CTA_TILE_KV", Outcome.FAILS),
        ("std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 /* CTA_TILE_KV > 32 */ : CTA_TILE_KV",
         Outcome.FAILS),
        ("CTA_TILE_KV", Outcome.FAILS),
        ("tile_of<DTypeKV>()", Outcome.UNKNOWN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_the_tile_is_read_by_its_value(real_tree, version, expression, outcome):
    ours = r"std::is_same_v<DTypeKV, __nv_fp8_e4m3> && CTA_TILE_KV > 32 \? 32 : CTA_TILE_KV"
    tree = changed(patched(NAME, real_tree(version)), [(KERNEL, ours, expression)])
    assert ask(series_of(NAME).patch(NAME).effect, tree).outcome is outcome


def test_a_launch_that_ignores_the_tile_is_seen(real_tree):
    stock = r"/\*CTA_TILE_Q_=\*/64, EFF_CTA_TILE_KV,"
    tree = changed(patched(NAME, real_tree("0.31.0")), [(KERNEL, stock, "64, CTA_TILE_KV * 2,")])
    answer = ask(series_of(NAME).patch(NAME).effect, tree)
    assert answer.outcome is Outcome.FAILS
    assert "the kernel takes 117312 bytes a block" in answer.evidence


def test_f2_the_stock_family_is_noted(real_tree):
    (note,) = series_of(NAME).patch(NAME).notes
    for version in VERSIONS:
        assert ask(note, real_tree(version)).outcome is Outcome.HOLDS
    without = changed(real_tree("0.31.0"), [(MODELS, r"GLM53_NOPE, DOTS3", "DOTS3")])
    assert ask(note, without).outcome is Outcome.FAILS
