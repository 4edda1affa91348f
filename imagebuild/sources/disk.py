"""Writing to a disk that may be full or read-only; it knows nothing of caches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from imagebuild.errors import EngineError

TEMPORARY = ".tmp-"  # how the names of temporaries start
BLOCK = 1 << 20  # bytes per read while hashing


class DiskError(EngineError):
    """The disk is full or a folder cannot be written."""


@contextlib.contextmanager
def disk_errors(
    folder: Path, needed: int | None = None, *, elsewhere: str = "IMAGEBUILD_CACHE=DIR"
) -> Iterator[None]:
    """Turns an OSError of writing under `folder` into a DiskError of one sentence.

    Args:
        folder: named in the message.
        needed: bytes that were to be written, where known.
        elsewhere: what names another folder; empty where that differs from call to call.
    """
    try:
        yield
    except OSError as error:
        amount = f"room for {needed} bytes" if needed is not None else "to write"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        found = "no space left there" if full else (error.strerror or type(error).__name__)
        hint = "name a folder that can be written" + (f": {elsewhere}" if elsewhere else "")
        if full:
            rest = f", or set {elsewhere}" if elsewhere else ""
            hint = f"free some space, run `build.py cache prune`{rest}"
        raise DiskError(f"{folder}: expected {amount}, found {found}", hint=hint) from error


def hash_file(file: BinaryIO, digest: hashlib._Hash | None = None) -> hashlib._Hash:
    """Hashes from the current position to the end; returns the sha256 so far."""
    digest = digest or hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file, which may take it in pieces."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged user may still write under `folder`, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file in one step, by a temporary beside it that is locked while it is written.

    Raises:
        OSError: the old file is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes names that were added to or removed from `folder` last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
