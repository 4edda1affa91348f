"""The ring layout from a sysfs of a few files; NCCL itself is not here."""

from __future__ import annotations

import ipaddress
import xml.etree.ElementTree as ET

import pytest
from serving import network, ring
from serving.cluster import Place
from serving.errors import EnvironmentFault
from serving.fabric import devices_of
from serving.main import Start, Tools
from serving.process import Signals
from serving.resolve import resolve

from tests.image.serving.test_network import port

# Interface, device, PCI address and IPv4 address, as on a GB10: a port is two PCIe links, in two
# domains. The names' order is not that of the PCI addresses.
LINKS = {
    "enp1s0f0": ("rocep1s0f0", "0000:01:00.0", "10.0.1.5"),
    "enP2p1s0f0": ("roceP2p1s0f0", "0002:01:00.0", "10.0.2.5"),
    "enp1s0f1": ("rocep1s0f1", "0000:01:00.1", "10.0.3.5"),
    "enP2p1s0f1": ("roceP2p1s0f1", "0002:01:00.1", "10.0.4.5"),
}
LAN = "192.168.1.5"
ENDS = {"GLM_RING_PREVIOUS": "enp1s0f1", "GLM_RING_NEXT": "enp1s0f0"}


def plug(root, links):
    for name, (device, pci, address) in links.items():
        port(root, device, name, address, index=2 + len(name) % 3)
        real = root / "devices" / pci
        real.mkdir(parents=True)
        (root / "infiniband" / device / "device").symlink_to(real)


def derive(folder, links=LINKS, environ=None, own=LAN, nccl="2.30.7", **knobs):
    root = folder / "sys"
    if not root.exists():
        plug(root, links)
    known = {name: (ipaddress.IPv4Address(address),) for name, (_, _, address) in links.items()}
    known["enP7s7"] = (ipaddress.IPv4Address(LAN),)
    ends = {} if "IMAGEBUILD_CLUSTER" in knobs else ENDS
    given = {"GLM_DEPLOYMENT": "gb10-4x", "GLM_TP": "RING4", "GLM_STATE_DIR": str(folder)}
    plan = resolve(given | ends | knobs)
    return ring.derive(plan, own, environ or {}, root=root, known=lambda: known, nccl=lambda: nccl)


def graphs(found):
    root = ET.parse(found.variables["NCCL_GRAPH_FILE"]).getroot()
    assert (root.tag, root.get("version")) == ("graphs", "1")
    return {graph.get("id"): graph for graph in root}


def channels(found):
    """For each ring channel the devices that it listens on and sends by, by name."""
    devices = found.variables["NCCL_IB_HCA"].removeprefix("=").split(",")
    said = []
    for channel in graphs(found)["0"]:
        assert [part.tag for part in channel] == ["net", "gpu", "net"]
        said.append(tuple(devices[int(part.get("dev"), 16)] for part in (channel[0], channel[2])))
    return said


def test_both_links_of_both_ports_are_used(tmp_path):
    found = derive(tmp_path)
    # The order is NCCL's: by PCI address. It numbers devices by it, and the graph has numbers.
    assert found.variables["NCCL_IB_HCA"] == "=rocep1s0f0,rocep1s0f1,roceP2p1s0f0,roceP2p1s0f1"
    assert channels(found) == [("rocep1s0f1", "rocep1s0f0"), ("roceP2p1s0f1", "roceP2p1s0f0")]
    assert devices_of(found.variables) == 2, "the other two receive"
    assert {p.device for p in found.ports} == {device for device, _, _ in LINKS.values()}
    assert found.variables["VLLM_HOST_IP"] == LAN
    assert found.variables["NCCL_SOCKET_IFNAME"] == "enP7s7"
    assert found.notices == ()


def test_the_graph_says_a_ring_and_a_tree_of_as_many_channels(tmp_path):
    """NCCL takes the fewer channels of the two, and reads the graph only if NICs may differ."""
    found = derive(tmp_path)
    assert {key: graph.get("pattern") for key, graph in graphs(found).items()} == {
        "0": "4", "1": "3"}  # fmt: skip
    for graph in graphs(found).values():
        assert graph.get("nchannels") == "2" and len(graph) == 2
        assert graph.get("crossnic") == found.variables["NCCL_CROSS_NIC"] == "1"


def test_turned_round(tmp_path):
    found = derive(tmp_path, GLM_RING_PREVIOUS="enp1s0f0", GLM_RING_NEXT="enP2p1s0f1")
    assert channels(found) == [("rocep1s0f0", "rocep1s0f1"), ("roceP2p1s0f0", "roceP2p1s0f1")]


def test_nccl_chooses_indexes_and_subnets_and_no_tree(tmp_path):
    found = derive(tmp_path, environ={"NCCL_IB_GID_INDEX": "3", "NCCL_ALGO": "Tree"})
    said = found.variables
    assert (said["NCCL_IB_GID_INDEX"], said["NCCL_IB_SUBNET_AWARE_ROUTING"]) == ("-1", "1")
    assert (said["NCCL_ALGO"], said["NCCL_NET"], said["NCCL_IB_MERGE_NICS"]) == ("Ring", "IB", "0")


