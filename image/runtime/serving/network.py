"""Interfaces, RDMA devices and address indexes of this node, read from sysfs at each start.

They are looked up and not configured, because they move: the index of a RoCE v2 address changes
from boot to boot, and with a wrong one NCCL falls back to TCP without a word.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.errors import EnvironmentFault
from serving.resolve import Plan

SYSFS = Path("/sys/class")
# Interface -> its IPv4 addresses.
Addresses = Mapping[str, Sequence[ipaddress.IPv4Address]]
_GIDS = 16
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Port:
    """One RDMA port that has an IPv4 address over RoCE v2.

    Attributes:
        device: of RDMA, such as rocep1s0f0.
        interface: of the network.
        address: of the interface.
        gid_index: of that address in the device's table.
        state: such as ACTIVE.
        rate: Gbit/s; 0 when the system does not say.
    """

    device: str
    interface: str
    address: ipaddress.IPv4Address
    gid_index: int
    state: str
    rate: int


@dataclass(frozen=True)
class Network:
    """What the ranks' network looks like from this node.

    Attributes:
        variables: for vLLM, Gloo and NCCL.
        ports: of RDMA, in use.
        notices: sentences for the log.
    """

    variables: Mapping[str, str]
    ports: tuple[Port, ...] = ()
    notices: tuple[str, ...] = ()


def addresses(names: Iterable[str] | None = None) -> Addresses:
    """The first IPv4 address of each interface; by default of all that sysfs has."""
    names = names if names is not None else sorted(p.name for p in (SYSFS / "net").glob("*"))
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            found[name] = (ipaddress.IPv4Address(answer[20:24]),)
    return found


def rdma_ports(root: Path, known: Addresses) -> list[Port]:
    """Every RDMA port with an IPv4 RoCE v2 address of an interface of this node."""
    found = []
    for port in sorted(root.glob("infiniband/*/ports/*")):
        device = port.parents[1].name
        for index in range(_GIDS):
            interface = _text(port / "gid_attrs" / "ndevs" / str(index))
            kind = _text(port / "gid_attrs" / "types" / str(index))
            gid = _text(port / "gids" / str(index)).lower().replace(":", "")
            if kind != "RoCE v2" or interface not in known:
                continue
            match = [a for a in known[interface] if gid == "0" * 20 + "ffff" + a.packed.hex()]
            if match:
                state = _text(port / "state").partition(":")[2].strip()
                rate = _text(port / "rate").partition(" ")[0].partition(".")[0]
                found.append(Port(device, interface, match[0], index, state,
                                  int(rate) if rate.isdecimal() else 0))  # fmt: skip
                break
    return found


def derive(
    plan: Plan,
    own_address: str,
    environ: Mapping[str, str],
    *,
    root: Path = SYSFS,
    known: Callable[[], Addresses] = addresses,
) -> Network:
    """The network of a rank in a cluster of several nodes; a single node needs none.

    Args:
        plan: the plan.
        own_address: of this node in the ranks' network, "" where discovery found none.
        environ: NCCL_IB_DISABLE=1 asks for TCP.
        root: stands for /sys/class.
        known: gives the interfaces' addresses.

    Raises:
        EnvironmentFault: what is missing, with what was found instead.
    """
    if plan.nodes == 1:
        return Network({})
    here = known()
    uses_rdma = plan.profile.has_fabric and environ.get("NCCL_IB_DISABLE") != "1"
    ports = _fabric(plan, root, here) if uses_rdma else []
    address = _own_address(plan, own_address, here, ports)
    interface = plan.settings.text("SOCKET_INTERFACE") or _owner(address, here)
    variables = {
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    if not uses_rdma:
        notice = "NCCL_IB_DISABLE=1: the ranks talk over TCP, which slows down every token"
        return Network(variables, (), (notice,))
    variables |= _hcas(plan, ports)
    notices = [f"{p.device} ({p.interface}) runs at {p.rate} Gbit/s, expected 200" for p in ports
               if 0 < p.rate < 200]  # fmt: skip
    return Network(variables, tuple(ports), tuple(notices))


def _fabric(plan: Plan, root: Path, here: Addresses) -> list[Port]:
    if plan.settings["IB_HCA"] is not None and plan.settings["IB_GID_INDEX"] is not None:
        return []
    ports = rdma_ports(root, here)
    wanted = [ipaddress.ip_network(text) for text in plan.settings.texts("FABRIC_SUBNETS")]
    chosen = [p for p in ports if not wanted or any(p.address in net for net in wanted)]
    if not chosen:
        devices = ", ".join(sorted(p.name for p in root.glob("infiniband/*"))) or "none"
        seen = ", ".join(f"{p.device} {p.address}" for p in ports) or "none"
        where = f" in {', '.join(map(str, wanted))}" if wanted else ""
        raise EnvironmentFault(
            f"expected an RDMA port with an IPv4 RoCE v2 address{where}, found {seen} (RDMA "
            f"devices: {devices}); are /dev/infiniband and the host's network given to the "
            "container, and have the ports addresses? NCCL_IB_DISABLE=1 does without, over TCP"
        )
    down = [f"{p.device} ({p.interface}) is {p.state}" for p in chosen if p.state != "ACTIVE"]
    if down:
        raise EnvironmentFault(f"expected every fabric port to be ACTIVE: {'; '.join(down)}")
    return chosen


def _hcas(plan: Plan, ports: Sequence[Port]) -> dict[str, str]:
    """NCCL's devices and index. In a ring each port has its own: see serving.ring."""
    made: dict[str, str] = {}
    if plan.is_ring:
        return made
    if plan.settings["IB_HCA"] is None:
        made["NCCL_IB_HCA"] = ",".join(dict.fromkeys(port.device for port in ports))
    if plan.settings["IB_GID_INDEX"] is None:
        indexes = {port.gid_index for port in ports}
        if len(indexes) > 1:
            seen = ", ".join(f"{port.device} has {port.gid_index}" for port in ports)
            raise EnvironmentFault(
                f"expected one index of the RoCE v2 address on all ports, found {seen}; bring the "
                "ports down and up in the same order, or limit them by GLM_FABRIC_SUBNETS"
            )
        made["NCCL_IB_GID_INDEX"] = str(indexes.pop())
    return made


def _own_address(plan: Plan, found: str, here: Addresses, ports: Sequence[Port]) -> str:
    if plan.settings.text("HOST_ADDRESS"):
        return plan.settings.text("HOST_ADDRESS")
    subnets = [ipaddress.ip_network(text) for text in plan.settings.texts("CLUSTER_SUBNET")]
    if subnets:
        mine = [a for owned in here.values() for a in owned if any(a in net for net in subnets)]
        if not mine:
            raise EnvironmentFault(
                f"expected an address in GLM_CLUSTER_SUBNET={','.join(map(str, subnets))}, found "
                f"{_shown(here)}"
            )
        return str(mine[0])
    return found or str(min((port.address for port in ports), default=""))


def _owner(address: str, here: Addresses) -> str:
    for interface, owned in here.items():
        if address in map(str, owned):
            return interface
    raise EnvironmentFault(
        f"expected an interface with the address {address}, found {_shown(here)}; Gloo needs its "
        "exact name: set GLM_HOST_ADDRESS or GLM_SOCKET_INTERFACE"
    )


def _shown(here: Addresses) -> str:
    return ", ".join(f"{name} {a}" for name, owned in here.items() for a in owned) or "none"


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""  # an empty entry of the table cannot be read
