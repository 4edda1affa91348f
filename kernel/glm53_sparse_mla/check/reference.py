"""What sparse MLA is, in fp64 torch: slow, plain, and the only thing that results are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 1 << 28  # of gathered fp64 rows at a time


def attention(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float, kv_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sparse MLA of every token: keys and values are the same rows.

    `out[t, h] = softmax_w(sm_scale * q[t, h] . k[t, w]) @ k[t, w]` over the w with
    `indices[t, w] >= 0`, where `k[t, w] = kv_scale * kv[indices[t, w]]`. A row that is masked is
    never read, so what is stored there, NaN included, is without effect. A row that is named twice
    counts twice. A token without any key gives zeros and a logarithm of -inf.

    Args:
        q: [T, H, D], any floating type.
        kv: [R, D], bf16 or e4m3, any row stride.
        indices: [T, W] int32 rows of `kv`; any negative one is masked.
        sm_scale: factor of the scores.
        kv_scale: what a stored value is multiplied with.

    Returns:
        out [T, H, D] and lse [T, H], the natural logarithm of the sum of exponentials; both fp64.
    """
    import torch

    tokens, heads, width = q.shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    step = max(1, _CHUNK_BYTES // (8 * width * max(1, indices.shape[1])))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        chosen = indices[part]
        is_valid = chosen >= 0
        rows = gather(kv, chosen.clamp(min=0)) * kv_scale
        rows = rows.masked_fill(~is_valid[..., None], 0.0)  # NaN * 0 would be NaN
        scores = torch.einsum("thd,twd->thw", q[part].double(), rows) * sm_scale
        scores = scores.masked_fill(~is_valid[:, None, :], -torch.inf)
        lse[part] = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[part][..., None])
        weights = torch.where(is_valid[:, None, :], weights, 0.0)  # -inf - -inf is NaN
        out[part] = torch.einsum("thw,twd->thd", weights, rows)
    return out, lse


def gather(kv: Tensor, rows: Tensor) -> Tensor:
    """`kv[rows]` in fp64; e4m3 has no indexing of its own on every torch."""
    import torch

    if kv.element_size() == 1:
        return kv.view(torch.uint8)[rows.long()].view(kv.dtype).float().double()
    return kv[rows.long()].double()
