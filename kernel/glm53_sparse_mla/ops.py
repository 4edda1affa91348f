"""Sparse MLA of the C library as operators of torch, one that allocates and one that does not.

    s = sm_scale * kv_scale * q @ kv[indices].T
    out = kv_scale * softmax(s) @ kv[indices],  lse = logsumexp(s)

    torch.ops.glm53_sparse_mla.forward(q, kv, indices, sm_scale, kv_scale) -> out, lse
    torch.ops.glm53_sparse_mla.forward_out(..., out, lse, workspace): writes to what it is given

q [tokens, heads, 512] bf16, any strides of whole 16 bytes whose last one is 1, 1 to 64 heads.
kv [rows, 512] bf16 or float8_e4m3fn; rows may lie apart. indices [tokens, width] int32, rows of kv;
a negative one is masked wherever it stands, one beyond the last row is not allowed, and duplicates
count twice. out as q; zeros where all indices are masked. lse [tokens, heads] float32, contiguous,
natural logarithm, -inf there. workspace uint8, from `workspace`; no two launches may use the same
one at the same time.

Both run on torch's current stream, wait for nothing, and may be captured into a CUDA graph.
"""

# ruff: noqa: PLR0917 - the arguments are the operator's, and torch passes them by position

from __future__ import annotations

import functools

import torch

from glm53_sparse_mla.library import KV_BF16, KV_E4M3, WIDTH, Arguments, Library

_KINDS = {torch.bfloat16: KV_BF16, torch.float8_e4m3fn: KV_E4M3}
_SCHEMAS = (
    "forward(Tensor q, Tensor kv, Tensor indices, float sm_scale, float kv_scale=1.0, "
    "int expected_width=0, int splits=0) -> (Tensor, Tensor)",
    "forward_out(Tensor q, Tensor kv, Tensor indices, float sm_scale, float kv_scale, "
    "int expected_width, int splits, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) workspace) -> ()",
)


@functools.cache
def library() -> Library:
    """The library of this process, loaded once. Raises LibraryError where none is usable."""
    return Library()


def workspace(tokens: int, heads: int, splits: int, device: torch.device) -> torch.Tensor:
    """Device memory that is enough for every call of up to `tokens` tokens with these `splits`.

    Raises:
        LibraryError: the GPU cannot run the library's code.
    """
    index = torch.device(device).index
    found = library().require(torch.cuda.current_device() if index is None else index)
    size = library().workspace_bytes(tokens, heads, splits, found.sm_count)
    return torch.empty(size, dtype=torch.uint8, device=device)


def forward_out(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_scale: float,
    expected_width: int,
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor,
) -> None:
    """Enqueues the attention; see the head of this module.

    Args:
        q: queries.
        kv: rows.
        indices: which rows count, for each token.
        sm_scale: factor of the scores.
        kv_scale: what a stored value counts for; 1.0 for bf16.
        expected_width: how many columns of `indices` are usually used, 0 for all. Work is shared
            out by it; an index beyond it counts like any other.
        splits: 0 shares the work out over the GPU. With n > 0 every token is split into n ranges,
            so that its bits depend on nothing but its own row.
        out: written.
        lse: written, unless None.
        workspace: of `workspace(...)` with the same `splits`.

    Raises:
        ValueError: a shape, type or stride that is not allowed.
        CallError: the library refused the call, or CUDA failed.
    """
    _check(q, kv, indices, out, lse, workspace)
    tokens, heads, _ = q.shape
    with torch.cuda.device(q.device):
        library().forward(Arguments(
            kv_dtype=_KINDS[kv.dtype],
            q=q.data_ptr(), q_token_stride=q.stride(0), q_head_stride=q.stride(1),
            kv=kv.data_ptr(), kv_rows=kv.shape[0], kv_row_stride=kv.stride(0), kv_scale=kv_scale,
            indices=indices.data_ptr(), index_stride=indices.stride(0),
            out=out.data_ptr(), out_token_stride=out.stride(0), out_head_stride=out.stride(1),
            lse=lse.data_ptr() if lse is not None else None,
            tokens=tokens, heads=heads, width=indices.shape[1], expected_width=expected_width,
            softmax_scale=sm_scale, splits=splits,
            workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(),
            stream=torch.cuda.current_stream(q.device).cuda_stream,
        ))  # fmt: skip


def forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_scale: float = 1.0,
    expected_width: int = 0,
    splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into new tensors: out and lse. Raises as `forward_out`."""
    out, lse = _results(q, kv, indices, sm_scale, kv_scale, expected_width, splits)
    space = workspace(q.shape[0], q.shape[1], splits, q.device)
    forward_out(q, kv, indices, sm_scale, kv_scale, expected_width, splits, out, lse, space)
    return out, lse


def _results(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_scale: float = 1.0,
    expected_width: int = 0,
    splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty results for these arguments: what torch traces in place of `forward`."""
    tokens, heads, width = q.shape
    return q.new_empty((tokens, heads, width)), q.new_empty((tokens, heads), dtype=torch.float32)


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor,
) -> None:
    """What the library cannot see, since it is told addresses. Raises ValueError."""
    tokens, heads = (q.shape[0], q.shape[1]) if q.ndim == 3 else (-1, -1)
    holds = (
        ("q", q, (torch.bfloat16,), (tokens, heads, WIDTH)),
        ("kv", kv, tuple(_KINDS), (kv.shape[0], WIDTH)),
        ("indices", indices, (torch.int32,), (tokens, indices.shape[-1])),
        ("out", out, (torch.bfloat16,), (tokens, heads, WIDTH)),
        *((("lse", lse, (torch.float32,), (tokens, heads)),) if lse is not None else ()),
        ("workspace", workspace, (torch.uint8,), (workspace.numel(),)),
    )
    for name, tensor, kinds, shape in holds:
        if tensor.dtype not in kinds or tuple(tensor.shape) != shape:
            raise ValueError(f"sparse MLA: {name}: expected {list(shape)} of "
                             f"{' or '.join(map(str, kinds))}, found {list(tensor.shape)} of "
                             f"{tensor.dtype}")  # fmt: skip
        if tensor.device != q.device:
            raise ValueError(f"sparse MLA: {name}: expected {q.device}, found {tensor.device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"sparse MLA: {name}: expected a last axis without gaps, found "
                             f"stride {tensor.stride(-1)}")  # fmt: skip
    if lse is not None and not lse.is_contiguous():
        raise ValueError("sparse MLA: lse: expected a contiguous tensor")


_LIBRARY = torch.library.Library("glm53_sparse_mla", "DEF")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("forward", forward, "CUDA")
_LIBRARY.impl("forward_out", forward_out, "CUDA")
torch.library.register_fake("glm53_sparse_mla::forward", _results, lib=_LIBRARY)
torch.library.register_fake("glm53_sparse_mla::forward_out", lambda *_arguments: None, lib=_LIBRARY)
