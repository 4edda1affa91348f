"""Child processes: each in a session of its own, its output copied, and ended with all it started.

What a child started must end with it: vLLM's workers hold the GPU's memory until they are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from serving.errors import EnvironmentFault

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LONGEST_LINE = 64 << 10
_LARGEST_LOG = 256 << 20  # bytes; of a server that runs for months two of them are kept
# Children that a `Child` waits for, and whether all others are orphans that we have adopted.
_WAITED: set[int] = set()
_ADOPTS = threading.Event()


class Stopped(BaseException):
    """A signal asked for the end while something blocked."""


class Signals:
    """SIGTERM and SIGINT, counted; inside `raising` the first one also interrupts what blocks."""

    def __init__(self) -> None:
        self.asked = 0
        self._is_raising = False

    def install(self) -> None:
        """Takes the signals; a SIGINT that was ignored by who started us is taken, too."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: object) -> None:
        self.asked += 1
        if self._is_raising:
            self._is_raising = False
            raise Stopped

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """For stages that wait inside of a call."""
        if self.asked:
            raise Stopped
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind, as PID 1 is anyway."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _ADOPTS.set()


class Child:
    """One child and all that it starts."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Path | None = None,
        on_line: Callable[[str], object] = lambda line: None,
        out: IO[bytes] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Starts it.

        Args:
            name: for messages.
            command: its arguments; never a shell's.
            env: its whole environment.
            log: file for a copy of its output; the one before is kept as NAME.prev, also when it
                has grown large.
            on_line: is told each line.
            out: where its output goes; by default our own standard output.
            cwd: its folder.

        Raises:
            EnvironmentFault: it cannot be started, or the log cannot be written.
        """
        self.name = name
        self._out = out if out is not None else sys.stdout.buffer
        self._path, self._size = log, 0
        self._log = _rotated(log) if log else None
        self._on_line = on_line
        # A number of a group that is gone may be another's next time.
        self._is_finished = False
        try:
            self._process = subprocess.Popen(
                list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EnvironmentFault(f"{command[0]} cannot be started: {reason}") from error
        _WAITED.add(self.pid)
        self._reader = threading.Thread(target=self._copy, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the child, which is also its process group's."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def finish(self) -> None:
        """Ends it and all that it left, in its group or orphaned, and takes its last lines."""
        if not self._is_finished:
            self._is_finished = True
            kill_group(self.pid)
            self._process.wait()
            _WAITED.discard(self.pid)
            end_orphans()
            self._reader.join(5)

    def stop(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Asks it to end, waits, and then ends its whole group by force.

        Args:
            seconds: how long to wait.
            hurry: asked often; True ends the wait.
        """
        if self._is_finished:
            return
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # To the child alone: it drains, and needs its own children for that.
                os.kill(self.pid, signal.SIGTERM)
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end and not hurry():
            time.sleep(0.05)
        self.finish()

    def _copy(self) -> None:
        pipe = self._process.stdout
        if pipe is None:
            return
        with pipe:
            while line := pipe.readline(_LONGEST_LINE):
                # A full disk or a closed terminal must not stop the server.
                with contextlib.suppress(OSError, ValueError):
                    self._out.write(line)
                    self._out.flush()
                with contextlib.suppress(OSError, ValueError, EnvironmentFault):
                    self._write_log(line)
                self._on_line(line.decode(errors="replace").rstrip())
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk again: it takes what it holds back
                self._log.close()

    def _write_log(self, line: bytes) -> None:
        """A copy in the file; one that has grown large becomes the one before it."""
        if self._log is None:
            return
        self._log.write(line)
        self._log.flush()
        self._size += len(line)
        if self._size > _LARGEST_LOG and self._path is not None:
            self._size = 0  # also where it cannot be replaced: then it grows on for as long again
            fresh = _rotated(self._path)
            self._log.close()
            self._log = fresh


def _rotated(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.prev"))
        return path.open("wb")
    except OSError as error:
        raise EnvironmentFault(f"{path}: the log cannot be written: {error.strerror}") from error


def kill_group(leader: int) -> None:
    """Ends every process of a group at once; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_orphans(seconds: float = 5.0) -> None:
    """Ends children of this process that no `Child` waits for: workers whose parent has gone.

    Args:
        seconds: how long to look for further ones.
    """
    end = time.monotonic() + seconds
    while _ADOPTS.is_set() and time.monotonic() < end:
        orphans = [pid for pid in _children() if pid not in _WAITED]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def end_all() -> None:
    """Ends every child, also one that a signal kept from getting a name here."""
    _WAITED.clear()
    end_orphans()


def reap() -> None:
    """Collects orphans that have ended, as PID 1 must."""
    for pid in _children("Z"):
        if pid not in _WAITED:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children(states: str = "") -> list[int]:
    """Processes whose parent is this one, by /proc; with `states` only those in one of them."""
    found, me = [], str(os.getpid())
    entries: list[Path] = []
    with contextlib.suppress(OSError):  # too many open files, say
        entries += Path("/proc").iterdir()
    for entry in entries:
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, parent = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            if parent == me and (not states or state in states):
                found.append(int(entry.name))
    return found
