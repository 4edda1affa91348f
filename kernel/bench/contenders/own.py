"""The kernel of this repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm53_sparse_mla.check.inputs import Inputs
from glm53_sparse_mla.check.native import Native

from kernel.bench import inputs
from kernel.bench.cases import SM_SCALE, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

# Of the batch-invariant mode, where a token's bits do not depend on who else is in the batch.
INVARIANT_SPLITS = (1, 8)


def contender(library: Path | None) -> Contender:
    """Raises RuntimeError where the library is missing or cannot run on this GPU."""
    native = Native(library)

    def plans(case: Case) -> Iterator[Plan]:
        yield Plan(_prepare(native, None))
        if case.heads != 16:
            return
        yield Plan(_prepare(native, None), "wide", inputs.wide)
        if case.phase == "prefill" and case.size == 4096:
            yield Plan(_prepare(native, None), "causal", inputs.causal)
        if case.dtype == "bf16":
            for splits in INVARIANT_SPLITS:
                yield Plan(_prepare(native, splits), f"splits{splits}")

    return Contender("glm53_sparse_mla", plans)


def _prepare(native: Native, splits: int | None) -> Callable[[Sequence[Set]], Call]:
    def prepare(sets: Sequence[Set]) -> Call:
        import torch

        given = [Inputs(one.q, one.kv, one.indices, expected_width=one.used) for one in sets]
        out = torch.empty_like(sets[0].q)

        def call(i: int) -> Tensor:
            native(given[i], out, None, sm_scale=SM_SCALE, kv_scale=1.0, splits=splits)
            return out

        return call

    return prepare
