"""Times launches inside one CUDA graph: no host in it, rows cold, a median of many replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable

WARM_UP, REPLAYS = 3, 15
_BUDGET_MS = 400.0  # of replays; a slow kernel gets fewer, but at least five


def microseconds(call: Callable[[int], object], count: int) -> float:
    """The median time of one launch.

    Args:
        call: launches on the i-th set of inputs, on the current stream, without synchronizing.
        count: of sets; all are in the graph, one after the other.
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
                call(i)
    torch.cuda.synchronize()
    times = [_replay(graph) for _ in range(WARM_UP)]
    replays = max(5, min(REPLAYS, int(_BUDGET_MS / max(times[-1], 1e-3))))
    return statistics.median(_replay(graph) for _ in range(replays)) * 1e3 / count


def _replay(graph: object) -> float:
    """Milliseconds."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()  # type: ignore[attr-defined]
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
