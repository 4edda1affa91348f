"""A test double of an OpenAI server on 127.0.0.1: streamed chat, models, metrics, faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass
class Behaviour:
    """What the server does; may be changed between requests.

    Attributes:
        words: the tokens of an answer, for a request body.
        counts: whether the stream ends with usage.
        key: asked for where set.
        refuse: answers 400 to a body that has one of these keys.
        fail: status that every chat request gets; 0 for none.
        cut: tokens after which the stream breaks off; None for never.
        accepted: draft tokens accepted for each draft; None for a server without speculation.
        message: the reply to a body, in place of `words`: content, reasoning, tool_calls, finish,
            prompt_tokens, and `raw` for a whole body as it is sent.
        hold: each chat request waits for it first.
    """

    words: Callable[[dict[str, Any]], list[str]] = lambda body: ["word"] * int(body["max_tokens"])
    counts: bool = True
    key: str = ""
    refuse: tuple[str, ...] = ()
    fail: int = 0
    cut: int | None = None
    accepted: float | None = None
    message: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    hold: threading.Event | None = None


@dataclass
class OpenAiServer:
    """Serves until the end of the `with` block.

    Attributes:
        asked: the chat requests so far.
        at_once: the largest number of them at one time.
    """

    behaviour: Behaviour = field(default_factory=Behaviour)
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    running: int = 0
    drafts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> OpenAiServer:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.double = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    double: OpenAiServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients break off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        double: OpenAiServer = self.server.double
        behaviour = double.behaviour
        if not self.is_allowed(behaviour):
            return
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "glm53", "object": "model"}]})
        elif self.path == "/metrics" and behaviour.accepted is not None:
            text = (f'vllm:spec_decode_num_drafts_total{{engine="0"}} {double.drafts}.0\n'
                    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} '
                    f"{double.drafts * behaviour.accepted}\n")  # fmt: skip
            self.answer(200, text)
        else:
            self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        double: OpenAiServer = self.server.double
        behaviour = double.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed(behaviour):
            return
        refused = [key for key in behaviour.refuse if key in body]
        if refused or behaviour.fail:
            self.answer(behaviour.fail or 400, {"error": {"message": f"no {refused}"}})
            return
        with double.lock:
            double.asked.append(body)
            double.running += 1
            double.drafts += 10
            double.at_once = max(double.at_once, double.running)
        try:
            if behaviour.hold is not None:
                behaviour.hold.wait(30)
            if behaviour.message is not None:
                self.message(behaviour.message(body), is_stream=bool(body.get("stream")))
            else:
                self.stream(behaviour, behaviour.words(body))
        finally:
            with double.lock:
                double.running -= 1

    def stream(self, behaviour: Behaviour, words: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number, word in enumerate(words):
            if number == behaviour.cut:
                return
            self.event({"choices": [{"delta": {"content": word}}]})
        if behaviour.counts:
            self.event({"choices": [], "usage": {"completion_tokens": len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def message(self, reply: dict[str, Any], *, is_stream: bool) -> None:
        if "raw" in reply:
            self.answer(200, reply["raw"])
            return
        calls = [
            {"index": number, "type": "function", "function": {"name": name, "arguments": text}}
            for number, (name, text) in enumerate(reply.get("tool_calls", ()))
        ]
        texts = {key: reply[key] for key in ("content", "reasoning", "reasoning_content")
                 if reply.get(key)}  # fmt: skip
        finish = reply.get("finish", "tool_calls" if calls else "stop")
        usage = {"prompt_tokens": reply.get("prompt_tokens", 20), "completion_tokens": 9}
        if not is_stream:
            message = {"role": "assistant", "content": None, **texts, "tool_calls": calls}
            choice = {"message": message, "finish_reason": finish}
            self.answer(200, {"choices": [choice], "usage": usage})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for key, text in texts.items():
            for start in range(0, len(text), 7):
                self.event({"choices": [{"delta": {key: text[start : start + 7]}}]})
        for call in calls:
            function = call["function"]
            parts = [{"name": function["name"]}]
            parts += [{"arguments": function["arguments"][i : i + 5]}
                      for i in range(0, len(function["arguments"]), 5)]  # fmt: skip
            for part in parts:
                delta = {"tool_calls": [{"index": call["index"], "function": part}]}
                self.event({"choices": [{"delta": delta}]})
        self.event({"choices": [{"delta": {}, "finish_reason": finish}]})
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def is_allowed(self, behaviour: Behaviour) -> bool:
        if behaviour.key and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
            self.answer(401, {"error": "unauthorized"})
            return False
        return True

    def answer(self, status: int, content: object) -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
