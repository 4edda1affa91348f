"""The audit's text: a table, then the evidence for what is not green and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from imagebuild.audit.report import json_report, text_report
from imagebuild.audit.results import (
    Audit,
    Bisection,
    EditCandidates,
    Evidence,
    Failure,
    LockNote,
    Near,
    PinChange,
    Release,
    ScopeDiff,
    Step,
    TokenChange,
    Watch,
    cell_of,
)
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
        name=version, identity=Identity(version, "abc1234"), pins={},
        evaluation=Evaluation(reports, {}), **{"changed_pins": {}, **more},
    )  # fmt: skip


def audit(*releases: Release, **more: Any) -> Audit:
    return Audit("tiny", "0.31.0", "", releases, **more)


Text = Callable[..., str]


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> Text:
    def shown(*releases: Release, **more: Any) -> str:
        text_report(Console(), audit(*releases, **more))
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
    changes = tuple(TokenChange((), (f"t{n}",), 0, n) for n in range(1, 15))
    scope = ScopeDiff("vllm/a.py::f", "vllm/a.py", "f", "0.31.0", 3, lines, changes)
    said = text(release(one, evidence={"vllm_a_b": Evidence((scope,))}))
    assert "  ! vllm_a_b: f changed [vllm/a.py:7]\n      next: read it\n" in said
    assert "        +59\n        ... 20 more lines; see --format json\n" in said
    assert "by tokens, 14 changes:\n        line 1: nothing => t1\n" in said
    assert (
        "        line 12: nothing => t12\n        ... 2 more changes; see --format json\n" in said
    )
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
    changed = {"torch": ("2.13.0", ""), "triton": ("", "3.8.0")}
    touched = PinChange("flashinfer", "0.7.0", "0.7.2", ("a", "b"))
    changes = (*(PinChange(name, *pair) for name, pair in changed.items()), touched)
    said = text(release(report(Verdict.OK), changed_pins=changed, pin_changes=changes))
    assert "  pin torch 2.13.0 -> none\n  pin triton none -> 3.8.0\n" in said
    assert "  pin flashinfer 0.7.0 -> 0.7.2: 2 patches edit it\n" in said
    # Green patches on a base that has other versions are not "all well".
    assert said.endswith("every patch fits; 0.31.0 requires other versions than the recipe's base "
                         "(see pin)\n")  # fmt: skip


def test_a_release_that_no_patch_is_for_is_said_to_be_one(text: Text) -> None:
    none, one = report(Verdict.NOT_APPLICABLE), report(Verdict.OK, name="vllm_c_d")
    said = text(release(none))
    assert "  no patch is for this release\n" in said
    assert said.endswith("nothing was tried: no patch is for 0.31.0\n")
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


def not_for(name: str, version: str) -> PatchReport:
    one = report(Verdict.NOT_APPLICABLE, name=name)
    why = f"{version} is before its first range, >=0.31,<0.32"
    one.selection = Selection(None, None, why)
    return one


def test_several_releases_are_a_grid_with_reasons(text: Text) -> None:
    old = [
        release(not_for("vllm_a_b", v), not_for("vllm_c_d", v), version=v, requests=1)
        for v in ("0.29.0", "0.30.0")
    ]
    new = release(
        report(Verdict.ABSORBED, declared=True), report(Verdict.REVIEW, name="vllm_c_d"),
        pin_changes=(PinChange("torch", "2", "3"),), changed_pins={"torch": ("2", "3")},
    )  # fmt: skip
    said = text(*old, new, requests=3, bytes_fetched=1_500_000, seconds=0.4)
    assert said == (
        "tiny by release\n"
        "  patch     0.29.0  0.30.0  0.31.0\n"
        "  vllm_a_b  -       -       dropped\n"
        "  vllm_c_d  -       -       review\n"
        "  - 2 patches are not for 0.29.0 to 0.30.0: before their first range, >=0.31,<0.32\n"
        "  dropped: declared for that release, and proven there\n"
        "vLLM 0.31.0 (abc1234)\n"
        "  pin torch 2 -> 3\n"
        "  fetched 1.50 MB in 3 requests, 0.4 s\n"
        "a person must look\n"
    )


def test_a_grid_on_a_narrow_screen_is_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[tuple[str, ...]] = []
    monkeypatch.setattr(Console, "width", property(lambda _self: 40))
    monkeypatch.setattr(Console, "table", lambda _self, _title, columns, *_: tables.append(columns))
    versions = [f"0.{minor}.0" for minor in range(31, 36)]
    text_report(Console(), audit(*(release(report(Verdict.DRIFTED), version=v) for v in versions)))
    assert tables == [
        ("patch", "0.31.0", "0.32.0"), ("patch", "0.33.0", "0.34.0"), ("patch", "0.35.0"),
    ]  # fmt: skip


def test_a_release_that_could_not_be_read_is_told(text: Text) -> None:
    failure = Failure("0.32.0", "host: expected it, found nothing", "try again", 5)
    found = audit(release(report(Verdict.OK)), failures=(failure,))
    assert (found.exit_code, json_report(found)["exit_code"]) == (5, 5)
    said = text(release(report(Verdict.OK)), failures=(failure,))
    assert "vLLM 0.32.0 could not be read: host: expected it, found nothing\n" in said
    assert "      next: try again\n" in said
    assert said.endswith("every patch fits; 1 release could not be read\n")


def test_candidates_say_where_and_why(text: Text) -> None:
    one = report(Verdict.MOVED)
    one.edits.append(EditReport("words", "vllm/a.py", "f", State.MOVED, 3, "gone"))
    near = Near("vllm/b.py", 7, 0.914, "    x = 1\n", "g", "g is like f was")
    edits = (EditCandidates("words", "vllm/a.py", "f", (near, near)),)
    said = text(release(one, evidence={"vllm_a_b": Evidence((), edits)}))
    line = "vllm/b.py:7 in g (91%; g is like f was):\n        |     x = 1\n"
    assert f"      'words' is most like {line}      'words' or like {line}" in said


@pytest.mark.parametrize(
    ("first_bad", "last_good", "said"),
    [
        ("0.33.0", "0.32.0", "0.33.0 is the first on which vllm_a_b is not green; 0.32.0 before "
         "it is; 2 not looked at"),
        ("0.31.0", "", "vllm_a_b is not green on 0.31.0, the first release looked at; 2 not"),
        ("", "0.33.0", "vllm_a_b is green up to 0.33.0; 2 not looked at"),
    ],
)  # fmt: skip
def test_a_search_shows_its_steps(text: Text, first_bad: str, last_good: str, said: str) -> None:
    step = Step("0.33.0", cell_of(report(Verdict.DRIFTED)))
    found = Bisection("vllm_a_b", (step,), first_bad, last_good, 2)
    shown = text(release(report(Verdict.OK)), bisection=found)
    assert "  0.33.0   drifted  chosen\n" in shown
    assert said in shown


def test_a_watch_says_what_the_lock_is(text: Text) -> None:
    notes = (LockNote("error", "mentat", "gone"), LockNote("info", "image", "as locked"))
    watch = Watch("0.33.0", ("0.34.0", "0.35.0"), ("0.34.0",), notes, 4)
    shown = text(watch=watch)
    assert shown.startswith("newest locked vLLM 0.33.0; newer: 0.34.0, 0.35.0\n"
                            "  reported before: 0.34.0\nthe lock: 1 broken\n  x mentat: gone\n"
                            "  i image: as locked\n")  # fmt: skip
    assert audit(watch=watch).exit_code == 4
    assert shown.endswith("no release to report (reported before); the lock: 1 broken\n")
    assert audit(release(report(Verdict.OK)), watch=watch).conclusion == (
        "every patch fits; the lock does not hold"
    )
