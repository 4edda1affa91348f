"""A folder of whole upstream files: put in on the base it was made from, and nowhere else."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from imagebuild.errors import BrokenError, UsageError
from imagebuild.patching.evaluate import Verdict, evaluate
from imagebuild.patching.fork import load_fork
from imagebuild.patching.series import Series
from imagebuild.patching.tree import DirTree, Identity, OverlayTree
from tests.support import site, toy

NAME, COMMIT = "vllm_core_forks", "0123abcd4"
FORKED = {toy.ENGINE: site.ENGINE.replace("12", "90"), "vllm/core/extra.py": "EXTRA = 1\n"}


def write(folder: Path, *, commit: str = COMMIT, version: str = "0.31.0") -> Path:
    root = folder / NAME
    lines = [f'schema = 1\nversion = "{version}"\ncommit = "{commit}"\n[files]']
    for path, text in FORKED.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        known = site.MODULES.get(path)
        before = hashlib.sha256(known.encode()).hexdigest() if known else ""
        lines.append(f'"{path}" = "{before}"')
    (root / "fork.toml").write_text("\n".join(lines) + "\n")
    return root


def series(folder: Path, *more: object) -> Series:
    patch, doc = load_fork(folder)
    found = toy.series(patch, *more)  # type: ignore[arg-type]
    return dataclasses.replace(found, docs={**found.docs, NAME: doc})


@pytest.fixture
def tree(tmp_path: Path) -> OverlayTree:
    root = tmp_path / "site"
    site.make_site(root)
    return OverlayTree(DirTree(root), {}, Identity("0.31.0", COMMIT + "99"))


def judged(wanted: Series, tree: OverlayTree):
    return evaluate(wanted, tree, "sm_120", lambda _name, _versions: {})


def test_it_takes_the_place_of_the_files_of_its_base(tmp_path: Path, tree: OverlayTree) -> None:
    evaluation = judged(series(write(tmp_path)), tree)
    (report,) = evaluation.reports
    assert (report.verdict, report.findings) == (Verdict.OK, [])
    assert evaluation.files == {path: text.encode() for path, text in FORKED.items()}


def test_another_commit_is_red_though_the_files_are_the_same(
    tmp_path: Path, tree: OverlayTree
) -> None:
    (report,) = judged(series(write(tmp_path, commit="fffffff00")), tree).reports
    assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)
    assert (
        f"commit {COMMIT}99; fork.toml says 0.31.0, commit fffffff00" in report.findings[-1].message
    )


def test_without_a_commit_the_version_decides(tmp_path: Path, tree: OverlayTree) -> None:
    assert judged(series(write(tmp_path, commit="")), tree).exit_code == 0
    other = write(tmp_path / "other", commit="", version="0.30.0")
    assert judged(series(other), tree).exit_code == 3


def test_another_file_is_drift_on_any_release(tmp_path: Path, tree: OverlayTree) -> None:
    changed = site.ENGINE.replace("helper", "helped").encode()
    for version in ("0.29.0", "0.31.0", "0.99.0"):
        other = OverlayTree(tree, {toy.ENGINE: changed}, Identity(version, COMMIT))
        (report,) = judged(series(write(tmp_path)), other).reports
        assert report.verdict is Verdict.DRIFTED
        assert (
            "exists upstream with other content than what was forked" in report.findings[0].message
        )


@pytest.mark.parametrize("first", [True, False])
def test_an_edit_of_a_forked_file_is_a_collision(
    tmp_path: Path, tree: OverlayTree, first: bool
) -> None:
    edit = toy.patch("vllm_engine_ceiling", toy.CEILING)
    fork = series(write(tmp_path)).patches[0]
    both = (edit, fork) if first else (fork, edit)
    wanted = toy.series(*both)
    reports = evaluate(wanted, tree, "sm_120", toy.locked_for(wanted, tree)).reports
    assert [one.verdict for one in reports] == [Verdict.OK, Verdict.COLLISION]


def test_apply_and_revert(tmp_path: Path, tree: OverlayTree) -> None:
    root = tmp_path / "site"
    before = site.picture(root)
    wanted = series(write(tmp_path, commit=""))
    toy.apply(root, wanted)
    assert (root / toy.ENGINE).read_text() == FORKED[toy.ENGINE]
    again = toy.apply(root, wanted)
    assert again.written == ()
    toy.engine.revert(root)
    assert site.picture(root) == before
    with pytest.raises(BrokenError):
        toy.apply(root, series(write(tmp_path / "other", commit="", version="0.30.0")))
    assert site.picture(root) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: (root / "fork.toml").unlink(), "expected the record of a fork"),
        (lambda root: (root / "fork.toml").write_text("schema = 2\n"), "expected schema = 1"),
        (lambda root: (root / "fork.toml").write_text("["), "expected TOML"),
        (lambda root: (root / "more.py").write_text(""), "more.py that it does not list"),
        (lambda root: (root / toy.ENGINE).unlink(), f"{toy.ENGINE} missing"),
        (lambda root: (root / "fork.toml").write_text(
            'schema = 1\nversion = "1"\n[files]\n"../x" = ""\n'), "expected [files]"),
        (lambda root: (root / "fork.toml").write_text(
            'schema = 1\nversion = 1\n[files]\n"x" = ""\n'), "expected strings"),
    ],
)  # fmt: skip
def test_a_record_that_does_not_hold(tmp_path: Path, change, said: str) -> None:
    root = write(tmp_path)
    change(root)
    with pytest.raises(UsageError) as caught:
        load_fork(root)
    assert said in str(caught.value)
