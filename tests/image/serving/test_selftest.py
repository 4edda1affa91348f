from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.chat import Api, ApiError
from serving.errors import CheckError
from serving.selftest import SelfTest, check, long_prompt, main, repeated

from tests.support.openai_server import OpenAiServer

RUNTIME = Path(__file__).resolve().parents[3] / "image" / "runtime"


def sound(body: dict[str, Any]) -> dict[str, Any]:
    """What a good model says to each question of the self-test."""
    asked = body["messages"][0]["content"]
    if "tools" in body:
        return {"reasoning": "I call it.", "tool_calls": [("get_weather", '{"city": "Oslo"}')]}
    for word, answer in {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "17 times": "391",
                         "archive": "marigold"}.items():  # fmt: skip
        if word in asked:
            return {"reasoning": "Easy.", "content": f"It is {answer}.",
                    "prompt_tokens": len(asked.split()) + 10}  # fmt: skip
    raise AssertionError(asked)


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with OpenAiServer() as running:
        running.behaviour.message = sound
        running.behaviour.accepted = 1.5
        yield running


def failures(server: OpenAiServer, *, timeout: float = 20.0, **options: Any) -> dict[str, str]:
    test = SelfTest(Api(server.url, timeout=timeout), model="glm53", **options)
    return {result.name: result.text for result in test.run(lambda _: None) if not result.ok}


def test_a_sound_server(server: OpenAiServer) -> None:
    assert failures(server, drafts=3) == {}
    names = [name for name, _ in SelfTest(Api(server.url), model="glm53", drafts=3).checks()]
    assert names == ["model", "answer", "arithmetic", "thinking off", "streamed answer",
                     "tool call", "streamed tool call", "long prompt", "same answer twice",
                     "speculation"]  # fmt: skip
    salts = [body["cache_salt"] for body in server.asked if "cache_salt" in body]
    assert len(salts) == len(set(salts)) == 3, "a cached prompt is not computed"
    assert any(body.get("chat_template_kwargs") == {"enable_thinking": False}
               for body in server.asked)  # fmt: skip
    assert all(body["temperature"] == 0 for body in server.asked)


def changed(**fields: Any) -> Any:
    """A sound server but for some fields of each reply."""
    return lambda body: {**sound(body), **fields}


EVERY_CHAT = {"answer", "arithmetic", "thinking off", "streamed answer", "tool call",
              "streamed tool call", "long prompt", "same answer twice"}  # fmt: skip


@pytest.mark.parametrize(("message", "failed", "found"), [
    # vLLM's glm45 parser with thinking left to the prompt: everything is dropped
    (changed(content="", reasoning="", tool_calls=[]), EVERY_CHAT, "expected"),
    (changed(content="locklocklock" * 20), EVERY_CHAT, "found 'lock' over and over"),
    (changed(reasoning="no " * 40), EVERY_CHAT, "over and over in reasoning"),
    (changed(content="Hm.</think>It is Paris, Tokyo, Rome, 391, marigold."), EVERY_CHAT,
     "found </think>"),
    (lambda body: {key if key != "reasoning" else "reasoning_content": value
                   for key, value in sound(body).items()}, EVERY_CHAT, "reasoning_content"),
    (lambda body: {**sound(body), "reasoning": ""}, {"answer"}, "found none: the parser"),
    # the reasoning parser takes the answer for thinking
    (lambda body: {**sound(body), "reasoning": "It is.", "content": ""},
     EVERY_CHAT - {"tool call", "streamed tool call", "same answer twice"}, "in the content"),
    (lambda body: {**sound(body), "content": "It is Madrid, 392, cowslip."},
     {"answer", "arithmetic", "thinking off", "streamed answer", "long prompt"}, "Madrid"),
    (lambda body: {**sound(body), "prompt_tokens": 2048}, {"long prompt"}, "more than 2048 tokens"),
])  # fmt: skip
def test_faulty_answers(server: OpenAiServer, message: Any, failed: set[str], found: str) -> None:
    server.behaviour.message = message
    wrong = failures(server)
    assert set(wrong) == failed
    assert all(found in text for text in wrong.values()), wrong


