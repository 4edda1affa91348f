"""A test double of a package index: a real HTTP server on 127.0.0.1 over a folder of wheels.

It speaks the JSON and the HTML form of the simple API, serves ranges, and fails on request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import trustme

JSON = "application/vnd.pypi.simple.v1+json"


@functools.cache
def authority() -> trustme.CA:
    """Who vouches for the double's TLS; nobody knows its key after the tests."""
    return trustme.CA()


class Asked(NamedTuple):
    """One request as it came in."""

    path: str
    range: str
    status: int


@dataclass
class Faults:
    """How the server fails; files and index pages alike where nothing else is said.

    Attributes:
        ranges: whether files are served by range.
        suffix_ranges: whether "bytes=-N" is understood (416 otherwise).
        etag: whether answers carry an ETag.
        length: whether file answers say Content-Length (they end by closing otherwise).
        busy: this many answers are `busy_status` with that Retry-After; -1 is all of them.
        busy_status, retry_after: see `busy`.
        dribble: bodies come in pieces of that many bytes.
        drop_after: each entry breaks one file answer off after that many bytes.
        cut: file answers declare and send this many bytes less.
        flip: a byte at this offset of each file is wrong.
        change_after: after this many file answers the file is another one.
        grow: bytes that a changed file has more.
        wrong_range: the answer's Content-Range starts one byte later than was asked.
        html_only: no JSON form.
        relative: links are relative to the page.
        hashes: whether the index gives sha256.
        sizes: whether the JSON form gives sizes.
        page: served instead of every index page.
        auth: user and password that are asked for.
        hold: answers wait for this event.
        yanked: reason by file name.
    """

    ranges: bool = True
    suffix_ranges: bool = True
    etag: bool = True
    length: bool = True
    busy: int = 0
    busy_status: int = 503
    retry_after: str = "0"
    dribble: int = 0
    drop_after: list[int] = field(default_factory=list)
    cut: int = 0
    flip: int | None = None
    change_after: int | None = None
    grow: int = 0
    wrong_range: bool = False
    html_only: bool = False
    relative: bool = False
    hashes: bool = True
    sizes: bool = True
    page: bytes | None = None
    auth: tuple[str, str] | None = None
    hold: threading.Event | None = None
    yanked: dict[str, str] = field(default_factory=dict)


