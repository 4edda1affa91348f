"""The top-k rule: the real kernels, run lane by lane in Python, against the rule in plain words."""

# ruff: noqa: PLR0917 - the shapes of the calls that they stand for

from __future__ import annotations

import importlib.util
import math
import random
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fake_triton
from tests.support.fake_triton import Kernel, Tensor, bits_of, fake_torch

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "glm_topk.py"
NAN, MINUS_NAN = math.nan, struct.unpack("<f", b"\x01\x00\xc0\xff")[0]
TINY = 2.0**-149  # the least float32 above 0
POISON = 777


def rule(scores, k):
    """k ids: the best scores, ties by lowest id, ascending, then -1; NaN is -inf."""
    plain = [-math.inf if math.isnan(score) else score for score in scores]
    best = sorted(range(len(plain)), key=lambda i: (-plain[i], i))[:k]
    return sorted(best) + [-1] * (k - len(best))


class Stock:
    """vLLM's kernel as far as it is known: the best scores, any order, any of the tied pools."""

    def __init__(self, kind="right"):
        self.kind, self.calls = kind, 0

    def __call__(self, logits, starts, ends, out, rows, stride0, stride1, k):
        self.calls += 1
        if self.kind == "none":
            return
        columns = logits.shape[1]
        for row in range(rows):
            start = starts.storage[starts.offset + row] if starts else 0
            end = min(ends[row] if starts is None else ends.storage[ends.offset + row], columns)
            scores = logits.rows()[row][start : max(start, end)]
            plain = [-math.inf if math.isnan(score) else score for score in scores]
            order = sorted(range(len(plain)), key=lambda i: (-plain[i], random.random()))
            listed = order[:k]
            if self.kind == "any":
                listed = [random.randrange(-9, columns + 9) for _ in range(k)]
            if self.kind == "repeated":
                listed = order[:1] * k
            if self.kind == "best repeated" and len(order) > k:
                listed = [order[0]] * (k - 1) + order[1:2]
            if self.kind == "one wrong" and len(order) > k:
                listed[-1] = order[-1]
            random.shuffle(listed)
            listed += [-1] * (k - len(listed))
            for place, value in enumerate(listed):
                out.storage[out.offset + row * out.strides[0] + place * out.strides[1]] = value


KINDS = ("right", "none", "any", "repeated", "best repeated", "one wrong")


