"""What the kernel is to reach, as data, and whether a run reached it. Source: docs of this folder.

A target was set from a prototype on one H200, below what it measured; it is no wish and no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from imagebuild.errors import BrokenError
from kernel.bench.cases import HEAD_DIM, TOPK
from kernel.bench.results import Results, Row

OWN = "glm53_sparse_mla"
READ_CASE = "decode bs256 h16 bf16 read"
Kind = Literal["hard", "stretch"]


@dataclass(frozen=True)
class Target:
    """One demand on one number.

    Attributes:
        what: the number, in words.
        value: takes it from the results.
        limit: that it must reach.
        at_most: the limit is an upper one.
        unit: of both.
    """

    kind: Kind
    what: str
    value: Callable[[Results], float]
    limit: float
    at_most: bool = False
    unit: str = "x"

    def is_met(self, results: Results) -> bool:
        """Whether a run reached it."""
        found = self.value(results)
        return found <= self.limit if self.at_most else found >= self.limit


_SPEEDUPS: dict[str, dict[str, float]] = {
    **{f"decode bs{size} h16 bf16": {"triton": 4.0, "fa2": 1.2} for size in (1, 8)},
    **{case: {"triton": 2.0, "fa2": 1.6, "sm120cfg": 3.8, "fa3": 0.95}
       for case in ("decode bs64 h8 bf16", "decode bs64 h16 bf16", "decode bs128 h16 bf16",
                    "decode bs256 h16 bf16")},
    "decode bs64 h32 bf16": {"triton": 3.0, "fa2": 1.4, "sm120cfg": 3.3},
    "decode bs64 h64 bf16": {"triton": 3.2, "fa2": 0.92, "sm120cfg": 2.0},
    **{f"prefill 4096 h{heads} bf16": {"triton": 1.85, "fa2": 1.8, "sm120cfg": 4.0, "fa3": 0.8}
       for heads in (8, 16)},
    "prefill 4096 h32 bf16": {"fa2": 1.55},
    "prefill 4096 h64 bf16": {"triton": 3.0, "fa2": 0.8, "sm120cfg": 1.8},
    **{case: {"fa3": 2.8} for case in ("decode bs64 h16 fp8", "decode bs128 h16 fp8",
                                       "decode bs256 h16 fp8")},
}  # fmt: skip
_ROOFLINE = {64: (0.80, 0.65), 128: (0.85, 0.75), 256: (0.85, 0.75)}


def targets() -> Iterator[Target]:
    """All of them, hard ones first."""
    for case, limits in _SPEEDUPS.items():
        for other, limit in limits.items():
            yield Target("hard", f"{case}: over {other}", _speedup(case, other), limit)
    for size, (of_gather, of_read) in _ROOFLINE.items():
        case = f"decode bs{size} h16 bf16"
        yield Target("hard", f"{case}: of gather-only", _speedup(case, "gather"), of_gather)
        yield Target("hard", f"{case}: of read bandwidth", _share_of_read(case, size), of_read)
    for size in (64, 128, 256):
        yield Target("hard", f"decode bs{size} h16 fp8: over own bf16", _fp8_gain(size), 1.0)
    yield Target("hard", "every case: max-relative", _worst("max_rel"), 4.1e-3, True, "")
    yield Target("hard", "every case: norm-relative", _worst("norm_rel"), 2.0e-3, True, "")
    yield Target("hard", "every case: cosine", _worst("cosine"), 0.999998, False, "")
    yield from _stretch()


def _stretch() -> Iterator[Target]:
    for case, limit in (("decode bs64 h16 bf16", 41.0), ("decode bs1 h16 bf16", 10.0),
                        ("prefill 4096 h64 bf16", 4000.0)):  # fmt: skip
        yield Target("stretch", case, _time(case), limit, True, "us")
    yield Target("stretch", "decode bs256 h16 fp8: over own bf16", _fp8_gain(256), 1.3)


def _time(case: str) -> Callable[[Results], float]:
    return lambda results: results.time(case, OWN)


def _speedup(case: str, other: str) -> Callable[[Results], float]:
    return lambda results: results.time(case, other) / results.time(case, OWN)


def _fp8_gain(size: int) -> Callable[[Results], float]:
    bf16, fp8 = (f"decode bs{size} h16 {dtype}" for dtype in ("bf16", "fp8"))
    return lambda results: results.time(bf16, OWN) / results.time(fp8, OWN)


def _share_of_read(case: str, size: int) -> Callable[[Results], float]:
    """Of the gathered rows alone, so that what else is moved counts against the kernel."""
    rows = size * TOPK * HEAD_DIM * 2
    return lambda results: rows / results.time(case, OWN) / read_bandwidth(results)


def read_bandwidth(results: Results) -> float:
    """Bytes a microsecond of a plain sum."""
    row = results.find(READ_CASE, "torch")
    if row is None:
        raise BrokenError(f"results: expected torch's row {READ_CASE!r}, found none")
    return row.bytes / row.microseconds


def _worst(field: str) -> Callable[[Results], float]:
    """Of all our rows but those whose tokens have few keys, for which the limit is not meant."""

    def worst(results: Results) -> float:
        pick = min if field == "cosine" else max
        found = [getattr(row, field) for row in results.rows if _is_random(row)]
        if not found:
            raise BrokenError(f"results: expected rows of {OWN}, found none")
        return float(pick(found))

    return worst


def _is_random(row: Row) -> bool:
    return row.kernel == OWN and not row.case.endswith("causal")
