"""The search by halves, for every place where a patch may turn bad."""

from __future__ import annotations

import math

import pytest

from imagebuild.audit.bisect import first_bad
from imagebuild.audit.results import Release, Step
from imagebuild.patching.evaluate import Evaluation, PatchReport, Verdict
from imagebuild.patching.patch import Answer, Outcome, Patch, Probe, Variant
from imagebuild.patching.selection import Selection
from imagebuild.patching.tree import Identity

PROBE = Probe("it holds", lambda _tree: Answer(Outcome.HOLDS, "seen"))
VARIANT = Variant(versions=">=0.1,<0.99")
PATCH = Patch(name="p", status="pending", upstream="", origin="", variants=(VARIANT,),
              reason=PROBE, effect=PROBE)  # fmt: skip


def release(version: str, verdict: Verdict) -> Release:
    report = PatchReport(PATCH, Selection(VARIANT, None, "chosen"), verdict)
    return Release(version, Identity(version), {}, {}, Evaluation((report,), {}))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_every_place(count: int) -> None:
    versions = [f"0.{minor}" for minor in range(1, count + 1)]
    for bad in range(count + 1):
        told: list[Step] = []

        def look(version: str, bad: int = bad) -> Release:
            is_bad = versions.index(version) >= bad
            return release(version, Verdict.DRIFTED if is_bad else Verdict.OK)

        found, seen = first_bad("p", versions, look, told.append)
        assert found.first_bad == (versions[bad] if bad < count else "")
        assert found.last_good == (versions[bad - 1] if bad else "")
        looked_at = [step.version for step in found.steps]
        assert len(looked_at) == len(set(looked_at))  # nothing twice
        assert len(looked_at) <= 2 + math.ceil(math.log2(count))
        assert found.untested == count - len(looked_at)
        assert (list(found.steps), [one.name for one in seen]) == (told, looked_at)


def test_what_is_green_is_good_and_what_needs_a_look_is_bad() -> None:
    verdicts = [Verdict.NOT_APPLICABLE, Verdict.OK, Verdict.REVIEW, Verdict.MISSING]
    versions = ["0.1", "0.2", "0.3", "0.4"]
    found, _seen = first_bad(
        "p", versions, lambda v: release(v, verdicts[versions.index(v)]), lambda _step: None
    )
    assert (found.first_bad, found.last_good) == ("0.3", "0.2")
