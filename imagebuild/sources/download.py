"""Downloads one whole file into the cache by its sha256; what breaks off is resumed.

A short, long or changed body is an error, never a file. It chooses no file and draws no progress.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO, Protocol

from imagebuild.errors import EngineError, IntegrityError
from imagebuild.sources.cache import Cache
from imagebuild.sources.disk import DiskError, disk_errors, free_bytes, hash_file, write_all
from imagebuild.sources.http import Http, Stream, TransferError
from imagebuild.sources.index import IndexFile

ATTEMPTS = 5  # in a row that bring less than PROGRESS_BYTES each
PROGRESS_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Progress(Protocol):
    """Is told how far a download is; called often, from the thread that downloads."""

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """`done` and `total` are bytes; `total` is None where nobody says it."""


class _StartAgain(Exception):  # noqa: N818  a signal within this module, not an error
    """What is in the `.part` file cannot be continued."""


def no_progress(name: str, done: int, total: int | None) -> None:
    """Shows nothing."""


def fetch(
    file: IndexFile,
    sha256: str | None,
    cache: Cache,
    http: Http,
    progress: Progress = no_progress,
) -> Path:
    """Returns the path of the whole, verified file in the cache; downloads it when absent.

    Args:
        file: what to download.
        sha256: the hash that the lock records; None takes the index's.
        cache: keeps the file locked until `Cache.close`.
        http: where to ask.
        progress: is told how far it is.

    Raises:
        IntegrityError: no hash is known, the index and the lock differ, or the body is not it.
        EngineError: offline and absent, the network failed, or the disk is full.
    """
    wanted = agreed_sha256(file, sha256)
    if wanted is None:
        raise IntegrityError(
            f"{file.url}: expected a sha256 from the index or the lock, found none",
            hint="use an index that gives hashes, or record the hash in the lock",
        )
    # Between `commit` and `blob` another process may prune; it cannot do so every time.
    for tries in range(3):
        if (path := cache.blob(wanted)) is not None:
            if tries:
                cache.keep_within_limit()
            return path
        _Download(file, wanted, cache, http, progress).run()
    raise EngineError(
        f"{cache.root}: expected to keep {file.filename}, found it gone each time",
        hint="stop what deletes files there, or set IMAGEBUILD_CACHE=DIR",
    )


def parse_content_range(text: str) -> tuple[int, int, int | None] | None:
    """First byte, one past the last byte and size of the whole of a Content-Range header."""
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is None:
        return None
    return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])


def agreed_sha256(file: IndexFile, sha256: str | None) -> str | None:
    """The hash that the lock (`sha256`) and the index give; None when neither does.

    Raises:
        IntegrityError: they differ.
    """
    if sha256 is not None and file.sha256 is not None and sha256 != file.sha256:
        raise IntegrityError(
            f"{file.filename}: expected sha256 {sha256}, found {file.sha256} in the index",
            hint="the index offers other bytes than the lock records; build.py lock check",
        )
    return sha256 or file.sha256


class _Download:
    """One run of one download; `part` is locked meanwhile, so that nobody fetches it twice."""

    def __init__(
        self, file: IndexFile, sha256: str, cache: Cache, http: Http, progress: Progress
    ) -> None:
        self.file = file
        self.sha256 = sha256
        self.cache = cache
        self.http = http
        self.progress = progress
        self.total = file.size

    def run(self) -> None:
        self.http.refuse_offline(self.file.url, self.file.filename)
        with self.cache.partial(self.sha256, self.file.size) as part:
            if self.cache.blob_path(self.sha256).exists():  # another process was faster
                self.cache.discard_partial(self.sha256)
                return
            try:
                self._complete(part)
            except (IntegrityError, DiskError):
                self.cache.discard_partial(self.sha256)
                raise
            except EngineError:
                if not self._size(part):
                    self.cache.discard_partial(self.sha256)
                raise
            self.cache.commit(self.sha256, part)

    def _complete(self, part: BinaryIO) -> None:
        """Fetches until the hash is right, from what is there, and once more from nothing."""
        resumed = self._size(part) > 0
        self._fill(part)
        if self._matches(part):
            return
        part.truncate(0)
        if resumed:
            self._fill(part)
            if self._matches(part):
                return
        raise IntegrityError(
            f"{self.file.url}: expected sha256 {self.sha256}, found other bytes",
            hint="a proxy or mirror changed them, or the lock is of another file",
        )

    def _fill(self, part: BinaryIO) -> None:
        failures = 0
        furthest = self._size(part)
        while True:
            have = self._size(part)
            try:
                self._receive(part, have)
                return
            except _StartAgain:
                part.truncate(0)
                problem: EngineError = self._short(have)
            except TransferError as error:
                problem = error
            # Only what was never reached before is progress: starting again is not.
            if (reached := self._size(part)) >= furthest + PROGRESS_BYTES:
                furthest, failures = reached, 0
            failures += 1
            if failures >= ATTEMPTS:
                raise problem
            self.http.sleep(failures)

    def _receive(self, part: BinaryIO, have: int) -> None:
        """Appends one answer to `part`."""
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        if have and have == self.total:
            return
        what = self.file.filename
        with self.http.stream(
            self.file.url, what=what, headers=headers, accept=(200, 206, 416)
        ) as stream:
            start = self._start_of(stream, have)
            self._make_room(start)
            with disk_errors(self.cache.root, self.total):
                part.truncate(start)
                part.seek(start)
            self._copy(stream, part, start)
        size = self._size(part)
        if self.total is not None and size != self.total:
            raise self._short(size)

    def _start_of(self, stream: Stream, have: int) -> int:
        """Where the body belongs; learns the size of the whole."""
        if stream.status == 416:
            raise _StartAgain
        if stream.status == 200:
            if "Content-Encoding" not in stream.headers:
                self._learn(stream.headers.get("Content-Length"))
            return 0
        place = parse_content_range(stream.headers.get("Content-Range", ""))
        if place is None or place[0] != have:
            raise _StartAgain
        self._learn(None if place[2] is None else str(place[2]))
        return have

    def _learn(self, size: str | None) -> None:
        if size is None or not size.isdecimal():
            return
        if self.total is not None and int(size) != self.total:
            raise IntegrityError(
                f"{self.file.url}: expected {self.total} bytes, found {size}",
                hint="a proxy or mirror changed the file; run the same command again",
            )
        self.total = int(size)

    def _make_room(self, have: int) -> None:
        folder = self.cache.root
        if self.total is not None and self.total - have > (free := free_bytes(folder)):
            raise DiskError(
                f"{folder}: expected room for {self.total - have} bytes, found {free} bytes free",
                hint="free some space, run `build.py cache prune`, or set IMAGEBUILD_CACHE=DIR",
            )

    def _copy(self, stream: Stream, part: BinaryIO, done: int) -> None:
        self.progress(self.file.filename, done, self.total)
        for chunk in stream.chunks():
            done += len(chunk)
            if self.total is not None and done > self.total:
                raise IntegrityError(f"{self.file.url}: expected {self.total} bytes, found more")
            with disk_errors(self.cache.root, self.total):
                write_all(part, chunk)
            self.progress(self.file.filename, done, self.total)

    def _short(self, size: int) -> TransferError:
        return TransferError(
            f"{self.file.url}: expected {self.total} bytes, found that the body ends after {size}",
            hint="run the same command again; it continues where this one stopped",
        )

    def _matches(self, part: BinaryIO) -> bool:
        part.seek(0)
        return hash_file(part).hexdigest() == self.sha256

    @staticmethod
    def _size(part: BinaryIO) -> int:
        return part.seek(0, 2)
