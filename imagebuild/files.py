"""Writing files and folders so that an interrupted run leaves the old state or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from imagebuild.errors import EngineError
from imagebuild.sources.disk import disk_errors, replace_file, sync_folder


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step. Raises EngineError when the disk is full or refuses."""
    with disk_errors(path.parent, len(data), elsewhere=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Holds a lock file; a second holder gets an EngineError that says `what` is under way."""
    handle = _open(path)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise EngineError(f"{path}: {what} is under way in another process",
                                  hint="wait for it, then try again") from error  # fmt: skip
            if _is_at(handle, path):
                break
            # Its holder removed it meanwhile: a lock on a file without a name keeps nobody out.
            os.close(handle)
            handle = _open(path)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    with disk_errors(path.parent, elsewhere=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; False where kernel, C library or file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return bool(rename(*paths, _RENAME_EXCHANGE) == 0)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder that takes the place of `folder` when the block ends well.

    Call it under `only_one`: what an interrupted run left behind is cleared first.
    """
    partial = folder.with_name(folder.name + ".partial")
    previous = folder.with_name(folder.name + ".previous")
    with disk_errors(folder.parent):
        _clear(folder, partial, previous)
        partial.mkdir(parents=True)
        try:
            yield partial
            if not folder.exists():
                partial.rename(folder)
            elif not _exchange(partial, folder):
                folder.rename(previous)
                partial.rename(folder)
            sync_folder(folder.parent)
        finally:
            _clear(folder, partial, previous)


def _clear(folder: Path, partial: Path, previous: Path) -> None:
    """Removes what is not the result; brings it back when a swap was stopped half-way."""
    if previous.exists() and not folder.exists():
        previous.rename(folder)
    for left in (previous, partial):
        if left.is_symlink():  # the result was a link, and was swapped out; its target is not ours
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)
