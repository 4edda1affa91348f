"""Wheels as trees: a whole one on disk, or a remote one of which only the needed parts are fetched.

Every file that is read is checked against its CRC and the wheel's RECORD. A whole wheel has been
checked by its own hash; a remote one rests on the index's TLS, its CRCs and its RECORD.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources import archive as zips
from imagebuild.sources.cache import Cache
from imagebuild.sources.disk import disk_errors, hash_file
from imagebuild.sources.download import Progress, agreed_sha256, fetch, no_progress
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile
from imagebuild.sources.ranges import RangeFile, RangeReader, RangesUnsupportedError, Span
from imagebuild.sources.wheelbase import Wheel

TAIL = 1 << 20  # bytes; holds directory, RECORD and METADATA of the vllm wheels (0.8 MB in 0.31.0)


class WheelTree(Wheel):
    """A whole wheel on disk."""

    def __init__(self, path: Path, *, platform: str = "linux/amd64", source: str = "") -> None:
        super().__init__(source or str(path), platform)
        self.path = path
        self._lock = threading.Lock()
        self._open: tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]] | None = None

    def close(self) -> None:
        """Closes the file; a later read opens it again."""
        with self._lock:
            if self._open is not None:
                self._open[0].close()
                self._open = None

    def __enter__(self) -> WheelTree:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def members(self) -> dict[str, zipfile.ZipInfo]:
        return self._opened()[1]

    def read(self, path: str) -> bytes:
        archive, members = self._opened()
        if path not in members:
            raise FileNotFoundError(path)
        data = zips.read_member(archive, members[path], self.source)
        self._check(path, data)
        return data

    def prefetch(self, paths: Iterable[str]) -> None:
        """Does nothing: local reads are cheap."""

    def extract(self, dest: Path, mtime: int) -> list[str]:
        """Unpacks all files into `dest` and returns their paths, sorted.

        Modes are 0644, or 0755 where the wheel marks a file executable; files and the folders that
        are made here get `mtime` (seconds since the epoch). No existing file is overwritten. What
        was written stays behind after an error.

        Raises:
            IntegrityError: a file differs from RECORD, or RECORD and the wheel list other files.
            UsageError: a file exists already.
            EngineError: the disk is full or cannot be written.
        """
        paths = list(self.iter())
        listed = {path for path in paths if not self._is_unhashed(path)}
        if odd := sorted(listed ^ self.record().keys()):
            raise IntegrityError(
                f"{self.source}: expected RECORD to list each file of the wheel and no other, "
                f"found {', '.join(odd[:5])}{', ...' if len(odd) > 5 else ''}"
            )
        made: set[Path] = set()
        for path in paths:
            with disk_errors(dest, self.members()[path].file_size):
                _make_folders((dest / path).parent, made)
            self._extract_one(path, dest, mtime)
        with disk_errors(dest):
            for folder in sorted(made, reverse=True):
                os.utime(folder, (mtime, mtime))
        return paths

    def _extract_one(self, path: str, dest: Path, mtime: int) -> None:
        archive, members = self._opened()
        member, target = members[path], dest / path
        digest, size = hashlib.sha256(), 0
        with disk_errors(dest, member.file_size):
            try:
                output = target.open("xb")
            except FileExistsError as error:
                raise UsageError(
                    f"{target}: expected nothing there, found a file that {self.source} holds too"
                ) from error
        with disk_errors(dest, member.file_size), output:
            for block in zips.blocks_of(archive, member, self.source):
                digest.update(block)
                size += len(block)
                output.write(block)
            os.fchmod(output.fileno(), 0o755 if member.external_attr >> 16 & 0o111 else 0o644)
        if not self._is_unhashed(path):
            zips.check_member(path, digest.hexdigest(), size, self.record(), self.source)
        os.utime(target, (mtime, mtime))

    def _opened(self) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
        with self._lock:
            if self._open is None:
                if not self.path.is_file():
                    raise UsageError(f"{self.path}: expected a wheel, found no file")
                self._open = zips.open_archive(self.path, self.source)
            return self._open


class RemoteWheel(Wheel):
    """A wheel of which the directory, and the files that are read, are fetched by range.

    What was read once is in the cache under the wheel's sha256 and is not asked for again. From a
    server without ranges the whole wheel is downloaded and checked instead.
    """

    def __init__(
        self,
        file: IndexFile,
        http: Http,
        cache: Cache,
        *,
        platform: str = "linux/amd64",
        sha256: str | None = None,
        progress: Progress = no_progress,
    ) -> None:
        super().__init__(file.filename, platform)
        self.file = file
        self.http = http
        self.cache = cache
        self.sha256 = agreed_sha256(file, sha256)
        self._progress = progress
        self._reader = RangeReader(http, file.url, file.filename, file.size)
        self._lock = threading.RLock()
        self._open: _Opened | None = None
        self._whole: WheelTree | None = None
        self._kept: dict[str, bytes] = {}  # what the cache cannot hold for want of a sha256

    def close(self) -> None:
        """Closes what a fallback to the whole wheel opened."""
        with self._lock:
            if self._whole is not None:
                self._whole.close()

    def __enter__(self) -> RemoteWheel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def members(self) -> dict[str, zipfile.ZipInfo]:
        with self._lock:
            opened = self._opened()
            return opened.members if opened is not None else self._fallback().members()

    def read(self, path: str) -> bytes:
        if path not in self.members():
            raise FileNotFoundError(path)
        with self._lock:
            return self._load([path])[path]

    def prefetch(self, paths: Iterable[str]) -> None:
        with self._lock:
            members = self.members()
            self._load([path for path in dict.fromkeys(paths) if path in members])

    def _load(self, paths: list[str]) -> dict[str, bytes]:
        """Contents from the cache, and the rest from the server in one go."""
        opened = self._opened()
        if opened is None:
            whole = self._fallback()
            return {path: whole.read(path) for path in paths}
        found: dict[str, bytes] = {}
        absent: list[str] = []
        for path in paths:
            if (data := self._cached(path)) is not None:
                found[path] = data
            else:
                absent.append(path)
        try:
            opened.file.fill(Span(*opened.spans[path]) for path in absent)
            for path in absent:
                found[path] = self._unpack(opened, path)
        except RangesUnsupportedError:
            whole = self._fallback()
            return {path: whole.read(path) for path in paths}
        except IntegrityError:
            self._distrust(opened)
            raise
        finally:
            opened.file.forget()
        return found

    def _distrust(self, opened: _Opened) -> None:
        """Forgets the directory and RECORD, so that a later run does not trip over them again."""
        if self.sha256 is not None:
            record = zips.find_record(opened.members, self.source)
            self.cache.drop("wheel-directory", self.sha256)
            self.cache.drop("wheel-member", f"{self.sha256} {record}")

    def _unpack(self, opened: _Opened, path: str) -> bytes:
        data = zips.read_member(opened.archive, opened.members[path], self.source)
        self._check(path, data)
        if self.sha256 is None:
            self._kept[path] = data
        else:
            self.cache.put("wheel-member", f"{self.sha256} {path}", data)
        return data

    def _cached(self, path: str) -> bytes | None:
        if self.sha256 is None:
            return self._kept.get(path)
        data = self.cache.get("wheel-member", f"{self.sha256} {path}")
        if data is not None:
            self._check(path, data)
        return data

    def _opened(self) -> _Opened | None:
        """The directory, from the cache or the server; None when only the whole wheel will do."""
        if self._open is None and self._whole is None:
            try:
                self._open = self._from_cache() or self._from_server()
            except RangesUnsupportedError:
                self._fallback()
        return None if self._whole is not None else self._open

    def _from_cache(self) -> _Opened | None:
        packed = self.cache.get("wheel-directory", self.sha256) if self.sha256 else None
        if packed is None:
            return None
        size, _, directory = packed.partition(b"\n")
        if not size.isdigit() or int(size) < len(directory):
            return None  # another version of this tool wrote it
        self._reader.size = int(size)
        return _Opened(self._reader, int(size) - len(directory), directory, self.source)

    def _from_server(self) -> _Opened:
        start, data = self._reader.tail(TAIL)
        opened = _Opened(self._reader, start, data, self.source)
        if self.sha256 is not None:
            packed = b"%d\n%s" % (opened.file.seek(0, os.SEEK_END), opened.directory())
            self.cache.put("wheel-directory", self.sha256, packed)
        self._open = opened
        # They are mostly in the tail that is here now.
        record = zips.find_record(opened.members, self.source)
        self.prefetch([record, record.removesuffix("RECORD") + "METADATA"])
        return opened

    def _fallback(self) -> WheelTree:
        if self._whole is None:
            path = fetch(self.file, self.sha256, self.cache, self.http, self._progress)
            self._whole = WheelTree(path, platform=self.platform, source=self.source)
        return self._whole


class _Opened:
    """An open directory over the fetched parts of a remote wheel."""

    def __init__(self, reader: RangeReader, start: int, data: bytes, source: str) -> None:
        self.file = RangeFile(start + len(data), reader.fetch)
        self.file.add(start, data)
        self.archive, self.members = zips.open_archive(cast(IO[bytes], self.file), source)
        self.spans = zips.spans_of(self.archive)

    def directory(self) -> bytes:
        """The central directory and what follows it."""
        self.file.seek(self.archive.start_dir)
        return self.file.read()


def open_wheel(
    file: IndexFile,
    http: Http,
    cache: Cache,
    *,
    platform: str = "linux/amd64",
    sha256: str | None = None,
    progress: Progress = no_progress,
) -> WheelTree | RemoteWheel:
    """The whole wheel where the cache or a local index has it, else the remote one.

    Raises:
        IntegrityError: the local bytes, or the index's hash, are not those of `sha256`.
    """
    wanted = agreed_sha256(file, sha256)
    if wanted is not None and (path := cache.blob(wanted)) is not None:
        return WheelTree(path, platform=platform, source=file.filename)
    if not file.url.startswith("file:"):
        return RemoteWheel(file, http, cache, platform=platform, sha256=sha256, progress=progress)
    path = Path(url2pathname(urlsplit(file.url).path))
    if wanted is not None:
        _check_file(path, wanted)
    return WheelTree(path, platform=platform, source=file.filename)


def _check_file(path: Path, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            found = hash_file(file).hexdigest()
    except OSError as error:
        raise EngineError(f"{path}: expected a wheel, found {error.strerror}") from error
    if found != sha256:
        raise IntegrityError(f"{path}: expected sha256 {sha256}, found {found}")


def _make_folders(folder: Path, made: set[Path]) -> None:
    """Makes `folder` and those above it, with mode 0755; adds the new ones to `made`."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir()
        new.chmod(0o755)
        made.add(new)
