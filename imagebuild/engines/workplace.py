"""The folder in which `reproduce` builds, and what an earlier run that was killed left of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from imagebuild.errors import EngineError, UsageError

Echo = Callable[[Sequence[str]], None]

SOURCE = "source"
_PREFIX = "reproduce-"
# Locked by who works there; a folder that somebody wants to keep has none.
_RUNNING = ".running"


@contextlib.contextmanager
def workplace(dist: Path, root: Path, *, is_kept: bool) -> Iterator[Path]:
    """A folder beside the results for two builds; removed afterwards unless it is kept.

    What a killed run left in `dist`, and its worktree of the repository `root`, is removed first.
    """
    dist.mkdir(parents=True, exist_ok=True)
    for left in dist.glob(f"{_PREFIX}*"):
        _remove_left(left, root)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=dist))
    lock = os.open(folder / f"{_RUNNING}.tmp", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / f"{_RUNNING}.tmp").rename(folder / _RUNNING)
        yield folder
    finally:
        if is_kept:
            (folder / _RUNNING).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(folder: Path, root: Path) -> None:
    """Removes the folder of a run that is no more."""
    try:
        lock = os.open(folder / _RUNNING, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / SOURCE).exists():
            _git(root, "worktree", "remove", "--force", str(folder / SOURCE))
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


@contextlib.contextmanager
def worktree(root: Path, revision: str, target: Path, echo: Echo) -> Iterator[Path]:
    """Checks a commit out beside the repository, which itself is left as it is.

    Raises:
        UsageError: the repository has no such commit, or is none.
    """
    if _git(root, "cat-file", "-e", f"{revision}^{{commit}}").returncode:
        raise UsageError(f"{root}: expected the commit {revision}, found none of that name",
                         hint="git fetch --all, or clone where it is from")  # fmt: skip
    done = _git(root, "worktree", "add", "--quiet", "--detach", str(target), revision, echo=echo)
    if done.returncode:
        raise EngineError(f"git worktree: {done.stderr.strip()}")
    try:
        yield target
    finally:
        _git(root, "worktree", "remove", "--force", str(target), echo=echo)


def _git(
    root: Path, *arguments: str, echo: Echo = lambda _command: None
) -> subprocess.CompletedProcess[str]:
    # A hook of the user's has no part in this.
    command = ["git", "-C", str(root), "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null",
               *arguments]  # fmt: skip
    echo(command)
    return subprocess.run(command, capture_output=True, text=True, check=False)
