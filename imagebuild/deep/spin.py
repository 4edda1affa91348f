"""Makes vLLM's real queue reader and watches when it stops spinning and waits on its socket."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from imagebuild.deep.base import About, environment, require

ABOUT = About(
    claim="a reader waits on its socket 2 ms after a message, or when the knob says",
    patches=("vllm_spin_wait",),
    imports=("vllm.distributed.device_communicators.shm_broadcast",),
)
_KNOB = "VLLM_SHM_BROADCAST_BUSY_LOOP_S"
_BAD = ("soon", "-1", "nan", "inf")
_NUMBERS: Iterator[int] = itertools.count()


def probe() -> str:
    """Runs readers with and without the knob, wakes one up, and tries malformed values."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        unset, half = _seconds(place, None), _seconds(place, "0.5")
        require(unset == 0.002, f"a reader spins {unset} s by default, expected 0.002")
        require(half == 0.5, f"a reader spins {half} s with {_KNOB}=0.5")
        taken = [value for value in _BAD if _is_taken(place, value)]
        require(not taken, f"malformed values of {_KNOB} are taken: {taken}")
        require(_polls(place, "30") == 0, "a reader with a 30 s knob polled its socket at once")
        require(_polls(place, None) == 1, "a reader at its default never polled its socket")
        require(_is_woken(place), "a waiting reader was not woken by a message")
    return f"2 ms by default, 0.5 s with {_KNOB}=0.5, {len(_BAD)} malformed values refused; woken"


def _reader(place: Path, setting: str | None) -> Any:  # noqa: ANN401 - a class of the tree
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    address = f"ipc://{place}/{next(_NUMBERS)}"
    with environment(_KNOB, setting):
        reader = SpinCondition(True, zmq.Context.instance(), address)
    reader.probe_address = address
    return reader


def _seconds(place: Path, setting: str | None) -> float:
    return float(_reader(place, setting).busy_loop_s)


def _is_taken(place: Path, setting: str) -> bool:
    try:
        _reader(place, setting)
    except ValueError:
        return False
    return True


def _polls(place: Path, setting: str | None) -> int:
    """How often a wait a hundredth of a second after a read reaches the socket."""
    reader = _reader(place, setting)
    asked: list[object] = []
    reader.poller = _Poller(asked)
    reader.record_read()
    time.sleep(0.01)
    reader.wait(timeout_ms=1)
    return len(asked)


class _Poller:
    """Stands for the reader's poller: notes that it was asked, and has no event."""

    def __init__(self, asked: list[object]) -> None:
        self.asked = asked

    def poll(self, timeout: object = None) -> list[object]:
        self.asked.append(timeout)
        return []


def _is_woken(place: Path) -> bool:
    """Whether a message ends a wait that would else last ten seconds."""
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    reader = _reader(place, None)
    writer = SpinCondition(False, zmq.Context.instance(), reader.probe_address)
    for _attempt in range(50):  # a message sent before the subscription is up is lost
        writer.notify()
        if dict(reader.poller.poll(timeout=100)):
            break
    reader.last_read = 0.0
    writer.notify()
    start = time.monotonic()
    reader.wait(timeout_ms=10_000)
    return time.monotonic() - start < 5
