"""Top-k of the sparse indexer by one exact rule, in place of vLLM's kernels: same bits every run.

The rule, for one row of scores and a number k: the k best scores win; where several pools share
the k-th score, those with the lowest ids win; the row lists the winners by ascending id and then
-1. Scores compare as numbers, so -0.0 equals 0.0, and a NaN counts as -inf. A row with k pools or
fewer keeps all of them, whatever their scores.

The names here stand where vLLM's own calls stood and take the same arguments, so that what a
column of the logits means is upstream's business alone: pool p of a row is column start + p.
GLM_TOPK_DETERMINISTIC=0 leaves what those calls chose as it is. Must not wait for the device, and
must not allocate but through torch: decode runs under CUDA graph capture.

How: vLLM's kernel runs first. Which pools it lists among tied ones, and in which order, differs
from run to run, but the lowest score that it lists is the k-th score, and with that one pass over
the row finds the winners. The pass counts, so a list that is wrong (NaN, say) is noticed on the
device; the k-th score of such a row is then searched for by halving. The result never depends on
the list, only the time does.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0917 - a Triton kernel has the shape that Triton wants, and the
# entry points have that of the calls they stand for

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.triton_utils import tl, triton

VARIABLE = "GLM_TOPK_DETERMINISTIC"

# Pools that a program looks at in one step, and its warps: 64 to 79 registers a thread, so that six
# programs share a multiprocessor (compiled by Triton 3.6 for sm_90, sm_120, sm_121; 2026-11-29).
# Four times the pools with twice the warps takes 166 to 180, and leaves room for one.
_BLOCK, _WARPS = 1024, 4
# Few rows are split over several programs, so that they fill a GPU; more than this many programs
# do not help.
_PROGRAMS = 1024
_MOST_PARTS = 64
# A row's winners are held in registers at once.
_MOST_K = 4096


def is_deterministic(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the rule is on: unset, empty or "1" is on, "0" is off.

    Raises:
        ValueError: the variable holds anything else.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} means nothing; expected 1 (the default) or 0")
    return value != "0"


# Read when vLLM imports its indexer, so that a wrong value stops the start before weights load.
IS_ON = is_deterministic()
logging.getLogger("vllm.glm_topk").info(
    "indexer top-k: %s", "ties by lowest id, ascending" if IS_ON else "as vLLM's kernels list"
)


@triton.jit
def _row_bounds(starts, ends, row, num_columns, SPREAD: tl.constexpr, HAS_STARTS: tl.constexpr):
    """Column of a row's pool 0, and how many pools it has (0 or less: none)."""
    start = 0
    if HAS_STARTS:
        start = tl.load(starts + row)
    # With SPREAD > 1 a request has one length, that of its last row.
    end = tl.load(ends + row // SPREAD) - (SPREAD - 1) + row % SPREAD
    return start, tl.minimum(end, num_columns) - start


@triton.jit
def _load_keys(places, valid):
    """int32 keys in the order of the scores; the scores' bits as the rule reads them; as stored.

    In integers, since a compiler may take liberties with -0.0 and NaN in floats. The key of -inf
    is the lowest of a score and still above that of what is no pool.
    """
    raw = tl.load(places, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(raw == -0x80000000, 0, raw)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -0x00800000, bits)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(valid, keys, -0x80000000), bits, raw


@triton.jit
def _listed_threshold(
    first,
    listed,
    count,
    K: tl.constexpr,
    LOGITS_STEP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    """The lowest key among the pools that vLLM's kernel listed, and how many tied pools win by it.

    Below every key, and none, when the row's pools all win.
    """
    threshold = -0x7FFFFFFF
    room = 0
    if count > K:
        lanes = tl.arange(0, PADDED_K)
        ids = tl.load(listed + lanes * OUT_STEP, mask=lanes < K, other=-1)
        valid = (ids >= 0) & (ids < count)
        keys, _bits, _raw = _load_keys(first + ids * LOGITS_STEP, valid)
        threshold = tl.min(tl.where(valid, keys, 0x7FFFFFFF))
        room = K - tl.sum((keys > threshold).to(tl.int32))
    return threshold, room


@triton.jit
def _search_threshold(
    first, count, K: tl.constexpr, LOGITS_STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for a row with more than K pools without a list, by halving the range of keys."""
    # K keys reach `low`, fewer reach `high`. In 64 bits: the span of 32-bit keys takes 33.
    low = tl.full((), -0x80000000, tl.int64)
    high = tl.full((), 0x7FFFFFFF, tl.int64)
    reach_high = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = 0
        for begin in range(0, count, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            keys, _bits, _raw = _load_keys(first + ids * LOGITS_STEP, ids < count)
            reached += tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        is_low = reached >= K
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
        reach_high = tl.where(is_low, reach_high, reached)
    return low.to(tl.int32), K - reach_high


@triton.jit
def _write_winners(
    first,
    out,
    begin,
    stop,
    threshold,
    greater,
    tied,
    room,
    K: tl.constexpr,
    LOGITS_STEP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists the winners among pools [begin, stop), behind those before `begin`.

    `greater` and `tied` say how many pools before `begin` are above and at the threshold, `room`
    how many tied pools of the whole row win. Returns both numbers with these pools counted.
    """
    for block in range(begin, stop, BLOCK):
        ids = block + tl.arange(0, BLOCK)
        valid = ids < stop
        places = first + ids * LOGITS_STEP
        keys, bits, raw = _load_keys(places, valid)
        above = (keys > threshold).to(tl.int32)
        equal = ((keys == threshold) & valid).to(tl.int32)
        # Both running counts in one scan: neither reaches 2**15.
        packed = tl.cumsum(above + equal * 65536, 0)
        above_count = greater + (packed & 0xFFFF)
        equal_count = tied + (packed >> 16)
        wins = (above > 0) | ((equal > 0) & (equal_count <= room))
        place = above_count + tl.minimum(equal_count, room) - 1
        # A wrong threshold may name more than K pools.
        tl.store(out + place * OUT_STEP, ids, mask=wins & (place < K))
        # A merge over ranks compares the bits of the winners, so they must follow the rule too.
        tl.store(places, bits.to(tl.float32, bitcast=True), mask=wins & (bits != raw))
        greater += tl.sum(above)
        tied += tl.sum(equal)
    return greater, tied


@triton.jit(
    do_not_specialize=["num_columns", "part_size"],
    do_not_specialize_on_alignment=["starts", "ends", "out"],
)
def _count_kernel(
    logits,
    starts,
    ends,
    out,
    thresholds,
    counts,
    logits_stride,
    out_stride,
    num_columns,
    part_size,
    K: tl.constexpr,
    SPREAD: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    LOGITS_STEP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """For split rows, program (row, part): the threshold, and the part's pools above and at it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    start, count = _row_bounds(starts, ends, row, num_columns, SPREAD, HAS_STARTS)
    first = logits + row.to(tl.int64) * logits_stride + start * LOGITS_STEP
    listed = out + row.to(tl.int64) * out_stride
    greater = 0
    tied = 0
    begin = part * part_size
    if begin < count:
        threshold, _room = _listed_threshold(
            first, listed, count, K, LOGITS_STEP, OUT_STEP, PADDED_K
        )
        if part == 0:
            tl.store(thresholds + row, threshold)
        stop = tl.minimum(begin + part_size, count)
        for block in range(begin, stop, BLOCK):
            ids = block + tl.arange(0, BLOCK)
            valid = ids < stop
            keys, _bits, _raw = _load_keys(first + ids * LOGITS_STEP, valid)
            above = (keys > threshold).to(tl.int32)
            packed = tl.sum(above + ((keys == threshold) & valid).to(tl.int32) * 65536)
            greater += packed & 0xFFFF
            tied += packed >> 16
    place = counts + (row * MOST_PARTS + part) * 2
    tl.store(place, greater)
    tl.store(place + 1, tied)


@triton.jit(
    do_not_specialize=["num_columns", "part_size", "num_parts"],
    do_not_specialize_on_alignment=["starts", "ends", "out"],
)
def _select_kernel(
    logits,
    starts,
    ends,
    out,
    thresholds,
    counts,
    logits_stride,
    out_stride,
    num_columns,
    part_size,
    num_parts,
    K: tl.constexpr,
    SPREAD: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    LOGITS_STEP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Program (row, part): the part's winners, and -1 behind the row's last from part 0."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    start, count = _row_bounds(starts, ends, row, num_columns, SPREAD, HAS_STARTS)
    first = logits + row.to(tl.int64) * logits_stride + start * LOGITS_STEP
    out_row = out + row.to(tl.int64) * out_stride
    begin = part * part_size
    none = tl.full((), 0, tl.int32)
    if begin < count:
        stop = tl.minimum(begin + part_size, count)
        if IS_SPLIT:
            threshold = tl.load(thresholds + row)
            parts = tl.arange(0, MOST_PARTS)
            places = counts + (row * MOST_PARTS + parts) * 2
            all_above = tl.load(places, mask=parts < num_parts, other=0)
            all_equal = tl.load(places + 1, mask=parts < num_parts, other=0)
            greater = tl.sum(all_above)
            tied = tl.sum(all_equal)
            room = K - greater
            is_right = (count <= K) | ((room > 0) & (tied >= room))
            if is_right:
                above_before = tl.sum(tl.where(parts < part, all_above, 0))
                equal_before = tl.sum(tl.where(parts < part, all_equal, 0))
                _write_winners(
                    first, out_row, begin, stop, threshold, above_before, equal_before, room,
                    K, LOGITS_STEP, OUT_STEP, BLOCK,
                )  # fmt: skip
        else:
            threshold, room = _listed_threshold(
                first, out_row, count, K, LOGITS_STEP, OUT_STEP, PADDED_K
            )
            greater, tied = _write_winners(
                first, out_row, 0, count, threshold, none, none, room,
                K, LOGITS_STEP, OUT_STEP, BLOCK,
            )  # fmt: skip
            is_right = (count <= K) | ((greater == K - room) & (tied >= room))
        if (part == 0) & (is_right == 0):
            threshold, room = _search_threshold(first, count, K, LOGITS_STEP, BLOCK)
            # What was written above must be there before it is written over.
            tl.debug_barrier()
            _write_winners(
                first, out_row, 0, count, threshold, none, none, room,
                K, LOGITS_STEP, OUT_STEP, BLOCK,
            )  # fmt: skip
    if part == 0:
        behind = tl.arange(0, PADDED_K)
        tl.store(out_row + behind * OUT_STEP, -1, mask=(behind >= count) & (behind < K))


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _sort_kernel(ids, stride, K: tl.constexpr, STEP: tl.constexpr, PADDED_K: tl.constexpr):
    """Sorts one row of K ids in place, negative ones last."""
    lanes = tl.arange(0, PADDED_K)
    places = ids + tl.program_id(0).to(tl.int64) * stride + lanes * STEP
    values = tl.load(places, mask=lanes < K, other=-1)
    values = tl.sort(tl.where(values < 0, 0x7FFFFFFF, values))
    tl.store(places, tl.where(values == 0x7FFFFFFF, -1, values), mask=lanes < K)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _check(logits: torch.Tensor, out: torch.Tensor, bounds: list[torch.Tensor], k: int) -> None:
    problems = []
    if not logits.is_cuda:
        problems.append("the logits are not on a GPU")
    if logits.dtype != torch.float32:
        problems.append(f"the logits are {logits.dtype}, not float32")
    if out.dtype != torch.int32:
        problems.append(f"the ids are {out.dtype}, not int32")
    if not 0 < k <= min(_MOST_K, out.shape[1]):
        problems.append(f"k is {k}, not within 1..{min(_MOST_K, out.shape[1])}")
    if not all(bound.is_contiguous() for bound in bounds):
        problems.append("the rows' bounds are not contiguous")
    if problems:
        raise ValueError(f"glm_topk: {'; '.join(problems)}; {VARIABLE}=0 takes vLLM's own kernel")


def _select(
    logits: torch.Tensor,
    strides: tuple[int, int],
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    k: int,
    spread: int = 1,
) -> None:
    """Puts the winners of `rows` rows where vLLM's kernel listed its own; see `prefill`."""
    if rows == 0:
        return
    blocks = max(1, -(-logits.shape[1] // _BLOCK))
    parts = min(blocks, _MOST_PARTS, max(1, _PROGRAMS // rows))
    part_size = -(-blocks // parts) * _BLOCK
    bounds = (ends if starts is None else starts, ends)
    thresholds = counts = bounds[1]  # not read unless rows are split
    sizes = (strides[0], out.stride(0), logits.shape[1], part_size)
    shape = {
        "K": k,
        "SPREAD": spread,
        "HAS_STARTS": starts is not None,
        "LOGITS_STEP": strides[1],
        "OUT_STEP": out.stride(1),
        "BLOCK": _BLOCK,
        "PADDED_K": _power_of_two(k),
        "MOST_PARTS": _MOST_PARTS,
        "num_warps": _WARPS,
    }
    if parts > 1:
        thresholds = torch.empty(rows, dtype=torch.int32, device=logits.device)
        counts = torch.empty((rows, _MOST_PARTS, 2), dtype=torch.int32, device=logits.device)
        _count_kernel[(rows, parts)](logits, *bounds, out, thresholds, counts, *sizes, **shape)
    _select_kernel[(rows, parts)](
        logits, *bounds, out, thresholds, counts, *sizes, parts, IS_SPLIT=parts > 1, **shape
    )


def prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    top_k: int,
) -> None:
    """Stands for `torch.ops._C.top_k_per_row_prefill`, in its argument order, and calls it.

    Args:
        logits: [rows, columns] float32 on the GPU, any strides. Scratch: a winning -0.0 becomes
            0.0, a winning NaN -inf. Columns outside a row's bounds are never read.
        row_starts: [rows] int32, contiguous; the column of the row's pool 0.
        row_ends: [rows] int32, contiguous; the column behind its last pool. Cut at `columns`; at
            or before the start means a row without pools.
        indices: [rows, >= top_k] int32, written in place: pool ids, relative to the row's start.
        num_rows: how many rows.
        stride0: elements from row to row of the logits.
        stride1: elements from column to column.
        top_k: k, 1 to 4,096.

    Raises:
        ValueError: a tensor is of another kind, or k is out of range.
    """
    if IS_ON:
        _check(logits, indices, [row_starts, row_ends], top_k)
    torch.ops._C.top_k_per_row_prefill(
        logits, row_starts, row_ends, indices, num_rows, stride0, stride1, top_k
    )
    if IS_ON:
        _select(logits, (stride0, stride1), row_starts, row_ends, indices, num_rows, top_k)


def decode(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stands around `get_indexer_topk(backend)`: gives it back as it is when the rule is off.

    Any backend will do, since only the k-th score is taken from it.
    """
    return functools.partial(_decode, stock) if IS_ON else stock


def _decode(
    stock: Callable[..., Any],
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    next_n: int,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    max_seq_len: int,
) -> None:
    """Stands for `SparseIndexerTopk.forward`, in its argument order.

    Args:
        stock: the kernel that runs first.
        logits: [rows, columns] float32 on the GPU, as for `prefill`; each row starts at column 0.
        seq_lens: int32, contiguous: the pools of each row ([rows], [rows, 1], [requests, next_n]),
            or of each request's last row ([requests], [requests, 1]), the one before having one
            less. Negative counts as 0.
        next_n: rows a request.
        topk_indices: [rows, >= topk_tokens] int32, written in place.
        topk_tokens: k.
        max_seq_len: for `stock` only: under a CUDA graph it is that of the captured batch.

    Raises:
        ValueError: as for `prefill`, or the lengths do not fit the rows.
    """
    rows = logits.shape[0]
    spread = 1 if seq_lens.numel() == rows else next_n
    if seq_lens.numel() * spread != rows:
        raise ValueError(
            f"glm_topk: {seq_lens.numel()} lengths for {rows} rows of {next_n} a request"
        )
    _check(logits, topk_indices, [seq_lens], topk_tokens)
    stock(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
    strides = (logits.stride(0), logits.stride(1))
    _select(logits, strides, None, seq_lens, topk_indices, rows, topk_tokens, spread)


def ascending(indices: torch.Tensor, world_size: int) -> None:
    """Puts the ids of each row in ascending order, in place, -1 last, after a merge over ranks.

    The merge picks by score, then by lowest id, but lists its winners as its threads come. With
    one rank there was no merge, and the rows are in order.

    Args:
        indices: [rows, k] int32 on the GPU, any strides.
        world_size: ranks that share the KV cache of a request (decode context parallel).
    """
    if not IS_ON or world_size <= 1 or indices.shape[0] == 0:
        return
    k = indices.shape[1]
    _sort_kernel[(indices.shape[0],)](
        indices, indices.stride(0), K=k, STEP=indices.stride(1), PADDED_K=_power_of_two(k)
    )
