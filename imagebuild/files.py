"""Writing files and folders so that an interrupted run leaves the old state or the new one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from imagebuild.errors import EngineError
from imagebuild.sources.disk import disk_errors, sync_folder


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step. Raises EngineError when the disk is full or refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path.parent, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Holds a lock file; a second holder gets an EngineError that says `what` is under way."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EngineError(f"{path}: {what} is under way in another process",
                          hint="wait for it, then try again") from error  # fmt: skip
    finally:
        os.close(handle)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder that takes the place of `folder` when the block ends well.

    Call it under `only_one`: what an interrupted run left behind is cleared first.
    """
    partial = folder.with_name(folder.name + ".partial")
    previous = folder.with_name(folder.name + ".previous")
    with disk_errors(folder.parent):
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            if folder.exists():
                folder.rename(previous)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(previous, ignore_errors=True)
