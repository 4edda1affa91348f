"""The wire between ranks: who is there, with which artefacts, and whether they still are.

Each worker holds one TCP connection to the head, from joining to the end. A frame is a line of
JSON. The worker sends {"hello": ...}; once all ranks are there, the head answers {"welcome": ...}
or {"refused": [sentence, ...], "code": exit code}. After that either side sends
{"leave": sentence}, or just goes; the connection lasts until one side closes it, which says that it
has ended.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
_LARGEST = 1 << 20  # bytes of a frame
_SEND_S = 10.0  # how long a peer may take to accept a frame
# A machine without power sends no FIN: it counts as lost after IDLE + COUNT * INTERVAL seconds.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 30_000,
}


class LinkError(Exception):
    """A connection broke, or what came over it is no frame; the message is a clause."""


class Link:
    """One connection, with frames as JSON objects."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.settimeout(_SEND_S)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, frame: Mapping[str, Any]) -> None:
        """Sends one frame. Raises LinkError."""
        try:
            self._socket.sendall(json.dumps(frame).encode() + b"\n")
        except OSError as error:
            raise LinkError(_reason(error)) from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next frame; None when none has come within `seconds`. Raises LinkError."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                if not select.select([self._socket], [], [], left)[0]:
                    return None
                block = self._socket.recv(65536)
            except OSError as error:
                raise LinkError(_reason(error)) from None
            except ValueError:  # what select says of a socket that another thread has closed
                raise LinkError("this side closed the connection") from None
            if not block:
                raise LinkError("it closed the connection")
            self._rest += block
            if len(self._rest) > _LARGEST:
                raise LinkError("it sent no frame")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            raise LinkError("it sent no frame")
        return frame

    def close(self) -> None:
        """Ends it; never raises."""
        with contextlib.suppress(OSError):
            self._socket.close()


def listen(address: str, port: int) -> socket.socket:
    """The head's socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=64)


def connect(address: str, port: int, seconds: float) -> Link:
    """A worker's connection. Raises OSError."""
    return Link(socket.create_connection((address, port), timeout=seconds))


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
