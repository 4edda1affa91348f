"""Makes the tensors of a case. Everything that no token selects is NaN, row 0 first of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53_sparse_mla.check.cases import HEAD_DIM, Case

if TYPE_CHECKING:
    from torch import Generator, Tensor

_NAN_E4M3 = 0x7F
PAGE = 64
# A kernel may take nothing but the sign as "masked".
_MASKED = (-1, -7, -(1 << 31))


@dataclass(frozen=True)
class Inputs:
    """Arguments of one launch.

    Attributes:
        q: [T, H, 512] bf16.
        kv: [R, 512] bf16 or e4m3, with the case's row stride.
        indices: [T, columns or W] int32 rows of `kv`.
        is_paged: the kernel is to be given pages of 64 rows, two pages apart, and `paged_indices`.
        expected_width: as the kernel's.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    is_paged: bool = False
    expected_width: int = 0

    def paged_indices(self) -> Tensor:
        """`indices` as rows of the pages, which number only the first half of every 128 rows."""
        paged = self.indices // (2 * PAGE) * PAGE + self.indices % (2 * PAGE)
        return paged.where(self.indices >= 0, self.indices)

    def of(self, tokens: slice) -> Inputs:
        """The inputs of some tokens."""
        return Inputs(self.q[tokens], self.kv, self.indices[tokens], self.is_paged,
                      self.expected_width)  # fmt: skip


def spread(shape: tuple[int, ...], device: str, *, has_gaps: bool) -> Tensor:
    """[T, H, 512] bf16 of NaN; with gaps of 3 heads a token and 16 values a head."""
    import torch

    tokens, heads, width = shape
    full = (tokens, heads + 3, width + 16) if has_gaps else shape
    store = torch.full(full, torch.nan, dtype=torch.bfloat16, device=device)
    return store[:, :heads, :width]


def make(case: Case, device: str) -> Inputs:
    """The inputs of a case, the same on every call. Raises torch's OutOfMemoryError."""
    import torch

    dice = torch.Generator(device=device).manual_seed(1000 + case.seed)
    q = torch.randn(case.tokens, case.heads, HEAD_DIM, generator=dice, device=device)
    chosen = _indices(case, dice, device)
    columns = max(case.columns, case.width)
    indices = torch.full((case.tokens, columns), -7, dtype=torch.int32, device=device)
    indices[:, : case.width] = chosen
    kv = _pool(case, chosen, dice, device)
    placed = spread(tuple(q.shape), device, has_gaps=case.has_gaps)
    placed.copy_((q * case.amplitude).bfloat16())
    return Inputs(placed, kv, indices, case.is_paged, case.expected_width)


def _indices(case: Case, dice: Generator, device: str) -> Tensor:
    import torch

    rows = [
        mask(case.masks[token % len(case.masks)], _choice(case, dice, device), token, dice)
        for token in range(case.tokens)
    ]
    return torch.stack(rows)


def _choice(case: Case, dice: Generator, device: str) -> Tensor:
    """[W] int32 different rows, never row 0."""
    import torch

    # Of a large pool the far end alone, where 32-bit offsets have wrapped around.
    first = case.rows - 16384 if case.rows > 1 << 17 else 1
    allowed = torch.arange(first, case.rows, device=device)
    if case.page_gap:
        allowed = allowed[allowed % (2 * PAGE) < PAGE]
    order = torch.randperm(len(allowed), generator=dice, device=device)[: case.width]
    return allowed[order].int()


def mask(name: str, row: Tensor, token: int, dice: Generator) -> Tensor:
    """One token's indices with a mask put on; any negative number masks.

    Args:
        name: of cases.MASKS, or "causal": as many keys as the token's position allows.
        row: [W] int32 row numbers.
        token: position in the batch, for "causal" and for which negative number is used.
        dice: for what is random.
    """
    import torch

    row = row.clone()
    width, column = len(row), torch.arange(len(row), device=row.device)
    if name == "duplicates":
        return row[column % max(1, min(8, width // 2))]
    if name == "same":
        return row[torch.zeros_like(column)]
    hidden = {
        "none": column < 0,
        "tail": column >= max(1, width // 3),
        "head": column < width // 2,
        "holes": torch.rand(width, generator=dice, device=row.device) < 0.5,
        "tile": (column >= 32) & (column < 64) if width > 64 else column < width // 2,
        "last": column < width - 1,
        "first": column > 0,
        "all": column >= 0,
        "causal": column > 13 * token,
    }[name]
    row[hidden] = _MASKED[token % len(_MASKED)]
    return row


def _pool(case: Case, chosen: Tensor, dice: Generator, device: str) -> Tensor:
    """[R, 512] in a buffer of NaN, with values in the rows that some token selects."""
    import torch

    used = torch.unique(chosen[chosen >= 0]).long()
    if case.dtype == "bf16":
        store = torch.full((case.rows * case.row_stride,), torch.nan, dtype=torch.bfloat16,
                           device=device)  # fmt: skip
        fresh = torch.randn(len(used), HEAD_DIM, generator=dice, device=device).bfloat16()
        kv = store.view(case.rows, case.row_stride)[:, :HEAD_DIM]
        kv[used] = fresh
        return kv
    codes = torch.full((case.rows * case.row_stride,), _NAN_E4M3, dtype=torch.uint8, device=device)
    if case.values == "codes":
        # All but the two NaN, 0x7F and 0xFF.
        drawn = torch.randint(0, 254, (len(used), HEAD_DIM), generator=dice, device=device)
        stored = torch.where(drawn >= _NAN_E4M3, drawn + 1, drawn).to(torch.uint8)
    else:
        normal = torch.randn(len(used), HEAD_DIM, generator=dice, device=device)
        stored = (normal / case.kv_scale).to(torch.float8_e4m3fn).view(torch.uint8)
    kv = codes.view(case.rows, case.row_stride)[:, :HEAD_DIM]
    kv[used] = stored
    return kv.view(torch.float8_e4m3fn)
