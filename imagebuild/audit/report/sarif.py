"""The audit as SARIF 2.1.0: a rule a verdict, a result a patch and release that needs a person.

A result stands at the patch's module, since that is what will be changed; where upstream is among
its related locations, below a base `SITE_PACKAGES` that has no address.
"""

from __future__ import annotations

import hashlib
import json
import os
from urllib.parse import quote

from imagebuild.audit.report.problems import (
    LOCK,
    MEANINGS,
    RELEASE,
    UNREADABLE,
    About,
    Place,
    Problem,
    problems,
)
from imagebuild.audit.results import Audit
from imagebuild.escape import visible
from imagebuild.patching.evaluate import Verdict
from imagebuild.show import Json

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_SITE = "SITE_PACKAGES"
_BROKEN = (Verdict.DRIFTED, Verdict.MOVED, Verdict.MISSING, Verdict.DEFEATED, Verdict.COLLISION,
           Verdict.PARTIAL)  # fmt: skip
_YELLOW = (Verdict.REVIEW, Verdict.ABSORBED, Verdict.REASON_GONE)


def sarif_report(audit: Audit, about: About) -> str:
    """The document, with a final newline."""
    found = problems(audit, about)
    rules = _rules()
    order = [rule["id"] for rule in rules]
    failures = [_notification(problem) for problem in found if problem.rule == UNREADABLE]
    results = [_result(p, order.index(p.rule)) for p in found if p.rule != UNREADABLE]
    run: Json = {
        "tool": {"driver": {"name": "imagebuild audit", "rules": rules}},
        "automationDetails": {"id": f"drift-audit/{visible(audit.recipe)}/"},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_SITE: {"description": {"text": "site-packages of the release"}}},
        "invocations": [{
            "executionSuccessful": not failures,
            "exitCode": audit.exit_code,
            "toolExecutionNotifications": failures,
        }],
        "results": results,
        "properties": {
            "conclusion": visible(audit.conclusion),
            "releases": [visible(column) for column in audit.grid.columns],
        },
    }  # fmt: skip
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rules() -> list[Json]:
    """Every rule, so that the place of each one is the same in all reports."""
    rules = [_rule(verdict.value, *MEANINGS[verdict], is_error=verdict in _BROKEN)
             for verdict in (*_BROKEN, *_YELLOW)]  # fmt: skip
    rules.append(_rule(RELEASE, "the release as a whole", "read it", is_error=False))
    rules.append(_rule(LOCK, "an entry of the lock", "build.py lock update", is_error=False))
    return rules


def _rule(name: str, meaning: str, step: str, *, is_error: bool) -> Json:
    return {
        "id": name,
        "name": "".join(word.title() for word in name.split("_")),
        "shortDescription": {"text": _sentence(meaning)},
        "help": {"text": f"Next: {step}."},
        "defaultConfiguration": {"level": "error" if is_error else "warning"},
    }


def _result(problem: Problem, index: int) -> Json:
    lines = [problem.title, *problem.lines, *(f"Next: {fix}" for fix in problem.fixes)]
    result: Json = {
        "ruleId": problem.rule,
        "ruleIndex": index,
        "level": "error" if problem.code > 1 else "warning",
        "message": {"text": visible("\n".join(lines))},
        # GitHub tells alerts of one file apart by this, and by nothing else.
        "partialFingerprints": {"primaryLocationLineHash": f"{_digest(problem)}:1"},
        "properties": {"release": visible(problem.release), "subject": visible(problem.subject)},
    }
    if problem.file:
        location: Json = {"artifactLocation": {"uri": _uri(problem.file)},
                          "region": {"startLine": 1}}  # fmt: skip
        result["locations"] = [{"physicalLocation": location}]
    if problem.places:
        places = enumerate(problem.places, 1)
        result["relatedLocations"] = [_related(number, place) for number, place in places]
    return result


def _related(number: int, place: Place) -> Json:
    physical: Json = {"artifactLocation": {"uri": _uri(place.path), "uriBaseId": _SITE}}
    if place.line:
        physical["region"] = {"startLine": place.line}
    return {"id": number, "physicalLocation": physical, "message": {"text": visible(place.note)}}


def _notification(problem: Problem) -> Json:
    lines = [problem.title, *problem.lines, *(f"Next: {fix}" for fix in problem.fixes)]
    return {"level": "error", "message": {"text": visible("\n".join(lines))}}


def _digest(problem: Problem) -> str:
    """The same for one patch, release and verdict, whatever the words become."""
    words = [problem.rule, problem.release, problem.subject]
    words += problem.lines if problem.rule in (RELEASE, LOCK) else ()
    return hashlib.sha256(visible("\0".join(words)).encode()).hexdigest()[:16]


def _uri(path: str) -> str:
    return quote(os.fsencode(path))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
