"""A patch whose text still applies everywhere, and whose reason is gone everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.patching.evaluate import Verdict, ask, evaluate, fingerprint_of
from imagebuild.patching.patch import Outcome
from imagebuild.patching.series import load_series
from imagebuild.patching.tree import OverlayTree
from imagebuild.patching.workspace import State
from tests.patches.harness import RUNTIME, VERSIONS, changed, contexts

WRAPPER = "flashinfer/mla/_batch_mla/_wrapper.py"


@pytest.fixture
def series(tmp_path):
    file = tmp_path / "series.toml"
    file.write_text('patches = ["vllm_sm90_version_gate"]\n')
    return load_series(file, Path(__file__).parent / "retired", RUNTIME)


def judge(series, tree):
    (patch,) = series.patches
    symbols = contexts(patch.variants[0])
    locked = {str(symbol): fingerprint_of(tree, symbol) for symbol in symbols}
    return evaluate(series, tree, None, lambda name, versions: locked)


@pytest.mark.parametrize("version", VERSIONS)
def test_reason_is_gone(real_base, series, version):
    evaluation = judge(series, real_base(version))
    (report,) = evaluation.reports
    assert [edit.state for edit in report.edits] == [State.PENDING]
    assert (report.verdict, report.exit_code) == (Verdict.REASON_GONE, 1)
    assert [finding.code for finding in report.findings] == ["reason-gone"]
    patched = OverlayTree(real_base(version), evaluation.files)
    assert ask(report.patch.effect, patched).outcome is Outcome.HOLDS
    assert ask(report.patch.effect, real_base(version)).outcome is Outcome.FAILS


def test_reason_holds_with_a_flashinfer_that_lacks_the_argument(real_base, series):
    tree = changed(real_base("0.31.0"), [(WRAPPER, r"\bckv_scale_arr\b", "ckv_other")])
    (report,) = judge(series, tree).reports
    assert report.verdict is Verdict.OK


def test_without_flashinfer_it_cannot_tell(real_base, series):
    tree = OverlayTree(real_base("0.31.0"), {WRAPPER: None})
    (report,) = judge(series, tree).reports
    assert report.verdict is Verdict.REVIEW
    assert [finding.code for finding in report.findings] == ["reason-unknown"]