class IndexServer:
    """Serves `folder` until the end of the `with` block.

    Attributes:
        faults: may be changed between requests.
        asked: the requests so far.
        held: is set once a request waits for `faults.hold`.
    """

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.folder = folder
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.file_answers = 0
        self.held = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.double = self
        self.scheme = "http"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority().issue_cert("127.0.0.1").configure_cert(context)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> IndexServer:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.faults.hold is not None:
            self.faults.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}/simple"

    def file_url(self, name: str) -> str:
        return f"{self.scheme}://{self.netloc}/files/{name}"

    def files_asked(self) -> list[Asked]:
        return [one for one in self.asked if one.path.startswith("/files/")]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    double: IndexServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients break off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        double: IndexServer = self.server.double  # type: ignore[attr-defined]
        faults = double.faults
        if faults.hold is not None:
            double.held.set()
            faults.hold.wait()
        with double.lock:
            is_busy = faults.busy != 0
            faults.busy -= faults.busy > 0
        path = unquote(self.path)
        if is_busy:
            self._send(faults.busy_status, b"busy", {"Retry-After": faults.retry_after})
        elif faults.auth is not None and not self._is_allowed(faults.auth):
            self._send(401, b"who are you", {"WWW-Authenticate": "Basic"})
        elif match := re.fullmatch(r"/simple/([^/]+)/", path):
            self._page(double, match[1])
        elif path.startswith("/moved/"):
            self._send(302, b"", {"Location": "/" + path.removeprefix("/moved/")})
        elif path.startswith("/files/") and (file := double.folder / Path(path).name).is_file():
            self._file(double, file)
        else:
            self._send(404, b"no such page", {})

    def _is_allowed(self, auth: tuple[str, str]) -> bool:
        token = base64.b64encode(":".join(auth).encode()).decode()
        return self.headers.get("Authorization") == f"Basic {token}"

    def _page(self, double: IndexServer, project: str) -> None:
        faults = double.faults
        pattern = project.replace("-", "[-_.]").lower()
        files = [
            file
            for file in sorted(double.folder.iterdir())
            if re.match(rf"{pattern}-\d", file.name.lower())
        ]
        if not files and faults.page is None:
            self._send(404, b"no such project", {})
            return
        rows = []
        for file in files:
            url = f"../../files/{file.name}" if faults.relative else double.file_url(file.name)
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest() if faults.hashes else ""
            rows.append((file, url, sha256))
        if not faults.html_only and JSON in self.headers.get("Accept", ""):
            kind, body = JSON, self._json(project, rows, faults)
        else:
            kind, body = "text/html; charset=utf-8", self._html(rows, faults)
        body = faults.page if faults.page is not None else body
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        headers = {"Content-Type": kind} | ({"ETag": etag} if faults.etag else {})
        if faults.etag and self.headers.get("If-None-Match") == etag:
            self._send(304, b"", headers)
        else:
            self._send(200, body, headers)

    def _json(self, project: str, rows: list[tuple[Path, str, str]], faults: Faults) -> bytes:
        files = []
        for file, url, sha256 in rows:
            entry: dict[str, object] = {
                "filename": file.name,
                "url": url,
                "hashes": {"sha256": sha256} if sha256 else {},
                "requires-python": ">=3.10",
                "upload-time": "2026-10-05T07:40:41.009965Z",
                "yanked": faults.yanked.get(file.name, False),
            }
            if faults.sizes:
                entry["size"] = file.stat().st_size
            files.append(entry)
        page = {"meta": {"api-version": "1.1"}, "name": project, "files": files, "versions": []}
        return json.dumps(page).encode()

    def _html(self, rows: list[tuple[Path, str, str]], faults: Faults) -> bytes:
        links = []
        for file, url, sha256 in rows:
            target = f"{url}#sha256={sha256}" if sha256 else url
            yanked = ""
            if file.name in faults.yanked:
                yanked = f' data-yanked="{html.escape(faults.yanked[file.name])}"'
            links.append(f'<a href="{html.escape(target)}"{yanked}>{file.name}</a><br/>')
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def _file(self, double: IndexServer, file: Path) -> None:
        faults = double.faults
        data = bytearray(file.read_bytes())
        with double.lock:
            double.file_answers += 1
            is_changed = (
                faults.change_after is not None and double.file_answers > faults.change_after
            )
            drop = faults.drop_after.pop(0) if faults.drop_after else None
        if is_changed:
            data += bytes(faults.grow)
        if faults.flip is not None:
            data[faults.flip] ^= 0xFF
        data = data[: len(data) - faults.cut]
        etag = f'"{"changed" if is_changed else "first"}"'
        headers = {"ETag": etag} if faults.etag else {}
        asked = self.headers.get("Range", "")
        if self.headers.get("If-Range", etag) != etag or not faults.ranges:
            asked = ""
        self._part(bytes(data), asked, headers, faults, drop)

    def _part(
        self, data: bytes, asked: str, headers: dict[str, str], faults: Faults, drop: int | None
    ) -> None:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if match is None:
            self._send(200, data, headers, drop)
            return
        if match[1]:
            start, end = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
        else:
            start, end = max(0, len(data) - int(match[2])), len(data)
        if start >= len(data) or not (match[1] or faults.suffix_ranges):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        told = start + faults.wrong_range
        headers["Content-Range"] = f"bytes {told}-{end - 1}/{len(data)}"
        self._send(206, data[start:end], headers, drop)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], drop: int | None = None
    ) -> None:
        double: IndexServer = self.server.double  # type: ignore[attr-defined]
        with double.lock:
            double.asked.append(Asked(self.path, self.headers.get("Range", ""), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if double.faults.length or not self.path.startswith("/files/"):
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if status == 304:
            return
        if drop is not None and drop < len(body):
            self.wfile.write(body[:drop])
            self.wfile.flush()
            self.close_connection = True
            return
        step = double.faults.dribble or len(body) or 1
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
