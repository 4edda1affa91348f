"""Runs the kernel on cases and judges what it wrote.

The kernel is a function that is passed in, so that tests can pass in wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from glm53_sparse_mla.check import inputs as made
from glm53_sparse_mla.check.cases import SM_SCALE, Case
from glm53_sparse_mla.check.compare import Measures, compare
from glm53_sparse_mla.check.inputs import Inputs
from glm53_sparse_mla.check.reference import attention

if TYPE_CHECKING:
    from torch import Tensor

_PERFECT = Measures()
_MANY = 256  # tokens; of more, some are compared
_FREE_BYTES = 3 << 30  # beside the pool: inputs, reference, workspace


class Kernel(Protocol):
    """Writes `out` [T, H, 512] bf16 and `lse` [T, H] fp32 on the current stream."""

    def __call__(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        *,
        sm_scale: float,
        kv_scale: float,
        splits: int | None,
    ) -> None:
        """`splits` of None leaves the number of splits to the kernel."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        name: of the cases' row.
        runs: launches that were compared.
        measures: the worst of them.
        not_run: why some were not; "" where all were.
    """

    name: str
    runs: int = 0
    measures: Measures = _PERFECT
    not_run: str = ""

    @property
    def is_well(self) -> bool:
        """Nothing missed; what was not run is no miss."""
        return not self.measures.problems


@dataclass(frozen=True)
class _Run:
    """A case with its inputs, and where results go; poisoned, so that what is not written shows."""

    case: Case
    kernel: Kernel
    inputs: Inputs

    def outputs(self) -> tuple[Tensor, Tensor]:
        """`out` and `lse`, all NaN."""
        return _outputs(self.inputs, self.case)

    def launch(self, inputs: Inputs, out: Tensor, lse: Tensor, splits: int | None) -> None:
        """One call of the kernel."""
        self.kernel(inputs, out, lse, sm_scale=SM_SCALE, kv_scale=self.case.kv_scale, splits=splits)


def _outputs(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    import torch

    q = inputs.q
    out = made.spread(tuple(q.shape), str(q.device), has_gaps=case.has_gaps)
    return out, torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)


def check(cases: Iterable[Case], kernel: Kernel, device: str = "cuda",
          tell: Callable[[str], None] = lambda _name: None) -> list[Row]:  # fmt: skip
    """Runs every case; one row for each name of a row, in the order in which they come.

    A case that breaks the device ends it: nothing that runs after it would mean anything.
    """
    rows: dict[str, Row] = {}
    for case in cases:
        if case.row not in rows:
            tell(case.row)
        row = rows.get(case.row, Row(case.row))
        rows[case.row], is_broken = _one(case, kernel, device, row)
        if is_broken:
            break
    return list(rows.values())


def _one(case: Case, kernel: Kernel, device: str, row: Row) -> tuple[Row, bool]:
    """A row with one more case in it, and whether the device is lost."""
    import torch

    lacking = _lacking(case, device)
    if lacking:
        return Row(row.name, row.runs, row.measures, lacking), False
    try:
        found = run(case, kernel, device)
    except RuntimeError as error:  # what torch and the binding raise for an error of CUDA
        said = str(error).strip().splitlines()[0]
        lost = Measures(float("inf"), float("inf"), -1.0, float("inf"),
                        (f"{case.label}: {said}",))  # fmt: skip
        is_broken = not isinstance(error, torch.cuda.OutOfMemoryError)
        return Row(row.name, row.runs, row.measures.worst(lost), row.not_run), is_broken
    return Row(row.name, row.runs + len(case.splits), row.measures.worst(found), row.not_run), False


def _lacking(case: Case, device: str) -> str:
    """What keeps a case with a large pool from being run; "" where nothing does."""
    import torch

    if device == "cpu" or case.pool_bytes < 1 << 30:
        return ""
    free, _total = torch.cuda.mem_get_info(device)
    needed = case.pool_bytes + _FREE_BYTES
    if free >= needed:
        return ""
    return f"needs {needed / 2**30:.1f} GiB of free GPU memory, found {free / 2**30:.1f}"


def run(case: Case, kernel: Kernel, device: str) -> Measures:
    """The worst of a case's launches. Raises RuntimeError when a launch fails."""
    one = _Run(case, kernel, made.make(case, device))
    picked = _picked(case)
    q, indices = one.inputs.q[picked], one.inputs.indices[picked]
    expected = attention(q, one.inputs.kv, indices, sm_scale=SM_SCALE, kv_scale=case.kv_scale)
    worst = _PERFECT
    for splits in case.splits:
        out, lse = _HOW[case.how](one, splits)
        found = compare(out[picked], lse[picked], *expected, is_random=case.is_random)
        problems = [*found.problems, *_repeats(one, splits, out, lse)]
        told = f"{case.label}, {splits or 'own'} splits"
        worst = worst.worst(Measures(found.max_rel, found.norm_rel, found.cosine, found.lse,
                                     tuple(f"{told}: {one}" for one in problems)))  # fmt: skip
    return worst