@pytest.mark.parametrize(("calls", "found"), [
    ([("get_weather", '{"city": "Bergen"}')], "found get_weather for 'Bergen'"),
    ([("get_time", '{"city": "Oslo"}')], "found get_time"),
    ([("get_weather", '{"city": "Oslo"')], "expected arguments with a city"),
    ([("get_weather", '["Oslo"]')], "expected arguments with a city"),
    ([("get_weather", '{"city": "Oslo"}')] * 2, "found 2"),
    ([], "found 0"),
])  # fmt: skip
def test_faulty_calls(server: OpenAiServer, calls: list[tuple[str, str]], found: str) -> None:
    server.behaviour.message = lambda body: (
        {"content": "x", "reasoning": "y", "tool_calls": calls} if "tools" in body else sound(body)
    )
    wrong = failures(server)
    assert set(wrong) == {"tool call", "streamed tool call"}
    assert all(found in text for text in wrong.values()), wrong


def test_a_stream_that_differs_from_the_whole(server: OpenAiServer) -> None:
    server.behaviour.message = lambda body: (
        {**sound(body), "tool_calls": [("get_weather", "{}")]}
        if "tools" in body and body.get("stream") else sound(body)
    )  # fmt: skip
    assert set(failures(server)) == {"streamed tool call"}


def test_a_call_must_end_as_a_call(server: OpenAiServer) -> None:
    server.behaviour.message = lambda body: (
        {**sound(body), "finish": "stop"} if "tools" in body else sound(body)
    )
    assert "ends with tool_calls, found 'stop'" in failures(server)["tool call"]


def test_different_answers_to_one_long_prompt(server: OpenAiServer) -> None:
    def message(body: dict[str, Any]) -> dict[str, Any]:
        reply = sound(body)
        if body.get("cache_salt", "").endswith("c"):
            reply["content"] = "It is Marigold."
        return reply

    server.behaviour.message = message
    assert failures(server) == {"same answer twice": (
        "expected the same answer to the same long prompt, found that they differ from character "
        "11 on")}  # fmt: skip
    assert failures(server, is_deterministic=False) == {}


@pytest.mark.parametrize(("accepted", "found"), [
    (None, "/metrics answers 404"), (0.1, "expected at least 1.15 tokens a step, found 1.10"),
])  # fmt: skip
def test_speculation(server: OpenAiServer, accepted: float | None, found: str) -> None:
    server.behaviour.accepted = accepted
    wrong = failures(server, drafts=3)
    assert set(wrong) == {"speculation"} and found in wrong["speculation"]
    assert failures(server, drafts=0) == {}


def test_no_draft_was_made(server: OpenAiServer) -> None:
    server.behaviour.accepted = 0.0
    server.behaviour.message = lambda body: setattr(server, "drafts", 0) or sound(body)
    assert "none was made" in failures(server, drafts=3)["speculation"]


def test_another_model(server: OpenAiServer) -> None:
    test = SelfTest(Api(server.url), model="glm-other")
    with pytest.raises(CheckError, match="self-test, model: expected glm-other, found glm53"):
        check(test, lambda _: None)


@pytest.mark.parametrize(("raw", "found"), [
    ("<html>busy</html>", "the answer is no JSON"), ("[]", "no JSON object"),
    ('{"error": {"message": "CUDA error"}}', "CUDA error"), ('{"choices": []}', "no message"),
    ("{" * 2000, "no JSON"), ("\ud83d".encode("utf-16", "surrogatepass").decode("latin-1"), "no"),
])  # fmt: skip
def test_answers_that_are_none(server: OpenAiServer, raw: str, found: str) -> None:
    server.behaviour.message = lambda body: {"raw": raw}
    wrong = failures(server)
    assert set(wrong) == EVERY_CHAT
    assert found in wrong["answer"]


