from __future__ import annotations

import pytest
from serving import fabric
from serving.errors import CheckError, EnvironmentFault
from serving.fabric import Measured, devices_of, judge, main

GB = 1_000_000_000


@pytest.mark.parametrize(("ranks", "gbps"), [(2, 8.0), (4, 12.0)])
def test_bus_bandwidth_is_what_a_rank_sends(ranks: int, gbps: float) -> None:
    assert Measured(1.0, GB, ranks, True).gbps == gbps


def test_a_good_fabric() -> None:
    assert judge(Measured(0.05, GB, 2, True), 2, 95) == (
        "fabric: 2 ranks, 160.0 Gbit/s over 2 RDMA devices, sums right"
    )
    assert "over TCP" in judge(Measured(9.0, GB, 2, True), 0, 95)


def test_just_fast_enough() -> None:
    seconds = 8 / (0.8 * 95 * 2)
    judge(Measured(seconds * 0.999, GB, 2, True), 2, 95)
    with pytest.raises(CheckError, match="expected 152 Gbit/s at least"):
        judge(Measured(seconds * 1.001, GB, 2, True), 2, 95)


def test_wrong_sums_are_worse_than_slow() -> None:
    with pytest.raises(CheckError, match="a cable, a port or a driver changes data"):
        judge(Measured(0.001, GB, 4, False), 2, 95)


@pytest.mark.parametrize(("environ", "count"), [
    ({}, 0), ({"NCCL_IB_HCA": "rocep1s0f0"}, 1), ({"NCCL_IB_HCA": "=a:1,b:1"}, 2),
    ({"NCCL_IB_HCA": "a,b", "NCCL_IB_DISABLE": "1"}, 0), ({"NCCL_IB_HCA": ""}, 0),
    ({"NCCL_IB_HCA": "=a,b,c,d", "NCCL_GRAPH_FILE": "/run/glm53/nccl-ring.xml"}, 2),
])  # fmt: skip
def test_devices(environ: dict[str, str], count: int) -> None:
    assert devices_of(environ) == count


def test_without_torch(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main(["--rank", "0", "--ranks", "2", "--head", "127.0.0.1", "--port", "1"], {}) == 5
    assert capsys.readouterr().out.startswith("fabric: torch cannot be imported")


def test_a_ring_that_does_not_close(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def measure(*_: object, **__: object) -> Measured:
        raise EnvironmentFault("fabric: 4 ranks do not meet")

    monkeypatch.setattr(fabric, "measure", measure)
    words = ["--rank", "0", "--ranks", "4", "--head", "127.0.0.1", "--port", "1"]
    assert main(words, {"NCCL_GRAPH_FILE": "x"}) == main(words, {}) == 5
    in_a_ring, elsewhere = capsys.readouterr().out.splitlines()
    assert in_a_ring.startswith("fabric: 4 ranks do not meet; in a ring GLM_RING_NEXT of each rank")
    assert elsewhere == "fabric: 4 ranks do not meet"
