"""The grid for people: patches by releases, as wide as the screen allows, with a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imagebuild.audit.results import Audit, Cell, Grid, Release
from imagebuild.console import Console
from imagebuild.patching.evaluate import Verdict

_FRAME = 3  # columns that a terminal's table adds to each cell


def show_grid(console: Console, audit: Audit) -> None:
    """Prints the grid of several releases, in as many tables as fit beside each other."""
    grid = audit.grid
    for columns in _chunks(grid, console.width):
        names = [grid.columns[index] for index in columns]
        rows = [
            (patch, *(_word(cells[index]) for index in columns))
            for patch, cells in grid.rows.items()
        ]
        codes = [(None, *(_code(cells[i]) for i in columns)) for cells in grid.rows.values()]
        console.table(f"{audit.recipe} by release", ("patch", *names), rows, codes)
    words = {_word(cell) for cells in grid.rows.values() for cell in cells}
    if "-" in words:
        for line in _why_not(audit.releases):
            console.result(f"  - {line}")
    if "dropped" in words:
        console.result("  dropped: declared for that release, and proven there")


def _word(cell: Cell) -> str:
    """The verdict in as few characters as say it."""
    if cell.verdict is Verdict.NOT_APPLICABLE:
        return "-"
    return "dropped" if cell.declared and cell.code == 0 else cell.verdict.value


def _code(cell: Cell) -> int | None:
    return None if cell.verdict is Verdict.NOT_APPLICABLE else cell.code


def _chunks(grid: Grid, width: int | None) -> list[list[int]]:
    """Numbers of the columns of each table."""
    everything = list(range(len(grid.columns)))
    if width is None or not everything:
        return [everything]
    left = width - max(map(len, grid.rows), default=0) - 2 * _FRAME
    found: list[list[int]] = [[]]
    used = 0
    for index in everything:
        words = [_word(cells[index]) for cells in grid.rows.values()]
        need = max(map(len, (grid.columns[index], *words))) + _FRAME
        if found[-1] and used + need > left:
            found.append([])
            used = 0
        found[-1].append(index)
        used += need
    return found


def _why_not(releases: Sequence[Release]) -> Iterator[str]:
    """One line for each reason: how many patches are not for which releases, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for release in releases:
        reasons: dict[str, list[str]] = {}
        for report in release.reports:
            if report.verdict is Verdict.NOT_APPLICABLE:
                why = report.selection.why.removeprefix(f"{release.version} ")
                reasons.setdefault(why, []).append(report.patch.name)
        for why, patches in reasons.items():
            what = patches[0] if len(patches) == 1 else f"{len(patches)} patches"
            found.setdefault((what, why), []).append(release.version)
    for (what, why), versions in found.items():
        which = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        is_one = not what[0].isdigit()
        yield f"{what} {'is' if is_one else 'are'} not for {which}: {_sentence(why, is_one)}"


def _sentence(why: str, is_one: bool) -> str:
    """The reason without the version that it began with."""
    why = why.removeprefix("is ")
    return why if is_one else why.replace("its first range", "their first range")
