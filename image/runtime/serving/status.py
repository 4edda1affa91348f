"""The status server: a page, health, state and metrics as JSON and text, and read-only MCP tools.

It answers from the state file alone, so it works from the first second of a start and after a
failure. Off loopback nothing is answered without the token. A web page of somebody else, open in a
browser on this machine, gets nothing either: its Origin is not ours, and a name that was rebound
to this address is not a host that we answer to.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import ipaddress
import json
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from serving import smallfile, state, statusfacts, statusmcp, statuspage

_COOKIE = "glm53_status"
_LARGEST = 1 << 16  # bytes of a request's body
_TIMEOUT_S = 15  # for a client that connects and says nothing
_LONGEST_S = 60.0  # that a connection lasts, however slowly it talks
# At a time. The threads and files of connections are those of the process that looks after vLLM.
_CONNECTIONS = 64
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"


@dataclass(frozen=True)
class Options:
    """Where and what to answer.

    Attributes:
        host, port: to bind to; port 0 takes a free one.
        folder: of the state file.
        log: vLLM's log, for the MCP tool; None for none.
        token: that every request must show; "" only on loopback.
    """

    host: str
    port: int
    folder: Path
    log: Path | None = None
    token: str = ""


class StatusServer:
    """Runs in a thread until `stop`."""

    def __init__(self, options: Options) -> None:
        """Binds.

        Raises:
            ValueError: an address off loopback without a token.
            OSError: the address cannot be bound to.
        """
        if not is_loopback(options.host) and not options.token:
            raise ValueError(f"{options.host}:{options.port} is not loopback, so it needs a token: "
                             "set GLM_STATUS_TOKEN_FILE, or GLM_STATUS_HOST=127.0.0.1")  # fmt: skip
        self.options = options
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._server = _Server((options.host, options.port), options, family)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="status", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; requests under way are cut."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], options: Options, family: int) -> None:
        self.address_family = family
        self.options = options
        self._ends: dict[socket.socket, float] = {}  # when each open connection is cut
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds, without HTTPServer's question to a name server that may not be there."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answers in a thread; where too many are connected, the one that was first goes."""
        with self._lock:
            many = len(self._ends)
            if many >= _CONNECTIONS:
                self._cut(min(self._ends, key=self._ends.__getitem__))
            if many < 2 * _CONNECTIONS:
                self._ends[request] = time.monotonic() + _LONGEST_S
        if many < 2 * _CONNECTIONS:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """Is called when a connection has ended."""
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Is called every moment."""
        now = time.monotonic()
        with self._lock:
            for request in [one for one, end in self._ends.items() if now > end]:
                self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        self._ends[request] = math.inf  # once; its thread takes it away
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: a client that goes away is no fault of this server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "glm53-status"
    sys_version = ""
    timeout = _TIMEOUT_S
    server: _Server

    def log_message(self, *_arguments: object) -> None:
        """Says nothing: the log is vLLM's, and a path may hold a token."""

    def do_GET(self) -> None:
        """Answers a page."""
        path = self._path()
        if not self._is_ours() or self._token_in_address(path) or not self._is_allowed():
            return
        options = self.server.options
        document = statusfacts.document(options.folder)
        if path == "/":
            nonce = statuspage.nonce()
            policy = {"Content-Security-Policy": statuspage.policy(nonce)}
            self._answer(HTTPStatus.OK, statuspage.render(document, nonce), _HTML, policy)
        elif path == "/healthz":
            code = HTTPStatus.OK if document["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(code, f"{document['stage']}\n", _TEXT)
        elif path == "/status.json":
            self._json(document)
        elif path == "/cluster.json":
            self._json(statusfacts.cluster(document, options.token))
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, statusfacts.metrics(document), _TEXT)
        elif path == "/mcp":
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "POST only\n", _TEXT, {"Allow": "POST"})
        else:
            self._answer(HTTPStatus.NOT_FOUND, "no such page\n", _TEXT)

    def do_POST(self) -> None:
        """Answers an MCP message."""
        if not self._is_ours() or not self._is_allowed():
            return
        if self._path() != "/mcp":
            self._answer(HTTPStatus.NOT_FOUND, "no such page\n", _TEXT)
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > _LARGEST:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "at most 64 KiB\n", _TEXT)
            return
        answer = statusmcp.answer(self.rfile.read(int(length)), self._tools())
        if answer is None:
            self._answer(HTTPStatus.ACCEPTED, "", _TEXT)
        else:
            self._json(answer)

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path
        except ValueError:  # such as http://[
            return ""

    def _tools(self) -> statusmcp.Source:
        options = self.server.options
        return statusmcp.Source(
            lambda: statusfacts.document(options.folder),
            lambda: statusfacts.cluster(statusfacts.document(options.folder), options.token),
            options.log,
        )

    def _is_ours(self) -> bool:
        """Whether host and origin are this server's own; answers 403 where not."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        # With a token that says who asks, under any name of this machine.
        known = bool(self.server.options.token) or is_loopback(_host_name(host))
        if known and (origin is None or origin.partition("://")[2] == host):
            return True
        self._answer(HTTPStatus.FORBIDDEN, "asked for by another site\n", _TEXT)
        return False

    def _token_in_address(self, path: str) -> bool:
        """Turns /?token=... into a cookie, so that the token stays out of the address line."""
        token = self.server.options.token
        if path != "/" or not token:
            return False
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if not _equal(given, token):
            return False
        cookie = f"{_COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(HTTPStatus.SEE_OTHER, "", _TEXT, {"Location": "/", "Set-Cookie": cookie})
        return True

    def _is_allowed(self) -> bool:
        token = self.server.options.token
        if not token or any(_equal(given, token) for given in self._given()):
            return True
        self._answer(HTTPStatus.UNAUTHORIZED, "a token is needed\n", _TEXT,
                     {"WWW-Authenticate": "Bearer"})  # fmt: skip
        return False

    def _given(self) -> list[str]:
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        given = [value.strip()] if scheme.lower() == "bearer" else []
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return given
        return given + ([cookies[_COOKIE].value] if _COOKIE in cookies else [])

    def _json(self, content: object) -> None:
        self._answer(HTTPStatus.OK, json.dumps(content, indent=1) + "\n", _JSON)

    def _answer(
        self, code: HTTPStatus, text: str, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.command == "POST" or {"content-length", "transfer-encoding"} & {
            name.lower() for name in self.headers
        }:
            # What is left of a body that was not read must not be taken for the next request.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def read_token(file: Path) -> str:
    """The token that a file holds.

    Raises:
        ValueError: it is too short to be one, or cannot stand in a header.
        OSError: the file cannot be read.
    """
    token = smallfile.read(file, smallfile.KEY_BYTES).decode("ascii", "replace").strip()
    if len(token) < 16 or not all(
        33 <= ord(letter) < 127 and letter not in '";,\\' for letter in token
    ):
        raise ValueError(f"{file}: expected a token of 16 or more letters and digits; make one "
                         "with: openssl rand -hex 32")  # fmt: skip
    return token


def main(arguments: list[str] | None = None) -> int:
    """`python3 -m serving.status`: the server alone, to look at a state file."""
    parser = argparse.ArgumentParser(prog="serving.status", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8082)
    parser.add_argument("--folder", type=Path, default=Path(state.DEFAULT_DIR))
    parser.add_argument("--log", type=Path, help="vLLM's log, for the MCP tool")
    parser.add_argument("--token-file", type=Path)
    asked = parser.parse_args(arguments)
    try:
        token = read_token(asked.token_file) if asked.token_file else ""
        server = StatusServer(Options(asked.host, asked.port, asked.folder, asked.log, token))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    server.start()
    sys.stderr.write(f"status on {asked.host}:{server.port}\n")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
