"""What is timed, and the names under which it is reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TOPK, HEAD_DIM = 2048, 512
FILLED, BUFFER = 2051, 2176  # what vLLM hands over for GLM-5.3: filled columns of so many
SM_SCALE = 256**-0.5  # GLM-5.3: 256 values a head before MLA absorbs the up-projection
PREFILL_ROWS = 8192  # context of a prefill
DECODE_ROWS = 65536  # context of one request
REQUESTS = 64  # pools of different requests; larger batches share them

Dtype = Literal["bf16", "fp8"]
# In the order of the tables.
KERNELS = ("glm53_sparse_mla", "triton", "fa2", "sm120cfg", "fa3", "flashmla", "tilelang", "torch",
           "gather")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One point.

    Attributes:
        size: tokens, of as many requests in decode and of one in prefill.
        variant: what differs from the plain case; "" for that itself.
    """

    phase: Literal["decode", "prefill"]
    size: int
    heads: int
    dtype: Dtype
    variant: str = ""

    @property
    def name(self) -> str:
        """Such as "decode bs64 h16 bf16"."""
        size = f"bs{self.size}" if self.phase == "decode" else str(self.size)
        return f"{self.phase} {size} h{self.heads} {self.dtype} {self.variant}".rstrip()

    @property
    def itemsize(self) -> int:
        """Bytes of a stored value."""
        return 2 if self.dtype == "bf16" else 1

    @property
    def bytes(self) -> int:
        """That one launch must read and write: gathered rows, queries, results, indices."""
        rows = self.size * TOPK * HEAD_DIM * self.itemsize
        return rows + self.size * (2 * self.heads * HEAD_DIM * 2 + 4 * TOPK)

    @property
    def flop(self) -> int:
        """Of both products, without padding of the heads."""
        return 4 * self.size * TOPK * HEAD_DIM * self.heads

    @property
    def sets(self) -> int:
        """Inputs that take turns, so that rows are cold: together several times the L2."""
        return max(1, min(128, 256 // self.size)) if self.phase == "decode" else 1


def cases() -> Iterator[Case]:
    """All plain cases; variants belong to kernels."""
    for size in (1, 8, 64, 128, 256):
        yield Case("decode", size, 16, "bf16")
    for heads in (8, 32, 64):
        yield Case("decode", 64, heads, "bf16")
    for size in (1, 8, 64, 128, 256):
        yield Case("decode", size, 16, "fp8")
    for heads in (8, 32, 64):
        yield Case("decode", 64, heads, "fp8")
    for heads in (8, 16, 32, 64):
        yield Case("prefill", 4096, heads, "bf16")
    for size in (1024, 8192):
        yield Case("prefill", size, 16, "bf16")
    for heads in (16, 64):
        yield Case("prefill", 4096, heads, "fp8")
