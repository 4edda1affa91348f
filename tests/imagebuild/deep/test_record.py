"""What the lock keeps of deep results, and when a later result contradicts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagebuild.deep.base import About
from imagebuild.deep.record import DeepRecord, compare, recorded
from imagebuild.deep.run import Outcome, Probe

PROBE = Probe("routes", "x.routes", About(claim="x"), "d" * 64)
GOOD = Outcome(PROBE, "ok", "three routes")
OTHER = Outcome(Probe("gates", "x.gates", About(claim="x"), "e" * 64), "ok", "two gates")
RECORD = DeepRecord("s" * 64, "sm_120", "3.11", "2.13.0+cpu", "a" * 64, "2026-11-29",
                    recorded([GOOD, OTHER]))  # fmt: skip


def test_a_record_comes_back_from_toml_as_it_was() -> None:
    assert DeepRecord.read(RECORD.to_toml()) == RECORD


@pytest.mark.parametrize("key", ["series", "torch_sha256", "date", "results"])
def test_a_record_without_a_part_is_malformed(key: str) -> None:
    table = RECORD.to_toml()
    del table[key]
    with pytest.raises(KeyError):
        DeepRecord.read(table)


def test_only_what_ran_is_recorded() -> None:
    skipped = replace(OTHER, result="skipped")
    assert list(recorded([GOOD, skipped])) == ["routes"]


def test_the_same_results_are_no_contradiction() -> None:
    assert compare(RECORD, [GOOD, OTHER]) == []


def test_a_result_that_turned_is_one() -> None:
    (found,) = compare(RECORD, [replace(GOOD, result="failed", evidence="no route"), OTHER])
    assert (found.probe, found.is_result) == ("routes", True)
    assert found.message == (
        "routes: expected ok as recorded 2026-11-29 with Python 3.11 and torch 2.13.0+cpu, "
        "found failed"
    )


def test_other_evidence_for_the_same_result_is_a_smaller_one() -> None:
    (found,) = compare(RECORD, [replace(GOOD, evidence="four routes")])
    assert (found.probe, found.is_result) == ("routes", False)
    assert found.message.endswith(": four routes")


def test_another_probe_text_a_skipped_and_a_new_probe_contradict_nothing() -> None:
    edited = replace(GOOD, probe=replace(PROBE, digest="f" * 64), result="failed")
    new = replace(GOOD, probe=replace(PROBE, name="new"), result="failed")
    assert compare(RECORD, [edited, new, replace(GOOD, result="skipped")]) == []


def test_recording_the_same_again_keeps_the_day() -> None:
    later = replace(RECORD, date="2027-01-01")
    assert later.again(RECORD) is RECORD
    assert later.again(None) is later
    changed = replace(later, torch="2.14.0+cpu")
    assert changed.again(RECORD) is changed
