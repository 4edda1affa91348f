"""Two hundred changes by a seed to real files: what is not seen, and what is a false alarm.

`python -m tests.drift.test_seeded` prints the table of docs/audit.md. CI runs a part of it.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebuild.config import ROOT
from imagebuild.patching.callers import CALLED, edges_of
from imagebuild.patching.evaluate import PatchReport, contexts_of, evaluate, fingerprint_of
from imagebuild.patching.patch import Patch, Symbol, Variant
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series
from imagebuild.patching.tree import OverlayTree, Tree
from tests.drift.field import RECIPE, RUNTIME
from tests.drift.mutations import CHANGES, NEUTRAL, Files, Target
from tests.patches.harness import VERSIONS, series_of
from tests.support.realtrees import FolderTrees, RealTrees

SEED, TOTAL = 20261129, 200
# CI runs every fifth, which visits all kinds; IMAGEBUILD_SEEDED=all runs every one.
STEP = 5
Open = Callable[[str], Tree]


@dataclass(frozen=True)
class Case:
    """One change.

    Attributes:
        number: of the case, from which all the rest follows.
        kind: see `mutations`.
        version, patch, symbol: what was changed, and whose scope it is.
        files: the changed files.
    """

    number: int
    kind: str
    version: str
    patch: str
    symbol: Symbol
    files: Files

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} of {self.symbol} in {self.version} ({self.patch})"


def patches(tree: Tree) -> list[tuple[Patch, Variant]]:
    """The patches that have a variant for a release."""
    found = ((one, select(one, tree.identity, None)) for one in RECIPE.series().patches)
    return [(one, chosen.variant) for one, chosen in found if chosen.variant]


def make(number: int, kind: str, open_: Open) -> Case:
    """The case of a number: a release, a patch and a scope where the kind can be had."""
    chance = random.Random(f"{SEED}/{number}")
    mutate = {**CHANGES, **NEUTRAL}[kind]
    for _ in range(400):
        version = chance.choice(VERSIONS)
        tree = open_(version)
        patch, variant = chance.choice(patches(tree))
        edited = sorted({Symbol(edit.path, edit.scope) for edit in variant.edits})
        symbols = [*edited, *edited, *variant.relies_on] if "caller" not in kind else edited
        target = Target(tree, variant, chance.choice(symbols))
        files = mutate(target, chance)
        if files:
            return Case(number, kind, version, patch.name, target.symbol, files)
    raise AssertionError(f"nothing in the series has a {kind}")


def cases(open_: Open, numbers: range) -> Iterator[Case]:
    kinds = list(CHANGES)
    return (make(number, kinds[number % len(kinds)], open_) for number in numbers)


def judge(name: str, tree: Tree, known: Tree) -> PatchReport:
    """The verdict on one patch behind what it needs, all of it as `lock update` found `known`."""
    series = series_of(name)

    def locked(one: str, versions: str) -> dict[str, str]:
        return _locked(series, one, versions, known)

    return evaluate(Series(series.patches, series.docs, (), RUNTIME), tree, None, locked).reports[
        -1
    ]


_KNOWN: dict[tuple[str, str, str], dict[str, str]] = {}


def _locked(series: Series, name: str, versions: str, known: Tree) -> dict[str, str]:
    key = (name, versions, known.identity.version)
    if key not in _KNOWN:
        variants = series.patch(name).variants
        variant = next(one for one in variants if one.versions == versions)
        found = {str(one): fingerprint_of(known, one) for one in contexts_of(variant)}
        known_symbols = {symbol: value for symbol, value in found.items() if value is not None}
        _KNOWN[key] = known_symbols | dict.fromkeys(edges_of(known, variant), CALLED)
    return _KNOWN[key]


def verdict(case: Case, open_: Open) -> PatchReport:
    known = open_(case.version)
    files = {path: text.encode() for path, text in case.files.items()}
    return judge(case.patch, OverlayTree(known, files), known)


def table(open_: Open, numbers: range) -> tuple[str, list[str]]:
    """Rows for the page, and the cases that are green."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    silent = []
    for case in cases(open_, numbers):
        report = verdict(case, open_)
        colour = {0: "green", 1: "yellow", 3: "red"}[report.exit_code]
        seen[case.kind][colour] += 1
        if colour == "green":
            silent.append(f"{case}: {report.verdict.value}")
    rows = [
        f"| {kind} | {sum(seen[kind].values())} | {seen[kind]['red']} | {seen[kind]['yellow']} "
        f"| {seen[kind]['green']} |"
        for kind in CHANGES
    ]
    return "\n".join(rows), silent


def _numbers() -> range:
    return range(0, TOTAL, 1 if os.environ.get("IMAGEBUILD_SEEDED") == "all" else STEP)


def test_nothing_that_changes_a_scope_stays_green(real_base: Open) -> None:
    _rows, silent = table(real_base, _numbers())
    assert silent == []


@pytest.mark.parametrize("kind", NEUTRAL)
def test_what_changes_nothing_is_no_alarm(kind: str, real_base: Open) -> None:
    for number in range(5):
        case = make(number, kind, real_base)
        report = verdict(case, real_base)
        assert report.exit_code == 0, (str(case), report.findings)


def test_a_case_follows_from_its_number(real_base: Open) -> None:
    one, again = (next(cases(real_base, range(7, 8))) for _ in range(2))
    assert one == again
    assert one.files != next(cases(real_base, range(7 + len(CHANGES), 8 + len(CHANGES)))).files


def test_the_page_has_all_kinds_and_their_sum() -> None:
    page = (ROOT / "docs" / "audit.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w ,]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(CHANGES)
    assert sum(int(row[1]) for row in rows) == TOTAL
    for kind, total, red, yellow, green in rows:
        assert int(total) == int(red) + int(yellow) + int(green)
        assert green == "0", kind


if __name__ == "__main__":
    folder = os.environ.get("IMAGEBUILD_TEST_TREES")
    with RealTrees() as real:
        base = FolderTrees(Path(folder)).base if folder else real.base
        found, greens = table(base, range(TOTAL))
    print(found)
    print("\n".join(greens))
    sys.exit(bool(greens))