def load(stock=None, block=4, programs=6, most_parts=4, environment=None):
    """The module with stand-ins for torch, Triton and vLLM, and programs of few lanes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"GLM_TOPK_DETERMINISTIC": None, **(environment or {})}.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        shim = SimpleNamespace(tl=fake_triton.tl, triton=fake_triton.triton)
        patch.setitem(sys.modules, "torch", fake_torch(stock))
        patch.setitem(sys.modules, "vllm", SimpleNamespace(triton_utils=shim))
        patch.setitem(sys.modules, "vllm.triton_utils", shim)
        spec = importlib.util.spec_from_file_location("glm_topk_under_test", SOURCE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    module._BLOCK, module._PROGRAMS, module._MOST_PARTS = block, programs, most_parts
    return module


def matrix(rows, gap=0):
    """A float32 tensor of rows of equal length, `gap` NaNs apart."""
    width = len(rows[0])
    storage = [value for row in rows for value in [*row, *[NAN] * gap]]
    return Tensor(storage, (len(rows), width), (width + gap, 1))


def ints(values, shape=None):
    return Tensor(list(values), shape or (len(values),), dtype="int32")


def ids(rows, k, extra=0):
    """A buffer of poison, with `extra` columns that are not ours."""
    return Tensor([POISON] * (rows * (k + extra)), (rows, k + extra), dtype="int32")


def run_prefill(module, logits, starts, ends, k, extra=0):
    out = ids(logits.shape[0], k, extra)
    module.prefill(
        logits, ints(starts), ints(ends), out, logits.shape[0], *logits.strides, k
    )  # fmt: skip
    return out.rows()


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, TINY, -TINY, math.inf, -math.inf, NAN, MINUS_NAN]),
    st.floats(width=32, allow_nan=False),
)


@st.composite
def rows_of_scores(draw):
    width = draw(st.integers(1, 40))
    few = draw(st.booleans())
    scores = st.sampled_from(draw(st.lists(SCORES, min_size=1, max_size=3))) if few else SCORES
    count = draw(st.integers(1, 3))
    rows = [draw(st.lists(scores, min_size=width, max_size=width)) for _ in range(count)]
    starts = [draw(st.integers(0, width)) for _ in range(count)]
    ends = [start + draw(st.integers(-2, width + 2)) for start in starts]
    return rows, starts, ends


@settings(max_examples=150, deadline=None)
@given(
    rows_of_scores(), st.integers(1, 9), st.sampled_from(KINDS), st.sampled_from([1, 6, 64]),
    st.integers(0, 2),
)  # fmt: skip
def test_prefill_follows_the_rule_whatever_the_kernel_listed(case, k, kind, programs, gap):
    rows, starts, ends = case
    wanted = [
        rule(row[start : max(start, end)], k)
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]
    module = load(Stock(kind), programs=programs)
    found = run_prefill(module, matrix(rows, gap), starts, ends, k, extra=2)
    assert [row[:k] for row in found] == wanted
    assert {value for row in found for value in row[k:]} == {POISON}


@settings(max_examples=60, deadline=None)
@given(rows_of_scores(), st.integers(1, 9), st.sampled_from([1, 64]))
def test_two_runs_agree_though_the_lists_differ(case, k, programs):
    rows, starts, ends = case
    module = load(Stock("right"), programs=programs)
    first = run_prefill(module, matrix(rows), starts, ends, k)
    logits = matrix(rows)
    assert run_prefill(module, logits, starts, ends, k) == first
    # The same buffers once more, as a replayed graph has them.
    assert run_prefill(module, logits, starts, ends, k) == first


@pytest.mark.parametrize("programs", [1, 64])
def test_only_a_wrong_list_is_searched_for(programs, monkeypatch):
    scores = [[float(i % 5) for i in range(37)]]

    def search(*args):
        raise LookupError

    module = load(Stock("right"), programs=programs)
    monkeypatch.setattr(module, "_search_threshold", search)
    assert run_prefill(module, matrix(scores), [0], [37], 8) == [rule(scores[0], 8)]
    for kind in ("none", "repeated", "best repeated", "one wrong"):
        module = load(Stock(kind), programs=programs)
        monkeypatch.setattr(module, "_search_threshold", search)
        with pytest.raises(LookupError):
            run_prefill(module, matrix(scores), [0], [37], 8)


def test_few_rows_are_split_and_many_are_not():
    for rows, expected in ((1, ["_count_kernel", "_select_kernel"]), (6, ["_select_kernel"])):
        module = load(Stock("right"), programs=6)
        Kernel.launches.clear()
        scores = [[float(c) for c in range(17)]] * rows
        found = run_prefill(module, matrix(scores), [0] * rows, [17] * rows, 3)
        assert found == [[14, 15, 16]] * rows
        assert Kernel.launches == expected


def test_no_row_launches_nothing():
    module = load(Stock("right"))
    Kernel.launches.clear()
    logits = Tensor([], (0, 8))
    module.prefill(logits, ints([]), ints([]), ids(0, 4), 0, 8, 1, 4)
    assert Kernel.launches == []


def test_winners_carry_the_bits_that_the_rule_reads():
    scores = [-0.0, 0.0, NAN, -0.0, -2.0]
    logits = matrix([scores])
    assert run_prefill(load(Stock("right")), logits, [0], [5], 4) == [[0, 1, 3, 4]]
    assert [bits_of(value) for value in logits.storage[:2]] == [0, 0]
    logits = matrix([[NAN, 3.0]])
    run_prefill(load(Stock("right")), logits, [0], [2], 4)
    assert logits.storage == [-math.inf, 3.0]


def listing(stock):
    """`stock` behind the interface of vLLM's dispatcher, for rows from column 0."""

    def call(logits, seq_lens, next_n, out, k, most):
        rows = logits.shape[0]
        spread = rows // seq_lens.numel()
        ends = [
            max(0, seq_lens.storage[r // spread] - (spread - 1) + r % spread) for r in range(rows)
        ]
        stock(logits, None, ends, out, rows, *logits.strides, k)

    return call


@pytest.mark.parametrize(
    ("shape", "lengths", "next_n", "ends"),
    [
        ((4, 1), [20, 0, 3, 11], 1, [20, 0, 3, 11]),
        ((4,), [20, 0, 3, 11], 1, [20, 0, 3, 11]),
        ((2, 2), [7, 8, 0, 0], 2, [7, 8, 0, 0]),
        ((2, 1), [20, 1], 2, [19, 20, 0, 1]),
        ((1, 1), [2], 4, [0, 0, 1, 2]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_reads_lengths_of_rows_and_of_requests(shape, lengths, next_n, ends, kind):
    rows = [[float(random.randrange(4)) for _ in range(20)] for _ in ends]
    module = load()
    out = ids(4, 5)
    select = module.decode(listing(Stock(kind)))
    select(matrix(rows), ints(lengths, shape), next_n, out, 5, 123)
    assert out.rows() == [rule(row[:end], 5) for row, end in zip(rows, ends, strict=True)]


def test_lengths_that_fit_no_row_are_refused():
    module = load()
    with pytest.raises(ValueError, match="3 lengths for 4 rows of 2"):
        module.decode(None)(matrix([[1.0]] * 4), ints([1, 1, 1]), 2, ids(4, 1), 1, 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"is_cuda": False}, "not on a GPU"),
        ({"dtype": "bfloat16"}, "bfloat16, not float32"),
    ],
)
def test_other_logits_are_refused_before_the_kernel_runs(change, match):
    stock = Stock()
    logits = matrix([[1.0, 2.0]])
    vars(logits).update(change)
    with pytest.raises(ValueError, match=match):
        run_prefill(load(stock), logits, [0], [2], 1)
    assert stock.calls == 0


def test_other_ids_bounds_and_k_are_refused():
    module, logits, bounds = load(Stock()), matrix([[1.0, 2.0]] * 2), ints([0, 0])
    gaps = Tensor([0, 0, 0], (2,), (2,), dtype="int32")
    wide = Tensor([0] * 4, (2, 2))
    for starts, out, k, match in (
        (bounds, wide, 1, "ids are float32"),
        (gaps, ids(2, 1), 1, "bounds are not contiguous"),
        (bounds, ids(2, 1), 2, r"k is 2, not within 1\.\.1"),
        (bounds, ids(2, 1), 0, r"k is 0"),
        (bounds, ids(2, 5000), 4097, r"not within 1\.\.4096"),
    ):
        with pytest.raises(ValueError, match=match):
            module.prefill(logits, starts, bounds, out, 2, 2, 1, k)


@pytest.mark.parametrize(("value", "is_on"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_the_switch(value, is_on):
    stock = Stock("right")
    module = load(stock, environment={"GLM_TOPK_DETERMINISTIC": value})
    assert module.IS_ON is is_on
    assert (module.decode(stock) is stock) is not is_on
    Kernel.launches.clear()
    run_prefill(module, matrix([[1.0, 5.0, 2.0]]), [0], [3], 2)
    unsorted = ints([3, -1, 2], (1, 3))
    module.ascending(unsorted, 2)
    assert stock.calls == 1
    assert bool(Kernel.launches) is is_on
    assert unsorted.rows() == [[2, 3, -1] if is_on else [3, -1, 2]]


@pytest.mark.parametrize("value", ["yes", "2", " 1", "off"])
def test_another_value_stops_the_import(value):
    with pytest.raises(ValueError, match=f"GLM_TOPK_DETERMINISTIC='{value}'"):
        load(environment={"GLM_TOPK_DETERMINISTIC": value})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 2**31 - 2), min_size=1, max_size=20))
def test_ascending_puts_missing_ids_last(row):
    ours = Tensor([POISON, *row, POISON], (1, len(row)), (len(row) + 2, 1), 1, "int32")
    load().ascending(ours, 2)
    there = sorted(value for value in row if value >= 0)
    assert ours.storage == [POISON, *there, *[-1] * (len(row) - len(there)), POISON]


def test_one_rank_needs_no_order():
    row = ints([3, 1], (1, 2))
    load().ascending(row, 1)
    assert row.rows() == [[3, 1]]


def merged(candidates, k):
    """vLLM's merge over ranks: by the scores' bits, then by lowest id, in any order."""

    def order(bits):
        return bits if bits >= 0 else bits ^ 0x7FFFFFFF

    best = sorted(candidates, key=lambda item: (-order(bits_of(item[0])), item[1]))[:k]
    random.shuffle(best)
    return [pool for _, pool in best] + [-1] * (k - len(best))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, NAN, MINUS_NAN, -math.inf, 2.5]), max_size=48),
    st.integers(1, 9), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_merged_over_ranks_it_is_the_rule_for_the_whole_row(scores, k, world, interleave):
    module = load(Stock("right"))
    candidates = []
    for rank in range(world):
        pools = [p for p in range(len(scores)) if p // interleave % world == rank]
        local = matrix([[scores[p] for p in pools] or [0.0]])
        (chosen,) = run_prefill(module, local, [0], [len(pools)], k)
        candidates += [(local.storage[c], pools[c]) for c in chosen if c >= 0]
    row = ints(merged(candidates, k), (1, k))
    module.ascending(row, world)
    assert row.rows() == [rule(scores, k)]
