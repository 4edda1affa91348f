from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.errors import EngineError
from imagebuild.servebench import client
from imagebuild.servebench.client import Answer, FailedRequestError, Server
from imagebuild.servebench.load import Level, Run, Shape, measure, prompt
from tests.support.openai_server import OpenAiServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAiServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with OpenAiServer() as running:
        yield running


def bench(url: str, *more: str) -> int:
    return main(["bench", "serve", url, "--format", "json", "--concurrency", "1,4", "--repeats",
                 "2", "--output-tokens", "6", "--prompt-tokens", "20", *more])  # fmt: skip


class TestCommand:
    def test_a_server_with_speculation(self, server: OpenAiServer, tmp_path: Path, capfd) -> None:
        server.behaviour.accepted = 1.57
        assert bench(server.url + "/v1", "--output", str(tmp_path / "a.json")) == 0
        told = json.loads(capfd.readouterr().out)
        assert json.loads((tmp_path / "a.json").read_bytes()) == told
        [measured] = told["servers"]
        assert [level["concurrency"] for level in measured["levels"]] == [1, 4]
        for level in measured["levels"]:
            assert level["failures"] == 0 and len(level["repeats"]) == 2
            assert level["acceptance"] == pytest.approx(2.57)
            assert 0 < level["ttft"] <= level["ttft_p99"] and level["throughput"] > 0
        # one to settle; then two a slot, for each slot of each repeat
        assert len(server.asked) == 1 + 2 * 2 * 1 + 2 * 2 * 4
        assert server.at_once <= 4
        texts = [body["messages"][0]["content"] for body in server.asked]
        assert len(set(texts)) == len(texts), "a prompt that comes twice measures the prefix cache"
        assert all(body["ignore_eos"] is True for body in server.asked)

    def test_without_speculation_nothing_is_made_up(self, server: OpenAiServer, capfd) -> None:
        server.behaviour.counts = False
        assert bench(server.url) == 0
        [measured] = json.loads(capfd.readouterr().out)["servers"]
        assert [level["acceptance"] for level in measured["levels"]] == [None, None]

    def test_a_server_that_is_not_vllm(self, server: OpenAiServer, capfd) -> None:
        server.behaviour.refuse = ("ignore_eos",)
        assert bench(server.url) == 0
        assert "refuses ignore_eos" in capfd.readouterr().err
        assert not any("ignore_eos" in body for body in server.asked)

    def test_two_servers_in_turn(self, server: OpenAiServer, monkeypatch, capfd) -> None:
        with OpenAiServer() as other:
            assert bench(server.url, "--versus", other.url) == 0
        out, err = capfd.readouterr()
        steps = [
            line.split(":")[2].split(" ")[0] for line in err.splitlines() if " repeat " in line
        ]
        assert len(set(steps)) == 2 and steps == steps[:2] * 4, "A B A B, not A A B B"
        told = json.loads(out)
        assert [row["concurrency"] for row in told["ratios"]] == [1, 4]
        first, second = (each["levels"][0]["throughput"] for each in told["servers"])
        assert told["ratios"][0]["throughput"] == pytest.approx(second / first)

    def test_against_an_earlier_run(self, server: OpenAiServer, tmp_path: Path, capfd) -> None:
        assert bench(server.url, "--output", str(tmp_path / "a.json")) == 0
        earlier = json.loads((tmp_path / "a.json").read_bytes())
        capfd.readouterr()
        assert bench(server.url, "--baseline", str(tmp_path / "a.json")) == 0
        told = json.loads(capfd.readouterr().out)
        base = earlier["servers"][0]["levels"][1]["ttft"]
        assert told["ratios"][1]["ttft"] == told["servers"][0]["levels"][1]["ttft"] / base

    def test_some_requests_fail(self, server: OpenAiServer, capfd) -> None:
        def words(body: dict[str, object]) -> list[str]:
            if len(server.asked) == 4:
                return []
            return ["word"] * 6

        server.behaviour.words = words
        assert bench(server.url) == 1
        out, err = capfd.readouterr()
        assert "1 requests failed with 1 at a time; it answers without a token" in err
        assert sum(level["failures"] for level in json.loads(out)["servers"][0]["levels"]) == 1

    @pytest.mark.parametrize(("fault", "found"), [
        ({"fail": 500}, "it answers 500"),
        ({"cut": 3}, "its stream ends without [DONE]"),
        ({"words": lambda body: []}, "it answers without a token"),
    ])  # fmt: skip
    def test_a_server_that_only_fails(self, server: OpenAiServer, capfd, fault, found) -> None:
        for name, value in fault.items():
            setattr(server.behaviour, name, value)
        assert bench(server.url) == 5
        assert found in capfd.readouterr().err

    def test_keys(self, server: OpenAiServer, tmp_path: Path, monkeypatch, capfd) -> None:
        server.behaviour.key = "secret"
        assert bench(server.url) == 2
        assert "OPENAI_API_KEY" in capfd.readouterr().err
        (tmp_path / "key").write_text("secret\n")
        assert bench(server.url, "--api-key-file", str(tmp_path / "key")) == 0
        assert "secret" not in "".join(capfd.readouterr())

    @pytest.mark.parametrize(("words", "code", "found"), [
        (["127.0.0.1:1"], 2, "expected http://HOST:PORT"),
        (["http://127.0.0.1:9"], 5, "cannot be reached"),
        (["http://127.0.0.1:9", "--concurrency", "0"], 2, "expected numbers from 1 to 1024"),
        (["http://127.0.0.1:9", "--repeats", "-1"], 2, "expected a number above 0"),
        (["http://127.0.0.1:9", "--baseline", "none.json"], 2, "expected what --output wrote"),
    ])  # fmt: skip
    def test_wrong_calls(self, capfd, words, code, found) -> None:
        assert main(["bench", "serve", *words]) == code
        assert found in capfd.readouterr().err


