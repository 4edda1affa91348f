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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import BrokenError, EngineError, IntegrityError, UsageError
from imagebuild.patching.manifest import (
    FOLDER,
    JOURNAL,
    MANIFEST,
    ORIGINALS,
    original_path,
    read_manifest,
    read_original,
    sha256,
)

_DEFAULT_MODE = 0o644
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)


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
        kind = UsageError if isinstance(error, _NO_FOLDER) else EngineError
        raise kind(f"{root}: expected a folder, found: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EngineError(f"{root}: another process is changing this tree",
                          hint="wait for it, then try again") from error  # fmt: skip
    finally:
        os.close(handle)


def commit(root: Path, changes: Mapping[str, Change], emptied: Sequence[str] = ()) -> None:
    """Writes all changes or none. Call it with `locked` held and without a journal.

    Args:
        root: the tree.
        changes: new content by path, the manifest's last.
        emptied: folders to remove as well if nothing is left in them, deepest first.

    Raises:
        BrokenError: a target is a symbolic link or no regular file.
        EngineError: the file system refused; the tree is back in its old state.
    """
    faults = [fault for path in changes if (fault := _target_fault(root, path))]
    if faults:
        raise BrokenError(f"{root}: {'; '.join(faults)}",
                          hint="give a tree of regular files, such as a fresh install")  # fmt: skip
    try:
        with _refusals(root):
            journal = {
                "schema": 1,
                "changes": [_keep_original(root, path, change) for path, change in changes.items()],
                "created": _absent_folders(root, changes),
                "emptied": list(emptied),
            }
            _write(root / JOURNAL, json.dumps(journal, indent=1).encode(), _DEFAULT_MODE)
            _sync_folder(root)
            # All content first: a full disk shows before any file has changed.
            for path, change in changes.items():
                if change.data is not None:
                    _stage(root / path, change.data, change.mode)
            for path, change in changes.items():
                _publish(root / path, remove=change.data is None)
    except BaseException:
        recover(root)
        tidy(root)
        raise
    _finish(root, emptied)


def recover(root: Path) -> bool:
    """Ends an interrupted change, if there is one: forward when all was written, else back.

    Raises:
        IntegrityError: the journal cannot be read, or a file is neither old nor new.
    """
    path = root / JOURNAL
    try:
        journal = json.loads(path.read_bytes())
        entries = [(e["path"], e["before"], e["after"], e["mode"]) for e in journal["changes"]]
        created, emptied = list(journal["created"]), list(journal["emptied"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path}: the journal of an interrupted change cannot be read",
                             hint="start from a pristine tree") from error  # fmt: skip
    now = {name: _digest_of(root / name) for name, _before, _after, _mode in entries}
    # An interpreter may have made byte code since; it is put back or removed like all else.
    foreign = [
        name
        for name, before, after, _mode in entries
        if now[name] not in (before, after) and not name.endswith(".pyc")
    ]
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
                    if before is not None:
                        _stage(root / name, read_original(root, before), mode)
                    _publish(root / name, remove=before is None)
            emptied = created
    _finish(root, emptied)
    return True


def _finish(root: Path, emptied: Sequence[str]) -> None:
    """Removes empty folders and, last, the journal."""
    with _refusals(root):
        for folder in emptied:
            try:
                (root / folder).rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
        (root / JOURNAL).unlink(missing_ok=True)
        _sync_folder(root / FOLDER)


def tidy(root: Path) -> None:
    """Removes from `.imagebuild/` what no manifest names. Call it without a journal."""
    folder = root / FOLDER
    manifest = read_manifest(root)
    keep = {root / MANIFEST, root / ORIGINALS} if manifest else set()
    for entry in manifest.files.values() if manifest else ():
        keep |= {original_path(root, entry.before)} if entry.before else set()
    with _refusals(root):
        for item in sorted(folder.rglob("*"), reverse=True):
            if item not in keep:
                item.rmdir() if item.is_dir() and not item.is_symlink() else item.unlink()
        if manifest is None and folder.is_dir():
            folder.rmdir()


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
        if at.exists() and not (at.is_file() if at == root / path else at.is_dir()):
            kind = "regular file" if at == root / path else "folder"
            return f"{at.relative_to(root)} is no {kind}"
    return ""


def _absent_folders(root: Path, paths: Iterable[str]) -> list[str]:
    """Folders that writing `paths` will create, deepest first."""
    parents = {parent.as_posix() for path in paths for parent in Path(path).parents} - {"."}
    absent = [parent for parent in parents if not (root / parent).exists()]
    return sorted(absent, key=lambda folder: (-folder.count("/"), folder))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.imagebuild-tmp")


def _write(target: Path, data: bytes, mode: int) -> None:
    """Replaces `target` in one step."""
    _stage(target, data, mode)
    _publish(target, remove=False)


def _stage(target: Path, data: bytes, mode: int) -> None:
    """Writes the temporary of `target`, with the mode and owner of a file that is there."""
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _publish(target: Path, *, remove: bool) -> None:
    """Puts the temporary in the place of `target`, or removes `target`."""
    if remove:
        target.unlink(missing_ok=True)
    else:
        _temporary(target).replace(target)
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
