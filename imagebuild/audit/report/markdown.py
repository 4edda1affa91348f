"""The audit as GitHub Markdown, for a job summary and for the body of an issue.

The document never exceeds what GitHub takes in an issue. What matters most comes first, and the
last line says what was left out. Text of others mentions nobody and links to no issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from imagebuild.audit.report.problems import About, Problem, problems
from imagebuild.audit.results import Audit, Cell, Release
from imagebuild.escape import one_line, visible

# GitHub refuses longer bodies. It counts characters; we count bytes, which are never fewer.
LIMIT = 65_536
# What the line about what was left out may take.
_RESERVE = 2000
_MARKS = {0: "✅", 1: "⚠️"}
_BROKEN = "❌"
_DIFF_LINES = 80
# Columns of a table that GitHub's page still shows without scrolling far.
_COLUMNS = 12


def markdown_report(audit: Audit, about: About) -> str:
    """The document, with a final newline; at most `LIMIT` bytes of UTF-8."""
    found = problems(audit, about)
    body = _Body()
    body.add(_head(audit, found))
    newest_first = range(len(audit.releases))[::-1]
    for first in range(0, len(audit.releases), _COLUMNS):
        rows = _grid(audit, newest_first[first : first + _COLUMNS])
        body.add_rows(f"vLLM {audit.grid.columns[newest_first[first]]} and older in the grid", rows)
    if found:
        body.add("## What needs you\n\n")
    for problem in found:
        body.add(_item(problem), problem.title)
    if any(release.pin_changes for release in audit.releases):
        body.add_rows("changed pins", _pins(audit))
    for column, release in reversed(list(zip(audit.grid.columns, audit.releases, strict=True))):
        for title, text in _evidence(column, release):
            body.add(text, title)
    body.add(_costs(audit), "what reading took")
    return body.text()


class _Body:
    """Blocks, as many as fit; knows what did not."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = LIMIT - _RESERVE
        self._missing: list[str] = []

    def add(self, text: str, name: str = "") -> bool:
        """Adds a whole block or nothing of it."""
        size = len(text.encode())
        if size > self._left:
            self._missing.append(name)
            return False
        self._parts.append(text)
        self._left -= size
        return True

    def add_rows(self, name: str, rows: Iterator[str]) -> None:
        """Adds a table with as many of its rows as fit; the first block is its head."""
        for row in rows:
            if not self.add(row, name):
                break
        self.add("\n")

    def text(self) -> str:
        left_out = [name for name in self._missing if name]
        if left_out:
            more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            first = _prose(left_out[0], 150)
            self._parts.append(f"\n*Left out, since GitHub takes {LIMIT:,} characters: {first}"
                               f"{more}. The html report has all.*\n")  # fmt: skip
        return "".join(self._parts)


def _head(audit: Audit, found: tuple[Problem, ...]) -> str:
    arch = f", for {_code(audit.gpu_arch)}" if audit.gpu_arch else ""
    counts = [f"{len(audit.grid.rows)} patches on {len(audit.releases)} releases"]
    if found:
        counts.append(f"{len(found)} need a person" if len(found) > 1 else "1 needs a person")
    lines = [
        f"# Drift audit of {_code(audit.recipe)}",
        f"{_mark(audit.exit_code)} **{_prose(audit.conclusion)}**",
        f"{'; '.join(counts)}. Base: vLLM {_code(audit.base_version)}{arch}.",
    ]
    if audit.watch:
        newer = ", ".join(map(_code, audit.watch.newer[:50])) or "none"
        newest = _code(audit.watch.newest_locked) if audit.watch.newest_locked else "none"
        lines.append(f"Newest locked release: {newest}. Newer ones: {newer}.")
        lines.append(f"{_prose(audit.watch.sentence.capitalize())}.")
    if audit.bisection:
        found_bad = audit.bisection.first_bad
        what = f"first bad release: {_code(found_bad)}" if found_bad else "no bad release"
        lines.append(f"{_code(audit.bisection.patch)}: {what}.")
    return "\n\n".join(lines) + "\n\n"


def _grid(audit: Audit, shown: range) -> Iterator[str]:
    columns = [_code(audit.grid.columns[index], in_table=True) for index in shown]
    yield f"| patch | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    for name, cells in audit.grid.rows.items():
        words = [_cell(cells[index]) for index in shown]
        yield f"| {_code(name, in_table=True)} | {' | '.join(words)} |\n"


