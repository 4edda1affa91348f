"""F5, F6, F9 and F10 of docs/drift.md: the text fits, and the code around it is another one."""

from __future__ import annotations

import ast
import dataclasses
import functools
from types import SimpleNamespace

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Edit, NewFile, Outcome, Symbol, Variant
from imagebuild.patching.structure import find, parse
from imagebuild.patching.tree import OverlayTree
from imagebuild.patching.workspace import State
from patches.glm53_flash import vllm_glm53_deterministic_topk as topk
from patches.glm53_flash import vllm_indexer_topk_init as fill
from patches.glm53_flash import vllm_pdl_off_sm12x as pdl
from patches.glm53_flash.upstream_fixes import FIXES
from tests.drift import naive
from tests.drift.field import (
    Said,
    alone,
    codes,
    judge,
    marker,
    ours,
    said,
    text_only,
    with_edits,
)
from tests.patches.harness import VERSIONS

INDEXER = "vllm/models/glm5next/nvidia/sparse_indexer.py"
EXPERT_FIX = next(fix for fix in FIXES if fix.name == "vllm_moe_expert_mapping_index")


class TestF5IndexerRewritten:
    """0.32 merges over ranks behind the top-k, and 0.33 lets every row start at column 0."""

    filled = with_edits(
        fill.PATCH,
        naive.SINCE_31,
        Edit(label="call", path=INDEXER, anchor="pool_topk = torch.empty(\n", count=2,
             text="pool_topk = torch.full(\n"),
        Edit(label="value", path=INDEXER, anchor="(num_rows, select_k), dtype=torch.int32, ",
             text="(num_rows, select_k), -1, dtype=torch.int32, ", count=2),
    )  # fmt: skip

    @pytest.mark.parametrize(("seen", "version"), [("0.31.0", "0.32.0"), ("0.32.0", "0.33.0")])
    def test_fill_wants_a_look_each_time(self, real_tree, seen, version):
        assert text_only(self.filled, real_tree(version)) is Said.APPLIES
        report = judge(self.filled, real_tree(version), seen=real_tree(seen))
        assert (report.verdict, report.exit_code) == (Verdict.REVIEW, 1)
        assert codes(report).count("context-changed") == len(codes(report)) > 0
        assert judge(self.filled, real_tree(seen), seen=real_tree(seen)).verdict is Verdict.OK

    @pytest.mark.parametrize("version", VERSIONS[1:])
    def test_an_order_before_the_merge_is_lost(self, real_tree, version):
        patch, tree = alone(topk.PATCH, 0, naive.SINCE_31), real_tree(version)
        assert text_only(patch, tree) is Said.APPLIES
        # Accepted by a person, even so.
        report = judge(patch, tree, seen=tree)
        assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)
        assert codes(report) == ["no-effect"]
        assert "the right pools, in any order" in said(report)

    @pytest.mark.parametrize("version", VERSIONS[:2])
    def test_columns_of_the_wrong_release_are_seen(self, real_tree, version):
        """A rule that computes the columns itself is right on one side of 0.33 only."""
        variant = topk.PATCH.variants[0 if version == "0.31.0" else 1]
        bounds = {"0.31.0": ("chunk.cu_seqlen_ks", "chunk.cu_seqlen_ke"),
                  "0.32.0": ("cu_seqlen_ks", "cu_seqlen_ke")}[version]  # fmt: skip
        lines = [" " * 16 + f"{name},\n" for name in bounds]
        if version == "0.32.0":
            lines = [" " * 4 + line for line in lines]
        zero = Edit(
            label="rows from column 0", path=INDEXER, scope="sparse_attn_indexer_kpool",
            anchor="".join(lines) + lines[0][: len(lines[0]) - len(lines[0].lstrip())] + "topk_dst",
            text="torch.zeros_like(" + bounds[0] + "),\n" + bounds[1] + " - " + bounds[0]
            + ",\ntopk_dst",
        )  # fmt: skip
        patch = alone(topk.PATCH, topk.PATCH.variants.index(variant), variant.versions)
        patch = _with(patch, zero)
        report = judge(patch, real_tree(version), seen=real_tree(version))
        assert report.verdict is Verdict.DEFEATED
        assert "prefill is told" in said(report)

    @pytest.mark.parametrize("name", ["vllm_indexer_topk_init", topk.PATCH.name])
    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours(self, real_base, version, name):
        assert ours(name, real_base(version)) == (Verdict.OK, False)


