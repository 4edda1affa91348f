"""How ranks find and keep each other, as `main` sees it; the single node is here, too.

Placement and the executor are vLLM's, Ray's or mentat's. What this asks for is only what they
cannot answer before the weights are loaded: who is rank 0, and does every rank hold the same
artefacts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from serving.fingerprint import Fingerprint
    from serving.resolve import Plan


class Place(NamedTuple):
    """Where this rank stands before it has joined.

    Attributes:
        is_head: whether it is rank 0.
        head_address: an IP address or name that the other ranks reach.
        own_address: of this rank, in the same network.
    """

    is_head: bool
    head_address: str
    own_address: str


class Membership(NamedTuple):
    """One rank in a complete cluster. A rank is a node here, not a GPU.

    Attributes:
        rank: 0 is the head, which serves the API.
        ranks: how many there are.
        head_address: an IP address or name that the other ranks reach.
        addresses: of all ranks in their order; empty where there is one.
    """

    rank: int
    ranks: int
    head_address: str
    addresses: tuple[str, ...] = ()


class Cluster(Protocol):
    """Implemented by `SingleNode` and, for several nodes, by `serving.election`.

    Each call may block no longer than the plan's GLM_JOIN_TIMEOUT_S, and raises:
        KnobError: role, head and peers contradict what is found.
        MismatchError: a rank's fingerprint differs; every rank raises it, with what differs.
        EnvironmentFault: the others were not found in time, or are lost.
    """

    def discover(self, plan: Plan) -> Place:
        """Finds out which rank this is, by the plan's knobs or by an election."""
        ...

    def join(self, plan: Plan, fingerprint: Fingerprint) -> Membership:
        """Waits until all ranks are there and have shown the same fingerprint."""
        ...

    def lost(self) -> str:
        """A sentence when another rank has left or died since `join`, else "". Never blocks."""
        ...

    def stopping(self) -> None:
        """Tells the others that this rank was asked to end; it stays in touch until `leave`."""
        ...

    def leave(self, reason: str) -> None:
        """Tells the others that this rank ends, and why; "" for an end that was asked for.

        It never raises, and it also ends a `discover` or `join` that blocks in another thread.
        """
        ...


class SingleNode:
    """One rank alone: nothing to find, nobody to lose."""

    def discover(self, plan: Plan) -> Place:
        """This node is the head."""
        return Place(True, "127.0.0.1", "127.0.0.1")

    def join(self, plan: Plan, fingerprint: Fingerprint) -> Membership:
        """Is complete at once."""
        return Membership(0, 1, "127.0.0.1")

    def lost(self) -> str:
        """Nobody is."""
        return ""

    def stopping(self) -> None:
        """Tells nobody."""

    def leave(self, reason: str) -> None:
        """Tells nobody."""


def of(plan: Plan) -> Cluster:
    """The cluster that a plan needs."""
    if plan.nodes == 1:
        return SingleNode()
    from serving.election import Election

    made: Cluster = Election()
    return made
