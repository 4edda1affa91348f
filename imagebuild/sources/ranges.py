"""Reads a remote file by HTTP ranges, and shows the fetched parts as one seekable file.

It parses no zip and caches nothing on disk.
"""

from __future__ import annotations

import bisect
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import NamedTuple

from imagebuild.errors import EngineError, IntegrityError
from imagebuild.sources.download import parse_content_range
from imagebuild.sources.http import CONNECTIONS, Http, Reply

GAP = 64 << 10  # bytes; a smaller hole is fetched along, since a request costs more


class RangesUnsupportedError(EngineError):
    """The server answers a range with the whole file, or refuses ranges."""


class Span(NamedTuple):
    """Bytes `start` up to, not including, `end`."""

    start: int
    end: int


def coalesce(spans: Iterable[Span], gap: int = GAP) -> list[Span]:
    """Joins spans that overlap or have at most `gap` bytes between them; sorted, none empty."""
    joined: list[Span] = []
    for span in sorted(span for span in spans if span.end > span.start):
        if joined and span.start - joined[-1].end <= gap:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


class RangeReader:
    """Fetches ranges of one URL and refuses answers that are not all of the same file.

    Attributes:
        size: bytes of the whole file; None until the first answer where the index did not say.
    """

    def __init__(self, http: Http, url: str, what: str, size: int | None = None) -> None:
        self.http = http
        self.url = url
        self.what = what
        self.size = size
        self._version: str | None = None
        self._answered = False
        self._lock = threading.Lock()

    def tail(self, length: int) -> tuple[int, bytes]:
        """Offset and content of the last `length` bytes, or of all when the file is shorter.

        Raises:
            RangesUnsupportedError: fetch the whole file instead.
            IntegrityError: the file is not the one that was asked before.
            EngineError: the network failed.
        """
        if self.size is not None:
            start = max(0, self.size - length)
            return start, self.fetch(Span(start, self.size))
        return self._ask(f"bytes=-{length}", None)

    def fetch(self, span: Span) -> bytes:
        """Content of `span`; errors as in `tail`."""
        if span.end <= span.start:
            return b""
        return self._ask(f"bytes={span.start}-{span.end - 1}", span)[1]

    def _ask(self, text: str, span: Span | None) -> tuple[int, bytes]:
        headers = {"Range": text, "Accept-Encoding": "identity"}
        # Only a strong ETag may be sent back in If-Range; a date is too coarse.
        if self._version and self._version.startswith('"'):
            headers["If-Range"] = self._version
        reply = self.http.get(
            self.url, what=self.what, headers=headers, accept=(206,), unread=(200, 416, 501)
        )
        if reply.status != 206:
            if "If-Range" in headers or (reply.status == 416 and self._answered):
                raise self._changed(f"status {reply.status}")
            raise RangesUnsupportedError(
                f"{self.url}: expected status 206 for a range, found {reply.status}"
            )
        return self._check(reply, span)

    def _check(self, reply: Reply, span: Span | None) -> tuple[int, bytes]:
        text = reply.headers.get("Content-Range", "")
        place = parse_content_range(text)
        if place is None:
            raise RangesUnsupportedError(f"{self.url}: expected a Content-Range, found {text!r}")
        start, end, size = place
        with self._lock:
            version = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
            if size is not None and self.size is not None and size != self.size:
                raise self._changed(f"{size} bytes instead of {self.size}")
            if self._answered and version != self._version:
                raise self._changed(f"version {version} instead of {self._version}")
            self._answered, self._version, self.size = True, version, self.size or size
        if span is not None and (start, end) != span:
            raise IntegrityError(
                f"{self.url}: expected bytes {span.start} to {span.end}, found {start} to {end}"
            )
        if len(reply.body) != end - start:
            raise IntegrityError(
                f"{self.url}: expected {end - start} bytes at {start}, found {len(reply.body)}"
            )
        return start, reply.body

    def _changed(self, found: str) -> IntegrityError:
        return IntegrityError(
            f"{self.url}: expected one file throughout, found that it changed while reading "
            f"({found})",
            hint="run the same command again",
        )


class RangeFile(io.RawIOBase):
    """A seekable file of `size` bytes whose parts come from `fetch` when they are first read."""

    def __init__(self, size: int, fetch: Callable[[Span], bytes]) -> None:
        super().__init__()
        self._size = size
        self._fetch = fetch
        self._at = 0
        self._parts: list[tuple[int, bytes]] = []  # by offset; they may overlap

    def add(self, start: int, data: bytes) -> None:
        """Puts in content that was fetched elsewhere."""
        if data:
            bisect.insort(self._parts, (start, data), key=lambda part: part[0])

    def fill(self, spans: Iterable[Span], gap: int = GAP) -> None:
        """Fetches what is not there yet of `spans`, several requests at a time."""
        joined = coalesce([hole for span in spans for hole in self._holes(span)], gap)
        if len(joined) <= 1:
            for span in joined:
                self.add(span.start, self._fetch(span))
            return
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            # Each with the context of who asks, to whose account the bytes go.
            tasks = [pool.submit(copy_context().run, self._fetch, span) for span in joined]
            for span, task in zip(joined, tasks, strict=True):
                self.add(span.start, task.result())

    def forget(self) -> None:
        """Drops all content; it is fetched again if it is read again."""
        self._parts.clear()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the start of the file")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        span = Span(self._at, max(end, self._at))
        self.fill([span], gap=0)
        pieces = []
        while self._at < span.end:
            start, part = self._part_at(self._at)
            piece = part[self._at - start : span.end - start]
            pieces.append(piece)
            self._at += len(piece)
        return b"".join(pieces)

    def _part_at(self, at: int) -> tuple[int, bytes]:
        for start, part in self._parts:
            if start <= at < start + len(part):
                return start, part
        raise OSError("short range")  # `fetch` gave less than it was asked for

    def _holes(self, span: Span) -> Iterator[Span]:
        """What of `span` is not there."""
        at = span.start
        for start, part in self._parts:
            if start >= span.end:
                break
            if start > at:
                yield Span(at, start)
            at = max(at, start + len(part))
        if at < span.end:
            yield Span(at, span.end)
