"""F1 to F4 of docs/drift.md: the text fits, and the reason or the effect is gone."""

from __future__ import annotations

import dataclasses
import re

import pytest

from imagebuild.lock import read_lock
from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Edit, Outcome
from imagebuild.patching.tree import OverlayTree
from imagebuild.patching.workspace import State
from patches.glm53_flash import flashinfer_mla_fp8_sm12x as fp8
from patches.glm53_flash import vllm_glm53_reasoning_always_parsed as reasoning
from tests.drift import naive
from tests.drift.field import (
    RECIPE,
    Said,
    alone,
    audited,
    codes,
    judge,
    ours,
    said,
    text_only,
    with_edits,
)
from tests.patches.harness import VERSIONS, changed
from tests.patches.retired.vllm_sm90_version_gate import PATCH as VERSION_GATE

FA = "flashinfer/mla/_batch_mla/_backends/_fa_common.py"
KERNEL = "flashinfer/data/include/flashinfer/attention/mla.cuh"
PARSER = "vllm/parser/glm47_moe.py"
AT_ONCE = (Verdict.OK, Verdict.OK, Verdict.DEFEATED)


class TestF1SharedMemoryTwice:
    """FlashInfer 0.7.2 computes the kernel's shared memory a second time, in Python."""

    gate = Edit(label="gate", path=FA, anchor="        if major != 9:\n",
                text="        if major not in (9, 12):\n")  # fmt: skip
    tile = Edit(label="tile", path=KERNEL, anchor="__nv_fp8_e4m3> ? 32 : CTA_TILE_KV;\n",
                text="__nv_fp8_e4m3> && CTA_TILE_KV > 32 ? 32 : CTA_TILE_KV;\n")  # fmt: skip
    # The seed asks less than we do: that these rows fit, whatever else changes.
    claim = dataclasses.replace(fp8.PATCH, effect=fp8.PATCH.absorbed)
    patch = with_edits(claim, naive.SINCE_31, gate, tile, keep_absorbed=False)

    @pytest.mark.parametrize(("version", "verdict"), list(zip(VERSIONS, AT_ONCE, strict=True)))
    def test_gate_and_tile_alone(self, real_base, version, verdict):
        tree = real_base(version)
        assert text_only(self.patch, tree) is Said.APPLIES
        # Accepted by a person on that very release: the effect is asked all the same.
        report = judge(self.patch, tree, seen=tree)
        assert report.verdict is verdict
        assert {edit.state for edit in report.edits} == {State.PENDING}
        if verdict is Verdict.DEFEATED:
            assert report.exit_code == 3
            assert codes(report) == ["no-effect"]
            assert "_generated_fa_shared_bytes says 117312, the kernel takes 91680" in said(report)
            assert "shared-memory bytes per block, but this device supports" in said(report)

    def test_only_the_copies_in_python_decided(self, real_base):
        """The files that the two edits change match in both releases; the header is even equal."""
        old, new = real_base("0.31.0"), real_base("0.33.0")
        assert old.read(KERNEL) == new.read(KERNEL)
        copies = [edit for edit in fp8.PATCH.variants[1].edits
                  if edit not in fp8.PATCH.variants[0].edits]  # fmt: skip
        assert len(copies) == 2
        mended = changed(new, [(FA, "^" + re.escape(one.anchor), one.text) for one in copies])
        assert judge(self.patch, mended, seen=mended).verdict is Verdict.OK

    def test_our_variant_of_before_is_defeated_too(self, real_base):
        report = judge(alone(fp8.PATCH, 0, naive.SINCE_31), real_base("0.33.0"),
                       seen=real_base("0.31.0"))  # fmt: skip
        assert report.verdict is Verdict.DEFEATED
        # Its context had changed as well, which alone would have been a review.
        assert codes(report) == ["context-changed", "no-effect"]

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours(self, real_base, version):
        assert ours("flashinfer_mla_fp8_sm12x", real_base(version)) == (Verdict.OK, False)


