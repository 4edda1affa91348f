"""Sparse MLA in Triton: the portable kernel of route `triton`, for any number of heads.

The formula is that of the CUDA kernel, and so are the inputs. One program serves one token and 16
heads, from the first index to the last, so that a token's bits depend on nothing but its own row.
Must not allocate and must not wait for the device: it runs under CUDA graph capture.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0917 - a Triton kernel has the shape that Triton wants

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDTH = 512
# 16 rows are what a tensor core takes. Compiled by Triton 3.6 for sm_120 and sm_121 (2026-11-29) a
# program needs 50,304 bytes of the 101,376 that there are, and no stack.
_HEADS, _KEYS, _WARPS, _STAGES = 16, 32, 8, 2


@triton.jit
def _sparse_mla_kernel(
    q,
    kv,
    indices,
    out,
    lse,
    rows,
    kv_stride,
    width,
    indices_stride,
    heads,
    scale,
    kv_scale,
    HAS_LSE: tl.constexpr,
    IS_E4M3: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    is_head = head < heads
    place = (token * heads + head[:, None]) * WIDTH + column[None, :]
    query = tl.load(q + place, mask=is_head[:, None], other=0.0)
    # A finite start: a tile without a valid key must not make NaN of "minus infinity twice".
    highest = tl.full((HEADS,), -1.0e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, WIDTH), tl.float32)
    for start in range(0, width, KEYS):
        at = start + tl.arange(0, KEYS)
        row = tl.load(indices + token * indices_stride + at, mask=at < width, other=-1)
        is_valid = (row >= 0) & (row < rows)
        # A masked row is never read: whatever lies there, NaN too, must not get into the sums.
        from_row = row.to(tl.int64)[:, None] * kv_stride + column[None, :]
        stored = tl.load(kv + from_row, mask=is_valid[:, None], other=0.0)
        key = stored.to(tl.bfloat16)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(is_valid[None, :], score, -1.0e30)
        peak = tl.maximum(highest, tl.max(score, 1))
        fade = tl.exp2(highest - peak)
        weight = tl.where(is_valid[None, :], tl.exp2(score - peak[:, None]), 0.0)
        total = total * fade + tl.sum(weight, 1)
        if IS_E4M3:
            # Both widen e4m3 without loss; float16 keeps three bits more of the weights.
            sums = tl.dot(weight.to(tl.float16), stored.to(tl.float16), sums * fade[:, None])
        else:
            sums = tl.dot(weight.to(tl.bfloat16), key, sums * fade[:, None])
        highest = peak
    is_any = total > 0.0
    factor = tl.where(is_any, kv_scale / tl.where(is_any, total, 1.0), 0.0)
    tl.store(out + place, (sums * factor[:, None]).to(tl.bfloat16), mask=is_head[:, None])
    if HAS_LSE:
        natural = (highest + tl.log2(tl.where(is_any, total, 1.0))) * 0.6931471805599453
        natural = tl.where(is_any, natural, float("-inf"))
        tl.store(lse + token * heads + head, natural, mask=is_head)


def forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    *,
    sm_scale: float,
    kv_scale: float = 1.0,
    lse: torch.Tensor | None = None,
) -> None:
    """Writes softmax(sm_scale * q k^T) k over the rows k that the indices select.

    Args:
        q: [tokens, heads, 512] bf16, contiguous.
        kv: [rows, 512] bf16 or float8_e4m3fn; the last axis is contiguous, rows may be apart.
        indices: [tokens, width] int32 rows of `kv`, last axis contiguous; one that is negative or
            beyond the last row is masked, in any position.
        out: [tokens, heads, 512] bf16, contiguous; written. Zeros where all indices are masked.
        sm_scale: factor of the scores.
        kv_scale: what a stored value counts for; 1.0 for bf16.
        lse: [tokens, heads] float32, contiguous; written when given: natural logarithm of the sum
            of exponentials, -inf where all indices are masked.
    """
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    grid = (tokens, triton.cdiv(heads, _HEADS))
    _sparse_mla_kernel[grid](
        q, kv, indices, out, lse if lse is not None else out, kv.shape[0], kv.stride(0),
        indices.shape[1], indices.stride(0), heads,
        # Powers of two are what the hardware takes.
        sm_scale * kv_scale * 1.4426950408889634, kv_scale,
        HAS_LSE=lse is not None, IS_E4M3=kv.dtype == torch.float8_e4m3fn,
        WIDTH=WIDTH, HEADS=_HEADS, KEYS=_KEYS,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
