"""The audit as one JSON document; docs/design.md lists the fields that others rely on."""

from __future__ import annotations

from dataclasses import asdict

from imagebuild.audit.results import Audit, Bisection, Evidence, Release
from imagebuild.show import Json, finding_json, report_json


def json_report(audit: Audit) -> Json:
    """The document, without its schema number."""
    document: Json = {
        "recipe": audit.recipe,
        "exit_code": audit.exit_code,
        "conclusion": audit.conclusion,
        "base_version": audit.base_version,
        "gpu_arch": audit.gpu_arch or None,
        "releases": [_release(release) for release in audit.releases],
        "failures": [asdict(failure) for failure in audit.failures],
        "requests": audit.requests,
        "bytes_fetched": audit.bytes_fetched,
        "seconds": round(audit.seconds, 3),
    }
    if audit.bisection is not None:
        document["bisection"] = _bisection(audit.bisection)
    if audit.watch is not None:
        document["watch"] = asdict(audit.watch)
    return document


def _release(release: Release) -> Json:
    patches = [report_json(report) for report in release.evaluation.reports]
    for patch in patches:
        patch["diffs"] = dict(release.diffs.get(str(patch["name"]), {}))
        patch["evidence"] = _evidence(release.evidence.get(str(patch["name"]), Evidence()))
    return {
        "version": release.identity.version,
        "commit": release.identity.commit,
        "name": release.name,
        "origin": release.origin,
        "exit_code": release.exit_code,
        "pins": dict(release.pins),
        "changed_pins": [
            {"project": project, "locked": old, "found": new}
            for project, (old, new) in release.changed_pins.items()
        ],
        "pin_changes": [
            {**asdict(change), "sentence": change.sentence} for change in release.pin_changes
        ],
        "findings": [finding_json(finding) for finding in release.findings],
        "requests": release.requests,
        "bytes_fetched": release.bytes_fetched,
        "seconds": round(release.seconds, 3),
        "patches": patches,
    }


def _evidence(evidence: Evidence) -> Json:
    return {
        "scopes": [asdict(scope) for scope in evidence.scopes],
        "candidates": [asdict(edit) for edit in evidence.candidates],
    }


def _bisection(found: Bisection) -> Json:
    steps = [
        {"version": step.version, "verdict": step.cell.verdict.value, "code": step.cell.code,
         "why": step.cell.why}
        for step in found.steps
    ]  # fmt: skip
    return {
        "patch": found.patch,
        "first_bad": found.first_bad,
        "last_good": found.last_good,
        "untested": found.untested,
        "steps": steps,
    }