def _with(patch, edit):
    (variant,) = patch.variants
    return dataclasses.replace(
        patch, variants=(dataclasses.replace(variant, edits=(*variant.edits, edit)),)
    )


class TestF6StaleFile:
    """0.32 reads a 3-D weight of a named expert as that expert's; a file of 0.31 does not."""

    index = naive.patch(
        "vllm_moe_index",
        Variant(
            versions=naive.ALL,
            edits=(
                Edit(label="index", path=naive.EXPERTS, text=naive.INDEXED, kind="insert_after",
                     anchor="expert_mapping = self.get_expert_mapping(include_fused=True)\n"),
            ),
            relies_on=(Symbol(naive.EXPERTS, "RoutedExperts.load_weights"),),
        ),
        EXPERT_FIX.probe,
        EXPERT_FIX.probe,
    )  # fmt: skip

    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_old_hunk_is_there_already(self, real_tree, version):
        tree = real_tree(version)
        assert text_only(self.index, tree) is Said.APPLIED
        report = judge(self.index, tree, seen=tree)
        assert (report.verdict, report.exit_code) == (Verdict.ABSORBED, 1)

    @pytest.mark.parametrize("version", VERSIONS[1:])
    def test_a_whole_file_is_refused(self, real_tree, version, tmp_path):
        (tmp_path / "routed_experts.py").write_bytes(real_tree("0.31.0").read(naive.EXPERTS))
        fork = naive.patch(
            "vllm_moe_fork",
            Variant(versions=naive.ALL,
                    files=(NewFile(source="routed_experts.py", path=naive.EXPERTS),)),
            EXPERT_FIX.probe,
            EXPERT_FIX.probe,
        )  # fmt: skip
        assert text_only(fork, real_tree(version)) is Said.APPLIES
        report = judge(fork, real_tree(version), seen=real_tree("0.31.0"), runtime=tmp_path)
        assert (report.verdict, report.exit_code) == (Verdict.DRIFTED, 3)
        assert "exists upstream with other content" in said(report)

    @pytest.mark.parametrize("version", VERSIONS[1:])
    def test_what_the_stale_file_does(self, real_tree, version):
        tree = real_tree(version)
        stale = OverlayTree(tree, {naive.EXPERTS: real_tree("0.31.0").read(naive.EXPERTS)})
        # Both the marker and the probe of the old fault are content with it.
        assert marker(stale, naive.EXPERTS, naive.INDEXED) is Said.APPLIED
        assert ask(EXPERT_FIX.probe, stale).outcome is Outcome.HOLDS
        assert naive.loaded(tree) == [(1, "whole")]
        assert naive.loaded(stale) == [(0, "whole, slice 0"), (1, "whole, slice 1")]
        watch = naive.patch(
            "vllm_moe_named_expert",
            Variant(versions=naive.ALL, relies_on=self.index.variants[0].relies_on),
            EXPERT_FIX.probe,
            naive.LOADS_BY_NAME,
        )
        assert judge(watch, tree, seen=tree).verdict is Verdict.OK
        assert judge(watch, tree, seen=real_tree("0.31.0")).verdict is Verdict.REVIEW
        report = judge(watch, stale, seen=tree)
        assert (report.verdict, codes(report)) == (
            Verdict.DEFEATED, ["context-changed", "no-effect"],
        )  # fmt: skip

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours_asserts_the_fix_and_patches_nothing_there(self, real_tree, version):
        assert ask(EXPERT_FIX.probe, real_tree(version)).outcome is Outcome.HOLDS


