"""F7, F8, F11 and F12 of docs/drift.md: plug-ins, markers and binaries."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Drop, Outcome
from imagebuild.patching.tree import OverlayTree
from imagebuild.verify import Group, fatbin, flashkda
from patches.glm53_flash import vllm_glm53_dflash2_kv_groups as kv_groups
from patches.glm53_flash import vllm_glm53_eagle3_aux as eagle3
from patches.glm53_flash import vllm_sm90_fp8_kv_dtype as kv_dtype
from patches.glm53_flash.upstream_fixes import FIXES
from tests.drift import naive
from tests.drift.field import RECIPE, Said, alone, codes, judge, marker, ours, said, text_only
from tests.patches.harness import VERSIONS, changed

MODEL = "vllm/models/glm5next/common/model.py"
TAIL = "vllm/models/glm5next/common/attention.py"
TAIL_FIX = next(fix for fix in FIXES if fix.name == "vllm_kpool_tail_ring")
KEYS = '                quant_method = "W4A16_NVFP4"\n'


class TestF7InputScaleUnused:
    """From 0.30 on a checkpoint of weights alone is served in a mode without input scales."""

    @pytest.mark.parametrize("version", ["0.30.0", *VERSIONS])
    def test_the_hooks_are_there_and_mean_nothing(self, real_tree, version):
        tree = real_tree(version)
        for name in (f"class {naive.MOE}(", '"w2_input_scale"', "process_weights_after_loading"):
            assert marker(tree, naive.MODELOPT, name) is Said.APPLIED
        report = judge(naive.INPUT_SCALE, tree, seen=tree)
        assert (report.verdict, report.exit_code) == (Verdict.REASON_GONE, 1)
        assert "served as W4A16_NVFP4" in said(report)

    def test_it_is_needed_where_upstream_does_not_look(self, real_tree):
        tree = real_tree("0.31.0")
        before = tree.read(naive.MODELOPT).decode()
        assert before.count(KEYS) == 1
        old = OverlayTree(
            tree, {naive.MODELOPT: before.replace(KEYS, " " * 16 + "pass\n").encode()}
        )
        assert naive.mode(old, None) == "NVFP4"
        assert judge(naive.INPUT_SCALE, old, seen=old).verdict is Verdict.OK

    def test_calibrated_checkpoints_keep_their_scales(self, real_tree):
        for version in VERSIONS:
            assert naive.mode(real_tree(version), {"num_bits": 4}) == "NVFP4"

    @pytest.mark.parametrize("version", VERSIONS)
    def test_declared_with_its_proof_it_is_green(self, real_tree, version):
        reason = naive.INPUT_SCALE.reason

        def unused(tree):
            answer = reason.check(tree)
            flipped = {Outcome.HOLDS: Outcome.FAILS, Outcome.FAILS: Outcome.HOLDS}
            return dataclasses.replace(answer, outcome=flipped[answer.outcome])

        proof = dataclasses.replace(reason, check=unused)
        drop = Drop(versions=">=0.30", proof=proof, sentence="Served as W4A16 (vllm#54427).")
        patch = dataclasses.replace(naive.INPUT_SCALE, variants=(), drops=(drop,))
        report = judge(patch, real_tree(version), seen=real_tree(version))
        assert (report.verdict, report.declared, report.exit_code) == (Verdict.ABSORBED, True, 0)


class TestF8PluginThatDoesNotImport:
    """0.33 takes a name away that a plug-in imports, and passes one more argument."""

    def test_what_it_relies_on(self, real_tree):
        seen = real_tree("0.31.0")
        assert judge(naive.BACKEND, seen, seen=seen).verdict is Verdict.OK
        for version in VERSIONS:
            # All that a check of text can know: the slot and the way in are there.
            tree = real_tree(version)
            assert marker(tree, naive.REGISTRY, "def register_backend(") is Said.APPLIED
            assert marker(tree, naive.REGISTRY, "FLASHINFER_MLA_SPARSE_SM120 = ") is Said.APPLIED

    def test_0_32_takes_a_class_away(self, real_tree):
        report = judge(naive.BACKEND, real_tree("0.32.0"), seen=real_tree("0.31.0"))
        assert (report.verdict, report.exit_code) == (Verdict.REVIEW, 1)
        assert f"{naive.CONFIG}::Glm5NextConfig is not in the tree" in said(report)

    def test_0_33_takes_the_name_away(self, real_tree):
        report = judge(naive.BACKEND, real_tree("0.33.0"), seen=real_tree("0.31.0"))
        assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)
        assert f"{naive.TORCH_UTILS}::is_quantized_kv_cache is not in the tree" in said(report)
        assert "can be imported: False; do_kv_cache_update gets {7}" in said(report)

    @pytest.mark.parametrize("version", VERSIONS)
    def test_ours_stops_the_start_instead(self, real_base, version):
        # That a server without the plug-in's backend does not start is shown beside the patch.
        assert ours("vllm_mla_route_switch", real_base(version)) == (Verdict.OK, False)


class TestF11Markers:
    """Checks that look for our own text are red where upstream has the fix."""

    dropped = (kv_dtype.PATCH, kv_groups.PATCH, eagle3.PATCH)

    @pytest.mark.parametrize("version", VERSIONS[1:])
    @pytest.mark.parametrize("patch", dropped, ids=[patch.name for patch in dropped])
    def test_text_is_red_where_upstream_has_it(self, real_base, patch, version):
        tree = real_base(version)
        assert text_only(patch, tree) is Said.FAILS
        assert ours(patch.name, tree) == (Verdict.ABSORBED, True)
        # As nobody had declared it: a person must look, and nothing is broken.
        report = judge(alone(patch, 0, naive.SINCE_31), tree, seen=tree)
        assert (report.verdict, report.declared, report.exit_code) == (Verdict.ABSORBED, False, 1)
        assert codes(report) == ["absorbed"]

    @pytest.mark.parametrize("patch", dropped, ids=[patch.name for patch in dropped])
    def test_text_is_green_where_it_is_needed(self, real_base, patch):
        plain = dataclasses.replace(patch.variants[0], files=())
        assert text_only(dataclasses.replace(patch, variants=(plain,)), real_base("0.31.0")) is (
            Said.APPLIES
        )
        assert ours(patch.name, real_base("0.31.0")) == (Verdict.OK, False)

    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_marker_of_the_tail_ring(self, real_tree, version):
        assert marker(real_tree(version), TAIL, "GLM53-KPOOL-TAIL-RING") is Said.FAILS
        assert ask(TAIL_FIX.probe, real_tree(version)).outcome is Outcome.HOLDS

    def test_a_name_passes_where_nobody_patched(self, real_base):
        tree = real_base("0.32.0")
        assert marker(tree, MODEL, "SupportsEagle3") is Said.APPLIED
        # And goes on passing where the states are lost.
        lost = changed(tree, [(MODEL, r"^            aux_hidden_states\.append\(final_aux\)$",
                               "            pass")])  # fmt: skip
        assert marker(lost, MODEL, "SupportsEagle3") is Said.APPLIED
        report = judge(eagle3.PATCH, lost, seen=lost)
        assert (report.verdict, report.declared, report.exit_code) == (Verdict.DEFEATED, True, 3)
        assert codes(report) == ["drop-not-proven"]


class TestF12StageWithoutReason:
    """The base holds the fixed FlashKDA from 0.31 on; 0.33 has another file with the same code."""

    @pytest.mark.parametrize("version", ["0.30.0", *VERSIONS])
    def test_the_stage(self, real_tree, version):
        tree = real_tree(version)
        data = tree.read(flashkda.LIBRARY)
        # The operators are what a check of text can find, and the broken one has them too.
        assert all(schema.encode() in data for schema in flashkda.SCHEMAS)
        report = judge(naive.STAGE, tree, seen=tree)
        wanted = (Verdict.OK, 0) if version == "0.30.0" else (Verdict.REASON_GONE, 1)
        assert (report.verdict, report.exit_code) == wanted
        if version != "0.30.0":
            assert "the fixed one" in said(report)

    def test_another_file_with_the_same_code(self, real_tree, tmp_path):
        libraries = {v: real_tree(v).read(flashkda.LIBRARY) for v in VERSIONS}
        files = {v: hashlib.sha256(data).hexdigest() for v, data in libraries.items()}
        assert files["0.31.0"] == files["0.32.0"] != files["0.33.0"]
        codes_of = {flashkda.code_digest(fatbin.device_code(data)) for data in libraries.values()}
        assert len(codes_of) == 1
        place = tmp_path / flashkda.LIBRARY
        place.parent.mkdir(parents=True)
        place.write_bytes(libraries["0.33.0"])
        # With only 0.31's file known, the code tells; with neither known it stays open, never red.
        first = tuple(one for one in flashkda.KNOWN if one.file == files["0.31.0"])
        for known, words, found in (
            (first, "the fixed one, the sm_120 device code of vLLM 0.31.0", []),
            ((), "sha256 " + files["0.33.0"][:12], ["flashkda-unknown"]),
        ):
            group = Group("FlashKDA")
            flashkda.check(group, tmp_path, "sm_120", RECIPE.platforms, known)
            assert group.summary.startswith(words)
            assert [(f.code, f.level) for f in group.findings] == [(c, "warning") for c in found]
