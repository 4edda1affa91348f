"""All-or-nothing change of files in a tree, under a journal.

The journal is written before the first change and removed after the last. A process killed at any
moment leaves a tree that `recover` brings to the old state or, when everything was written, to the
new one. Each file is written to a temporary beside it, synced and renamed, so that nobody ever sees
half a file, and a hard link into a package cache is broken instead of written through.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import BrokenError, EngineError, IntegrityError
from imagebuild.patching.manifest import (
    FOLDER,
    JOURNAL,
    ORIGINALS,
    original_path,
    read_original,
    sha256,
)

_DEFAULT_MODE = 0o644


@dataclass(frozen=True)
class Change:
    """New content of one file (None removes it) and the permission bits for a file that is new."""

    data: bytes | None
    mode: int = _DEFAULT_MODE


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the tree against other writers.

    Raises:
        EngineError: another process is changing it, or it cannot be opened.
    """
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise EngineError(f"{root}: expected a folder, found: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EngineError(f"{root}: another process is changing this tree",
                          hint="wait for it, then try again") from error  # fmt: skip
    finally:
        os.close(handle)


def commit(root: Path, changes: Mapping[str, Change]) -> None:
    """Writes all changes or none. Call it with `locked` held and without a journal.

    Raises:
        BrokenError: a target is a symbolic link or no regular file.
        EngineError: the file system refused; the tree is back in its old state.
    """
    faults = [fault for path in changes if (fault := _target_fault(root, path))]
    if faults:
        raise BrokenError(f"{root}: {'; '.join(faults)}",
                          hint="give a tree of regular files, such as a fresh install")  # fmt: skip
    entries = [_keep_original(root, path, change) for path, change in changes.items()]
    with _refusals(root):
        folders = [folder for path in changes for folder in _absent_folders(root, path)]
        journal = {"schema": 1, "changes": entries, "folders": list(dict.fromkeys(folders))}
        _write(root / JOURNAL, json.dumps(journal, indent=1).encode(), _DEFAULT_MODE)
    try:
        with _refusals(root):
            for path, change in changes.items():
                _put(root / path, change)
    except BaseException:
        recover(root)
        raise
    _finish(root)


def recover(root: Path) -> bool:
    """Ends an interrupted change, if there is one: forward when all was written, else back.

    Raises:
        IntegrityError: the journal cannot be read, or a file is neither old nor new.
    """
    path = root / JOURNAL
    try:
        journal = json.loads(path.read_bytes())
        entries = [(e["path"], e["before"], e["after"], e["mode"]) for e in journal["changes"]]
        folders = [str(folder) for folder in journal["folders"]]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path}: the journal of an interrupted change cannot be read",
                             hint="start from a pristine tree") from error  # fmt: skip
    now = {name: _digest_of(root / name) for name, _before, _after, _mode in entries}
    foreign = [n for n, before, after, _m in entries if now[n] not in (before, after)]
    if foreign:
        raise IntegrityError(
            f"{root / foreign[0]}: neither as before nor as after the interrupted change: "
            "something else wrote it",
            hint="start from a pristine tree",
        )
    with _refusals(root):
        for name, _before, _after, _mode in entries:
            _temporary(root / name).unlink(missing_ok=True)
        if any(now[name] != after for name, _before, after, _mode in entries):
            for name, before, _after, mode in entries:
                if now[name] != before:
                    data = None if before is None else read_original(root, before)
                    _put(root / name, Change(data, mode))
            for folder in folders:
                with contextlib.suppress(OSError):
                    (root / folder).rmdir()
    _finish(root)
    return True


def _finish(root: Path) -> None:
    (root / JOURNAL).unlink(missing_ok=True)
    _sync_folder(root / FOLDER)


def discard_folder(root: Path) -> None:
    """Removes what is left of `.imagebuild/` once no manifest and no journal is in it."""
    folder = root / FOLDER
    with contextlib.suppress(FileNotFoundError):
        for item in sorted(folder.rglob("*"), reverse=True):
            item.rmdir() if item.is_dir() and not item.is_symlink() else item.unlink()
        folder.rmdir()


def prune_originals(root: Path, digests: set[str]) -> None:
    """Removes kept originals that no manifest entry names."""
    for item in (root / ORIGINALS).glob("*"):
        if item.name.removesuffix(".bz2") not in digests:
            item.unlink()


def _keep_original(root: Path, path: str, change: Change) -> dict[str, object]:
    """Stores the current content, and describes the change for the journal."""
    target = root / path
    after = None if change.data is None else sha256(change.data)
    try:
        data = target.read_bytes()
    except FileNotFoundError:
        return {"path": path, "before": None, "after": after, "mode": change.mode}
    before = sha256(data)
    kept = original_path(root, before)
    if not kept.exists():
        with _refusals(root):
            kept.parent.mkdir(parents=True, exist_ok=True)
            # bz2: its output does not depend on the library's version, as zlib's does.
            _write(kept, bz2.compress(data), _DEFAULT_MODE)
    mode = stat.S_IMODE(target.stat().st_mode)
    return {"path": path, "before": before, "after": after, "mode": mode}


def _target_fault(root: Path, path: str) -> str:
    """Why a path must not be written, as a clause; "" when it may be."""
    at = root
    parts = path.split("/")
    for part in parts:
        at = at / part
        if at.is_symlink():
            return f"{at.relative_to(root)} is a symbolic link to {at.readlink()}"
    if at.exists() and not at.is_file():
        return f"{path} is no regular file"
    return ""


def _absent_folders(root: Path, path: str) -> list[str]:
    """Folders that writing `path` will create, deepest first."""
    parents = [parent for parent in Path(path).parents if parent != Path()]
    return [parent.as_posix() for parent in parents if not (root / parent).exists()]


def _put(target: Path, change: Change) -> None:
    if change.data is None:
        target.unlink(missing_ok=True)
        _sync_folder(target.parent)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, change.data, change.mode)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.imagebuild-tmp")


def _write(target: Path, data: bytes, mode: int) -> None:
    """Replaces `target` in one step, keeping the mode and owner of a file that is there."""
    temporary = _temporary(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = target.stat()
        mode = stat.S_IMODE(known.st_mode)
    except FileNotFoundError:
        known = None
    temporary.unlink(missing_ok=True)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            if known and (known.st_uid, known.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), known.st_uid, known.st_gid)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if not folder.is_dir():
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest_of(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _refusals(root: Path) -> Iterator[None]:
    """Turns what a file system refuses into one sentence."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EngineError(f"{where}: no space left on the device",
                              hint=f"free space on the disk of {root}") from error  # fmt: skip
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EngineError(f"{where}: cannot be written: {error.strerror}",
                              hint="run as the owner of the tree") from error  # fmt: skip
        raise EngineError(f"{where}: {error.strerror}") from error
