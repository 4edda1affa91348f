"""Interfaces and RDMA devices from a sysfs of a few files."""

from __future__ import annotations

import ipaddress

import pytest
from serving import network
from serving.errors import EnvironmentFault
from serving.resolve import resolve

LAN, ONE, TWO = "192.168.1.5", "10.0.1.5", "10.0.2.5"
KNOWN = {
    "enP7s7": (ipaddress.IPv4Address(LAN),),
    "enp1s0f0": (ipaddress.IPv4Address(ONE),),
    "enp1s0f1": (ipaddress.IPv4Address(TWO),),
}


def port(root, device, interface, address, *, index=3, state="4: ACTIVE", rate="200"):
    """A device whose table has the IPv6 and RoCE v1 entries that real ones have, too."""
    folder = root / "infiniband" / device / "ports" / "1"
    for name in ("gids", "gid_attrs/ndevs", "gid_attrs/types"):
        (folder / name).mkdir(parents=True)
    words = ipaddress.IPv4Address(address).packed.hex()
    mapped = f"0000:0000:0000:0000:0000:ffff:{words[:4]}:{words[4:]}"
    entries = {0: ("fe80:" * 7 + "0001", "RoCE v2"), index - 1: (mapped, "IB/RoCE v1"),
               index: (mapped, "RoCE v2")}  # fmt: skip
    for number, (gid, kind) in entries.items():
        (folder / "gids" / str(number)).write_text(f"{gid}\n")
        (folder / "gid_attrs" / "ndevs" / str(number)).write_text(f"{interface}\n")
        (folder / "gid_attrs" / "types" / str(number)).write_text(f"{kind}\n")
    (folder / "state").write_text(f"{state}\n")
    (folder / "rate").write_text(f"{rate} Gb/sec (4X HDR)\n")


@pytest.fixture
def sysfs(tmp_path):
    port(tmp_path, "rocep1s0f0", "enp1s0f0", ONE)
    port(tmp_path, "rocep1s0f1", "enp1s0f1", TWO)
    return tmp_path


def derive(root, own="", environ=None, deployment="gb10-2x", **knobs):
    plan = resolve({"GLM_DEPLOYMENT": deployment} | knobs)
    return network.derive(plan, own, environ or {}, root=root, known=lambda: KNOWN)


def test_both_ports_are_found(sysfs):
    found = derive(sysfs, ONE)
    assert found.variables == {
        "VLLM_HOST_IP": ONE,
        "GLOO_SOCKET_IFNAME": "enp1s0f0",
        "NCCL_SOCKET_IFNAME": "enp1s0f0",
        "NCCL_IB_HCA": "rocep1s0f0,rocep1s0f1",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert not found.notices


def test_a_single_machine_needs_nothing(tmp_path):
    assert derive(tmp_path, deployment="rtx6000-4x").variables == {}


def test_addresses_by_knob_subnet_discovery_or_fabric(sysfs):
    assert derive(sysfs, LAN).variables["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert derive(sysfs).variables["VLLM_HOST_IP"] == ONE
    asked = derive(sysfs, ONE, GLM_CLUSTER_SUBNET="192.168.0.0/16")
    assert asked.variables["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert derive(sysfs, ONE, GLM_HOST_ADDRESS=TWO).variables["VLLM_HOST_IP"] == TWO
    named = derive(sysfs, "10.9.9.9", GLM_SOCKET_INTERFACE="bond0")
    assert named.variables["NCCL_SOCKET_IFNAME"] == "bond0"


def test_subnets_choose_the_ports(sysfs):
    found = derive(sysfs, ONE, GLM_FABRIC_SUBNETS="10.0.2.0/24")
    assert found.variables["NCCL_IB_HCA"] == "rocep1s0f1"


def test_pinned_values_are_kept_out(sysfs):
    found = derive(sysfs, ONE, GLM_IB_HCA="mlx5_0", GLM_IB_GID_INDEX="5")
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"} & set(found.variables)


def test_a_slow_port_is_a_notice_and_a_dead_one_an_error(tmp_path):
    port(tmp_path, "rocep1s0f0", "enp1s0f0", ONE, rate="25")
    assert derive(tmp_path, ONE).notices == (
        "rocep1s0f0 (enp1s0f0) runs at 25 Gbit/s, expected 200",
    )
    port(tmp_path, "rocep1s0f1", "enp1s0f1", TWO, state="1: DOWN")
    with pytest.raises(EnvironmentFault, match=r"rocep1s0f1 \(enp1s0f1\) is DOWN"):
        derive(tmp_path, ONE)


def test_indexes_that_differ_stop_a_mesh_and_not_a_ring(tmp_path):
    port(tmp_path, "rocep1s0f0", "enp1s0f0", ONE, index=3)
    port(tmp_path, "rocep1s0f1", "enp1s0f1", TWO, index=5)
    with pytest.raises(EnvironmentFault, match="rocep1s0f0 has 3, rocep1s0f1 has 5"):
        derive(tmp_path, ONE)
    ring = derive(tmp_path, ONE, deployment="gb10-4x", GLM_TP="RING4",
                  GLM_RING_PREVIOUS="enp1s0f0", GLM_RING_NEXT="enp1s0f1")  # fmt: skip
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX"} & set(ring.variables)


def test_no_rdma_says_what_was_found_and_tcp_must_be_asked_for(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"found none \(RDMA devices: none\)"):
        derive(tmp_path, ONE)
    found = derive(tmp_path, ONE, {"NCCL_IB_DISABLE": "1"})
    assert "NCCL_IB_HCA" not in found.variables
    assert "TCP" in found.notices[0]


def test_an_address_that_is_nowhere(sysfs):
    with pytest.raises(EnvironmentFault, match=r"10\.9\.9\.9, found enP7s7 192\.168\.1\.5"):
        derive(sysfs, "10.9.9.9")
    with pytest.raises(EnvironmentFault, match="GLM_CLUSTER_SUBNET=172"):
        derive(sysfs, ONE, GLM_CLUSTER_SUBNET="172.16.0.0/12")


def test_this_machine_has_loopback():
    assert network.addresses(["lo", "no-such-one"]) == {"lo": (ipaddress.IPv4Address("127.0.0.1"),)}
