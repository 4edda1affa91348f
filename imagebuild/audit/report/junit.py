"""The audit as JUnit XML: a suite a release, a case a patch.

What needs a person is a failure whose type is the verdict, what could not be read is an error, and
a patch that is not for a release is skipped. Source of the shape: Jenkins' junit-4.xsd.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET  # it writes here, and reads nothing
from collections.abc import Iterable

from imagebuild.audit.report.problems import LOCK, About, Problem, of_patch, problems
from imagebuild.audit.results import Audit, Release
from imagebuild.escape import one_line, visible
from imagebuild.patching.evaluate import PatchReport, Verdict


def junit_report(audit: Audit, about: About) -> str:
    """The document, with its declaration and a final newline."""
    root = ET.Element("testsuites", name=f"drift audit of {one_line(audit.recipe)}",
                      time=f"{audit.seconds:.3f}")  # fmt: skip
    for column, release in zip(audit.grid.columns, audit.releases, strict=True):
        root.append(_suite(audit, column, release, about))
    others = [p for p in problems(audit, about) if p.rule in ("unreadable", LOCK)]
    if others:
        root.append(_others(audit, others))
    for kind in ("tests", "failures", "errors"):
        root.set(kind, str(sum(int(suite.get(kind, "0")) for suite in root)))
    ET.indent(root, " ")
    declaration = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return declaration + ET.tostring(root, encoding="unicode") + "\n"


def _suite(audit: Audit, column: str, release: Release, about: About) -> ET.Element:
    suite = ET.Element("testsuite", name=f"vLLM {one_line(column)}", time=f"{release.seconds:.3f}")
    properties = ET.SubElement(suite, "properties")
    known = {"commit": release.identity.commit, "origin": release.origin}
    known |= {f"pin.{project}": version for project, version in release.pins.items()}
    for name, value in known.items():
        ET.SubElement(properties, "property", name=one_line(name), value=one_line(value))
    group = f"{audit.recipe}.{column}"
    for report in release.reports:
        suite.append(_case(group, report, of_patch(column, release, report, about)))
    for number, finding in enumerate(release.findings, 1):
        case = _new_case(group, f"release finding {number}")
        if finding.level == "info":
            ET.SubElement(case, "system-out").text = visible(finding.message)
        else:
            _failure(case, finding.code, finding.message, [finding.message, finding.fix])
        suite.append(case)
    return _counted(suite)


def _case(group: str, report: PatchReport, told: Problem) -> ET.Element:
    case = _new_case(group, report.patch.name)
    if report.exit_code:
        places = [f"at {p.path}:{p.line}: {p.note}" for p in told.places]
        lines = [*told.lines, *places, *(f"next: {fix}" for fix in told.fixes)]
        _failure(case, told.rule, told.lines[0], lines)
    elif report.verdict is Verdict.NOT_APPLICABLE:
        ET.SubElement(case, "skipped").text = visible(report.selection.why)
    notes = [finding.message for finding in report.findings if finding.level == "info"]
    if notes and report.verdict is not Verdict.NOT_APPLICABLE:
        ET.SubElement(case, "system-out").text = visible("\n".join(notes))
    return case


def _others(audit: Audit, found: Iterable[Problem]) -> ET.Element:
    suite = ET.Element("testsuite", name="releases not read, and the lock", time="0")
    for problem in found:
        case = _new_case(f"{audit.recipe}.{problem.rule}", problem.release or problem.subject)
        tag = "failure" if problem.rule == LOCK else "error"
        lines = [*problem.lines, *(f"next: {fix}" for fix in problem.fixes)]
        _failure(case, problem.rule, problem.lines[0], lines, tag)
        suite.append(case)
    return _counted(suite)


def _new_case(group: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=one_line(group), name=one_line(name), time="0")


def _failure(
    case: ET.Element, kind: str, message: str, lines: Iterable[str], tag: str = "failure"
) -> None:
    element = ET.SubElement(case, tag, type=one_line(kind), message=one_line(message))
    element.text = visible("\n".join(line for line in lines if line))


def _counted(suite: ET.Element) -> ET.Element:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    return suite
