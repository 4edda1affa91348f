"""FlashMLA's sparse attention as vLLM ships it: 64 or 128 heads, so that fewer are padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.bench.cases import HEAD_DIM, SM_SCALE, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = "_flashmla_C.abi3.so"
_HEADS = 64


def contender(parts: Path) -> Contender:
    """Raises OSError where the library is missing or cannot be loaded."""
    import torch

    path = parts / LIBRARY
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected vLLM's FlashMLA, found no file")
    torch.ops.load_library(str(path))

    def plans(case: Case) -> Iterator[Plan]:
        if case.dtype == "bf16":  # its fp8 rows are of another format
            yield Plan(_prepare)

    return Contender("flashmla", plans)


def _prepare(sets: Sequence[Set]) -> Call:
    import torch

    tokens, heads, _ = sets[0].q.shape
    padded = []
    for one in sets:  # a server could keep them so; it is not timed
        q = torch.zeros(tokens, _HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        q[:, :heads] = one.q
        padded.append(q)

    def call(i: int) -> Tensor:
        result = torch.ops._flashmla_C.sparse_prefill_fwd(
            padded[i], sets[i].kv.view(-1, 1, HEAD_DIM), sets[i].indices[:, None, :], SM_SCALE,
            HEAD_DIM, None, None, None,
        )  # fmt: skip
        out: Tensor = result[0][:, :heads]
        return out

    return call
