"""The audit for people: a table a release, then the evidence for all that is not green."""

from __future__ import annotations

from collections.abc import Mapping

from imagebuild.audit.results import Audit, Release
from imagebuild.console import Console
from imagebuild.patching.evaluate import PatchReport, Verdict
from imagebuild.show import report_rows

_DIFF_LINES = 60


def text_report(console: Console, audit: Audit) -> None:
    """Prints every release; says what to do next about each patch that is not green."""
    for release in audit.releases:
        rows = report_rows(release.evaluation.reports)
        title = f"vLLM {release.identity.version} ({release.identity.commit or 'commit unknown'})"
        console.table(title, ("patch", "verdict", "what"), rows)
        if all(report.verdict is Verdict.NOT_APPLICABLE for report in release.evaluation.reports):
            console.result("  no patch is for this release")
        for project, (old, new) in release.changed_pins.items():
            console.result(f"  pin {project}: {old or 'none'} -> {new or 'none'}")
        for report in release.evaluation.reports:
            _evidence(console, report, release.diffs.get(report.patch.name, {}))
        console.result(f"  {_cost(release)}, {release.seconds:.1f} s")
    console.verdict(audit.conclusion, audit.exit_code)


def _cost(release: Release) -> str:
    if release.requests == 0:
        return "nothing fetched"
    requests = "1 request" if release.requests == 1 else f"{release.requests} requests"
    return f"fetched {release.bytes_fetched / 1e6:.2f} MB in {requests}"


def _evidence(console: Console, report: PatchReport, diffs: Mapping[str, str]) -> None:
    for finding in report.findings:
        is_note = finding.code == "note"
        if report.exit_code == 0 and not is_note:
            continue
        place = f" [{finding.file}:{finding.line}]" if finding.line else ""
        mark = {"error": "x", "warning": "!", "info": "i"}[finding.level]
        console.result(f"  {mark} {report.patch.name}: {finding.message}{place}")
        if finding.fix:
            console.result(f"      next: {finding.fix}")
    if report.exit_code == 0:
        return
    for edit in report.edits:
        if edit.candidate:
            near = edit.candidate
            console.result(f"      {edit.label!r} is most like {near.path}:{near.line} "
                           f"({near.similarity:.0%}):")  # fmt: skip
            for line in near.text.rstrip("\n").split("\n"):
                console.result(f"        | {line}")
    for symbol, diff in diffs.items():
        lines = diff.split("\n")
        console.result(f"      {symbol}:")
        for line in lines[:_DIFF_LINES]:
            console.result(f"        {line}")
        if len(lines) > _DIFF_LINES:
            console.result(f"        ... {len(lines) - _DIFF_LINES} more lines; see --format json")
