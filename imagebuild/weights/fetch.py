"""Fetches a checkpoint into a folder: space first, several files at once, each resumed and hashed.

A file has its own name only once its hash is right; until then its name ends in `.part`. Files that
are right already are kept, so a second call continues the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imagebuild.errors import BuildError, IntegrityError
from imagebuild.files import only_one
from imagebuild.sources.disk import DiskError, disk_errors, free_bytes, sync_folder, write_all
from imagebuild.sources.download import ATTEMPTS, PROGRESS_BYTES, Progress, parse_content_range
from imagebuild.sources.http import Http, TransferError
from imagebuild.sources.pipconf import scrub
from imagebuild.weights import manifest
from imagebuild.weights.listing import Listing, WeightFile, hub_headers

RESERVE = 1 << 30  # bytes that stay free: a full disk stops more than this fetch
LOCK = ".weights.lock"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """What a fetch did.

    Attributes:
        kept: files that were right already.
        fetched: files that were downloaded or copied.
        bytes_fetched: how much of them came over in this call.
    """

    kept: int
    fetched: int
    bytes_fetched: int


class _Stopped(Exception):  # noqa: N818  a signal within this module
    """Another file failed; this one stops where it is."""


def fetch(
    listing: Listing,
    folder: Path,
    http: Http,
    *,
    jobs: int,
    token: str | None,
    progress: Progress,
) -> Fetched:
    """Makes `folder` hold the files of a listing, and writes weights.json last.

    Args:
        listing: what to have.
        folder: made when absent; what else is in it stays.
        http: where to ask.
        jobs: files at a time.
        token: the hub's, sent to the hub alone.
        progress: is told how far each file is; called from several threads.

    Raises:
        DiskError: too little space, found before the first byte.
        IntegrityError: a file has other bytes than its source says.
        EngineError: the network failed; what is there is kept for the next call.
    """
    with only_one(folder / LOCK, f"a fetch into {folder}"):
        run = _Fetch(folder, http, token, progress)
        known = _known(folder)
        have: dict[str, tuple[int, str]] = {}
        missing: list[WeightFile] = []
        for file in listing.files:
            right = run.verified(file, known.get(file.path))
            if right:
                have[file.path] = right
            else:
                missing.append(file)
        missing = [run.sized(file) for file in missing]
        run.make_room(missing)
        have |= run.all(missing, jobs)
        manifest.write(folder, manifest.Manifest(listing.source, listing.revision,
                                                 listing.licence, have))  # fmt: skip
        (folder / LOCK).unlink(missing_ok=True)
    return Fetched(len(listing.files) - len(missing), len(missing), run.received)


def _known(folder: Path) -> dict[str, tuple[int, str]]:
    """What an earlier fetch recorded; nothing where that is unreadable: all is hashed anyway."""
    with contextlib.suppress(BuildError):
        return manifest.read(folder).files
    return {}


class _Fetch:
    def __init__(self, folder: Path, http: Http, token: str | None, progress: Progress) -> None:
        self.folder = folder
        self.http = http
        self.progress = progress
        self.received = 0
        self._headers = hub_headers(token)
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def verified(
        self, file: WeightFile, recorded: tuple[int, str] | None
    ) -> tuple[int, str] | None:
        """Size and sha256 of a file that is right already, else None."""
        path = self.folder / file.path
        for place in (path, self._part(file)):
            if place.is_dir():  # else it would be found once all is there
                raise DiskError(f"{place}: expected a file or nothing, found a folder",
                                hint="remove it, or name another folder with --to")  # fmt: skip
        if not path.is_file() or file.size not in (None, path.stat().st_size):
            return None
        with path.open("rb") as content:
            size, sha256, git = _hashes(content)
        wanted = file.sha256 or file.git_sha1
        if wanted is None:
            # A folder without SHA256SUMS says nothing of its bytes; an earlier fetch did.
            return (size, sha256) if recorded == (size, sha256) else None
        return (size, sha256) if wanted in (sha256, git) else None

    def sized(self, file: WeightFile) -> WeightFile:
        """The file with its size, asked for where the listing does not say it."""
        if file.size is not None:
            return file
        headers = {"Accept-Encoding": "identity"}
        with self.http.stream(file.url, what=file.path, headers=headers) as stream:
            said = stream.headers.get("Content-Length", "")
            is_packed = "Content-Encoding" in stream.headers  # whose length is another
        size = int(said) if said.isdecimal() and len(said) < 20 and not is_packed else None
        return WeightFile(file.path, file.url, size, file.sha256, file.git_sha1)

    def make_room(self, files: list[WeightFile]) -> None:
        """Raises DiskError where the missing bytes do not fit."""
        there = sum(_size(self._part(file)) for file in files)
        needed = sum(file.size or 0 for file in files) - there
        free = free_bytes(self.folder)
        if files and needed + RESERVE > free:
            raise DiskError(f"{self.folder}: expected {needed / 1e9:.1f} GB and a reserve of "
                            f"{RESERVE / 1e9:.1f} GB, found {free / 1e9:.1f} GB free",
                            hint="free some space, or name another folder with --to")  # fmt: skip

    def all(self, files: list[WeightFile], jobs: int) -> dict[str, tuple[int, str]]:
        """Fetches files, `jobs` at a time; the first failure stops the others."""
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="weights") as pool:
            futures = {pool.submit(self._one, file): file for file in files}
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                if any(not future.done() for future in futures):
                    self._stop.set()
                for future in futures:
                    future.cancel()
        failed = [future.exception() for future in futures if not future.cancelled()]
        for error in failed:
            if error is not None and not isinstance(error, _Stopped):
                raise error
        return {file.path: future.result() for future, file in futures.items()}

    def _part(self, file: WeightFile) -> Path:
        path = self.folder / file.path
        return path.with_name(path.name + ".part")

    def _one(self, file: WeightFile) -> tuple[int, str]:
        part, path = self._part(file), self.folder / file.path
        with disk_errors(self.folder, file.size, elsewhere="--to DIR"):
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab+", buffering=0) as content:
                had = _size(part)
                self._fill(file, content)
                right, found = self._check(file, content)
                if not right and had:  # what was there was of another file
                    content.truncate(0)
                    self._fill(file, content)
                    right, found = self._check(file, content)
            if not right:
                part.unlink()
                raise IntegrityError(
                    f"{scrub(file.url)}: expected hash {file.sha256 or file.git_sha1}, "
                    f"found sha256 {found[1]}",
                    hint="a proxy or mirror changed it, or the source moved; run it again",
                )
            part.replace(path)
            sync_folder(path.parent)
        return found

    def _check(self, file: WeightFile, content: BinaryIO) -> tuple[bool, tuple[int, str]]:
        content.seek(0)
        size, sha256, git = _hashes(content)
        wanted = file.sha256 or file.git_sha1
        return wanted is None or wanted in (sha256, git), (size, sha256)

    def _fill(self, file: WeightFile, content: BinaryIO) -> None:
        failures = 0
        furthest = content.seek(0, 2)
        while True:
            have = content.seek(0, 2)
            try:
                self._receive(file, content, have)
                return
            except TransferError:
                # Only what was never reached before is progress: starting again is not.
                if (reached := content.seek(0, 2)) >= furthest + PROGRESS_BYTES:
                    furthest, failures = reached, 0
                failures += 1
                if failures >= ATTEMPTS:
                    raise
                self.http.sleep(failures)

    def _receive(self, file: WeightFile, content: BinaryIO, have: int) -> None:
        if have and have == file.size:
            return
        if file.size is not None and have > file.size:
            content.truncate(0)
            have = 0
        headers = {"Accept-Encoding": "identity", **self._headers}
        if have:
            headers["Range"] = f"bytes={have}-"
        with self.http.stream(file.url, what=file.path, headers=headers, accept=(200, 206, 416),
                              own_auth=bool(self._headers)) as stream:  # fmt: skip
            place = parse_content_range(stream.headers.get("Content-Range", ""))
            if stream.status != 206 or place is None or place[0] != have:
                content.truncate(0)
                if stream.status != 200:
                    raise TransferError(f"{scrub(file.url)}: expected to continue at byte "
                                        f"{have}, found that the server cannot")  # fmt: skip
                have = 0
            for chunk in self._chunks(stream.chunks()):
                have += len(chunk)
                if file.size is None:
                    self._keep_reserve()
                elif have > file.size:
                    raise IntegrityError(
                        f"{scrub(file.url)}: expected {file.size} bytes, found more"
                    )
                write_all(content, chunk)
                self.progress(file.path, have, file.size)
        if file.size is not None and have != file.size:
            raise TransferError(
                f"{scrub(file.url)}: expected {file.size} bytes, found that it ends after {have}",
                hint="run the same command again; it continues",
            )

    def _keep_reserve(self) -> None:
        """For a file whose size nobody says: it may have no end."""
        if (free := free_bytes(self.folder)) < RESERVE:
            raise DiskError(f"{self.folder}: expected to leave {RESERVE / 1e9:.1f} GB free, found "
                            f"{free / 1e9:.1f} GB", hint="free some space, or name another folder "
                            "with --to")  # fmt: skip

    def _chunks(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stop.is_set():
                raise _Stopped
            with self._lock:
                self.received += len(chunk)
            yield chunk


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _hashes(content: BinaryIO) -> tuple[int, str, str]:
    """Size, sha256 and git's hash of what is left of an open file."""
    start = content.tell()
    size = content.seek(0, 2) - start
    content.seek(start)
    sha256 = hashlib.sha256()
    git = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    is_small = size < 64 << 20  # large files have a sha256; git's is for small ones alone
    while block := content.read(_BLOCK):
        sha256.update(block)
        if is_small:
            git.update(block)
    return size, sha256.hexdigest(), git.hexdigest() if is_small else ""