@dataclass
class Scripted:
    """Stands for a Server whose answers are known."""

    answers: list[Answer | str]
    counters: list[tuple[float, float] | None] = field(default_factory=lambda: [None, None])
    name: str = "scripted"

    def ask(self, text: str, tokens: int) -> Answer:
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            raise FailedRequestError(answer)
        return answer

    def drafts(self) -> tuple[float, float] | None:
        return self.counters.pop(0)


class TestFigures:
    def run(self, scripted: Scripted, requests: int) -> Run:
        seconds = iter([100.0, 104.0])
        [[level]] = measure([scripted], [1], Shape(requests=requests, repeats=1),  # type: ignore[list-item]
                            step=lambda _: None, clock=lambda: next(seconds))  # fmt: skip
        return level.runs[0]

    def test_medians_and_rates(self) -> None:
        answers = [
            Answer(0.5, 2.5, 21, True),
            Answer(0.1, 1.1, 11, True),
            Answer(0.9, 4.9, 41, True),
        ]
        run = self.run(Scripted([*answers], [(10.0, 10.0), (30.0, 20.0)]), 3)
        assert (run.ttft, run.ttft_p99, run.decode) == (0.5, 0.9, 10.0)
        assert run.throughput == (21 + 11 + 41) / 4
        assert run.acceptance == 3.0

    def test_failures_are_kept_apart(self) -> None:
        run = self.run(Scripted([Answer(0.5, 0.5, 1, True), "it broke"]), 2)
        assert run.failures == ("it broke",)
        assert (run.ttft, run.decode, run.throughput) == (0.5, None, 0.25)

    def test_the_median_is_over_repeats_that_have_one(self) -> None:
        level = Level(1, [Run(t, t, None, 1.0, None) for t in (3.0, 1.0, 2.0)])
        assert level.median("ttft") == 2.0 and level.median("decode") is None

    def test_prompts_are_alike_in_length_and_differ_from_the_first_word(self) -> None:
        shape = Shape(prompt_tokens=100)
        texts = [prompt(number, shape) for number in range(50)]
        assert len({text.split()[0] for text in texts}) == 50
        assert {len(text.split()) for text in texts} == {96}
        assert texts[7] == prompt(7, shape) != prompt(7, Shape(prompt_tokens=100, seed=1))

    def test_v1_is_taken_off(self, server: OpenAiServer) -> None:
        made = Server(server.url + "/v1/", model="m", key=None, timeout=5)
        assert made.url == server.url and made.ask("hello", 3).tokens == 3


