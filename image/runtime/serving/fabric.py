"""The fabric check: an all-reduce over all ranks, right to the bit and fast, before the load.

A fabric that fell back to TCP, or a port at half its rate, is no error to NCCL: every token is just
slow. Exit 0: all well; 3: wrong sums, or too slow; 5: the ranks do not meet, or torch fails. The
last line of the output says which.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from serving.errors import CheckError, EnvironmentFault

_VALUES = 128 << 20  # of bf16: 256 MiB, large enough that latency does not count
_WARM, _TIMED = 2, 5
_RING_HINT = (
    "; in a ring GLM_RING_NEXT of each rank leads to GLM_RING_PREVIOUS of the rank after "
    "it, and the ring closes"
)
_SHARE = 0.8  # of the devices' rate that must be reached


class Measured(NamedTuple):
    """What one rank saw.

    Attributes:
        seconds: of the slowest rank, for one all-reduce; median of several.
        size: bytes that were reduced.
        ranks: how many took part.
        is_right: whether every sum was the expected one, on every rank.
    """

    seconds: float
    size: int
    ranks: int
    is_right: bool

    @property
    def gbps(self) -> float:
        """Bus bandwidth, Gbit/s: what each rank sends, however many there are."""
        moved = self.size * 2 * (self.ranks - 1) / self.ranks
        return moved * 8 / self.seconds / 1e9


def is_ring(environ: Mapping[str, str]) -> bool:
    """Whether the ranks are cabled in a ring; `serving.ring` sets this."""
    return "NCCL_GRAPH_FILE" in environ


def devices_of(environ: Mapping[str, str]) -> int:
    """RDMA devices that send at once; 0 where NCCL may use TCP.

    In a ring one half of them sends to the next rank, and the other receives.
    """
    if environ.get("NCCL_IB_DISABLE") == "1":
        return 0
    names = environ.get("NCCL_IB_HCA", "").lstrip("=^")
    count = len([name for name in names.split(",") if name])
    return count // 2 if is_ring(environ) else count


def judge(measured: Measured, devices: int, gbps: int) -> str:
    """A sentence about a good fabric.

    Args:
        measured: what was seen.
        devices: of RDMA; 0 asks for right sums alone.
        gbps: expected of one device, Gbit/s.

    Raises:
        CheckError: a sum is wrong, or the rate too low.
    """
    if not measured.is_right:
        raise CheckError(f"fabric: expected the sum of {measured.ranks} ranks, found other "
                         "numbers: a cable, a port or a driver changes data")  # fmt: skip
    least = _SHARE * gbps * devices
    if measured.gbps < least:
        raise CheckError(
            f"fabric: expected {least:.0f} Gbit/s at least ({devices} devices of {gbps}, "
            f"{_SHARE:.0%} of it), found {measured.gbps:.1f}; look for NET/Socket in NCCL's lines, "
            "and at link rates and PCIe width"
        )
    over = f"{devices} RDMA devices" if devices else "TCP"
    return f"fabric: {measured.ranks} ranks, {measured.gbps:.1f} Gbit/s over {over}, sums right"


def measure(
    rank: int, ranks: int, address: str, seconds: int, *, values: int = _VALUES
) -> Measured:
    """Reduces over all ranks; on a machine without a GPU by gloo, else by NCCL.

    Raises:
        EnvironmentFault: torch is absent, or the ranks do not meet in time.
    """
    try:
        import torch
        from torch import distributed
    except ImportError as error:
        raise EnvironmentFault(f"fabric: torch cannot be imported: {error}") from error
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    try:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"tcp://{address}", rank=rank,
            world_size=ranks, timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        try:
            return _reduce(torch, distributed, device, values)
        finally:
            distributed.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise EnvironmentFault(
            f"fabric: {ranks} ranks do not meet at {address}: {said[0]}"
        ) from error


def _reduce(torch: Any, distributed: Any, device: Any, values: int) -> Measured:  # noqa: ANN401
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    data = torch.empty(values, dtype=torch.bfloat16, device=device)
    # Small whole numbers: their sums are exact in bf16, in whatever order.
    expected = ranks * (ranks + 1) // 2
    is_right, times = True, []
    for number in range(_WARM + _TIMED):
        data.fill_(rank + 1)
        _settle(torch, device)
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(data)
        _settle(torch, device)
        if number >= _WARM:
            times.append(time.perf_counter() - start)
        is_right = is_right and bool((data == expected).all())
    # All ranks judge by the same figures: the slowest rank's time, and whether any found a fault.
    shared = torch.tensor([sorted(times)[len(times) // 2], 0.0 if is_right else 1.0],
                          dtype=torch.float64, device=device)  # fmt: skip
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return Measured(float(shared[0]), values * 2, ranks, float(shared[1]) == 0.0)


def _settle(torch: Any, device: Any) -> None:  # noqa: ANN401
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """`python3 -m serving.fabric`, on each rank at the same time."""
    parser = argparse.ArgumentParser(prog="serving.fabric", description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--head", required=True, help="address of rank 0")
    parser.add_argument("--port", type=int, required=True, help="a free port there")
    parser.add_argument("--timeout", type=int, default=120, help="seconds to meet, and for a step")
    parser.add_argument("--gbps", type=int, default=95, help="expected of one RDMA device")
    parser.add_argument("--values", type=int, default=_VALUES, help="bf16 numbers to reduce")
    asked = parser.parse_args(arguments)
    head = f"[{asked.head}]" if ":" in asked.head else asked.head
    timer = threading.Timer(2.5 * asked.timeout, _give_up, (2.5 * asked.timeout,))
    timer.daemon = True
    timer.start()
    try:
        measured = measure(asked.rank, asked.ranks, f"{head}:{asked.port}", asked.timeout,
                           values=asked.values)  # fmt: skip
        _say(judge(measured, devices_of(environ), asked.gbps))
    except (CheckError, EnvironmentFault) as error:
        _say(f"{error}{_RING_HINT if is_ring(environ) else ''}")
        return error.exit_code
    finally:
        timer.cancel()
    return 0


def _give_up(seconds: float) -> None:
    """A collective whose peer died may block in C for ever; nothing but an exit ends that."""
    _say(f"fabric: expected an end within {seconds:.0f} s, found that a rank hangs or is gone")
    os._exit(EnvironmentFault.exit_code)


def _say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
