"""FlashInfer's MLA attention over pages of one row, from libraries compiled ahead of time.

`sm120cfg` is the FA2 code with the shared memory of an sm_12x card: what stock FA2 would run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.bench.cases import HEAD_DIM, SM_SCALE, TOPK, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor


def contender(name: str, parts: Path) -> Contender:
    """Raises ImportError without tvm_ffi, OSError where a library is missing."""
    import tvm_ffi

    def load(stem: str) -> Any:  # noqa: ANN401 - tvm_ffi's module
        path = parts / f"{stem}.so"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected FlashInfer's {name}, found no file")
        return tvm_ffi.load_module(str(path))

    bf16 = load(name)
    fp8 = load("fa3_fp8") if name == "fa3" else None  # its FA2 refuses fp8 rows on this card

    def plans(case: Case) -> Iterator[Plan]:
        module = bf16 if case.dtype == "bf16" else fp8
        if module is not None:
            yield Plan(_prepare(module))

    return Contender(name, plans)


def _prepare(module: Any) -> Callable[[Sequence[Set]], Call]:  # noqa: ANN401
    def prepare(sets: Sequence[Set]) -> Call:
        import torch

        tokens, heads, _ = sets[0].q.shape
        floats = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        ints = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
        ends = torch.arange(tokens + 1, dtype=torch.int32)
        lengths = torch.full((tokens,), TOPK, dtype=torch.int32)
        plan, used = module.plan(
            floats, ints, pinned, ends, ends * TOPK, lengths, heads, HEAD_DIM, False
        )
        # The plan is in pinned memory; since 0.7 bringing it over is the caller's part.
        ints[: int(used)].copy_(pinned[: int(used)])
        torch.cuda.synchronize()
        out = torch.empty_like(sets[0].q)
        no_rope = torch.empty(tokens, heads, 0, dtype=torch.bfloat16, device="cuda")

        def call(i: int) -> Tensor:
            rows = sets[i].kv.view(-1, 1, HEAD_DIM)
            module.run(floats, ints, plan, sets[i].q, no_rope, rows, rows[..., :0],
                       sets[i].indices.view(-1), out, None, 0, heads, 1, SM_SCALE, False, 1.0,
                       1.0, None)  # fmt: skip
            return out

        return call

    return prepare
