"""Both paths select by the rule, after the merge over ranks, with bounds that fit the logits."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.tree import OverlayTree
from imagebuild.patching.workspace import State, Workspace
from tests.patches.harness import (
    RUNTIME,
    VERSIONS,
    PatchContract,
    changed,
    extract,
    patched,
    run,
    series_of,
    variant_of,
)

PATH = "vllm/models/glm5next/nvidia/sparse_indexer.py"
SCOPE = "sparse_attn_indexer_kpool"
LOGITS = "vllm/utils/deep_gemm.py"
MODULE = "glm_topk.py"
NAME = "vllm_glm53_deterministic_topk"
MERGING = ("0.32.0", "0.33.0")

STABLE_PREFILL = (PATH, r"_C\.top_k_per_row_prefill\(", "_C.stable_topk_per_row_prefill(")
STABLE_DECODE = (
    PATH,
    r"get_indexer_topk\(topk_backend\)\(",
    "get_indexer_topk(topk_backend, deterministic=True)(",
)
SORTED = (PATH, r"pool_topk\.to\(torch\.int64\)", "pool_topk.to(torch.int64).sort(dim=-1).values")
NO_ORDER = (PATH, r"^ +glm_topk\.ascending\(.*\)\n", "")


class TestDeterministicTopk(PatchContract):
    name = NAME
    upstream_fix = (STABLE_PREFILL, STABLE_DECODE, SORTED)


def outcome(kind, tree):
    return ask(getattr(TestDeterministicTopk().patch, kind), tree).outcome


# What the patched function does.


class Metadata(SimpleNamespace):
    """Stands for DeepseekV32IndexerMetadata."""


class Globals(dict):
    """Globals of the function, in which every unknown name is a mock."""

    def __missing__(self, name):
        if name.startswith("__"):
            raise KeyError(name)
        return MagicMock(name=name)


def events(tree, monkeypatch, world=1, columns=9):
    """Calls about the pools, in order: one prefill chunk, then one decode batch."""
    seen = []

    def note(what):
        return lambda *args, **words: seen.append((what, *args))

    ours = SimpleNamespace(
        prefill=note("prefill"),
        decode=lambda stock: lambda *args: (seen.append(("decode", stock)), stock(*args)),
        ascending=lambda ids, size: seen.append(("ascending", size)),
    )
    monkeypatch.setitem(sys.modules, "glm_topk", ours)
    logits, queries = MagicMock(shape=(4, columns)), MagicMock()
    queries.__getitem__.return_value.new_empty.return_value = logits
    gemm = SimpleNamespace(
        fp8_fp4_mqa_logits=lambda *args, **words: logits,
        fp8_fp4_paged_mqa_logits=lambda *args, **words: logits,
    )
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", gemm)
    chunk = MagicMock(name="chunk", local_total_seq_lens=columns, token_start=2, token_end=6)
    metadata = Metadata(
        slot_mapping=MagicMock(shape=(6,)), num_decodes=2, num_prefills=1, num_decode_tokens=2,
        max_seq_len=9999, prefill=MagicMock(max_prefill_seq_len=9999, chunks=[chunk]),
        decode=MagicMock(requires_padding=False),
    )  # fmt: skip
    torch = MagicMock()
    torch.ops._C.top_k_per_row_prefill = note("stock prefill")
    names = {
        "torch": torch,
        "glm_topk": ours,
        "as_fp32_logits": lambda logits, ends: logits,
        "mqa_logits_mx_inputs": lambda q, scale, weights: (scale, weights),
        "get_forward_context": lambda: SimpleNamespace(attn_metadata={"k": metadata}),
        "_resolve_layer_name": lambda name: name,
        "DeepseekV32IndexerMetadata": Metadata,
        "_gather_workspace_shapes": lambda *args: (1, 2),
        "current_workspace_manager": lambda: SimpleNamespace(
            get_simultaneous=lambda *args: [MagicMock(), MagicMock()]
        ),
        "PrefillRowShard": SimpleNamespace(from_metadata=lambda *args: None),
        "get_indexer_topk": lambda backend: note(f"kernel {backend}"),
        "_merge_dcp_topk_global": lambda *args, **words: seen.append(("merge", args[4])),
        "_fill_short_decode_causal_indices": lambda *args: False,
        "kpool_ops": SimpleNamespace(
            expand_pools_and_append_tail=lambda *args: (seen.append(("expand",)), MagicMock())[1]
        ),
    }
    stock = extract(tree, PATH, SCOPE, {})
    function = type(stock)(
        stock.__code__, Globals(names, __builtins__=stock.__builtins__), SCOPE, stock.__defaults__
    )
    context = {} if "dcp_world_size" not in stock.__code__.co_varnames else {
        "dcp_rank": 0, "dcp_world_size": world,
    }  # fmt: skip
    function(
        MagicMock(), "k", MagicMock(), queries,
        None, MagicMock(), MagicMock(), 128, None, 2048, 128, 1024, 64, MagicMock(),
        skip_k_cache_insert=True, index_kpool=4, positions=MagicMock(), topk_backend="per_row",
        **context,
    )  # fmt: skip
    return seen, chunk


@pytest.mark.parametrize("version", VERSIONS)
def test_both_paths_go_through_the_rule(real_tree, version, monkeypatch):
    seen, chunk = events(patched(NAME, real_tree(version)), monkeypatch, world=2)
    behind = [] if version == "0.31.0" else ["merge", "ascending"]
    assert [what for what, *_ in seen] == [
        "prefill", *behind, "expand", "decode", "kernel per_row", *behind, "expand",
    ]  # fmt: skip
    (_, logits, starts, ends, _ids, _rows, stride0, stride1, k) = seen[0]
    assert (k, stride0, stride1) == (512, logits.stride(0), logits.stride(1))
    if version != "0.33.0":
        assert (starts, ends) == (chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
    assert [size for what, *size in seen if what in ("merge", "ascending")] == [[2]] * len(
        behind
    ) * 2


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_goes_to_the_kernels(real_tree, version, monkeypatch):
    seen, _ = events(real_tree(version), monkeypatch)
    behind = [] if version == "0.31.0" else ["merge"]
    assert [what for what, *_ in seen] == [
        "stock prefill", *behind, "expand", "kernel per_row", *behind, "expand",
    ]  # fmt: skip


@pytest.mark.parametrize("version", MERGING)
def test_a_rank_without_pools_still_merges_in_order(real_tree, version, monkeypatch):
    tree = patched(NAME, real_tree(version))
    seen, _ = events(tree, monkeypatch, world=2, columns=0)
    assert [what for what, *_ in seen][:3] == ["merge", "ascending", "expand"]


def test_the_module_enters_the_tree(real_tree):
    files = run(NAME, real_tree("0.31.0")).files
    assert files[MODULE] == (RUNTIME / MODULE).read_bytes()


# What the probes say of other forms (F5).


@pytest.mark.parametrize("version", MERGING)
def test_the_edits_of_031_match_later_and_are_not_enough(real_tree, version):
    old, tree = real_tree("0.31.0"), real_tree(version)
    patch = TestDeterministicTopk().patch
    variant = variant_of(patch, old)
    workspace = Workspace(tree)
    reports = workspace.run(patch, variant, series_of(NAME).new_files(variant))
    assert {report.state for report in reports} == {State.PENDING}  # text alone says green
    assert outcome("effect", OverlayTree(tree, workspace.changed())) is Outcome.FAILS


@pytest.mark.parametrize("version", MERGING)
@pytest.mark.parametrize("indent", [8, 12])
def test_each_merge_must_be_put_in_order(real_tree, version, indent):
    path, pattern, text = NO_ORDER
    change = (path, pattern.replace(" +", f" {{{indent}}}"), text)
    tree = changed(patched(NAME, real_tree(version)), [change])
    assert outcome("effect", tree) is Outcome.FAILS


def test_order_for_another_group_does_not_count(real_tree):
    change = (PATH, r"ascending\(topk_dst, dcp_world_size\)", "ascending(topk_dst, 1)")
    tree = changed(patched(NAME, real_tree("0.33.0")), [change])
    assert outcome("effect", tree) is Outcome.FAILS


@pytest.mark.parametrize(
    ("version", "was", "now"),
    [
        ("0.33.0", r"torch\.zeros_like\(row_ends\)", "cu_seqlen_ks"),
        ("0.33.0", r"(zeros_like\(row_ends\),\n +)row_ends,", r"\1cu_seqlen_ke,"),
        ("0.31.0", r"(glm_topk\.prefill\([^\n]+\n +logits,\n +)chunk\.cu_seqlen_ks",
         r"\1torch.zeros_like(chunk.cu_seqlen_ks)"),
    ],
)  # fmt: skip
def test_bounds_of_another_layout_do_not_count(real_tree, version, was, now):
    tree = changed(patched(NAME, real_tree(version)), [(PATH, was, now)])
    assert outcome("effect", tree) is Outcome.FAILS


def test_a_layout_that_changes_below_is_seen(real_tree):
    # The indexer's text stays, the logits lose their compression.
    change = (LOGITS, r"\bmax_seqlen_k\b", "width")
    tree = changed(patched(NAME, real_tree("0.33.0")), [change])
    assert outcome("effect", tree) is Outcome.FAILS


@pytest.mark.parametrize(
    "change",
    [
        (PATH, r"glm_topk\.prefill\(", "torch.ops._C.top_k_per_row_prefill("),
        (PATH, r"glm_topk\.decode\((get_indexer_topk\(topk_backend\))\)", r"\1"),
        (PATH, r"^( +)(if index_kpool > 1:\n +pool_ids = )", r"\1topk_dst.copy_(other)\n\1\2"),
        (PATH, r"pool_topk\.to\(torch\.int64\)", "other.to(torch.int64)"),
        (MODULE, r"^    _sort_kernel\[", "    _other_kernel["),
        (MODULE, r"^( +)_select\(", r"\1_other("),
    ],
)  # fmt: skip
def test_a_path_around_the_rule_is_seen(real_tree, change):
    tree = changed(patched(NAME, real_tree("0.33.0")), [change])
    assert outcome("effect", tree) is Outcome.FAILS


def test_the_module_must_be_there(real_tree):
    after = patched(NAME, real_tree("0.32.0"))
    assert outcome("effect", OverlayTree(after, {MODULE: None})) is Outcome.FAILS
    foreign = OverlayTree(real_tree("0.32.0"), {MODULE: b"def prefill(*args): pass\n"})
    report = next(one for one in run(NAME, foreign).reports if one.patch.name == NAME)
    assert report.verdict is Verdict.DRIFTED


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("0.31.0", [STABLE_PREFILL]),
        ("0.31.0", [STABLE_DECODE]),
        ("0.33.0", [STABLE_PREFILL, STABLE_DECODE]),  # the merge gives no order
        ("0.33.0", [SORTED]),  # an order alone settles no tie
    ],
)
def test_half_a_fix_is_not_absorbed(real_tree, version, changes):
    assert outcome("absorbed", changed(real_tree(version), changes)) is Outcome.FAILS


def test_a_stable_kernel_without_a_merge_is_absorbed(real_tree):
    tree = changed(real_tree("0.31.0"), [STABLE_PREFILL, STABLE_DECODE])
    assert outcome("absorbed", tree) is Outcome.HOLDS
    assert outcome("reason", tree) is Outcome.FAILS


def test_without_the_expansions_the_answer_is_unknown(real_tree):
    tree = changed(real_tree("0.33.0"), [(PATH, r"\bexpand_pools_\w+", "other")])
    assert outcome("reason", tree) is Outcome.UNKNOWN
