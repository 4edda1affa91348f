"""Times launches inside one CUDA graph: no host in it, rows cold, a median of many replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import CUDAGraph

WARM_UP, REPLAYS = 3, 15
_BUDGET_MS = 400.0  # of replays; a slow kernel gets fewer, but at least five


@dataclass(frozen=True)
class Timed:
    """What was measured.

    Attributes:
        microseconds: median of one launch.
        out: what the last launch of the graph returned, as the last replay left it.
        graph: owns the memory of `out`.
    """

    microseconds: float
    out: Tensor
    graph: CUDAGraph


def time_launches(call: Callable[[int], Tensor], count: int) -> Timed:
    """Times launches on `count` sets, all in one graph, one after the other.

    Args:
        call: launches on the i-th set of inputs, on the current stream, without synchronizing.
        count: of sets.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(min(count, 2)):  # compiles, loads, sets attributes
            call(i)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(count):
                out = call(i)
    torch.cuda.synchronize()
    times = [_replay(graph) for _ in range(WARM_UP)]
    replays = max(5, min(REPLAYS, int(_BUDGET_MS / max(times[-1], 1e-3))))
    median = statistics.median(_replay(graph) for _ in range(replays))
    return Timed(median * 1e3 / count, out, graph)


def _replay(graph: CUDAGraph) -> float:
    """Milliseconds."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
