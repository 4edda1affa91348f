"""Ranks on the addresses 127.0.0.2 to 127.0.0.5 of one machine, each in a thread."""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from serving import rendezvous
from serving.cluster import Membership, Place
from serving.discover import place_of
from serving.election import Election
from serving.errors import EnvironmentFault, KnobError, MismatchError, ServingError
from serving.fingerprint import Fingerprint
from serving.resolve import Plan, resolve

PARTS = {"kernel": "a" * 64, "series": "b" * 64, "GLM_MAX_MODEL_LEN": "524288"}
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 6)]


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def plan_of(deployment: str = "gb10-4x", **knobs: str) -> Plan:
    given = {f"GLM_{name}": value for name, value in knobs.items()}
    if not {"GLM_HEAD", "GLM_PEERS"} & set(given):
        given["GLM_HEAD"] = ADDRESSES[0]
    return resolve({"GLM_DEPLOYMENT": deployment, **given})


class Ranks:
    """Starts ranks in threads, and ends them with the test."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pool = ThreadPoolExecutor(8)
        self.made: list[Election] = []

    def start(self, number: int, parts: dict[str, str] | None = None,
              deployment: str = "gb10-4x", **knobs: str) -> Future[Membership]:  # fmt: skip
        knobs = {"RENDEZVOUS_PORT": str(self.port), "JOIN_TIMEOUT_S": "20", **knobs}
        place = Place(number == 0, ADDRESSES[0], ADDRESSES[number])
        election = Election(place=lambda _: place, grace=0.5)
        self.made.append(election)
        plan = plan_of(deployment, **knobs)

        def run() -> Membership:
            election.discover(plan)
            return election.join(plan, Fingerprint(parts or PARTS))

        return self.pool.submit(run)


@pytest.fixture
def ranks(port: int) -> Iterator[Ranks]:
    made = Ranks(port)
    yield made
    for election in made.made:
        election.leave("")
    made.pool.shutdown()


def eventually(found: Callable[[], str]) -> str:
    deadline = time.monotonic() + 10
    while not (text := found()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return text


class TestJoin:
    def test_four_ranks_in_any_order(self, ranks: Ranks) -> None:
        waiting = {number: ranks.start(number) for number in (3, 1, 0, 2)}
        got = {number: future.result(20) for number, future in waiting.items()}
        assert got == {n: Membership(n, 4, ADDRESSES[0], tuple(ADDRESSES)) for n in range(4)}
        assert [election.lost() for election in ranks.made] == [""] * 4

    def test_asked_ranks_are_kept(self, ranks: Ranks) -> None:
        waiting = [ranks.start(0), ranks.start(1, RANK="3"), ranks.start(2), ranks.start(3)]
        assert [future.result(20).rank for future in waiting] == [0, 3, 1, 2]
        by_rank = tuple(ADDRESSES[number] for number in (0, 2, 3, 1))
        assert {future.result(20).addresses for future in waiting} == {by_rank}

    def test_one_other_kernel_stops_all_and_is_named(self, ranks: Ranks) -> None:
        other = {**PARTS, "kernel": "c" * 64}
        waiting = [ranks.start(n, other if n == 2 else None) for n in range(4)]
        for future in waiting:
            with pytest.raises(MismatchError) as caught:
                future.result(20)
            [problem] = caught.value.problems
            assert problem.startswith(
                "kernel: the head (127.0.0.2) has sha256:aaaaaaaaaaaa, rank 127.0.0.4 has "
                "sha256:cccccccccccc"
            )
            assert caught.value.exit_code == 4

    def test_a_mismatch_does_not_wait_for_the_last_rank(self, ranks: Ranks) -> None:
        waiting = [ranks.start(0), ranks.start(1, {**PARTS, "GLM_MAX_MODEL_LEN": "1024"})]
        for future in waiting:
            with pytest.raises(MismatchError, match="GLM_MAX_MODEL_LEN: the head"):
                future.result(15)

    def test_a_missing_rank_is_told_to_all(self, ranks: Ranks) -> None:
        waiting = [ranks.start(n, JOIN_TIMEOUT_S="1") for n in (0, 1)]
        for future in waiting:
            with pytest.raises(EnvironmentFault, match=r"expected 4 ranks within 1 s|found that"):
                future.result(15)

    def test_nobody_answers(self, ranks: Ranks) -> None:
        with pytest.raises(EnvironmentFault, match="expected the head and all 4 ranks within 1 s"):
            ranks.start(1, JOIN_TIMEOUT_S="1").result(15)

    @pytest.mark.parametrize(("second", "found"), [
        ({"number": 1}, "127.0.0.3 has joined already"),
        ({"number": 2, "RANK": "1"}, "GLM_RANK=1 is 127.0.0.3's already"),
        ({"number": 2, "GROUP": "other"}, "GLM_GROUP=other, but the head's cluster is glm53"),
        ({"number": 2, "deployment": "gb10-2x"}, "this node has 2 nodes in its deployment"),
    ])  # fmt: skip
    def test_who_does_not_belong_is_told_and_harms_nobody(
        self, ranks: Ranks, second: dict[str, Any], found: str
    ) -> None:
        head, first = ranks.start(0), ranks.start(1, RANK="1")
        assert eventually(lambda: "x" if len(ranks.made[0]._links) == 1 else "")
        with pytest.raises(KnobError, match=found):
            ranks.start(**second).result(15)
        rest = [ranks.start(2), ranks.start(3)]
        assert [future.result(20).rank for future in (head, first, *rest)] == [0, 1, 2, 3]

    @pytest.mark.parametrize("said", [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100 + b"\n", b"[]\n", b'{"hello": 3}\n',
        b'{"hello": {"schema": 1, "rank": null, "address": "x", "group": "glm53"}}\n',
        b'{"hello": {"schema": 1, "rank": null, "address": "127.0.0.9", "fingerprint": {}}}\n',
        b"[" * 50_000 + b"\n",
    ])  # fmt: skip
    def test_strangers_are_sent_away(self, ranks: Ranks, port: int, said: bytes) -> None:
        head = ranks.start(0, deployment="gb10-2x")
        connected = False
        while not connected:
            try:
                with socket.create_connection((ADDRESSES[0], port), timeout=5) as stranger:
                    connected = True
                    stranger.sendall(said)
                    if said:
                        assert stranger.recv(10) == b""
            except ConnectionRefusedError:
                time.sleep(0.01)
            except ConnectionResetError:
                pass
        assert ranks.start(1, deployment="gb10-2x").result(20).rank == 1
        assert head.result(20).rank == 0

    def test_a_rank_that_restarts_while_others_are_awaited(self, ranks: Ranks) -> None:
        head, first = ranks.start(0), ranks.start(1)
        assert eventually(lambda: "x" if len(ranks.made[0]._links) == 1 else "")
        ranks.made[1].leave("restarted")
        with pytest.raises(EnvironmentFault):
            first.result(15)
        waiting = [ranks.start(n) for n in (1, 2, 3)]
        assert [future.result(20).rank for future in (head, *waiting)] == [0, 1, 2, 3]

    def hello(self, **fields: object) -> dict[str, Any]:
        shown = Fingerprint(PARTS).document()
        return {"hello": {"schema": 1, "group": "glm53", "nodes": 2, "address": "127.0.0.3",
                          "rank": None, "fingerprint": shown, **fields}}  # fmt: skip

    def call(self, port: int) -> rendezvous.Link:
        while True:
            try:
                return rendezvous.connect(ADDRESSES[0], port, 5)
            except ConnectionRefusedError:
                time.sleep(0.01)

    @pytest.mark.parametrize(("fields", "found"), [
        ({"address": ADDRESSES[0]}, "127.0.0.2 is the head's address"),
        ({"rank": 0}, "GLM_RANK=0: expected 1 to 1"), ({"rank": 9}, "GLM_RANK=9"),
        ({"rank": -1}, "GLM_RANK=-1"), ({"nodes": "2"}, "this node has 2 nodes"),
    ])  # fmt: skip
    def test_a_place_that_nobody_can_have(self, ranks: Ranks, port: int, fields, found) -> None:
        head = ranks.start(0, deployment="gb10-2x")
        link = self.call(port)
        link.send(self.hello(**fields))
        answer = link.receive(10)
        link.close()
        assert answer is not None and found in answer["refused"][0] and answer["code"] == 2
        assert ranks.start(1, deployment="gb10-2x").result(20).rank == 1
        assert head.result(20).rank == 0

    def test_a_rank_that_is_back_before_its_end_was_seen(self, port: int) -> None:
        """Its container was killed and started again while the head listened to a stranger."""
        head, plan = Election(lambda _: Place(True, ADDRESSES[0], ADDRESSES[0])), plan_of("gb10-2x")
        head.discover(plan)
        workers: list[Any] = []
        with rendezvous.listen(ADDRESSES[0], port) as listener:
            old, new = self.call(port), self.call(port)
            old.send(self.hello())
            workers.append(head._accept(listener, plan, workers))
            new.send(self.hello())
            old.close()
            assert head._accept(listener, plan, workers) is not None
        assert workers == [], "the old one has gone"
        new.close()
        head.leave("")

    @pytest.mark.parametrize("answer", [
        {"welcome": {"rank": 0, "addresses": ["a", "b"]}}, {"welcome": {"rank": 7}},
        {"welcome": {"rank": 1, "addresses": ["a"]}}, {"welcome": 3}, {"hello": {}}, {},
    ])  # fmt: skip
    def test_a_head_of_another_version(
        self, ranks: Ranks, port: int, answer: dict[str, Any]
    ) -> None:
        with socket.create_server((ADDRESSES[0], port)) as server:
            waiting = ranks.start(1, deployment="gb10-2x")
            link = rendezvous.Link(server.accept()[0])
            link.receive(10)
            link.send(answer)
            with pytest.raises(EnvironmentFault, match="does not understand"):
                waiting.result(20)
            link.close()

    @pytest.mark.parametrize("code", [[], {}, None, 99, "2"])
    def test_a_refusal_with_an_odd_code(self, ranks: Ranks, port: int, code: object) -> None:
        with socket.create_server((ADDRESSES[0], port)) as server:
            waiting = ranks.start(1, deployment="gb10-2x")
            link = rendezvous.Link(server.accept()[0])
            link.receive(10)
            link.send({"refused": ["no"], "code": code})
            with pytest.raises(EnvironmentFault, match="no"):
                waiting.result(20)
            link.close()

    def test_the_port_is_taken(self, ranks: Ranks, port: int) -> None:
        with (
            socket.create_server((ADDRESSES[0], port)),
            pytest.raises(EnvironmentFault, match="is GLM_RENDEZVOUS_PORT taken"),
        ):
            ranks.start(0).result(15)

    def test_leaving_ends_a_wait(self, ranks: Ranks) -> None:
        waiting = [ranks.start(0), ranks.start(1)]
        assert eventually(lambda: "x" if len(ranks.made[0]._links) == 1 else "")
        ranks.made[0].leave("interrupted")
        for future in waiting:
            with pytest.raises(ServingError):
                future.result(15)


class TestLost:
    @pytest.fixture
    def joined(self, ranks: Ranks) -> Ranks:
        for future in [ranks.start(number) for number in range(4)]:
            future.result(20)
        return ranks

    def test_a_worker_leaves_with_a_reason(self, joined: Ranks) -> None:
        joined.made[2].leave("self-test failed")
        assert eventually(joined.made[0].lost) == "rank 2 (127.0.0.4) has ended: self-test failed"
        assert joined.made[0].lost(), "it stays lost"

    def test_a_worker_that_was_asked_to_end_sees_when_the_head_has(self, joined: Ranks) -> None:
        head, worker = joined.made[0], joined.made[1]
        worker.stopping()
        assert eventually(head.lost) == "rank 1 (127.0.0.3) has ended"
        # It drains; the worker's connection tells nothing yet, however often it is asked.
        assert [worker.lost() for _ in range(3)] == ["", "", ""]
        head.leave("")
        assert "the head (127.0.0.2)" in eventually(worker.lost)
        assert "the head" in eventually(joined.made[3].lost)

    def test_the_head_leaves(self, joined: Ranks) -> None:
        joined.made[0].leave("")
        for worker in joined.made[1:]:
            assert eventually(worker.lost) == "the head (127.0.0.2) has ended"

    def test_a_worker_dies(self, joined: Ranks) -> None:
        for link in list(joined.made[3]._links):
            link.close()
        assert "rank 3 (127.0.0.5) is lost: it closed" in eventually(joined.made[0].lost)

    def test_garbage_is_a_loss_and_no_traceback(self, joined: Ranks) -> None:
        for link in list(joined.made[1]._links):
            link._socket.sendall(b"\xff\n")
        assert "rank 1 (127.0.0.3) is lost: it sent no frame" in eventually(joined.made[0].lost)


def test_a_frame_has_a_limit() -> None:
    one, two = socket.socketpair()
    with two:
        one.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = rendezvous.connect("127.0.0.1", server.getsockname()[1], 5)
        peer, _ = server.accept()
        threading.Thread(target=lambda: _flood(peer)).start()
        with pytest.raises(rendezvous.LinkError, match="no frame"):
            while True:
                link.receive(5)
        link.close()


def _flood(peer: socket.socket) -> None:
    with peer:
        try:
            peer.sendall(b"x" * (4 << 20))
        except OSError:
            return


class TestPlace:
    """Which node this is, with names and own addresses that are given."""

    NAMES: ClassVar = {"head": "10.0.0.1", "two": "10.0.0.2", "ten": "10.0.0.10"}

    def place(self, mine: str, **knobs: str) -> Place:
        def named(name: str) -> list[Any]:
            return [ipaddress.ip_address(self.NAMES.get(name, name))]

        return place_of(plan_of("gb10-2x", **knobs), resolve=named, own=lambda a: str(a) == mine)

    def test_the_head_by_its_address(self) -> None:
        assert self.place("10.0.0.1", HEAD="head") == Place(True, "10.0.0.1", "10.0.0.1")
        found = self.place("10.0.0.2", HEAD="head", HOST_ADDRESS="10.0.0.2")
        assert found == Place(False, "10.0.0.1", "10.0.0.2")

    def test_the_lowest_of_the_peers_as_a_number(self) -> None:
        for mine, is_head in (("10.0.0.2", True), ("10.0.0.10", False)):
            assert self.place(mine, PEERS="ten,two") == Place(is_head, "10.0.0.2", mine)

    @pytest.mark.parametrize(("mine", "knobs", "found"), [
        ("10.0.0.2", {"HEAD": "head", "ROLE": "head"}, "GLM_HEAD=head (10.0.0.1) is not this node"),
        ("10.0.0.1", {"HEAD": "head", "ROLE": "worker"}, "is this node's address"),
        ("10.0.0.1", {"HEAD": "head", "RANK": "1"}, "GLM_RANK=1, but GLM_HEAD=head"),
        ("10.0.0.2", {"HEAD": "head", "RANK": "0"}, "GLM_RANK=0, but GLM_HEAD=head"),
        ("10.0.0.7", {"PEERS": "two,ten"}, "expected one of them to be this node's"),
        ("127.0.0.1", {"HEAD": "127.0.0.1"}, "is a loopback address"),
    ])  # fmt: skip
    def test_contradictions(self, mine: str, knobs: dict[str, str], found: str) -> None:
        with pytest.raises(KnobError) as caught:
            self.place(mine, **knobs)
        assert found in str(caught.value)

    def test_a_name_that_is_loopback_here_is_no_address(self) -> None:
        """As Debian's /etc/hosts has it for a machine's own name."""
        names = {"one": ["10.0.0.1"], "me": ["127.0.1.1"]}

        def named(name: str) -> list[Any]:
            return [ipaddress.ip_address(text) for text in names.get(name, [name])]

        def place(**knobs: str) -> Place:
            return place_of(plan_of("gb10-2x", **knobs), resolve=named,
                            own=lambda address: str(address) == "127.0.1.1")  # fmt: skip

        with pytest.raises(KnobError, match=r"entry of GLM_PEERS.*found 127\.0\.1\.1"):
            place(PEERS="one,me")
        with pytest.raises(KnobError, match=r"GLM_HOST_ADDRESS=me: expected an address"):
            place(HEAD="one", HOST_ADDRESS="me")

    def test_every_node_finds_the_same_head_in_names_with_several_addresses(self) -> None:
        orders = [["fd00::9", "127.0.1.1", "10.0.0.9"], ["10.0.0.9", "fd00::9"]]
        for order in orders:

            def named(name: str, order: list[str] = order) -> list[Any]:
                return list(map(ipaddress.ip_address, order if name == "both" else ["10.0.0.20"]))

            found = place_of(plan_of("gb10-2x", PEERS="both,other"), resolve=named,
                             own=lambda address: str(address) == "10.0.0.20")  # fmt: skip
            assert found == Place(False, "10.0.0.9", "10.0.0.20")

    def test_neither_head_nor_peers(self) -> None:
        plan = replace(plan_of("gb10-2x"), settings=resolve({"GLM_DEPLOYMENT": "gb10-2x"}).settings)
        with pytest.raises(KnobError, match="expected GLM_HEAD, the head's address, or GLM_PEERS"):
            place_of(plan)

    def test_real_names_and_addresses(self) -> None:
        with pytest.raises(EnvironmentFault, match="does not resolve"):
            place_of(plan_of("gb10-2x", HEAD="no-such-host.invalid"))
        assert json.dumps(place_of(plan_of("gb10-2x", HEAD="192.0.2.1", HOST_ADDRESS="192.0.2.2")))
