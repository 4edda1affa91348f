"""Rows and JSON of verdicts, shared by the verbs that judge patches."""

from __future__ import annotations

from collections.abc import Iterable

from imagebuild.patching.evaluate import Finding, PatchReport
from imagebuild.patching.workspace import EditReport

Json = dict[str, object]


def report_rows(reports: Iterable[PatchReport]) -> list[tuple[str, str, str]]:
    """Name, verdict and the telling finding of each patch."""
    return [(r.patch.name, verdict_word(r), headline(r)) for r in reports]


def verdict_word(report: PatchReport) -> str:
    """The verdict, marked when the recipe declares it."""
    return report.verdict.value + (" (declared)" if report.declared else "")


def headline(report: PatchReport) -> str:
    """The first finding that matters, else the range that was chosen."""
    order = {"error": 0, "warning": 1}
    telling = [f for f in report.findings if f.level in order]
    if telling:
        return min(telling, key=lambda f: order[f.level]).message
    return report.selection.why


def report_json(report: PatchReport) -> Json:
    """One patch for machines (docs/design.md lists the fields)."""
    return {
        "name": report.patch.name,
        "verdict": report.verdict.value,
        "declared": report.declared,
        "exit_code": report.exit_code,
        "variant": report.selection.variant.versions if report.selection.variant else None,
        "why": report.selection.why,
        "edits": [edit_json(edit) for edit in report.edits],
        "contexts": [
            {"symbol": str(c.symbol), "locked": c.locked, "found": c.found} for c in report.contexts
        ],
        "findings": [finding_json(finding) for finding in report.findings],
    }


def edit_json(edit: EditReport) -> Json:
    """One edit; `candidate` is the nearest text where the anchor was not found."""
    near = edit.candidate
    return {
        "label": edit.label,
        "path": edit.path,
        "scope": edit.scope,
        "state": edit.state.value,
        "line": edit.line,
        "message": edit.message,
        "candidate": near and {
            "path": near.path, "line": near.line, "similarity": near.similarity, "text": near.text,
        },
    }  # fmt: skip


def finding_json(finding: Finding) -> Json:
    """One finding."""
    return {
        "level": finding.level,
        "code": finding.code,
        "file": finding.file,
        "line": finding.line,
        "message": finding.message,
        "fix": finding.fix,
    }


def offsets(reports: Iterable[PatchReport]) -> list[str]:
    """A sentence for each hunk of a diff that fits elsewhere than the diff says."""
    return [
        f"{report.patch.name}: {finding.message}"
        for report in reports
        for finding in report.findings
        if finding.code == "offset"
    ]
