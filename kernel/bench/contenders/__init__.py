"""Every kernel that is timed, each behind the same two questions: what can it do, and do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glm53_sparse_mla.check.compare import Measures

from kernel.bench.cases import Case
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

# Launches on the i-th set on the current stream; returns where the result will be, [T, H, 512].
Call = Callable[[int], "Tensor"]
# Launches once more and measures the result, where it is not attention.
Proof = Callable[[Sequence[Set], Call], Measures]


@dataclass(frozen=True)
class Plan:
    """One way to run a case.

    Attributes:
        prepare: takes the sets, allocates and plans whatever is not timed, and gives the call.
        variant: words that are added to the case's name; "" for the plain case.
        change: makes the sets from the case's own; None takes those.
        proof: how results are checked; None compares with attention in fp64.
        bytes: that a launch must move; 0 for the case's.
    """

    prepare: Callable[[Sequence[Set]], Call]
    variant: str = ""
    change: Callable[[Sequence[Set]], list[Set]] | None = None
    proof: Proof | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Contender:
    """A kernel: its name in the results, and its plans for a case, none where it cannot run it."""

    name: str
    plans: Callable[[Case], Iterator[Plan]]


def load(parts: Path, library: Path | None) -> tuple[list[Contender], list[str]]:
    """All kernels whose parts are there, and a sentence on each that is not.

    Args:
        parts: what `build.py kernel bench --prepare` made.
        library: ours; None for the installed one.
    """
    from kernel.bench.contenders import flashinfer, flashmla, floor, own, tilelang, triton

    found: list[Contender] = []
    missing: list[str] = []
    makers: dict[str, Callable[[], Contender]] = {
        "glm53_sparse_mla": lambda: own.contender(library),
        "triton": lambda: triton.contender(parts),
        "fa2": lambda: flashinfer.contender("fa2", parts),
        "sm120cfg": lambda: flashinfer.contender("sm120cfg", parts),
        "fa3": lambda: flashinfer.contender("fa3", parts),
        "flashmla": lambda: flashmla.contender(parts),
        "tilelang": tilelang.contender,
        "torch": floor.torch_contender,
        "gather": lambda: floor.gather_contender(parts),
    }
    for name, make in makers.items():
        try:
            found.append(make())
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{name}: {error}")
    return found, missing
