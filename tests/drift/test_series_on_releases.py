"""The whole series on the three releases, by the lock: green, and every declared drop is proven."""

from __future__ import annotations

import pytest

from imagebuild.lock import read_lock
from imagebuild.patching.evaluate import Verdict, ask, evaluate
from imagebuild.patching.patch import GPU_ARCHES, Outcome
from imagebuild.patching.tree import OverlayTree
from tests.drift.field import RECIPE, audited
from tests.patches.harness import VERSIONS

DROPPED = {"vllm_sm90_fp8_kv_dtype", "vllm_glm53_eagle3_aux", "vllm_glm53_dflash2_kv_groups"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_verdict_is_green(real_base, version):
    reports = audited(real_base(version))
    assert list(reports) == [patch.name for patch in RECIPE.series().patches]
    for name, report in reports.items():
        assert report.exit_code == 0, (name, report.verdict, report.findings)
        is_dropped = name in DROPPED and version != "0.31.0"
        wanted = (Verdict.ABSORBED, True) if is_dropped else (Verdict.OK, False)
        assert (report.verdict, report.declared) == wanted, name
        assert {finding.level for finding in report.findings} <= {"info"}, name


@pytest.mark.parametrize("arch", GPU_ARCHES)
def test_each_arch_is_green_as_well(real_base, arch):
    tree = real_base("0.33.0")
    lock = read_lock(RECIPE.lock_file)
    evaluation = evaluate(RECIPE.series(), tree, arch, lock.fingerprints_for(tree.identity))
    assert evaluation.exit_code == 0


@pytest.mark.parametrize("version", VERSIONS[1:])
@pytest.mark.parametrize("name", sorted(DROPPED))
def test_a_drop_is_green_by_its_proof_alone(real_base, version, name):
    tree = real_base(version)
    (drop,) = RECIPE.series().patch(name).drops
    assert ask(drop.proof, tree).outcome is Outcome.HOLDS
    assert drop.proof.check(tree).evidence in audited(tree)[name].findings[0].message
    lost = OverlayTree(tree, dict.fromkeys(drop.proof.paths))
    lock = read_lock(RECIPE.lock_file)
    reports = evaluate(RECIPE.series(), lost, None, lock.fingerprints_for(tree.identity)).reports
    report = next(report for report in reports if report.patch.name == name)
    assert (report.verdict, report.declared, report.exit_code) == (Verdict.DEFEATED, True, 3)