def _cell(cell: Cell) -> str:
    mark = "⚪" if cell.verdict.value == "not_applicable" else _mark(cell.code)
    return f"{mark} {_prose(cell.word)}"


def _item(problem: Problem) -> str:
    where = f" on {_code(problem.release)}" if problem.release else ""
    lines = [f"- {_mark(problem.code)} {_code(problem.subject or 'vLLM')}{where}: "
             f"**{_prose(problem.rule)}**"]  # fmt: skip
    lines += [f"  - {_prose(line)}" for line in problem.lines]
    places = [f"{_code(f'{p.path}:{p.line}')} ({_prose(p.note)})" for p in problem.places if p.line]
    lines += [f"  - upstream: {place}" for place in places]
    lines += [f"  - next: {_prose(fix)}" for fix in problem.fixes]
    return "\n".join(lines) + "\n\n"


def _pins(audit: Audit) -> Iterator[str]:
    yield (
        "\n## Pins that differ from the base's\n\n"
        "| release | project | base | this | edited by |\n|---|---|---|---|---|\n"
    )
    for column, release in reversed(list(zip(audit.grid.columns, audit.releases, strict=True))):
        for change in release.pin_changes:
            old, new = (_code(text, in_table=True) if text else "none"
                        for text in (change.locked, change.found))  # fmt: skip
            touched = ", ".join(_code(name, in_table=True) for name in change.patches) or "-"
            cells = (_code(column, in_table=True), _code(change.project, in_table=True), old, new)
            yield f"| {' | '.join(cells)} | {touched} |\n"


def _evidence(column: str, release: Release) -> Iterator[tuple[str, str]]:
    """A block a patch: its name for the line about what was left out, and the text."""
    for name, evidence in release.evidence.items():
        parts = [_diff(scope.symbol, scope.unified) for scope in evidence.scopes if scope.unified]
        for edit in evidence.candidates:
            for near in edit.candidates:
                place = f"{near.path}:{near.line}, {near.similarity:.0%} like {edit.label!r}"
                parts.append(_prose(place) + "\n\n" + _fence(near.text, ""))
        if parts:
            title = f"{name} on vLLM {column}"
            summary = _html(title)
            yield title, (f"<details><summary>{summary}</summary>\n\n" + "\n".join(parts)
                          + "\n</details>\n\n")  # fmt: skip


def _diff(symbol: str, unified: str) -> str:
    lines = unified.split("\n")
    more = len(lines) - _DIFF_LINES
    text = _prose(symbol) + "\n\n" + _fence("\n".join(lines[:_DIFF_LINES]), "diff")
    return text + (f"\n{more} more lines in the html report.\n" if more > 0 else "")


def _costs(audit: Audit) -> str:
    return (f"Fetched {audit.bytes_fetched / 1e6:.2f} MB in {audit.requests} requests, "
            f"{audit.seconds:.1f} s.\n")  # fmt: skip


def _mark(code: int) -> str:
    return _MARKS.get(code, _BROKEN)


def _prose(text: str, limit: int = 1000) -> str:
    """Text of others as plain words: no markup, no mention, no link, no reference to an issue."""
    line = one_line(text)
    line = line if len(line) <= limit else line[:limit] + "..."
    escaped = re.sub(r"[\\`*_\[\]<|~$&#]|^[-+=>]|:(?=[\w+-]+:|//)", r"\\\g<0>", line)
    escaped = re.sub(r"^(\d+)([.)] )", r"\1\\\2", escaped)
    # A comment parts what GitHub looks for after it took the backslashes away.
    return re.sub(r"@|\\#|GH-(?=\d)", r"\g<0><!-- -->", escaped)


def _code(text: str, *, in_table: bool = False) -> str:
    """A code span; its fence is longer than any run of backticks in it."""
    line = one_line(text)
    runs = [len(run) for run in re.findall("`+", line)]
    fence = "`" * (max(runs, default=0) + 1)
    pad = " " if line[:1] in ("`", "") or line[-1:] == "`" else ""
    return f"{fence}{pad}{line.replace('|', chr(92) + '|') if in_table else line}{pad}{fence}"


def _fence(text: str, language: str) -> str:
    shown = visible(text).rstrip("\n")
    runs = [len(run) for run in re.findall("`+", shown)]
    fence = "`" * max(3, max(runs, default=0) + 1)
    return f"{fence}{language}\n{shown}\n{fence}\n"


def _html(text: str) -> str:
    """A code element, in which GitHub looks for no mention."""
    return f"<code>{escape(one_line(text))}</code>"