def _picked(case: Case) -> list[int]:
    """Tokens that are compared: all, or of many the first, the last and some between."""
    if case.tokens <= _MANY:
        return list(range(case.tokens))
    step = case.tokens // 30
    return sorted({*range(0, case.tokens, step), case.tokens - 1})


def _repeats(one: _Run, splits: int | None, out: Tensor, lse: Tensor) -> list[str]:
    """Whether a second launch writes the same bits; with fixed splits, also for a token alone."""
    import torch

    def is_same(tokens: slice) -> bool:
        inputs = one.inputs.of(tokens)
        again, again_lse = _outputs(inputs, one.case)
        one.launch(inputs, again, again_lse, splits)
        bits = torch.equal(again.view(torch.int16), out[tokens].view(torch.int16))
        bits = bits and torch.equal(again_lse.view(torch.int32), lse[tokens].view(torch.int32))
        return bool(bits)

    problems = [] if is_same(slice(None)) else ["a second launch wrote other bits"]
    middle = one.case.tokens // 2
    if splits is not None and not is_same(slice(middle, middle + 1)):
        problems.append(f"token {middle} has other bits when it is alone in the batch")
    return problems


def _plain(one: _Run, splits: int | None) -> tuple[Tensor, Tensor]:
    out, lse = one.outputs()
    one.launch(one.inputs, out, lse, splits)
    return out, lse


def _graph(one: _Run, splits: int | None) -> tuple[Tensor, Tensor]:
    """Captures on other inputs, then replays on the case's, put into the same memory."""
    import torch

    case = one.case
    fixed = made.make(replace(case, seed=case.seed + 1), str(one.inputs.q.device))
    out, lse = one.outputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is loaded or set once is so before the capture
        one.launch(fixed, out, lse, splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.launch(fixed, out, lse, splits)
    fixed.q.copy_(one.inputs.q)
    fixed.kv.copy_(one.inputs.kv)
    fixed.indices.copy_(one.inputs.indices)
    for _ in range(3):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    return out, lse


def _stream(one: _Run, splits: int | None) -> tuple[Tensor, Tensor]:
    """On a stream of its own, where the inputs arrive late: too late for any other stream."""
    import torch

    late = replace(one.inputs, q=torch.zeros_like(one.inputs.q),
                   indices=torch.full_like(one.inputs.indices, -1))  # fmt: skip
    out, lse = one.outputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # clock cycles; some 10 ms
        late.q.copy_(one.inputs.q)
        late.indices.copy_(one.inputs.indices)
        one.launch(late, out, lse, splits)
    torch.cuda.synchronize()
    return out, lse


_HOW: dict[str, Callable[[_Run, int | None], tuple[Tensor, Tensor]]] = {
    "plain": _plain, "graph": _graph, "stream": _stream,
}  # fmt: skip
