"""The audit for people: a table or a grid, then the evidence for all that is not green."""

from __future__ import annotations

from collections.abc import Sequence

from imagebuild.audit.report.grid import show_grid
from imagebuild.audit.results import (
    Audit,
    Bisection,
    EditCandidates,
    Evidence,
    Release,
    ScopeDiff,
    Watch,
)
from imagebuild.audit.tokens import shown
from imagebuild.console import Console
from imagebuild.patching.evaluate import Finding, PatchReport
from imagebuild.show import report_rows

_DIFF_LINES = 60
_TOKEN_RUNS = 12
# What is told of a green patch as well.
_TOLD = ("note", "offset")


def text_report(console: Console, audit: Audit) -> None:
    """Prints every release; says what to do next about each patch that is not green."""
    if len(audit.releases) > 1:
        show_grid(console, audit)
    for release in audit.releases:
        _release(console, release, is_alone=len(audit.releases) == 1)
    for failure in audit.failures:
        console.verdict(f"vLLM {failure.name} could not be read: {failure.message}", 3)
        if failure.hint:
            console.result(f"      next: {failure.hint}")
    if audit.bisection is not None:
        _bisection(console, audit.bisection)
    if audit.watch is not None:
        _watch(console, audit.watch)
    if len(audit.releases) > 1:
        console.result(f"  {_cost(audit.requests, audit.bytes_fetched)}, {audit.seconds:.1f} s")
    console.verdict(audit.conclusion, audit.exit_code)


def _release(console: Console, release: Release, *, is_alone: bool) -> None:
    commit = release.identity.commit or "commit unknown"
    title = f"{release.identity.title} {release.version} ({commit})"
    if release.name != release.version:
        title += f", {release.name}"
    shown_ones = [report for report in release.reports if _is_shown(report)]
    if is_alone:
        rows = report_rows(release.reports)
        codes = [(None, report.exit_code, None) for report in release.reports]
        console.table(title, ("patch", "verdict", "what"), rows, codes)
        if release.is_for_nobody:
            console.result("  no patch is for this release")
    elif release.exit_code == 0 and release.is_for_nobody:
        return  # the grid says it; what it requires is news to nobody
    elif shown_ones or release.pin_changes or release.findings:
        console.verdict(title, release.exit_code)
    for change in release.pin_changes:
        console.result(f"  pin {change.sentence}")
    for finding in release.findings:
        _finding(console, "", finding)
    for report in shown_ones:
        _evidence(console, report, release.evidence.get(report.patch.name, Evidence()))
    if is_alone:
        console.result(f"  {_cost(release.requests, release.bytes_fetched)}, "
                       f"{release.seconds:.1f} s")  # fmt: skip


def _is_shown(report: PatchReport) -> bool:
    return report.exit_code != 0 or any(finding.code in _TOLD for finding in report.findings)


def _cost(requests: int, size: int) -> str:
    if requests == 0:
        return "nothing fetched"
    count = "1 request" if requests == 1 else f"{requests} requests"
    return f"fetched {size / 1e6:.2f} MB in {count}"


def _evidence(console: Console, report: PatchReport, evidence: Evidence) -> None:
    for finding in report.findings:
        if report.exit_code != 0 or finding.code in _TOLD:
            _finding(console, report.patch.name, finding)
    if report.exit_code == 0:
        return
    searched = {(one.label, one.path, one.scope) for one in evidence.candidates}
    for edit in report.edits:
        if edit.candidate and (edit.label, edit.path, edit.scope) not in searched:
            near = edit.candidate
            console.result(f"      {edit.label!r} is most like {near.path}:{near.line} "
                           f"({near.similarity:.0%}):")  # fmt: skip
            _quoted(console, near.text)
    for one in evidence.candidates:
        _candidates(console, one)
    for scope in evidence.scopes:
        _scope(console, scope)


def _finding(console: Console, name: str, finding: Finding) -> None:
    place = f" [{finding.file}:{finding.line}]" if finding.line else ""
    mark = {"error": "x", "warning": "!", "info": "i"}[finding.level]
    start = f"{name}: " if name else ""
    console.result(f"  {mark} {start}{finding.message}{place}")
    if finding.fix:
        console.result(f"      next: {finding.fix}")


def _candidates(console: Console, edit: EditCandidates) -> None:
    for number, near in enumerate(edit.candidates):
        word = "is most like" if number == 0 else "or like"
        where = f" in {near.scope}" if near.scope else ""
        console.result(f"      {edit.label!r} {word} {near.path}:{near.line}{where} "
                       f"({near.similarity:.0%}; {near.why}):")  # fmt: skip
        _quoted(console, near.text)


def _quoted(console: Console, text: str) -> None:
    for line in text.rstrip("\n").split("\n"):
        console.result(f"        | {line}")


def _scope(console: Console, scope: ScopeDiff) -> None:
    console.result(f"      {scope.symbol}:")
    _some(console, scope.unified.split("\n") if scope.unified else [], _DIFF_LINES, "lines")
    if not scope.tokens:
        return
    count = len(scope.tokens)
    console.result(f"      by tokens, {count} {'change' if count == 1 else 'changes'}:")
    lines = []
    for change in scope.tokens:
        place = change.new_line or change.old_line
        at = f"line {place}: " if place else "outside: "
        lines.append(f"{at}{shown(change.old) or 'nothing'} => {shown(change.new) or 'nothing'}")
    _some(console, lines, _TOKEN_RUNS, "changes")


def _some(console: Console, lines: Sequence[str], most: int, what: str) -> None:
    for line in lines[:most]:
        console.result(f"        {line}")
    if len(lines) > most:
        console.result(f"        ... {len(lines) - most} more {what}; see --format json")


def _bisection(console: Console, found: Bisection) -> None:
    rows = [(step.version, step.cell.word, step.cell.why) for step in found.steps]
    codes = [(None, step.cell.code, None) for step in found.steps]
    console.table(f"search for {found.patch}", ("release", "verdict", "what"), rows, codes)
    if not found.first_bad:
        text = f"{found.patch} is green up to {found.last_good}"
    elif not found.last_good:
        text = f"{found.patch} is not green on {found.first_bad}, the first release looked at"
    else:
        text = f"{found.first_bad} is the first on which {found.patch} is not green; " \
               f"{found.last_good} before it is"  # fmt: skip
    console.result(f"  {text}; {found.untested} not looked at")


def _watch(console: Console, watch: Watch) -> None:
    newest = watch.newest_locked or "none"
    console.result(f"newest locked vLLM {newest}; newer: {', '.join(watch.newer) or 'none'}")
    if watch.reported:
        console.result(f"  reported before: {', '.join(watch.reported)}")
    console.result(watch.sentence)
    marks = {"error": ("x", 3), "warning": ("!", 1), "info": ("i", 0)}
    for note in watch.lock:
        mark, colour = marks[note.level]
        console.verdict(f"  {mark} {note.entry}: {note.message}", colour)