class Raw:
    """A server that answers each chat request with the same bytes, and again and again if asked."""

    def __init__(self, head: bytes, piece: bytes = b"") -> None:
        self.head, self.piece = head, piece

    def __enter__(self) -> Raw:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    _whole_request(connection)
                    connection.sendall(self.head)
                    while self.piece:
                        connection.sendall(self.piece)

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def _whole_request(connection: socket.socket) -> None:
    """Reads all of it: closing with a rest unread would reset what was sent."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(65536) or b" " * int(length[1])


OK = b"HTTP/1.1 200 OK\r\n\r\n"
TOKEN = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'


class TestHostileServers:
    @pytest.mark.parametrize(("head", "piece", "timeout", "found"), [
        (OK, b": ping\n\n", 0.2, "it sent no token in time"),
        (OK, TOKEN, 60, "it does not end after the 3 tokens asked for"),
        (OK, b"x" * 1024, 60, "it sends a line without end"),
        (OK + b"data: " + b"[" * 100_000 + b"\n\n", b"", 60, "it sends no JSON"),
        (OK + b"data: [1]\n\n", b"", 60, "it sends b'[1]'"),
        (OK + TOKEN, b"", 60, "its stream ends without"),
        (b"HTTP/1.1 429 Busy\r\n\r\n", b"busy \xff\x1b ", 60, "it answers 429: busy"),
        (b"SSH-2.0\r\n", b"", 60, "broke off"),
    ])  # fmt: skip
    def test_every_request_ends_in_a_sentence(
        self, monkeypatch, head, piece, timeout, found
    ) -> None:
        monkeypatch.setattr(client, "_LARGEST", 1 << 20)
        with Raw(head, piece) as raw:
            made = Server(raw.url, model="m", key=None, timeout=timeout)
            with pytest.raises(FailedRequestError, match=re.escape(found)):
                made.ask("hello", 3)

    @pytest.mark.parametrize("usage", [
        "null", "3", '{"completion_tokens": null}', '{"completion_tokens": true}',
        '{"completion_tokens": -5}', '{"completion_tokens": 1' + "0" * 400 + "}",
    ])  # fmt: skip
    def test_a_count_that_is_none_is_not_taken(self, usage: str) -> None:
        said = TOKEN + b'data: {"choices": [], "usage": %s}\n\ndata: [DONE]\n' % usage.encode()
        with Raw(OK + said) as raw:
            answer = Server(raw.url, model="m", key=None, timeout=5).ask("hello", 3)
        assert (answer.tokens, answer.is_counted) == (1, False)

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "tool_calls"])
    def test_all_that_a_model_says_counts(self, name: str) -> None:
        said = b'data: {"choices": [{"delta": {"%s": ["x"]}}]}\r\n\r\ndata: [DONE]' % name.encode()
        with Raw(OK + said) as raw:
            assert Server(raw.url, model="m", key=None, timeout=5).ask("hello", 3).tokens == 1

    def test_a_busy_server_refuses_no_parameter(self, server: OpenAiServer, capfd) -> None:
        server.behaviour.fail = 429
        assert bench(server.url) == 5
        assert "it answers 429" in capfd.readouterr().err and "ignore_eos" not in str(server.asked)

    @pytest.mark.parametrize("text", ["1.2.3", "NaN", "1e999", "e+", "."])
    def test_counters_that_are_none(self, text: str) -> None:
        assert client._metric(f"vllm:x {text}\n", "vllm:x") is None
        assert client._metric('vllm:x{a="b"} 1.5e+03\nvllm:x 2.0\n', "vllm:x") == 1502.0

    @pytest.mark.parametrize("page", [b"[" * 100_000, b"{}", b'{"data": []}', b"\xff"])
    def test_models_that_are_none(self, page: bytes) -> None:
        with Raw(OK + page) as raw, pytest.raises(EngineError, match="expected a model"):
            Server(raw.url, model=None, key=None, timeout=5)

    def test_a_page_without_end(self, monkeypatch) -> None:
        monkeypatch.setattr(client, "_LARGEST", 1 << 20)
        with Raw(OK, b"x" * 65536) as raw, pytest.raises(EngineError, match="found no end of it"):
            Server(raw.url, model=None, key=None, timeout=60)

    @pytest.mark.parametrize("key", ["a b", "k\u0113y", "one\ntwo"])
    def test_a_key_that_is_none_is_not_shown(self, monkeypatch, capfd, key: str) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
        assert bench("http://127.0.0.1:9") == 2
        err = capfd.readouterr().err
        assert "OPENAI_API_KEY: expected an API key on one line" in err and key not in err

    @pytest.mark.parametrize("levels", ['[{"concurrency": 1, "ttft": "x"}]', '"x"', "[[1]]"])
    def test_a_baseline_of_other_figures(self, tmp_path: Path, capfd, levels: str) -> None:
        file = tmp_path / "a.json"
        file.write_text(f'{{"schema": 1, "servers": [{{"levels": {levels}}}]}}')
        assert bench("http://127.0.0.1:9", "--baseline", str(file)) == 2
        assert "expected what --output wrote" in capfd.readouterr().err

    def test_an_address_that_is_none(self, capfd) -> None:
        assert bench("http://[::1") == 2
        assert "expected http://HOST:PORT" in capfd.readouterr().err
