"""Makes the tensors that contenders are timed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernel.bench.cases import (
    BUFFER,
    DECODE_ROWS,
    FILLED,
    HEAD_DIM,
    PREFILL_ROWS,
    REQUESTS,
    TOPK,
    Case,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Set:
    """Arguments of one launch, all contiguous.

    Attributes:
        q: [T, H, 512] bf16.
        kv: [R, 512] bf16 or e4m3; its scale is 1.
        indices: [T, W] int32; -1 is masked.
        used: columns of the indices that are usually filled.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    used: int = TOPK


class Pools:
    """The pool of rows, made once and shared by all cases of a phase and a type."""

    def __init__(self) -> None:
        self._bf16: tuple[str, Tensor] | None = None
        self._fp8: tuple[str, Tensor] | None = None

    def get(self, case: Case) -> Tensor:
        """[R, 512]; of a decode 64 contexts of 65,536 rows one after the other."""
        import torch

        if self._bf16 is None or self._bf16[0] != case.phase:
            self._bf16 = self._fp8 = None
            rows = PREFILL_ROWS if case.phase == "prefill" else REQUESTS * DECODE_ROWS
            pool = torch.empty(rows, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            self._bf16 = (case.phase, pool.normal_())
        if case.dtype == "bf16":
            return self._bf16[1]
        if self._fp8 is None:
            self._fp8 = (case.phase, self._bf16[1].to(torch.float8_e4m3fn))
        return self._fp8[1]


def sets(case: Case, pools: Pools) -> list[Set]:
    """The case's inputs, random and different, the same on every run."""
    import torch

    torch.manual_seed(case.size * 100 + case.heads)
    pool = pools.get(case)
    made = []
    for number in range(case.sets):
        q = torch.randn(case.size, case.heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        rows = [_rows(case, number * case.size + token) for token in range(case.size)]
        made.append(Set(q, pool, torch.stack(rows)))
    return made


def _rows(case: Case, token: int) -> Tensor:
    """[2048] int32 different rows of the token's context."""
    import torch

    if case.phase == "prefill":
        # The tokens are the last of the context: each sees what stands before it.
        seen = PREFILL_ROWS - case.size + token if case.size < PREFILL_ROWS else PREFILL_ROWS
        return torch.randperm(max(TOPK, seen), device="cuda")[:TOPK].int()
    first = token % REQUESTS * DECODE_ROWS
    return (torch.randperm(DECODE_ROWS, device="cuda")[:TOPK] + first).int()


def wide(given: Sequence[Set]) -> list[Set]:
    """As vLLM hands them over for GLM-5.3: three newest tokens more, and padding to 2,176."""
    import torch

    made = []
    for one in given:
        indices = torch.full((len(one.q), BUFFER), -1, dtype=torch.int32, device="cuda")
        indices[:, :TOPK] = one.indices
        indices[:, TOPK:FILLED] = one.indices[:, : FILLED - TOPK] ^ 1
        made.append(replace(one, indices=indices, used=FILLED))
    return made


def causal(given: Sequence[Set]) -> list[Set]:
    """A prompt's beginning: token t has t + 1 keys, the rest of its columns is masked."""
    import torch

    made = []
    for one in given:
        tokens = torch.arange(len(one.q), device="cuda")[:, None]
        column = torch.arange(TOPK, device="cuda")[None, :]
        masked = one.indices.masked_fill(column > tokens, -1)
        made.append(replace(one, indices=masked))
    return made
