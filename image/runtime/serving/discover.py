"""Which rank this node is: by its knobs, and by which of the named addresses is its own.

Placement stays with the executor. Here only the head is found, and nothing is asked of the network
but names: with GLM_HEAD everybody knows it, with GLM_PEERS it is the lowest address among them.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from serving.cluster import Place
from serving.errors import EnvironmentFault, KnobError
from serving.resolve import Plan

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Sequence[Address]]
IsOwn = Callable[[Address], bool]


def resolve_name(name: str) -> Sequence[Address]:
    """Addresses of a name, or the address that it is. Raises EnvironmentFault."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "malformed"
        raise EnvironmentFault(f"{name}: expected a node's address, found that its name does not "
                               f"resolve ({reason}); use an IP address") from None  # fmt: skip
    texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    return [ipaddress.ip_address(text) for text in texts]


def is_own(address: Address) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return not address.is_unspecified


def place_of(plan: Plan, *, resolve: Resolve = resolve_name, own: IsOwn = is_own) -> Place:
    """Where this node stands.

    Raises:
        KnobError: what is set contradicts what this machine is.
        EnvironmentFault: a name does not resolve.
    """
    settings = plan.settings
    head, peers = settings.text("HEAD"), settings.texts("PEERS")
    if not head and not peers:
        raise KnobError(f"{plan.profile.name} has {plan.nodes} nodes; expected GLM_HEAD, the "
                        "head's address, or GLM_PEERS, those of all, found neither")  # fmt: skip
    # Which address of a name comes first is each node's own affair; the head must be everyone's.
    addresses = {peer: min(resolve(peer), key=_order) for peer in peers}
    if not head:
        head = min(addresses, key=lambda peer: _order(addresses[peer]))
    head_address = min(resolve(head), key=_order)
    is_head = own(head_address)
    _agree(plan, head, head_address, is_head=is_head)
    mine = [address for address in addresses.values() if own(address)]
    if peers and not mine:
        raise KnobError(f"GLM_PEERS={','.join(peers)}: expected one of them to be this node's "
                        "address, found none")  # fmt: skip
    if len(mine) > 1:
        raise KnobError(f"GLM_PEERS: expected one address a node, found that {mine[0]} and "
                        f"{mine[1]} are both this node's")  # fmt: skip
    if is_head:
        return Place(True, str(head_address), str(head_address))
    if address := settings.text("HOST_ADDRESS"):
        found = resolve(address)[0]
    else:
        found = mine[0] if mine else _towards(head_address)
    if found.is_loopback:
        # Debian and Ubuntu write "127.0.1.1 HOSTNAME" to /etc/hosts.
        named = f"GLM_HOST_ADDRESS={address}" if address else "this node's entry of GLM_PEERS"
        raise KnobError(f"{named}: expected an address that the other nodes reach, found {found}, "
                        "which is loopback; use its IP address")  # fmt: skip
    return Place(False, str(head_address), str(found))


def _order(address: Address) -> tuple[bool, int, int]:
    return address.is_loopback, address.version, int(address)


def _agree(plan: Plan, head: str, address: Address, *, is_head: bool) -> None:
    role, rank = plan.settings.text("ROLE"), plan.settings["RANK"]
    named = f"GLM_HEAD={head}" if plan.settings.has("HEAD") else f"the lowest of GLM_PEERS, {head}"
    if role == "head" and not is_head:
        raise KnobError(f"GLM_ROLE=head, but {named} ({address}) is not this node's address")
    if (role == "worker" or rank not in (None, 0)) and is_head:
        said = f"GLM_ROLE={role}" if role == "worker" else f"GLM_RANK={rank}"
        raise KnobError(f"{said}, but {named} ({address}) is this node's address")
    if rank == 0 and not is_head:
        raise KnobError(f"GLM_RANK=0, but {named} ({address}) is not this node's address")
    if address.is_loopback:
        raise KnobError(f"{named} is a loopback address, which the other nodes cannot reach")


def _towards(address: Address) -> Address:
    """The address from which this machine speaks to another; nothing is sent."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise EnvironmentFault(f"{address}: expected a way to the head, found none "
                               f"({error.strerror}); is the network up?") from None  # fmt: skip
