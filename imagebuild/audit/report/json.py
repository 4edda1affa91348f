"""The audit as one JSON document; docs/design.md lists the fields that others rely on."""

from __future__ import annotations

from collections.abc import Sequence

from imagebuild.audit.run import Release
from imagebuild.show import Json, report_json


def json_report(recipe: str, releases: Sequence[Release]) -> Json:
    """The document, without its schema number."""
    return {
        "recipe": recipe,
        "exit_code": max((r.evaluation.exit_code for r in releases), default=0),
        "releases": [_release(release) for release in releases],
    }


def _release(release: Release) -> Json:
    patches = [report_json(report) for report in release.evaluation.reports]
    for patch in patches:
        patch["diffs"] = release.diffs.get(str(patch["name"]), {})
    return {
        "version": release.identity.version,
        "commit": release.identity.commit,
        "name": release.name,
        "pins": release.pins,
        "changed_pins": [
            {"project": project, "locked": old, "found": new}
            for project, (old, new) in release.changed_pins.items()
        ],
        "requests": release.requests,
        "bytes_fetched": release.bytes_fetched,
        "seconds": round(release.seconds, 3),
        "patches": patches,
    }
