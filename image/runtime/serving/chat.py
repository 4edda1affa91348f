"""A chat request to the API over `http.client`, whole or streamed, within a deadline.

A reply is put together here as a client sees it: content, reasoning and tool calls apart.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_BLOCK = 65536
_LARGEST = 32 << 20  # bytes of a reply; more is no reply to what is asked here


class ApiError(Exception):
    """The API did not answer as an OpenAI API does; the message says how, as a clause."""


@dataclass
class Reply:
    """One finished reply.

    Attributes:
        content: text for the user; "" for none.
        reasoning: the thinking; "" for none.
        calls: (name, arguments as text) of the tool calls.
        finish: why it ended, such as "stop" or "tool_calls"; "" where that is not said.
        prompt_tokens: of the prompt, 0 where that is not said.
        keys: the message's own keys that hold text, such as "reasoning".
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    keys: set[str] = field(default_factory=set)


class Api:
    """The API at an address such as http://127.0.0.1:8002.

    Attributes:
        timeout: seconds that one request may take in all.
    """

    def __init__(self, base: str, *, key: str = "", timeout: float = 300.0) -> None:
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, found {base!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.timeout = timeout

    def get(self, path: str) -> str:
        """The text of a page. Raises ApiError."""
        return b"".join(self._ask("GET", path, None)).decode("utf-8", "replace")

    def models(self) -> list[str]:
        """Names that are served. Raises ApiError."""
        found = _object(self.get("/v1/models"))
        entries = found.get("data")
        if not isinstance(entries, list):
            raise ApiError("/v1/models holds no list of models")
        return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]

    def chat(self, body: Mapping[str, Any], *, stream: bool = False) -> Reply:
        """Sends one chat request. Raises ApiError."""
        asked = dict(body)
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        blocks = self._ask("POST", "/v1/chat/completions", json.dumps(asked).encode())
        try:
            if stream:
                return _joined(_events(blocks))
            return _whole(_object(b"".join(blocks).decode("utf-8", "replace")))
        except (TypeError, ValueError, AttributeError) as error:
            raise ApiError(f"the answer is not of the form that it should be: {error}") from error

    def _ask(self, method: str, path: str, body: bytes | None) -> Iterator[bytes]:
        """The body of the answer in blocks, until it ends or the time is up."""
        deadline = time.monotonic() + self.timeout
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(300).decode("utf-8", "replace")
                raise ApiError(f"{path} answers {response.status}: {' '.join(said.split())}")
            size = 0
            while block := self._block(connection, response, deadline, path):
                size += len(block)
                if size > _LARGEST:
                    raise ApiError(f"{path} answers with more than {_LARGEST >> 20} MiB")
                yield block
        except TimeoutError:
            raise ApiError(f"{path} took longer than {self.timeout:.0f} s") from None
        except http.client.IncompleteRead:
            raise ApiError(f"{path} breaks off within its answer") from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{path} cannot be reached ({_reason(error)})") from None
        finally:
            connection.close()

    def _block(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        deadline: float,
        path: str,
    ) -> bytes:
        # A server that sends a byte now and then would never run into a socket's own timeout.
        left = deadline - time.monotonic()
        if left <= 0:
            raise ApiError(f"{path} took longer than {self.timeout:.0f} s")
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(left)
        return response.read1(_BLOCK)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or type(error).__name__


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(f"the answer is no JSON: {text[:80]!r}") from None
    if not isinstance(found, dict):
        raise ApiError(f"the answer is no JSON object: {text[:80]!r}")
    if "error" in found:
        raise ApiError(f"the answer is an error: {str(found['error'])[:200]}")
    return found


def _events(blocks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, until [DONE]."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            yield _object(data.decode("utf-8", "replace"))
    raise ApiError("the stream ends without [DONE]")


def _choice(found: Mapping[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return {}
    return choices[0]


def _whole(found: Mapping[str, Any]) -> Reply:
    choice = _choice(found)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ApiError("the answer holds no message")
    reply = Reply(finish=str(choice.get("finish_reason") or ""))
    _count(reply, found)
    _add(reply, message)
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            reply.calls.append((str(function.get("name")), str(function.get("arguments"))))
    return reply


def _joined(events: Iterator[dict[str, Any]]) -> Reply:
    reply = Reply()
    calls: dict[int, list[str]] = {}
    for event in events:
        _count(reply, event)
        choice = _choice(event)
        reply.finish = str(choice.get("finish_reason") or reply.finish)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            continue
        _add(reply, delta)
        for call in delta.get("tool_calls") or []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                parts = calls.setdefault(int(call.get("index") or 0), ["", ""])
                parts[0] += str(function.get("name") or "")
                parts[1] += str(function.get("arguments") or "")
    reply.calls = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
    return reply


def _add(reply: Reply, part: Mapping[str, Any]) -> None:
    for key in ("content", "reasoning", "reasoning_content"):
        if isinstance(part.get(key), str) and part[key]:
            reply.keys.add(key)
    reply.content += part.get("content") or ""
    reply.reasoning += part.get("reasoning") or ""


def _count(reply: Reply, found: Mapping[str, Any]) -> None:
    usage = found.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
        reply.prompt_tokens = usage["prompt_tokens"]