def test_neighbours_as_mentat_names_them(tmp_path):
    environ = {"MENTAT_FABRIC_PREV_IFACE": "enp1s0f1", "MENTAT_FABRIC_NEXT_IFACE": "enp1s0f0"}
    found = derive(tmp_path, environ=environ, IMAGEBUILD_CLUSTER="mentat")
    assert channels(found)[0] == ("rocep1s0f1", "rocep1s0f0")
    with pytest.raises(EnvironmentFault) as caught:
        derive(tmp_path, IMAGEBUILD_CLUSTER="mentat")
    assert [text.partition(",")[0] for text in caught.value.problems] == [
        "expected the interface to the previous node in GLM_RING_PREVIOUS",
        "expected the interface to the next node in GLM_RING_NEXT",
    ]


def test_everything_that_is_missing_is_said_at_once(tmp_path):
    with pytest.raises(EnvironmentFault) as caught:
        derive(tmp_path, nccl="2.29.7", GLM_RING_PREVIOUS="enp9s9")
    missing, old = caught.value.problems
    assert missing.startswith("GLM_RING_PREVIOUS=enp9s9: expected an RDMA device")
    assert "enP2p1s0f1 (roceP2p1s0f1)" in missing
    assert "needs NCCL 2.30.7, found 2.29.7" in old


@pytest.mark.parametrize(("version", "environ"), [
    ("2.30.7", {}), ("2.31.2", {}), ("3.0", {}), ("2.29.7", {"VLLM_NCCL_SO_PATH": "/x.so"}),
])  # fmt: skip
def test_nccl_that_does(tmp_path, version, environ):
    assert not derive(tmp_path, environ=environ, nccl=version).notices


def test_nccl_of_no_version_is_a_notice(tmp_path):
    assert "2.30.7 or newer" in derive(tmp_path, nccl="").notices[0]


def test_one_subnet_for_both_neighbours(tmp_path):
    links = LINKS | {"enP2p1s0f0": ("roceP2p1s0f0", "0002:01:00.0", "10.0.3.9")}
    with pytest.raises(EnvironmentFault) as caught:
        derive(tmp_path, links)
    [problem] = caught.value.problems
    assert "enP2p1s0f0 (10.0.3.9) to the next, but both are in 10.0.3.0/24" in problem


def test_two_links_of_one_port_are_no_two_neighbours(tmp_path):
    with pytest.raises(EnvironmentFault, match="are on one port, rocep1s0f0"):
        derive(tmp_path, GLM_RING_PREVIOUS="enP2p1s0f0")


def test_a_port_with_one_address_runs_at_half_its_rate(tmp_path):
    links = {name: link for name, link in LINKS.items() if name != "enP2p1s0f1"}
    found = derive(tmp_path, links)
    assert channels(found) == [("rocep1s0f1", "rocep1s0f0"), ("rocep1s0f1", "roceP2p1s0f0")]
    assert found.notices[0].startswith("the port to the previous node has one RDMA device")


def test_an_address_on_a_cable_is_a_notice(tmp_path):
    assert "only by a route" in derive(tmp_path, own="10.0.1.5").notices[0]


def test_a_port_that_is_down_is_the_network_module_s(tmp_path):
    plug(tmp_path / "sys", LINKS)
    (tmp_path / "sys/infiniband/rocep1s0f0/ports/1/state").write_text("1: DOWN\n")
    with pytest.raises(EnvironmentFault, match=r"rocep1s0f0 .* is DOWN"):
        derive(tmp_path)


def test_tcp_needs_no_ring(tmp_path):
    found = derive(tmp_path, environ={"NCCL_IB_DISABLE": "1"})
    assert "NCCL_GRAPH_FILE" not in found.variables and "TCP" in found.notices[0]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        derive(tmp_path, GLM_STATE_DIR=str(tmp_path / "file"))


def test_this_version_is_found_or_not():
    assert ring.nccl_version() == "" or ring.nccl_version()[0].isdigit()


@pytest.mark.parametrize(("knobs", "chosen"), [
    ({"GLM_TP": "RING4"} | ENDS, ring), ({"GLM_TP": "4"}, network),
])  # fmt: skip
def test_a_start_takes_the_layout_s_module(monkeypatch, knobs, chosen):
    for module in (ring, network):
        found = network.Network({"by": module.__name__})
        monkeypatch.setattr(module, "derive", lambda *_, found=found: found)
    plan = resolve({"GLM_DEPLOYMENT": "gb10-4x"} | knobs)
    start = Start({}, Tools(), Signals())
    assert start._network(plan, Place(True, LAN, LAN)).variables == {"by": chosen.__name__}
