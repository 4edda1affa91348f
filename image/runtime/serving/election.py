"""Several nodes: ranks find the head, show their fingerprints, and notice when one is gone.

The head decides for all, once all are there; ranks follow from addresses, so that a restart gives
every node the rank that it had.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving import fingerprint as fingerprints
from serving import rendezvous
from serving.cluster import Membership, Place
from serving.discover import place_of
from serving.errors import EnvironmentFault, KnobError, MismatchError, ServingError
from serving.fingerprint import Fingerprint
from serving.rendezvous import Link, LinkError
from serving.resolve import Plan

_STEP_S = 0.2  # how often a wait looks whether it should end
_RETRY_S = 1.0
_HELLO_S = 2.0  # how long a stranger may keep the head from others
# How long the head still listens after a mismatch, to tell it to ranks that come a little later.
_GRACE_S = 10.0
_KINDS: dict[int, type[ServingError]] = {
    kind.exit_code: kind for kind in (KnobError, MismatchError, EnvironmentFault)
}


@dataclass
class _Worker:
    """A rank as the head knows it."""

    address: str
    asked: int | None
    fingerprint: Fingerprint
    link: Link

    @property
    def name(self) -> str:
        return self.address


class Election:
    """The `Cluster` of several nodes; one object a start."""

    def __init__(
        self,
        place: Callable[[Plan], Place] = place_of,
        clock: Callable[[], float] = time.monotonic,
        grace: float = _GRACE_S,
    ) -> None:
        self._find = place
        self._clock = clock
        self._grace = grace
        self._place = Place(False, "", "")
        self._links: dict[Link, str] = {}
        # Those that said that they end: they see by the connection when this rank has ended.
        self._parted: list[Link] = []
        self._ended = threading.Event()
        self._lost = ""

    def discover(self, plan: Plan) -> Place:
        """By GLM_HEAD or GLM_PEERS, whichever is set."""
        self._place = self._find(plan)
        return self._place

    def join(self, plan: Plan, fingerprint: Fingerprint) -> Membership:
        """Meets the other ranks; see `Cluster.join`."""
        deadline = self._clock() + plan.settings.number("JOIN_TIMEOUT_S")
        if self._place.is_head:
            return self._gather(plan, fingerprint, deadline)
        return self._report(plan, fingerprint, deadline)

    def lost(self) -> str:
        """A sentence once a rank has gone; never blocks."""
        for link, name in list(self._links.items()):
            try:
                frame = link.receive(0)
            except LinkError as error:
                self._lost = self._lost or f"{name} is lost: {error}"
            else:
                if frame is not None and "leave" in frame:
                    said = str(frame["leave"])
                    self._lost = self._lost or f"{name} has ended" + (f": {said}" if said else "")
                    self._links.pop(link, None)
                    self._parted.append(link)
                continue
            self._drop(link)
        return self._lost

    def stopping(self) -> None:
        """Tells all, and keeps the connections."""
        for link in list(self._links):
            self._tell(link, {"leave": ""})

    def leave(self, reason: str) -> None:
        """Tells all, and ends a wait in another thread."""
        self._ended.set()
        for link in list(self._links):
            self._tell(link, {"leave": reason})
            self._drop(link)
        while self._parted:
            self._parted.pop().close()

    # The head.

    def _gather(self, plan: Plan, fingerprint: Fingerprint, deadline: float) -> Membership:
        port = plan.settings.number("RENDEZVOUS_PORT")
        try:
            listener = rendezvous.listen(self._place.own_address, port)
        except OSError as error:
            raise EnvironmentFault(
                f"{self._place.own_address}:{port}: expected to listen for the other ranks, found "
                f"{error.strerror}; is another start running, or is GLM_RENDEZVOUS_PORT taken?"
            ) from None
        workers: list[_Worker] = []
        problems: list[str] = []
        with listener:
            while len(workers) < plan.nodes - 1:
                worker = self._accept(listener, plan, workers)
                if worker is not None:
                    workers.append(worker)
                    problems += fingerprint.differences(worker.fingerprint, *self._names(worker))
                    if problems:
                        deadline = min(deadline, self._clock() + self._grace)
                self._still_there(workers)
                if self._clock() > deadline:
                    break
            if problems:
                self._refuse(workers, problems, MismatchError.exit_code)
                raise MismatchError(*problems)
            if len(workers) < plan.nodes - 1:
                raise self._missing(plan, workers)
        return self._welcome(plan, workers)

    def _names(self, worker: _Worker) -> tuple[str, str]:
        return f"the head ({self._place.own_address})", f"rank {worker.address}"

    def _accept(
        self, listener: socket.socket, plan: Plan, workers: list[_Worker]
    ) -> _Worker | None:
        """The next rank that comes within a step; a stranger is sent away."""
        if self._ended.is_set():
            raise EnvironmentFault("the wait for the other ranks was ended")
        if not select.select([listener], [], [], _STEP_S)[0]:
            return None
        try:
            connection, _ = listener.accept()
            link = Link(connection)
        except OSError:  # it has gone again
            return None
        try:
            hello = (link.receive(_HELLO_S) or {}).get("hello")
            worker = self._read(hello, link)
            # A rank that starts again may be here before its end was looked at.
            self._still_there(workers)
            problem = self._unfit(plan, hello, worker, workers)
        except (LinkError, ValueError, TypeError, KeyError):
            link.close()  # not one of ours: a port scan, say
            return None
        if problem:
            self._tell(link, {"refused": [problem], "code": KnobError.exit_code})
            link.close()
            return None
        self._links[link] = f"rank {worker.address}"
        return worker

    @staticmethod
    def _read(hello: Any, link: Link) -> _Worker:  # noqa: ANN401  whatever came over the wire
        asked = hello["rank"]
        is_rank = asked is None or (isinstance(asked, int) and not isinstance(asked, bool))
        if hello["schema"] != rendezvous.SCHEMA or not is_rank:
            raise ValueError("another protocol")
        address = str(ipaddress.ip_address(hello["address"]))
        return _Worker(address, asked, fingerprints.parse(hello["fingerprint"]), link)

    def _unfit(
        self, plan: Plan, hello: Any, worker: _Worker, workers: list[_Worker]  # noqa: ANN401
    ) -> str:  # fmt: skip
        group, nodes = plan.settings.text("GROUP"), plan.nodes
        if hello["group"] != group:
            return f"GLM_GROUP={hello['group']}, but the head's cluster is {group}"
        if hello["nodes"] != nodes:
            return f"this node has {hello['nodes']} nodes in its deployment, the head {nodes}"
        if worker.address == self._place.own_address:
            return f"{worker.address} is the head's address; expected this node's own"
        if worker.asked is not None and not 1 <= worker.asked < nodes:
            return f"GLM_RANK={worker.asked}: expected 1 to {nodes - 1}"
        for other in workers:
            if other.address == worker.address:
                return f"{worker.address} has joined already; is a second container running there?"
            if worker.asked is not None and other.asked == worker.asked:
                return f"GLM_RANK={worker.asked} is {other.address}'s already"
        return ""

    def _still_there(self, workers: list[_Worker]) -> None:
        """Forgets ranks that went while others were awaited: they will come again."""
        for worker in list(workers):
            try:
                frame = worker.link.receive(0)
            except LinkError:
                frame = {"leave": ""}
            if frame is not None:
                workers.remove(worker)
                self._drop(worker.link)

    def _missing(self, plan: Plan, workers: list[_Worker]) -> EnvironmentFault:
        there = ", ".join([self._place.own_address, *(worker.address for worker in workers)])
        text = (f"expected {plan.nodes} ranks within {plan.settings.number('JOIN_TIMEOUT_S')} s, "
                f"found {len(workers) + 1}: {there}; look at the others' logs")  # fmt: skip
        self._refuse(workers, [text], EnvironmentFault.exit_code)
        return EnvironmentFault(text)

    def _welcome(self, plan: Plan, workers: list[_Worker]) -> Membership:
        taken = {worker.asked for worker in workers}
        free = iter([rank for rank in range(1, plan.nodes) if rank not in taken])
        by_address = sorted(workers, key=lambda worker: int(ipaddress.ip_address(worker.address)))
        ranks = {worker.asked if worker.asked is not None else next(free): worker
                 for worker in by_address}  # fmt: skip
        others = [ranks[rank].address for rank in sorted(ranks)]
        addresses = (self._place.head_address, *others)
        for rank, worker in ranks.items():
            self._links[worker.link] = f"rank {rank} ({worker.address})"
            welcome = {"rank": rank, "ranks": plan.nodes, "addresses": addresses}
            self._tell(worker.link, {"welcome": welcome})
        return Membership(0, plan.nodes, self._place.head_address, addresses)

    def _refuse(self, workers: list[_Worker], problems: list[str], code: int) -> None:
        for worker in workers:
            self._tell(worker.link, {"refused": problems, "code": code})
            self._drop(worker.link)

    # A worker.

    def _report(self, plan: Plan, fingerprint: Fingerprint, deadline: float) -> Membership:
        hello = {
            "schema": rendezvous.SCHEMA,
            "group": plan.settings.text("GROUP"),
            "nodes": plan.nodes,
            "address": self._place.own_address,
            "rank": plan.settings["RANK"],
            "fingerprint": fingerprint.document(),
        }
        why = "nobody answers"
        while self._clock() < deadline:
            if self._ended.is_set():
                raise EnvironmentFault("the wait for the head was ended")
            try:
                answer = self._ask(plan, hello, deadline)
            except (OSError, LinkError) as error:
                why = str(error) or type(error).__name__
                self._ended.wait(_RETRY_S)
                continue
            if answer is None:
                break
            return self._answered(plan, answer)
        raise EnvironmentFault(
            f"{self._place.head_address}:{plan.settings.number('RENDEZVOUS_PORT')}: expected the "
            f"head and all {plan.nodes} ranks within {plan.settings.number('JOIN_TIMEOUT_S')} s, "
            f"found that {why}; look at the head's log"
        )

    def _ask(self, plan: Plan, hello: dict[str, Any], deadline: float) -> dict[str, Any] | None:
        """The head's answer; None when the time is up. Raises OSError or LinkError."""
        port = plan.settings.number("RENDEZVOUS_PORT")
        link = rendezvous.connect(self._place.head_address, port, 5.0)
        self._links[link] = f"the head ({self._place.head_address})"
        try:
            link.send({"hello": hello})
            while self._clock() < deadline and not self._ended.is_set():
                frame = link.receive(_STEP_S)
                if frame is not None:
                    return frame
        except LinkError:
            self._drop(link)
            raise
        self._drop(link)
        return None

    def _answered(self, plan: Plan, answer: dict[str, Any]) -> Membership:
        welcome = answer.get("welcome")
        rank = welcome.get("rank") if isinstance(welcome, dict) else None
        listed = welcome.get("addresses") if isinstance(welcome, dict) else None
        if (
            isinstance(rank, int) and 1 <= rank < plan.nodes
            and isinstance(listed, list) and len(listed) == plan.nodes
        ):  # fmt: skip
            addresses = tuple(map(str, listed))
            return Membership(rank, plan.nodes, self._place.head_address, addresses)
        for link in list(self._links):
            self._drop(link)
        refused = answer.get("refused")
        if isinstance(refused, list):
            kind = next((_KINDS[code] for code in _KINDS if code == answer.get("code")),
                        EnvironmentFault)  # fmt: skip
            raise kind(*map(str, refused))
        if "leave" not in answer:
            raise EnvironmentFault("the head answers what this version does not understand; "
                                   "send the head's image with `build.py ship`")  # fmt: skip
        said = str(answer["leave"])
        raise EnvironmentFault("the head has ended" + (f": {said}" if said else ""))

    # Both.

    @staticmethod
    def _tell(link: Link, frame: dict[str, Any]) -> None:
        with contextlib.suppress(LinkError):  # who is gone needs no telling
            link.send(frame)

    def _drop(self, link: Link) -> None:
        self._links.pop(link, None)
        link.close()
