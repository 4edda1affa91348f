"""The ring layout, `GLM_TP=RING4`: no switch, each of a node's two ports cabled to one neighbour.

What NCCL must be told, and why (its sources, 2.30.7):

- A ring channel of a node with one GPU takes one device for both directions, the first of its
  channel in the graph. Left alone, NCCL may choose one that the sender has no cable to. So the
  graph file names the previous node's port first: there a node listens.
- The sender then leaves that device for the one in the listener's subnet. This is
  NCCL_IB_SUBNET_AWARE_ROUTING, which older releases ignore without a word.
- Opposite nodes have no cable, so no tree and no chain may be connected: ring only, and
  connections only once they are used, which needs cuMem.
- Each port has an index of its own for its address, so NCCL looks it up for each device.

Ranks follow each other along the ring: NEXT of rank n leads to PREVIOUS of rank n + 1.

Tested with a made-up sysfs and by reading NCCL's sources: no ring was at hand. mentat gives
neighbours to its workers only, too late for this; here they come from the container's environment.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from serving import network, places
from serving.errors import EnvironmentFault
from serving.network import Network, Port
from serving.resolve import Plan
from serving.state import replace_file

_SIDES = {"previous": ("RING_PREVIOUS", "MENTAT_FABRIC_PREV_IFACE"),
          "next": ("RING_NEXT", "MENTAT_FABRIC_NEXT_IFACE")}  # fmt: skip
_OLDEST_NCCL = (2, 30, 7)
_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_PREFIX = 24  # bits by which NCCL tells subnets apart, unless it is told another number
# GB/s of one channel: a GB10's port is two PCIe links of some 100 Gbit/s.
_CHANNEL_SPEED = 12
# NCCL's numbers: identity and pattern of the graphs for rings and trees.
_GRAPHS = ((0, 4), (1, 3))
_FIXED = {
    "NCCL_NET": "IB",  # without a device it stops, instead of TCP
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    "NCCL_IB_SUBNET_PREFIX_LEN": str(_PREFIX),
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_IB_DEVICE_PCI_ORDER": "1",
    "NCCL_IB_GID_INDEX": "-1",
    "NCCL_IB_ADDR_FAMILY": "AF_INET",
    "NCCL_IB_ROCE_VERSION_NUM": "2",
    "NCCL_CROSS_NIC": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_RUNTIME_CONNECT": "1",
    "NCCL_CUMEM_ENABLE": "1",
}


def nccl_version() -> str:
    """Of the package that torch loads; "" when there is none."""
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def derive(
    plan: Plan,
    own_address: str,
    environ: Mapping[str, str],
    *,
    root: Path = network.SYSFS,
    known: Callable[[], network.Addresses] = network.addresses,
    nccl: Callable[[], str] = nccl_version,
    save: Callable[[Path, bytes], object] = replace_file,
) -> Network:
    """The network of a rank in a ring, and NCCL's graph file in GLM_STATE_DIR.

    Args:
        plan: of a ring.
        own_address: of this node in a network that all ranks share, which the ring is not.
        environ: the container's; it may name the neighbours' interfaces as mentat does.
        root: stands for /sys/class.
        known: gives the interfaces' addresses.
        nccl: gives NCCL's version.
        save: writes the graph file.

    Raises:
        EnvironmentFault: everything that is missing, a sentence each.
    """
    found = network.derive(plan, own_address, environ, root=root, known=known)
    if not found.ports:
        return found  # TCP was asked for: it needs no ring
    problems: list[str] = []
    ends = {}
    for side, (knob, of_mentat) in _SIDES.items():
        name = plan.settings.text(knob) or environ.get(of_mentat, "")
        ends[side] = _end(name, found.ports, root)
        if not ends[side]:
            problems.append(_missing(side, knob, name, found.ports))
    problems += _same_subnet(ends["previous"], ends["next"])
    problems += _too_old(nccl(), environ)
    if problems:
        raise EnvironmentFault(*problems)
    order = sorted({port.device: port for side in ends.values() for port in side}.values(),
                   key=lambda port: _pci(root, port.device))  # fmt: skip
    devices = [port.device for port in order]
    file = Path(plan.settings.text("STATE_DIR")) / places.RING_GRAPH
    try:
        save(file, graph(ends["previous"], ends["next"], devices).encode())
    except OSError as error:
        raise EnvironmentFault(f"{file} cannot be written: {error.strerror}") from error
    made = {"NCCL_IB_HCA": f"={','.join(devices)}", "NCCL_GRAPH_FILE": str(file)}
    notices = (*found.notices, *_notices(ends, found.variables["VLLM_HOST_IP"], nccl()))
    return Network({**found.variables, **_FIXED, **made}, tuple(order), notices)


def graph(previous: Sequence[Port], following: Sequence[Port], devices: Sequence[str]) -> str:
    """NCCL's XML for this node: a channel for each pair of devices, listening at `previous`.

    Args:
        previous: devices of the port to the previous node.
        following: devices of the port to the next node.
        devices: all of them in NCCL's order; it counts devices and does not name them.
    """
    count = max(len(previous), len(following))
    channels = []
    for number in range(count):
        ends = previous[number % len(previous)], following[number % len(following)]
        # NCCL reads these numbers as hexadecimal.
        listen, send = (quoteattr(f"{devices.index(port.device):x}") for port in ends)
        channels.append(
            f'    <channel><net dev={listen}/><gpu dev="0"/><net dev={send}/></channel>'
        )
    lines = ['<graphs version="1">']
    for identity, pattern in _GRAPHS:
        lines += [
            f'  <graph id="{identity}" pattern="{pattern}" crossnic="1" nchannels="{count}" '
            f'speedintra="{_CHANNEL_SPEED}" speedinter="{_CHANNEL_SPEED}" latencyinter="0" '
            'typeintra="LOC" typeinter="PHB" samechannels="0">',
            *channels,
            "  </graph>",
        ]
    return "\n".join([*lines, "</graphs>", ""])


def _end(name: str, ports: Sequence[Port], root: Path) -> list[Port]:
    """Devices of the port that an interface belongs to: each of its PCIe links is one."""
    named = [port for port in ports if port.interface == name]
    place = _pci(root, named[0].device)[1:] if named else ()
    twins = [port for port in ports if place and _pci(root, port.device)[1:] == place]
    return sorted(twins or named, key=lambda port: _pci(root, port.device))


def _missing(side: str, knob: str, name: str, ports: Sequence[Port]) -> str:
    if not name:
        return f"expected the interface to the {side} node in GLM_{knob}, found none"
    seen = ", ".join(f"{port.interface} ({port.device})" for port in ports)
    return (
        f"GLM_{knob}={name}: expected an RDMA device with an IPv4 RoCE v2 address on it, found "
        f"such devices only on {seen}"
    )


def _pci(root: Path, device: str) -> tuple[int, ...]:
    """Domain, bus, device and function; () where sysfs does not say.

    A port's links differ in the first only, and NCCL counts devices in this order.
    """
    match = _PCI.fullmatch((root / "infiniband" / device / "device").resolve().name)
    return tuple(int(part, 16) for part in match.groups()) if match else ()


def _same_subnet(previous: Sequence[Port], following: Sequence[Port]) -> list[str]:
    problems = []
    for one in previous:
        for other in following:
            if one.device == other.device:
                return [f"GLM_RING_PREVIOUS and GLM_RING_NEXT are on one port, {one.device}"]
            near = ipaddress.ip_network(f"{one.address}/{_PREFIX}", strict=False)
            if other.address in near:
                problems.append(
                    f"{one.interface} ({one.address}) leads to the previous node and "
                    f"{other.interface} ({other.address}) to the next, but both are in {near}, by "
                    "which NCCL tells the neighbours apart; give each cable a network of its own"
                )
    return problems


def _too_old(version: str, environ: Mapping[str, str]) -> list[str]:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not numbers or numbers >= _OLDEST_NCCL or environ.get("VLLM_NCCL_SO_PATH"):
        return []
    wanted = ".".join(map(str, _OLDEST_NCCL))
    return [
        f"a ring needs NCCL {wanted}, found {version}, which ignores the setting by which ranks "
        "choose the port to a neighbour; take a base with a newer one, or name a library by "
        "VLLM_NCCL_SO_PATH and LD_PRELOAD"
    ]


def _notices(ends: Mapping[str, Sequence[Port]], own: str, version: str) -> list[str]:
    said = [
        f"the port to the {side} node has one RDMA device with an address, {ports[0].device}; a "
        "GB10's has two, of half its rate each"
        for side, ports in ends.items()
        if len(ports) == 1
    ]
    if own in {str(port.address) for ports in ends.values() for port in ports}:
        said.append(
            f"{own} is this node's address on a cable of the ring, which the opposite node reaches "
            "only by a route; name another network by GLM_CLUSTER_SUBNET"
        )
    if not version:
        said.append("NCCL's version is not known; a ring needs "
                    f"{'.'.join(map(str, _OLDEST_NCCL))} or newer")  # fmt: skip
    return said
