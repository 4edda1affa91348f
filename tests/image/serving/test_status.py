from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import state, status, statusfacts, statusmcp, statuspage
from serving.status import Options, StatusServer, main, read_token

TOKEN = "0123456789abcdef0123"
CALL = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "cluster"}}'
PATHS = ("/", "/healthz", "/status.json", "/cluster.json", "/metrics", "/mcp", "/nothing")


@pytest.fixture
def shown(tmp_path: Path) -> state.StateFile:
    return state.StateFile(tmp_path / "run", "gb10-2x")


class Client:
    def __init__(self, server: StatusServer) -> None:
        self.server = server

    def __call__(self, path: str, method: str = "GET", body: str | None = None,
                 **headers: str) -> tuple[int, str, http.client.HTTPMessage]:  # fmt: skip
        connection = http.client.HTTPConnection(
            self.server.options.host, self.server.port, timeout=10
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text, reply.headers


@pytest.fixture
def ask(shown: state.StateFile, tmp_path: Path) -> Iterator[Client]:
    log = tmp_path / "vllm.log"
    log.write_text("".join(f"line {number} \x1b[32mINFO\x1b[0m\n" for number in range(300)))
    server = StatusServer(Options("127.0.0.1", 0, shown.path.parent, log))
    server.start()
    yield Client(server)
    server.stop()


@pytest.fixture
def guarded(shown: state.StateFile) -> Iterator[Client]:
    """A server with a token, as off loopback."""
    server = StatusServer(Options("127.0.0.2", 0, shown.path.parent, None, TOKEN))
    server.start()
    yield Client(server)
    server.stop()


class TestPages:
    def test_health_follows_the_start(self, ask: Client, shown: state.StateFile) -> None:
        for stage in state.STAGES[:-2]:
            shown.begin(stage)
            assert ask("/healthz")[:2] == (503, f"{stage}\n")
        shown.begin("serving")
        assert ask("/healthz")[:2] == (200, "serving\n")
        shown.fail("rank 1 (10.0.0.2) is lost: it closed the connection")
        assert ask("/healthz")[:2] == (503, "failed\n")
        status, text, _ = ask("/status.json")
        assert status == 200 and json.loads(text)["error"].startswith("rank 1")

    def test_without_a_state(self, tmp_path: Path) -> None:
        server = StatusServer(Options("127.0.0.1", 0, tmp_path / "none"))
        server.start()
        try:
            assert Client(server)("/healthz")[:2] == (503, "none\n")
            assert Client(server)("/")[0] == 200
            (tmp_path / "none").mkdir()
            (tmp_path / "none/state.json").write_text("{half")
            assert json.loads(Client(server)("/status.json")[1])["stage"] == "none"
        finally:
            server.stop()

    def test_metrics(self, ask: Client, shown: state.StateFile) -> None:
        shown.begin("load")
        shown.begin("serving")
        text = ask("/metrics")[1]
        assert "\nglm53_healthy 1\n" in text and 'glm53_stage{stage="serving"} 1' in text
        assert re.search(r'glm53_stage_seconds\{stage="load"\} \d+\.\d\n', text)
        assert re.search(r'glm53_memory_bytes\{kind="available"\} \d{8,}\n', text)
        assert "\n\n" not in text and text.endswith("\n")

    def test_what_is_not_there(self, ask: Client) -> None:
        assert ask("/../etc/passwd")[0] == ask("/mcp/x")[0] == 404
        assert ask("/mcp")[0] == 405
        assert ask("/status.json", "POST", "{}")[0] == 404

    def test_the_page_holds_the_state_as_text(self, ask: Client, shown: state.StateFile) -> None:
        shown.begin("load", "</script><script>alert(1)</script>")
        shown.update(knobs={"GLM_X": "<img src=x onerror=alert(2)>"})
        _, text, headers = ask("/")
        assert "<script>alert" not in text and "<img" not in text
        [number] = re.findall(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])
        assert text.count(f'nonce="{number}"') == 3 and "{{" not in text
        assert number not in ask("/")[1], "a nonce that is known beforehand keeps nobody out"
        held = json.loads(re.findall(r'id="state"[^>]*>(.*?)</script>', text, re.DOTALL)[0])
        assert held["knobs"] == {"GLM_X": "<img src=x onerror=alert(2)>"}

    def test_the_page_names_every_stage(self) -> None:
        page = (Path(statuspage.__file__).with_name("status.html")).read_text()
        for stage in state.STAGES:
            assert re.search(rf"\b{stage}: \"", page), stage


