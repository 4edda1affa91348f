"""The cache on disk: whole files by their sha256, and small entries that carry their own.

It fetches nothing. Every write goes to a temporary that is synced and renamed, every read is
checked, and what another process holds (flock) is never deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources.disk import TEMPORARY, disk_errors, hash_file, replace_file, sync_folder

DEFAULT_LIMIT = 20 << 30  # bytes
SMOKE = "smoke"  # the folder of environments, which are installed and not cached file by file
LEFT_OVER_AFTER = 3600  # seconds; a younger temporary may be of a writer that still runs
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MAGIC = b"imagebuild-entry-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Stats:
    """What a cache holds; sizes in bytes."""

    root: Path
    files: int
    bytes: int
    limit_bytes: int
    bytes_by_kind: dict[str, int]


@dataclass(frozen=True)
class Pruned:
    """What `Cache.prune` did; `kept_in_use` files were left because a process holds them."""

    files: int
    bytes: int
    kept_in_use: int


def parse_size(text: str, *, where: str) -> int:
    """Reads "20GiB", "500 MB" or a number of bytes.

    Raises:
        UsageError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{where}: expected a size such as 20GiB, found {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def default_root() -> Path:
    """IMAGEBUILD_CACHE, else the folder of this tool in the XDG cache folder."""
    if own := os.environ.get("IMAGEBUILD_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "glm53-imagebuild"


def default_limit() -> int:
    """IMAGEBUILD_CACHE_LIMIT in bytes, else 20 GiB."""
    text = os.environ.get("IMAGEBUILD_CACHE_LIMIT", "")
    return parse_size(text, where="IMAGEBUILD_CACHE_LIMIT") if text else DEFAULT_LIMIT


class Cache:
    """A cache folder; see the module for what it promises.

    Attributes:
        root: the folder; made at the first write.
        limit_bytes: size above which the least recently used files go.
        offline: a corrupt entry is an error instead of something to fetch again.
    """

    def __init__(
        self,
        root: Path | None = None,
        limit_bytes: int | None = None,
        *,
        offline: bool = False,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.root = root or default_root()
        self.limit_bytes = default_limit() if limit_bytes is None else limit_bytes
        self.offline = offline
        self._notice = notice
        self._lock = threading.Lock()
        # Held until `close`: whole files that were handed out, locked against `prune`.
        self._held: dict[str, BinaryIO] = {}

    def close(self) -> None:
        """Lets go of every file that was handed out."""
        with self._lock:
            for file in self._held.values():
                file.close()
            self._held.clear()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # Whole files

    def blob_path(self, sha256: str) -> Path:
        """Where the file with that hash is, or would be."""
        if not _SHA256.fullmatch(sha256):
            raise UsageError(f"sha256: expected 64 lower-case hex digits, found {sha256!r}")
        return self.root / "sha256" / sha256[:2] / sha256

    def blob(self, sha256: str) -> Path | None:
        """The whole file with that hash, hashed anew by each process and then held; None if absent.

        Raises:
            IntegrityError: offline, and the bytes have another hash.
        """
        path = self.blob_path(sha256)
        with self._lock:
            if sha256 in self._held and path.exists():
                return path
            file = _open_shared(path)
            if file is None:
                return None
            found = hash_file(file).hexdigest()
            if found != sha256:
                file.close()
                self._corrupt(path, f"sha256 {sha256}", f"sha256 {found}")
                return None
            _touch(path)
            self._held[sha256] = file
            return path

    @contextlib.contextmanager
    def partial(self, sha256: str, needed: int | None = None) -> Iterator[BinaryIO]:
        """The `.part` file of a download, made if absent, positioned at 0, for one process alone.

        A second one waits here until the first is done. Content of an earlier try is kept.
        """
        path = self._part_path(sha256)
        # The lock is another file: the part is renamed and then shared, and whoever still waited
        # for it alone would wait until all who share it end.
        guard = _guard_of(path)
        with disk_errors(path.parent, needed):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _open_exclusive(guard)
        with lock:
            try:
                with disk_errors(path.parent, needed):
                    part = _open_unbuffered(path)
                with part:
                    yield part
            finally:
                with contextlib.suppress(OSError):
                    guard.unlink()

    def commit(self, sha256: str, part: BinaryIO) -> None:
        """Makes a complete, verified `.part` file the file with that hash."""
        path = self.blob_path(sha256)
        with disk_errors(path.parent):
            os.fsync(part.fileno())
            path.parent.mkdir(parents=True, exist_ok=True)
            self._part_path(sha256).replace(path)
            sync_folder(path.parent)

    def discard_partial(self, sha256: str) -> None:
        """Deletes the `.part` file; only for who holds it."""
        with contextlib.suppress(OSError):
            self._part_path(sha256).unlink()

    def _part_path(self, sha256: str) -> Path:
        return self.root / "partial" / f"{self.blob_path(sha256).name}.part"

    # Small entries

    def get(self, kind: str, key: str) -> bytes | None:
        """Content of the entry, or None.

        Raises:
            IntegrityError: offline, and the entry is not what was written.
        """
        path = self._entry_path(kind, key)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EngineError(f"{path}: expected to read it, found {error.strerror}") from error
        head, _, content = data.partition(b"\n")
        digest = hashlib.sha256(content).hexdigest()
        if head != b"%s %s" % (_MAGIC, digest.encode()):
            self._corrupt(path, "an entry with its own sha256", f"{len(data)} bytes that differ")
            return None
        _touch(path)
        return content

    def put(self, kind: str, key: str, content: bytes) -> None:
        """Writes an entry, or replaces it.

        Raises:
            EngineError: the disk is full or the folder cannot be written.
        """
        path = self._entry_path(kind, key)
        head = b"%s %s\n" % (_MAGIC, hashlib.sha256(content).hexdigest().encode())
        with disk_errors(self.root, len(head) + len(content)):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, head + content)

    def drop(self, kind: str, key: str) -> None:
        """Deletes an entry that turned out to be wrong, unless offline, where it stays."""
        path = self._entry_path(kind, key)
        if not self.offline:
            with disk_errors(path.parent):
                path.unlink(missing_ok=True)

    def _entry_path(self, kind: str, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return self.root / kind / name[:2] / name

    def _corrupt(self, path: Path, expected: str, found: str) -> None:
        text = f"{path}: expected {expected}, found {found}"
        if self.offline:
            raise IntegrityError(text, hint="run once without --offline to fetch it again")
        self._notice(f"{text}; it is fetched again")
        with disk_errors(path.parent):
            path.unlink(missing_ok=True)

    # Size

    def stats(self) -> Stats:
        """Counts files and bytes, temporaries included."""
        kinds: dict[str, int] = {}
        count = 0
        for path, status in self._files():
            kind = path.relative_to(self.root).parts[0]
            kinds[kind] = kinds.get(kind, 0) + status.st_size
            count += 1
        return Stats(
            self.root, count, sum(kinds.values()), self.limit_bytes, dict(sorted(kinds.items()))
        )

    def prune(self, limit_bytes: int | None = None) -> Pruned:
        """Deletes the least recently used files until at most `limit_bytes` are left.

        Temporaries of killed processes go first, whatever the limit.

        Raises:
            EngineError: a file cannot be deleted.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        total = freed = gone = in_use = 0
        files: list[tuple[bool, int, Path, int]] = []
        for path, status in self._files():
            total += status.st_size
            files.append(
                (not _is_left_over(path, status), status.st_mtime_ns, path, status.st_size)
            )
        for useful, _, path, size in sorted(files):
            if useful and total <= limit:
                break
            if not _remove_unheld(path):
                in_use += 1
                continue
            gone, freed, total = gone + 1, freed + size, total - size
        return Pruned(gone, freed, in_use)

    def keep_within_limit(self) -> None:
        """Prunes after a write; where it cannot, it says so and goes on."""
        try:
            self.prune()
        except EngineError as error:
            self._notice(f"the cache was not pruned: {error}")

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, folders, names in os.walk(self.root):
            if Path(folder) == self.root and SMOKE in folders:
                folders.remove(SMOKE)  # a part of an environment would be worse than none
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.lstat()


def _is_left_over(path: Path, status: os.stat_result) -> bool:
    return path.name.startswith(TEMPORARY) and status.st_mtime < time.time() - LEFT_OVER_AFTER


def _touch(path: Path) -> None:
    # The time of last use, for `prune`; a read-only cache still serves.
    with contextlib.suppress(OSError):
        os.utime(path)


def _same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_shared(path: Path) -> BinaryIO | None:
    """Opens and locks against deletion; None when there is no such file (any more)."""
    try:
        file = path.open("rb")
        fcntl.flock(file, fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EngineError(f"{path}: expected to read it, found {error.strerror}") from error
    if _same_file(file, path):
        return file
    file.close()
    return None


def _guard_of(part: Path) -> Path:
    return part.with_suffix(".lock")


def _open_unbuffered(path: Path) -> BinaryIO:
    # Unbuffered: what was received is in the file even after kill -9, and closing cannot fail.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return cast(BinaryIO, os.fdopen(handle, "r+b", buffering=0))


def _open_exclusive(path: Path, *, how: int = fcntl.LOCK_EX) -> BinaryIO:
    """Opens, made if absent, and locks for this process alone."""
    while True:
        file = _open_unbuffered(path)
        try:
            fcntl.flock(file, how)
        except BaseException:
            file.close()
            raise
        # Whoever held it may have deleted it meanwhile.
        if _same_file(file, path):
            return file
        file.close()


def _remove_unheld(path: Path) -> bool:
    """Deletes a file unless a process holds it; True when it is gone."""
    guard = _guard_of(path) if path.suffix == ".part" else path
    try:
        if not path.exists():
            return True
        with _open_exclusive(guard, how=fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink(missing_ok=True)
            guard.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError as error:
        raise EngineError(f"{path}: expected to delete it, found {error.strerror}") from error
    return True
