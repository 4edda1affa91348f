"""How the field checks a patch, beside how this project does, for the cases of docs/drift.md."""

from __future__ import annotations

import dataclasses
import enum
import functools
from pathlib import Path

from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from imagebuild.patching.evaluate import (
    PatchReport,
    Verdict,
    contexts_of,
    evaluate,
    fingerprint_of,
)
from imagebuild.patching.patch import Edit, Patch, Variant
from imagebuild.patching.series import Series
from imagebuild.patching.tree import OverlayTree, Tree

RECIPE = load_recipe("glm53-flash")
RUNTIME = RECIPE.root / "image" / "runtime"


class Said(enum.Enum):
    """What a check of text says; the first two are its green."""

    APPLIES = "applies"
    APPLIED = "applied"
    FAILS = "fails"


def text_only(patch: Patch, tree: Tree) -> Said:
    """What a recipe says that counts text in whole files: of its newest form, whatever the release.

    An edit is applied where its new text is in the file, and applies where its anchor is there as
    often as declared. A file that is copied over upstream's always lands.
    """
    variant = patch.variants[-1]
    found = {_edit(edit, tree) for edit in variant.edits}
    found |= {Said.APPLIES for _file in variant.files}
    return next(said for said in (Said.FAILS, Said.APPLIES, Said.APPLIED) if said in found)


def _edit(edit: Edit, tree: Tree) -> Said:
    if not tree.exists(edit.path):
        return Said.FAILS
    text = tree.read(edit.path).decode()
    if edit.text in text:
        return Said.APPLIED
    return Said.APPLIES if text.count(edit.anchor) == edit.count else Said.FAILS


def marker(tree: Tree, path: str, text: str) -> Said:
    """What a recipe says that looks for a string in a file afterwards."""
    return Said.APPLIED if text in tree.read(path).decode() else Said.FAILS


def judge(patch: Patch, tree: Tree, seen: Tree, runtime: Path = RUNTIME) -> PatchReport:
    """What this project says of one patch, whose context was last looked at on `seen`."""

    def fingerprints(_name: str, versions: str) -> dict[str, str]:
        variant = next(one for one in patch.variants if one.versions == versions)
        found = {str(symbol): fingerprint_of(seen, symbol) for symbol in contexts_of(variant)}
        return {symbol: value for symbol, value in found.items() if value is not None}

    series = Series((patch,), {patch.name: ""}, (), runtime)
    (report,) = evaluate(series, tree, None, fingerprints).reports
    return report


def alone(patch: Patch, number: int, versions: str) -> Patch:
    """The patch with one of its variants for all of `versions`, and no declared drop."""
    only = dataclasses.replace(patch.variants[number], versions=versions)
    return dataclasses.replace(patch, variants=(only,), drops=())


def with_edits(patch: Patch, versions: str, *edits: Edit, keep_absorbed: bool = True) -> Patch:
    """The same claim with other edits: probes and reason are ours, the text is not."""
    variant = Variant(versions=versions, edits=edits, relies_on=patch.variants[0].relies_on)
    absorbed = patch.absorbed if keep_absorbed else None
    return dataclasses.replace(patch, variants=(variant,), drops=(), absorbed=absorbed)


@functools.lru_cache(maxsize=8)
def audited(tree: Tree) -> dict[str, PatchReport]:
    """The whole series on a real release, by the lock, as the audit does it."""
    lock = read_lock(RECIPE.lock_file)
    identity = lock.identify(tree.identity)
    known = OverlayTree(tree, {}, identity)
    evaluation = evaluate(RECIPE.series(), known, None, lock.fingerprints_for(identity))
    return {report.patch.name: report for report in evaluation.reports}


def ours(name: str, tree: Tree) -> tuple[Verdict, bool]:
    """Verdict of a patch of the series, which must be green, and whether it is declared."""
    report = audited(tree)[name]
    assert report.exit_code == 0, (name, report.verdict, report.findings)
    return report.verdict, report.declared


def codes(report: PatchReport) -> list[str]:
    """What was found, in order."""
    return [finding.code for finding in report.findings if finding.level != "info"]


def said(report: PatchReport) -> str:
    """All messages of a report."""
    return "\n".join(finding.message for finding in report.findings)
