"""Deep probes as part of verify: what the lock has recorded, and what they find now.

It runs nothing unless it is asked to; what runs them is `imagebuild.deep.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.deep import run as deep
from imagebuild.deep.record import DeepRecord, compare
from imagebuild.deep.run import Outcome, Where
from imagebuild.lock import Lock
from imagebuild.verify.report import Group, VerifyReport

RECORD = "build.py lock update --deep --tree {root}"


def check_record(found: Group, record: DeepRecord | None, series: str | None, root: Path) -> None:
    """Says what was recorded for this release, and whether it is about this series."""
    if record is None:
        found.skip("none is recorded for this release")
        return
    count = len(record.results)
    made = f"{record.date}, Python {record.python}, torch {record.torch}"
    found.summary = f"{count} recorded ({made})"
    if series is not None and record.series != series:
        found.skip(f"{count} recorded on another series ({made}, {record.series[:12]})")
        found.info("deep-other-series", f"recorded on series {record.series[:12]}, this tree has "
                   f"{series[:12]}; {RECORD.format(root=root)} records anew")  # fmt: skip
    for name, one in record.results.items():
        if one.result != "ok":
            found.error("deep-recorded", f"{name}: recorded as {one.result}",
                        fix="repair it, then " + RECORD.format(root=root))  # fmt: skip


def check_now(
    report: VerifyReport,
    recipe: Recipe,
    lock: Lock,
    where: Where,
    step: Callable[[str], None] = lambda _text: None,
) -> list[Outcome]:
    """Runs the probes on the report's tree and adds what they find to it."""
    series = recipe.series()
    names = {patch.name for patch in series.patches} | {fix.name for fix in series.fixes}
    outcomes = deep.run(
        report.root,
        deep.probes(),
        where,
        lambda probe: deep.why_skipped(probe, report.version, names),
        step,
    )
    found = report.group("deep probes, now")
    judge(found, outcomes)
    base = lock.find(report.version.partition("+")[0])
    record = base.deep if base else None
    if record is not None and record.series == series.digest:
        for difference in compare(record, outcomes):
            add = found.error if difference.is_result else found.warning
            add("deep-contradicts" if difference.is_result else "deep-differs", difference.message,
                fix=RECORD.format(root=report.root))  # fmt: skip
    return outcomes


def judge(found: Group, outcomes: Sequence[Outcome]) -> None:
    """Makes an error of every probe whose claim was not shown."""
    for one in outcomes:
        if one.is_bad:
            owner = ", ".join(one.probe.about.patches) or "the base"
            found.error("deep-failed", f"{one.probe.name} ({owner}): {one.result}: {one.evidence}",
                        fix="the claim is: " + one.probe.about.claim)  # fmt: skip
    ran = [one for one in outcomes if one.result != "skipped"]
    if not ran:
        found.error("deep-none", "no deep probe is about this tree, so nothing was shown",
                    fix="run it from a whole checkout, on a release of the series")  # fmt: skip
    found.summary = f"{sum(not one.is_bad for one in ran)} of {len(ran)} hold"


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Probe, result and evidence, for a table."""
    return [(one.probe.name, one.result, one.evidence) for one in outcomes]


def to_json(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """The outcomes as data."""
    return [
        {
            "probe": one.probe.name,
            "claim": one.probe.about.claim,
            "patches": list(one.probe.about.patches),
            "result": one.result,
            "evidence": one.evidence,
            "seconds": round(one.seconds, 1),
            "torch": one.torch,
        }
        for one in outcomes
    ]
