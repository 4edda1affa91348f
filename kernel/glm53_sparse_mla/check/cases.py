"""What is checked: every case by name, and how its inputs are made. Data only, no kernel is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["bf16", "fp8"]
How = Literal["plain", "graph", "stream"]

HEAD_DIM = 512
SM_SCALE = 256**-0.5  # GLM-5.3: of the 256 values a head before MLA absorbs the up-projection
TOPK = 2048
# What vLLM hands over for a top-k of 2,048: that, up to 3 newest tokens, and padding to 2,176.
FILLED, BUFFER = 2051, 2176
HEADS = (8, 16, 24, 32, 64)
DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")
WIDTHS = (1, 31, 32, 33, 64, TOPK, FILLED)
TOKENS = (1, 2, 7, 64, 129, 4096)
AMPLITUDES = (1.0, 2.0, 40.0)
SPLITS = (None, 1, 2, 3, 8, 64)
# One after the other over the tokens of a case.
MASKS = ("none", "tail", "head", "holes", "tile", "last", "first", "all", "duplicates", "same")
_UNUSUAL: tuple[How, ...] = ("graph", "stream")
FP8_SCALE = 0.37  # any but 1
HUGE_ROWS = (1 << 22) + 4096  # times 512 values is more than 2^31


@dataclass(frozen=True)
class Case:
    """One set of inputs, and how the kernel is run on it.

    Attributes:
        row: of the report; several cases may share one.
        tokens: T.
        width: W, filled columns of the indices.
        columns: of the index tensor; those from `width` on hold negative filler.
        masks: the i-th token gets mask i modulo their number.
        amplitude: standard deviation of q.
        values: of the rows; "codes" are all finite e4m3 values.
        row_stride: values from one row of the pool to the next.
        rows: of the pool.
        page_gap: of every 128 rows the second half belongs to another layer: never selected.
        is_paged: the kernel is given pages and the distance between them, not plain rows.
        has_gaps: queries and results lie apart from token to token and from head to head.
        expected_width: what the kernel is told of how many columns are used; 0 for all.
        splits: that the kernel is run with; None leaves the choice to it.
        how: launched plainly, replayed as a CUDA graph, or on a stream of its own.
        is_random: the strict limits hold.
    """

    row: str
    heads: int
    dtype: Dtype
    tokens: int = 10
    width: int = TOPK
    columns: int = 0
    masks: tuple[str, ...] = ("none",)
    amplitude: float = 1.0
    values: Literal["normal", "codes"] = "normal"
    row_stride: int = HEAD_DIM
    rows: int = 8192
    page_gap: bool = False
    is_paged: bool = False
    has_gaps: bool = False
    expected_width: int = 0
    splits: tuple[int | None, ...] = (None,)
    how: How = "plain"
    is_random: bool = False
    seed: int = 0

    @property
    def label(self) -> str:
        """Row and parameters, for messages."""
        extra = f"T{self.tokens} W{self.width} q x{self.amplitude:g}"
        return f"{self.row} ({extra})"

    @property
    def kv_scale(self) -> float:
        """What stored values are multiplied with."""
        return FP8_SCALE if self.dtype == "fp8" else 1.0

    @property
    def pool_bytes(self) -> int:
        """Of the pool on the device."""
        return self.rows * self.row_stride * (1 if self.dtype == "fp8" else 2)


def named() -> Iterator[Case]:
    """The six cases that users of earlier kernels know: 8, 16 and 32 heads, both types."""
    for heads, dtype in itertools.product((8, 16, 32), DTYPES):
        yield Case(f"h{heads} {dtype}", heads, dtype, tokens=64, is_random=True)


def quick() -> Iterator[Case]:
    """A few seconds: the named cases, every mask, both ways to launch, vLLM's buffer."""
    yield from named()
    for heads, dtype in itertools.product((8, 16, 32, 64), DTYPES):
        case = _masked(f"masks h{heads} {dtype}", heads, dtype, columns=BUFFER)
        yield replace(case, expected_width=FILLED, splits=(None, 3))
    for how in _UNUSUAL:
        yield Case(how, 16, "bf16", tokens=3, how=how)


def full() -> Iterator[Case]:
    """The whole matrix."""
    yield from named()
    for heads, dtype in itertools.product(HEADS, DTYPES):
        for width, amplitude in itertools.product(WIDTHS, AMPLITUDES):
            case = _masked(f"matrix h{heads} {dtype}", heads, dtype, width=width)
            # Wider than filled, by an odd number: the row stride is no multiple of anything.
            yield replace(case, amplitude=amplitude, columns=width + 61, splits=SPLITS)
        for tokens in TOKENS:
            yield Case(f"tokens h{heads} {dtype}", heads, dtype, tokens=tokens,
                       is_random=tokens > 1, seed=tokens)  # fmt: skip
    yield from _layouts()
    yield from _launches()


def _masked(row: str, heads: int, dtype: Dtype, *, width: int = FILLED, columns: int = 0) -> Case:
    return Case(row, heads, dtype, tokens=len(MASKS), width=width, columns=columns, masks=MASKS,
                rows=4096)  # fmt: skip


def _layouts() -> Iterator[Case]:
    """Where rows can be: padded, between pages of other layers, far beyond 2^31 values."""
    for heads, dtype in itertools.product((8, 16, 32, 64), DTYPES):
        base = _masked(f"layout h{heads} {dtype}", heads, dtype, columns=BUFFER)
        yield replace(base, row_stride=528, has_gaps=True)
        # Told too little: it costs time, and no key.
        yield replace(base, row_stride=1024, expected_width=100)
        yield replace(base, page_gap=True, rows=65536)
        yield replace(base, page_gap=True, is_paged=True, rows=65536, row_stride=528)
    for dtype in DTYPES:
        yield _masked(f"values {dtype}", 16, dtype, columns=BUFFER)
        yield Case(f"pool over 2^31 {dtype}", 16, dtype, tokens=33, rows=HUGE_ROWS, is_random=True)
        yield Case(f"stride over 2^31 {dtype}", 32, dtype, tokens=33, rows=HUGE_ROWS // 8,
                   row_stride=8 * HEAD_DIM, is_random=True)  # fmt: skip
        yield Case(f"pages over 2^31 {dtype}", 64, dtype, tokens=33, rows=HUGE_ROWS,
                   page_gap=True, is_paged=True, is_random=True)  # fmt: skip
    codes = _masked("values fp8", 16, "fp8", columns=BUFFER)
    yield replace(codes, values="codes")
    # As fp16 these queries would be infinite.
    yield replace(codes, amplitude=1e5)


def _launches() -> Iterator[Case]:
    """What a server does: graphs, streams, prefill and decode in one launch."""
    for dtype, how in itertools.product(DTYPES, _UNUSUAL):
        for heads, tokens in itertools.product((8, 16, 32, 64), (1, 64)):
            yield Case(f"{how} {dtype}", heads, dtype, tokens=tokens, how=how)
    for heads, dtype in itertools.product((8, 16, 32, 64), DTYPES):
        yield Case(f"prefill and decode {dtype}", heads, dtype, tokens=160, width=FILLED,
                   columns=BUFFER, masks=("causal",) * 5 + ("none", "holes"))  # fmt: skip
