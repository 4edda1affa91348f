"""Children that die, or whose file system refuses, at a chosen step of a change.

A step is a call that changes the disk or waits for it. Between two steps nothing on the disk
changes, so that every n from 1 to the last covers every moment at which a kill can strike.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import IO, Any
from unittest import mock

STEPS = ("replace", "unlink", "rmdir", "mkdir", "fsync")


class Steps:
    """Counts steps, and calls `strike` before the n-th."""

    def __init__(self, n: int, strike: Callable[[str], None]) -> None:
        self.n = n
        self.count = 0
        self.strike = strike

    def step(self, name: str) -> None:
        self.count += 1
        if self.count == self.n:
            self.strike(name)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.step(name)
            # SIGKILL takes no page from the kernel: waiting for the disk would only cost time.
            return None if name == "fsync" else real(*args, **kwargs)

        return call

    def fdopen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _HalfWriter(real(*args, **kwargs), self)


class _HalfWriter:
    """A file whose write is a step: it strikes when half of the data is on the disk."""

    def __init__(self, file: IO[bytes], steps: Steps) -> None:
        self.file = file
        self.steps = steps

    def __enter__(self) -> _HalfWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.steps.count += 1
        if self.steps.count == self.steps.n:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            self.steps.strike("write")
        return self.file.write(data)


@contextlib.contextmanager
def armed(n: int, strike: Callable[[str], None]) -> Iterator[Steps]:
    """Patches `os` so that `strike` is called before the n-th step, and half way in a write."""
    steps = Steps(n, strike)
    with contextlib.ExitStack() as stack:
        for name in STEPS:
            stack.enter_context(mock.patch.object(os, name, steps.wrap(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "fdopen", steps.fdopen(os.fdopen)))
        yield steps


def die(_step: str) -> None:
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(n: int, act: Callable[[], object]) -> bool:
    """Runs `act` in a child that is killed at its n-th step; False when it ended before."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            with armed(n, die):
                act()
            code = 0
        finally:
            os._exit(code)
    _pid, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"the child failed with {os.WEXITSTATUS(status)}"
    return False


def in_child(act: Callable[[], str]) -> str:
    """What `act` returns, or its error as "Type: message", from a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                text = act()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer
