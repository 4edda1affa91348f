"""Whether an API lives, asked of whatever may listen on its port."""

from __future__ import annotations

import socket
import threading

import pytest
from serving.supervise import is_healthy


@pytest.mark.parametrize(("answer", "healthy"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
    (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", False),
    (b"SSH-2.0-OpenSSH_9.6\r\n", False),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", False),
    (b"", False),
])  # fmt: skip
def test_whatever_answers(answer: bytes, healthy: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert is_healthy(f"http://127.0.0.1:{server.getsockname()[1]}") is healthy
        thread.join()