@pytest.mark.parametrize("message", [
    {"content": ["a"]}, {"reasoning": 3}, {"tool_calls": 5}, {"tool_calls": "x"},
    {"tool_calls": [{"index": "x", "function": {}}]},
    {"tool_calls": [{"index": [], "function": {"name": []}}]},
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_another_form_are_sentences(server, message: Any, *, stream: bool) -> None:
    def raw(_: object) -> dict[str, Any]:
        part = {"delta" if stream else "message": message, "finish_reason": {}}
        text = json.dumps({"choices": [part], "usage": {"prompt_tokens": "x"}})
        return {"raw": f"data: {text}\n\ndata: [DONE]\n\n" if stream else text}

    server.behaviour.message = raw
    found = failures(server)
    assert "streamed answer" in found and "answer" in found


def test_a_key_that_is_none_is_not_shown(server, tmp_path: Path, capsys) -> None:
    (tmp_path / "key").write_text("hunter2\nhunter3")
    assert main(["--base", server.url, "--api-key-file", str(tmp_path / "key")]) == 2
    assert "hunter" not in capsys.readouterr().err and server.asked == []


@pytest.mark.parametrize("page", ["abc", "1.2.3", "NaN", "1e999"])
def test_counters_that_are_none(server, monkeypatch, page: str) -> None:
    text = f"vllm:spec_decode_num_drafts_total {page}\n"
    monkeypatch.setattr(Api, "get", lambda self, path: text)
    with pytest.raises(Exception, match="none was made"):
        SelfTest(Api(server.url), model="glm53", drafts=3)._speculation()


def test_a_server_that_refuses(server: OpenAiServer) -> None:
    server.behaviour.fail = 500
    assert set(failures(server)) == EVERY_CHAT


def test_a_server_that_dies_in_mid_stream(server: OpenAiServer) -> None:
    server.behaviour.message = None
    server.behaviour.cut = 3
    assert failures(server)["streamed answer"].endswith("the stream ends without [DONE]")


def test_a_server_that_hangs_takes_its_time_and_no_more(server: OpenAiServer) -> None:
    server.behaviour.hold = threading.Event()
    try:
        wrong = failures(server, timeout=0.05)
    finally:
        server.behaviour.hold.set()
    assert set(wrong) == EVERY_CHAT and "took longer than 0 s" in wrong["answer"]


def test_a_server_that_drips_runs_into_the_deadline() -> None:
    """Each byte comes in time for a socket's own timeout, and the whole never ends."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.01):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(ApiError, match="took longer than"):
                Api(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3).get("/x")
        finally:
            stop.set()
            thread.join()


def test_nobody_there() -> None:
    with pytest.raises(ApiError, match="cannot be reached"):
        Api("http://127.0.0.1:9", timeout=1).models()


@pytest.mark.parametrize(("text", "unit"), [
    ("locklocklock" * 5, "lock"), ("the capital " * 12, "the capital "), ("a" * 30, "a"),
    ("It is Paris.", None), ("-" * 60, None), ("." * 60, None), ("", None), ("ha" * 11, None),
    ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13", None),
])  # fmt: skip
def test_repetition(text: str, unit: str | None) -> None:
    assert repeated(text) == unit


def test_the_long_prompt_is_long_and_no_line_of_it_comes_twice() -> None:
    lines = long_prompt().splitlines()
    assert len(lines) == len(set(lines)) and len(long_prompt().split()) > 4096
    assert lines[7].endswith("marigold.") and "marigold" not in "".join(lines[8:])


class TestCommand:
    def test_json_and_codes(self, server: OpenAiServer, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--base", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"] is True
        server.behaviour.fail = 503
        assert main(["--base", server.url, "--timeout", "5"]) == 3
        assert "FAIL arithmetic" in capsys.readouterr().out
        assert main(["--base", "ftp://x"]) == 2
        assert main(["--api-key-file", "/none"]) == 2

    def test_as_the_container_runs_it(self, server: OpenAiServer, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("secret")
        server.behaviour.key = "secret"
        command = [sys.executable, "-m", "serving.selftest", "--base", server.url,
                   "--api-key-file", str(tmp_path / "key")]  # fmt: skip
        done = subprocess.run(command, cwd=RUNTIME, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("ok  ") == 9 and "secret" not in done.stdout
