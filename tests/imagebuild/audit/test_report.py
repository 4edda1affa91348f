"""The audit's text: a table, then the evidence for what is not green and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from imagebuild.audit.report import json_report, text_report
from imagebuild.audit.results import Audit, Release
from imagebuild.audit.run import only, order
from imagebuild.console import Console
from imagebuild.patching.evaluate import Evaluation, PatchReport, Verdict
from imagebuild.patching.patch import Answer, Outcome, Patch, Probe, Variant
from imagebuild.patching.selection import Selection
from imagebuild.patching.tree import Identity
from imagebuild.patching.workspace import EditReport, State

PROBE = Probe("it holds", lambda _tree: Answer(Outcome.HOLDS, "seen"))


def report(verdict: Verdict, *, declared: bool = False, name: str = "vllm_a_b") -> PatchReport:
    variant = Variant(versions=">=0.31,<0.32")
    patch = Patch(name=name, status="pending", upstream="", origin="", variants=(variant,),
                  reason=PROBE, effect=PROBE)  # fmt: skip
    return PatchReport(patch, Selection(variant, None, "chosen"), verdict, declared)


def release(*reports: PatchReport, version: str = "0.31.0", **more: Any) -> Release:
    return Release(
        name=version, identity=Identity(version, "abc1234"), pins={}, changed_pins={},
        evaluation=Evaluation(reports, {}), **more,
    )  # fmt: skip


def audit(*releases: Release, **more: Any) -> Audit:
    return Audit("tiny", "0.31.0", "", releases, **more)


Text = Callable[[Release], str]


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> Text:
    def shown(one: Release) -> str:
        text_report(Console(), audit(one))
        return capsys.readouterr().out

    return shown


def test_what_is_green_shows_notes_and_no_other_evidence(text: Text) -> None:
    one = report(Verdict.ABSORBED, declared=True)
    one.add("info", "dropped", "upstream has it")
    one.add("info", "note", "a stock route exists")
    said = text(release(one, diffs={"vllm_a_b": {"vllm/a.py::f": "-x"}}))
    assert "vllm_a_b  absorbed (declared)  chosen" in said
    assert "  i vllm_a_b: a stock route exists\n" in said
    assert "upstream has it" not in said
    assert "-x" not in said
    assert said.endswith("all well\n")


def test_what_is_not_green_shows_place_next_step_and_diff(text: Text) -> None:
    one = report(Verdict.REVIEW)
    one.add("warning", "context-changed", "f changed", file="vllm/a.py", line=7, fix="read it")
    lines = "\n".join(f"+{number}" for number in range(80))
    said = text(release(one, diffs={"vllm_a_b": {"vllm/a.py::f": lines}}))
    assert "  ! vllm_a_b: f changed [vllm/a.py:7]\n      next: read it\n" in said
    assert "        +59\n        ... 20 more lines; see --format json\n" in said
    assert said.endswith("a person must look\n")


@pytest.mark.parametrize(
    "requests, said",
    [
        (0, "  nothing fetched, 0.4 s\n"),
        (1, "  fetched 1.50 MB in 1 request, 0.4 s\n"),
        (2, "  fetched 1.50 MB in 2 requests, 0.4 s\n"),
    ],
)
def test_what_reading_took(text: Text, requests: int, said: str) -> None:
    cost = {"requests": requests, "bytes_fetched": 1_500_000, "seconds": 0.4}
    assert said in text(release(report(Verdict.OK), **cost))


def test_a_pin_that_came_or_went_is_none(text: Text) -> None:
    one = release(report(Verdict.OK))
    one.changed_pins.update({"torch": ("2.13.0", ""), "triton": ("", "3.8.0")})
    said = text(one)
    assert "  pin torch: 2.13.0 -> none\n  pin triton: none -> 3.8.0\n" in said


def test_a_release_that_no_patch_is_for_is_said_to_be_one(text: Text) -> None:
    none, one = report(Verdict.NOT_APPLICABLE), report(Verdict.OK, name="vllm_c_d")
    assert "  no patch is for this release\n" in text(release(none))
    assert "no patch is for" not in text(release(none, one))


@pytest.mark.parametrize(
    ("verdict", "declared", "code"),
    [
        (Verdict.OK, False, 0), (Verdict.NOT_APPLICABLE, False, 0), (Verdict.ABSORBED, True, 0),
        (Verdict.ABSORBED, False, 1), (Verdict.REASON_GONE, False, 1), (Verdict.REVIEW, False, 1),
        (Verdict.DRIFTED, False, 3), (Verdict.MOVED, False, 3), (Verdict.MISSING, False, 3),
        (Verdict.COLLISION, False, 3), (Verdict.PARTIAL, False, 3), (Verdict.DEFEATED, False, 3),
        (Verdict.DEFEATED, True, 3),
    ],
)  # fmt: skip
def test_the_code_of_each_verdict(verdict: Verdict, declared: bool, code: int) -> None:
    green = release(report(Verdict.OK), version="0.30.0")
    found = json_report(audit(green, release(report(verdict, declared=declared))))
    assert found["exit_code"] == code


def test_every_verdict_of_the_readme_is_one() -> None:
    from tests.support.product import REPOSITORY

    table = (REPOSITORY / "README.md").read_text().partition("| verdict |")[2]
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].split("\n")[2:]]
    assert {word.strip(" `") for row in rows for word in row.split(",")} == {
        verdict.value for verdict in Verdict
    }


def test_edits_and_candidates_are_data() -> None:
    one = report(Verdict.DRIFTED)
    one.edits.append(EditReport("words", "vllm/a.py", "f", State.DRIFTED, 3, "gone"))
    found = json_report(audit(release(one)))
    (patch,) = found["releases"][0]["patches"]  # type: ignore[index]
    assert patch["edits"] == [{
        "label": "words", "path": "vllm/a.py", "scope": "f", "state": "drifted", "line": 3,
        "message": "gone", "candidate": None,
    }]  # fmt: skip


def test_order_and_selection() -> None:
    newer, older = release(report(Verdict.OK), version="0.33.0"), release(report(Verdict.OK))
    assert order([newer, older]) == [older, newer]
    two = release(report(Verdict.DRIFTED), report(Verdict.OK, name="vllm_c_d"))
    assert only(two, ["vllm_c_d"]).evaluation.exit_code == 0