class TestWhoMayAsk:
    @pytest.mark.parametrize("path", PATHS)
    def test_nothing_without_the_token(self, guarded: Client, path: str) -> None:
        wrong: list[dict[str, str]] = [
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"},
            {"Cookie": "glm53_status=wrong"}, {"Cookie": "; ;=\x01"},
        ]  # fmt: skip
        for headers in wrong:
            status, text, _ = guarded(path, **headers)
            assert (status, text) == (401, "a token is needed\n"), headers
        assert guarded(path, "POST", "{}")[0] == 401
        assert guarded(f"{path}?token=wrong")[0] == 401

    def test_with_the_token(self, guarded: Client) -> None:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert guarded("/status.json", **bearer)[0] == 200
        assert guarded("/", **bearer, Host="box.lan:8082")[0] == 200
        status, _, headers = guarded(f"/?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert guarded("/", Cookie=cookie.partition(";")[0])[0] == 200
        assert TOKEN not in guarded("/", **bearer)[1]

    def test_off_loopback_there_is_no_server_without_a_token(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is not loopback, so it needs a token"):
            StatusServer(Options("0.0.0.0", 0, tmp_path))
        with pytest.raises(ValueError, match="needs a token"):
            StatusServer(Options("::", 0, tmp_path))

    @pytest.mark.parametrize("headers", [
        {"Host": "evil.example"}, {"Host": "evil.example:8082"}, {"Host": "["},
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": ""},
    ])  # fmt: skip
    def test_another_site_in_a_browser_here_gets_nothing(self, ask: Client, headers) -> None:
        call = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        for path, method, body in (("/status.json", "GET", None), ("/mcp", "POST", call)):
            assert ask(path, method, body, **headers)[0] == 403

    def test_tokens_of_files(self, tmp_path: Path) -> None:
        (tmp_path / "good").write_text(f"{TOKEN}\n")
        assert read_token(tmp_path / "good") == TOKEN
        for text in ("", "short", "with space and more letters", 'quote"' * 4, "ümlaut" * 5):
            (tmp_path / "bad").write_text(text)
            with pytest.raises(ValueError, match="expected a token of 16 or more"):
                read_token(tmp_path / "bad")

    def test_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--host", "0.0.0.0", "--folder", str(tmp_path)]) == 2
        assert main(["--token-file", str(tmp_path / "none")]) == 2
        assert "error: " in capsys.readouterr().err

    def test_the_command_knows_the_log(self, tmp_path: Path) -> None:
        (tmp_path / "vllm.log").write_text("Loading weights took 9 s\n")
        command = [sys.executable, "-m", "serving.status", "--port", "0", "--folder", str(tmp_path),
                   "--log", str(tmp_path / "vllm.log")]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(Path(state.__file__).parents[1])}
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                port = int(server.stderr.readline().rpartition(":")[2])
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("POST", "/mcp", CALL.replace("cluster", "log"))
                assert "Loading weights took 9 s" in connection.getresponse().read().decode()
                connection.close()
            finally:
                server.kill()


class TestMcp:
    def call(self, ask: Client, method: str, **params: Any) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        status, text, _ = ask("/mcp", "POST", json.dumps(body))
        found: dict[str, Any] = json.loads(text)
        assert status == 200 and found["id"] == 7 and found["jsonrpc"] == "2.0"
        return found

    def text(self, ask: Client, name: str, **arguments: Any) -> str:
        found = self.call(ask, "tools/call", name=name, arguments=arguments)
        return str(found["result"]["content"][0]["text"])

    def test_a_session(self, ask: Client, shown: state.StateFile) -> None:
        started = self.call(ask, "initialize", protocolVersion="2025-06-18")["result"]
        assert (
            started["protocolVersion"] == statusmcp.VERSION and "tools" in started["capabilities"]
        )
        assert ask("/mcp", "POST", '{"jsonrpc": "2.0", "method": "notifications/initialized"}')[
            :2
        ] == (202, "")
        tools = self.call(ask, "tools/list")["result"]["tools"]
        assert [tool["name"] for tool in tools] == ["status", "cluster", "log"]
        assert all(tool["annotations"]["readOnlyHint"] for tool in tools)
        shown.begin("warmup")
        assert json.loads(self.text(ask, "status"))["stage"] == "warmup"
        assert json.loads(self.text(ask, "cluster"))["ranks"][0]["stage"] == "warmup"

    def test_the_log(self, ask: Client) -> None:
        assert self.text(ask, "log", lines=2) == "line 298 INFO\nline 299 INFO"
        assert self.text(ask, "log", contains="LINE 17 ") == "line 17 INFO"
        assert self.text(ask, "log", contains="zzz") == "no such lines"

    @pytest.mark.parametrize(("body", "code"), [
        ("{", -32700), ("[]", -32600), ("3", -32600), ('{"id": 1}', -32600),
        ('{"id": 1, "method": "shell"}', -32601),
        ('{"id": 1, "method": "ping", "params": [1]}', -32602),
        ('{"id": 1, "method": "tools/call", "params": {"name": "find_files"}}', -32602),
        ('{"id": 1, "method": "tools/call", "params": {"name": "log", "arguments": {"lines": -1}}}',
         -32602),
        ('{"id": 1, "method": "tools/call", "params": {"name": "log", "arguments": [1]}}', -32602),
        ("[" * 3000, -32700),
    ])  # fmt: skip
    def test_malformed(self, ask: Client, body: str, code: int) -> None:
        status, text, _ = ask("/mcp", "POST", body)
        assert status == 200 and json.loads(text)["error"]["code"] == code

    def test_batches_and_size(self, ask: Client) -> None:
        two = '[{"id": 1, "method": "ping"}, {"method": "x"}, {"id": 2, "method": "ping"}]'
        assert [each["id"] for each in json.loads(ask("/mcp", "POST", two)[1])] == [1, 2]
        assert ask("/mcp", "POST", "[" + " " * 70_000 + "]")[0] == 413


class TestCluster:
    def test_all_ranks(self, shown: state.StateFile, tmp_path: Path) -> None:
        other = state.StateFile(tmp_path / "other", "gb10-2x")
        other.update(rank=1, fingerprint={"digest": "f" * 64})
        other.fail("kernel: the head has sha256:a, rank 1 has sha256:c")
        peer = StatusServer(Options("127.0.0.3", 0, other.path.parent, None, TOKEN))
        peer.start()
        shown.update(rank=0, peers=["own", f"127.0.0.3:{peer.port}", "127.0.0.4:9"])
        head = StatusServer(Options("127.0.0.2", 0, shown.path.parent, None, TOKEN))
        head.start()
        try:
            status, text, _ = Client(head)("/cluster.json", Authorization=f"Bearer {TOKEN}")
            called = Client(head)("/mcp", "POST", CALL, Authorization=f"Bearer {TOKEN}")[1]
        finally:
            head.stop()
            peer.stop()
        mine, one, two = json.loads(text)["ranks"]
        assert status == 200 and mine["stage"] == "preflight"
        assert (one["rank"], one["stage"], one["fingerprint"]) == (1, "failed", "f" * 64)
        assert one["error"].startswith("kernel: ")
        assert two["rank"] == 2 and two["stage"] == "unknown" and "does not answer" in two["error"]
        assert json.loads(json.loads(called)["result"]["content"][0]["text"]) == json.loads(text)

    def test_the_order_is_that_of_the_ranks(self, shown: state.StateFile) -> None:
        """Whoever is asked; and before they have joined there is one."""
        alone = statusfacts.cluster(statusfacts.document(shown.path.parent), "")
        assert [rank["rank"] for rank in alone["ranks"]] == [None]
        shown.update(rank=1, peers=["127.0.0.1:9", "here:1", "[::1]:9"])
        ranks = statusfacts.cluster(statusfacts.document(shown.path.parent), "")["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2]
        assert [rank["stage"] for rank in ranks] == ["unknown", "preflight", "unknown"]
        assert ranks[1]["address"] == "here:1"

    @pytest.mark.parametrize("answer", [b"", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n[1]",
                                        b"HTTP/1.1 401 Unauthorized\r\n\r\n{}"])  # fmt: skip
    def test_a_peer_that_talks_nonsense(self, shown: state.StateFile, answer: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            shown.update(rank=0, peers=["own", f"127.0.0.1:{server.getsockname()[1]}"])
            thread = threading.Thread(target=self.talk, args=(server, answer))
            thread.start()
            found = statusfacts.cluster(statusfacts.document(shown.path.parent), "")
            thread.join()
        assert found["ranks"][1]["healthy"] is False
        assert "does not answer" in found["ranks"][1]["error"]

    @staticmethod
    def talk(server: socket.socket, answer: bytes) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    def test_memory(self, tmp_path: Path) -> None:
        assert statusfacts.memory()["total"] > statusfacts.memory()["available"] > 0
        assert statusfacts.memory(tmp_path / "none") == {}


class TestHostileClients:
    def test_many_idle_connections_keep_nobody_out(self, ask: Client, monkeypatch) -> None:
        monkeypatch.setattr(status, "_CONNECTIONS", 4)
        before = threading.active_count()
        idle = [socket.create_connection(("127.0.0.1", ask.server.port)) for _ in range(30)]
        try:
            assert ask("/healthz")[0] == 503
            assert threading.active_count() <= before + 8
            idle[0].settimeout(10)
            assert idle[0].recv(1) == b"", "who was first has gone"
        finally:
            for one in idle:
                one.close()

    def test_a_slow_one_is_cut(self, ask: Client, monkeypatch) -> None:
        monkeypatch.setattr(status, "_LONGEST_S", 0.0)
        with socket.create_connection(("127.0.0.1", ask.server.port), timeout=10) as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            assert slow.recv(1) == b""

    def test_a_body_is_not_the_next_request(self, ask: Client) -> None:
        inner = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for head in (b"Content-Length: %d" % len(inner), b"transfer-encoding: chunked"):
            with socket.create_connection(("127.0.0.1", ask.server.port), timeout=10) as one:
                one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n"
                            + inner)  # fmt: skip
                said = b""
                with contextlib.suppress(ConnectionResetError):
                    while block := one.recv(65536):
                        said += block
            assert said.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in said

    @pytest.mark.parametrize("line", ["GET http://[ HTTP/1.1", "GET //[?token=x HTTP/1.1"])
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_an_address_that_is_none(self, ask: Client, line: str, method: str) -> None:
        with socket.create_connection(("127.0.0.1", ask.server.port), timeout=10) as one:
            one.sendall(line.replace("GET", method).encode() + b"\r\nHost: localhost\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 404 ")

    @pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"])
    def test_other_methods_tell_nothing(self, guarded: Client, method: str) -> None:
        code, text, headers = guarded("/status.json", method)
        assert code == 501 and "stage" not in text and "Access-Control-Allow-Origin" not in headers

    def test_a_length_of_many_digits(self, ask: Client) -> None:
        assert ask("/mcp", "POST", None, Content_Length="9" * 5000)[0] == 413

    def test_an_id_of_any_depth(self, ask: Client) -> None:
        body = '{"method": "ping", "id": ' + "[" * 900 + "]" * 900 + "}"
        status_code, text, _ = ask("/mcp", "POST", body)
        assert (status_code, json.loads(text)["error"]["code"]) == (200, -32600)

    def test_no_name_server_is_asked(self, tmp_path: Path, monkeypatch) -> None:
        def asked(*_: object) -> str:
            raise AssertionError("a dead name server would hold up the start")

        monkeypatch.setattr(socket, "getfqdn", asked)
        StatusServer(Options("127.0.0.1", 0, tmp_path))._server.server_close()