class TestF2StockRouteAppeared:
    """The stock backend of capability 12 learned rows without rope in 0.31, outside of Python."""

    @pytest.mark.parametrize("version", ["0.30.0", *VERSIONS])
    def test_list_with_hopper_first(self, real_base, version):
        tree = real_base(version)
        assert text_only(naive.SM90_FIRST, tree) is Said.APPLIES
        report = judge(naive.SM90_FIRST, tree, seen=real_base("0.30.0"))
        assert report.is_applied
        if version == "0.30.0":
            assert (report.verdict, codes(report)) == (Verdict.OK, [])
            return
        assert (report.verdict, report.exit_code) == (Verdict.REASON_GONE, 1)
        assert codes(report)[0] == "reason-gone"
        assert "GLM53_NOPE" in said(report)

    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_binary_says_so_too(self, version):
        """Some 50 MB of a wheel, so only where the whole wheel is at hand; see test_builds.py."""
        from imagebuild.sources.cache import Cache
        from imagebuild.sources.wheel import WheelTree

        with Cache(offline=True) as cache:
            pin = read_lock(RECIPE.lock_file).base(version).wheel("vllm", "linux/amd64")
            path = cache.blob(pin.sha256)
        if path is None:
            pytest.skip(f"vllm {version} is not in the cache as a whole")
        with WheelTree(path) as tree:
            data = tree.read(naive.LIBRARY)
        stock = OverlayTree(tree, {naive.LIBRARY: data})
        claim = dataclasses.replace(naive.SM90_FIRST, reason=naive.BINARY_REASON)
        report = judge(claim, stock, seen=stock)
        assert (report.verdict, codes(report)) == (Verdict.REASON_GONE, ["reason-gone"])
        # As 0.30.0 has it; its own binary is one more of those 50 MB.
        before = OverlayTree(tree, {naive.LIBRARY: data.replace(naive.NEW_CHECK, naive.OLD_CHECK)})
        assert judge(claim, before, seen=before).verdict is Verdict.OK
        unknown = OverlayTree(tree, {naive.LIBRARY: data.replace(naive.NEW_CHECK, b"")})
        report = judge(claim, unknown, seen=unknown)
        assert (report.verdict, codes(report)) == (Verdict.REVIEW, ["reason-unknown"])

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours_claims_a_route_and_names_the_stock_one(self, real_base, version):
        assert ours("vllm_mla_sm90_on_sm12x", real_base(version)) == (Verdict.OK, False)
        report = audited(real_base(version))["vllm_mla_sm90_on_sm12x"]
        assert [f.message.partition(":")[0] for f in report.findings if f.code == "note"] == [
            "as far as Python shows, capability 12 has a stock route for this model"
        ]


class TestF3GateThatNeverCloses:
    """More of it, with the FlashInfer that would need it, in tests/patches/test_version_gate.py."""

    @pytest.mark.parametrize("version", VERSIONS)
    def test_version_gate(self, real_base, version):
        tree = real_base(version)
        assert text_only(VERSION_GATE, tree) is Said.APPLIES
        report = judge(VERSION_GATE, tree, seen=tree)
        assert (report.verdict, report.exit_code) == (Verdict.REASON_GONE, 1)
        assert report.is_applied

    def test_ours_has_no_such_patch(self):
        assert VERSION_GATE.name not in [patch.name for patch in RECIPE.series().patches]


class TestF4FixedForOthersOnly:
    """0.32 ignores the switch for templates without one; ours has one."""

    patch = with_edits(
        reasoning.PATCH,
        naive.SINCE_31,
        Edit(label="always", path=PARSER, anchor="        self.thinking_enabled = (\n",
             text="        self.thinking_enabled = True or (\n"),
    )  # fmt: skip
    # As upstream's own template: all that it looks for, and no switch.
    without_switch = (
        "[gMASK]<sop><|system|>Reasoning Effort: Max"
        "<tool_call><arg_key><arg_value><|assistant|><think>"
    )

    @pytest.mark.parametrize("version", VERSIONS)
    def test_one_line_anchor(self, real_tree, version):
        tree = real_tree(version)
        assert text_only(self.patch, tree) is Said.APPLIES
        report = judge(self.patch, tree, seen=real_tree("0.31.0"))
        expected = Verdict.OK if version == "0.31.0" else Verdict.REVIEW
        assert report.verdict is expected
        assert set(codes(report)) == (set() if expected is Verdict.OK else {"context-changed"})

    @pytest.mark.parametrize("version", VERSIONS[1:])
    def test_dropping_it_would_be_wrong(self, real_tree, version, monkeypatch):
        tree = real_tree(version)
        asked = reasoning.PATCH.absorbed
        assert b"def _glm53_always_thinks(" in tree.read(PARSER)
        assert ask(asked, tree).outcome is Outcome.FAILS
        monkeypatch.setattr(reasoning, "_TEMPLATE", self.without_switch)
        assert ask(asked, tree).outcome is Outcome.HOLDS
        assert judge(reasoning.PATCH, tree, seen=tree).verdict is Verdict.ABSORBED

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours(self, real_base, version):
        assert ours("vllm_glm53_reasoning_always_parsed", real_base(version)) == (
            Verdict.OK, False,
        )  # fmt: skip
