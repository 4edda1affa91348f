"""Results of deep probes as the lock keeps them, and how fresh ones compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from imagebuild.deep.run import Outcome


@dataclass(frozen=True)
class Recorded:
    """One result. `evidence` and `probe` are digests: of what it said, and of its module."""

    result: str
    evidence: str
    probe: str


@dataclass(frozen=True)
class DeepRecord:
    """What deep probes found on one patched tree.

    Attributes:
        series: digest of the series that the tree was patched with.
        gpu_arch: what it was built for.
        python: minor version of the interpreter.
        torch: version of torch.
        torch_sha256: of its wheel.
        date: when, such as "2026-11-29".
        results: by probe.
    """

    series: str
    gpu_arch: str
    python: str
    torch: str
    torch_sha256: str
    date: str
    results: Mapping[str, Recorded]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> DeepRecord:
        """From the lock. Raises KeyError, TypeError or AttributeError when it is malformed."""
        names = ("series", "gpu_arch", "python", "torch", "torch_sha256", "date")
        results = {
            str(name): Recorded(*(str(entry[key]) for key in ("result", "evidence", "probe")))
            for name, entry in table["results"].items()
        }
        return cls(**{name: str(table[name]) for name in names}, results=results)

    def to_toml(self) -> dict[str, Any]:
        """For the lock."""
        return {**vars(self), "results": {n: vars(r) for n, r in sorted(self.results.items())}}

    def again(self, known: DeepRecord | None) -> DeepRecord:
        """This record, or the known one where nothing but the day differs."""
        if known is not None and DeepRecord(**{**vars(self), "date": known.date}) == known:
            return known
        return self


def digest(evidence: str) -> str:
    """What the lock keeps of a sentence: enough to see that it is another one."""
    return hashlib.sha256(evidence.encode()).hexdigest()[:16]


def recorded(outcomes: Iterable[Outcome]) -> dict[str, Recorded]:
    """Results of the probes that ran, for the lock."""
    return {
        one.probe.name: Recorded(one.result, digest(one.evidence), one.probe.digest[:16])
        for one in outcomes
        if one.result != "skipped"
    }


@dataclass(frozen=True)
class Difference:
    """A probe that says something else than the record; `is_result`: it passes no more, or now."""

    probe: str
    is_result: bool
    message: str


def compare(record: DeepRecord, outcomes: Iterable[Outcome]) -> list[Difference]:
    """What fresh results of the same series contradict, in the order of the probes."""
    found = []
    for one in outcomes:
        known = record.results.get(one.probe.name)
        # Another text of the probe may claim something else.
        if known is None or one.result == "skipped" or known.probe != one.probe.digest[:16]:
            continue
        where = f"recorded {record.date} with Python {record.python} and torch {record.torch}"
        if known.result != one.result:
            message = f"{one.probe.name}: expected {known.result} as {where}, found {one.result}"
            found.append(Difference(one.probe.name, True, message))
        elif known.evidence != digest(one.evidence):
            message = f"{one.probe.name}: says something else than {where}: {one.evidence}"
            found.append(Difference(one.probe.name, False, message))
    return found
