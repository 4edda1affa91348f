"""The fabric check between real processes, by torch's gloo, since here is no GPU for NCCL."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from imagebuild.deep.run import Where

pytestmark = pytest.mark.network
RUNTIME = Path(__file__).resolve().parents[3] / "image" / "runtime"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def start(where: Where, rank: int, ranks: int, port: str, **environ: str) -> subprocess.Popen[str]:
    command = [str(where.python), "-m", "serving.fabric", "--rank", str(rank), "--ranks",
               str(ranks), "--head", "127.0.0.1", "--port", port, "--timeout", "15",
               "--values", "200000"]  # fmt: skip
    # Gloo looks this machine's own name up where it is not told an interface.
    environment = {"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", **environ}
    return subprocess.Popen(command, cwd=RUNTIME, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip


def test_three_ranks(where: Where) -> None:
    port = free_port()
    ranks = [start(where, rank, 3, port) for rank in range(3)]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert all("3 ranks" in each and "over TCP, sums right" in each for each in said)


def test_a_rate_that_no_loopback_reaches(where: Where) -> None:
    port = free_port()
    ranks = [start(where, rank, 2, port, NCCL_IB_HCA=",".join("abcd" * 500)) for rank in range(2)]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3]
    assert all("expected 152000 Gbit/s at least (2000 devices of 95" in each for each in said)


def test_a_rank_that_never_comes(where: Where) -> None:
    rank = start(where, 0, 2, free_port())
    said, _ = rank.communicate(timeout=90)
    assert rank.returncode == 5 and "2 ranks do not meet at 127.0.0.1" in said
