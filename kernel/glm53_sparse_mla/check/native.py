"""The kernel of this package behind the interface of `attention.Kernel`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glm53_sparse_mla.check.inputs import PAGE, Inputs
from glm53_sparse_mla.library import KV_BF16, KV_E4M3, Arguments, Library

if TYPE_CHECKING:
    from torch import Tensor


class Native:
    """The library on the current GPU, with one workspace for all calls.

    That one is shared is part of the check: whatever a launch leaves in it must not matter to the
    next one, of another shape.

    Raises:
        LibraryError: there is no library, or it cannot run on this GPU.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.library = Library(path)
        self.device = self.library.require()
        self._workspace: Tensor | None = None

    def __call__(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor | None,
        *,
        sm_scale: float,
        kv_scale: float,
        splits: int | None,
    ) -> None:
        """As `attention.Kernel`; `lse` may be None. Raises CallError."""
        import torch

        q, kv = inputs.q, inputs.kv
        indices = inputs.paged_indices() if inputs.is_paged else inputs.indices
        tokens, heads, _ = q.shape
        workspace = self._room(tokens, heads, splits or 0)
        arguments = Arguments(
            kv_dtype=KV_E4M3 if kv.element_size() == 1 else KV_BF16,
            q=q.data_ptr(), q_token_stride=q.stride(0), q_head_stride=q.stride(1),
            kv=kv.data_ptr(), kv_rows=len(kv) // 2 if inputs.is_paged else len(kv),
            kv_row_stride=kv.stride(0),
            kv_page_stride=2 * PAGE * kv.stride(0) if inputs.is_paged else 0,
            page_size=PAGE if inputs.is_paged else 0, kv_scale=kv_scale,
            indices=indices.data_ptr(), index_stride=indices.stride(0),
            out=out.data_ptr(), out_token_stride=out.stride(0), out_head_stride=out.stride(1),
            lse=None if lse is None else lse.data_ptr(),
            tokens=tokens, heads=heads, width=indices.shape[1],
            expected_width=inputs.expected_width, softmax_scale=sm_scale, splits=splits or 0,
            workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(),
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        self.library.forward(arguments)

    def _room(self, tokens: int, heads: int, splits: int) -> Tensor:
        """A workspace that is large enough, of NaN."""
        import torch

        needed = self.library.workspace_bytes(tokens, heads, splits, self.device.sm_count)
        if self._workspace is None or self._workspace.numel() < needed:
            room = torch.full((needed,), 0xFF, dtype=torch.uint8, device="cuda")
            self._workspace = room
        return self._workspace