class TestF9MovedPlanning:
    """0.33 plans the KV cache in another file; the old one stays, and so does the line."""

    def test_the_line_is_in_another_function_now(self, real_tree):
        old, new = real_tree("0.31.0"), real_tree("0.33.0")
        assert text_only(naive.LESS_MEMORY, old) is Said.APPLIES
        assert text_only(naive.LESS_MEMORY, new) is Said.APPLIES
        assert judge(naive.LESS_MEMORY, old, seen=old).verdict is Verdict.OK
        report = judge(naive.LESS_MEMORY, new, seen=old)
        assert (report.verdict, report.exit_code) == (Verdict.MOVED, 3)
        assert naive.PLANNING in {finding.file for finding in report.findings}
        assert f"{naive.UTILS} has no {naive.PLAN}" in said(report)
        # What the edit was for has gone where upstream plans now.
        assert find(parse(new, naive.PLANNING), naive.PLAN) is not None

    def test_two_lines_are_too_many_even_for_text(self, real_tree):
        """In 0.32 both functions had it: loud for text, and no matter where scopes count."""
        tree = real_tree("0.32.0")
        assert text_only(naive.LESS_MEMORY, tree) is Said.FAILS
        assert judge(naive.LESS_MEMORY, tree, seen=tree).verdict is Verdict.OK

    def test_a_whole_file_is_refused(self, real_tree, tmp_path):
        (tmp_path / "utils.py").write_bytes(real_tree("0.31.0").read(naive.UTILS))
        fork = naive.patch(
            "vllm_kv_fork",
            Variant(versions=naive.ALL, files=(NewFile(source="utils.py", path=naive.UTILS),)),
            naive.LESS_MEMORY.reason,
            naive.LESS_MEMORY.reason,
        )
        new = real_tree("0.33.0")
        assert text_only(fork, new) is Said.APPLIES
        report = judge(fork, new, seen=new, runtime=tmp_path)
        assert (report.verdict, report.exit_code) == (Verdict.DRIFTED, 3)
        assert "reason-gone" in codes(report)

    def test_ours(self, real_base):
        name = "vllm_glm53_dflash2_kv_groups"
        assert ours(name, real_base("0.31.0")) == (Verdict.OK, False)
        for version in VERSIONS[1:]:
            assert ours(name, real_base(version)) == (Verdict.ABSORBED, True)


class TestF10Memoised:
    """0.33 puts @cache on the method: an edit of its source works, a patch at run time may not."""

    one_line = with_edits(
        pdl.PATCH,
        naive.SINCE_31,
        Edit(label="one line", path=naive.CUDA, anchor="        return major >= 9\n",
             text="        return 9 <= major < 12\n"),
    )  # fmt: skip
    whole = with_edits(
        pdl.PATCH,
        naive.SINCE_31,
        Edit(
            label="whole method", path=naive.CUDA,
            scope="CudaPlatformBase.is_arch_support_pdl",
            anchor="    @classmethod\n    def is_arch_support_pdl(cls) -> bool:\n",
            text="    @classmethod\n    def is_arch_support_pdl(cls) -> bool:  # not on 12\n",
        ),
    )  # fmt: skip

    def test_one_line_anchor_wants_a_look(self, real_tree):
        for version in VERSIONS:
            assert text_only(self.one_line, real_tree(version)) is Said.APPLIES
        # The field's edit names no scope, so the file is its context; ours names the method.
        for patch in (self.one_line, alone(pdl.PATCH, 0, naive.SINCE_31)):
            report = judge(patch, real_tree("0.33.0"), seen=real_tree("0.32.0"))
            assert (report.verdict, report.exit_code) == (Verdict.REVIEW, 1)
        assert f"{naive.CUDA}::CudaPlatformBase.is_arch_support_pdl changed" in said(report)

    def test_long_anchor_is_loud(self, real_tree):
        assert text_only(self.whole, real_tree("0.32.0")) is Said.APPLIES
        assert text_only(self.whole, real_tree("0.33.0")) is Said.FAILS
        report = judge(self.whole, real_tree("0.33.0"), seen=real_tree("0.32.0"))
        assert report.verdict is Verdict.DRIFTED
        assert report.edits[0].state is State.DRIFTED
        assert report.edits[0].line > 0

    @pytest.mark.parametrize(("version", "second"), [("0.32.0", False), ("0.33.0", True)])
    def test_what_a_patch_at_run_time_gets(self, real_tree, version, second):
        """The upstream method, run twice: on capability 10, then as if on 8."""
        found = find(parse(real_tree(version), naive.CUDA), "CudaPlatformBase.is_arch_support_pdl")
        assert isinstance(found, ast.FunctionDef)
        device = {"major": 10}
        cuda = SimpleNamespace(
            current_device=lambda: 0, get_device_capability=lambda _device: (device["major"], 0)
        )
        owner = ast.ClassDef("Platform", [], [], [found], [])
        owner.type_params = []  # a field that 3.12 and later want
        names = {"torch": SimpleNamespace(cuda=cuda), "cache": functools.cache}
        module = ast.fix_missing_locations(ast.Module([owner], []))
        exec(compile(module, naive.CUDA, "exec", dont_inherit=True), names)
        platform = names["Platform"]
        assert platform.is_arch_support_pdl() is True
        device["major"] = 8
        assert platform.is_arch_support_pdl() is second

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours(self, real_base, version):
        assert ours("vllm_pdl_off_sm12x", real_base(version)) == (Verdict.OK, False)
