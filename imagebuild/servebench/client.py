"""One streamed chat request, timed token by token; and what a server says of itself."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources.pipconf import scrub

CONNECT_TIMEOUT = 10.0  # seconds
_LARGEST = 32 << 20  # bytes of a page or of one event
_MOST_TOKENS = 10**8  # of an answer; more is no count
# source: vLLM's Prometheus names, v1/spec_decode/metrics.py of 0.31 to 0.33
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"


@dataclass(frozen=True)
class Answer:
    """One finished request.

    Attributes:
        first: seconds from sending it to its first token, reasoning included.
        total: seconds from sending it to its last token.
        tokens: output tokens, as the server counts them.
        is_counted: the server counted them; else each event counts as one.
    """

    first: float
    total: float
    tokens: int
    is_counted: bool

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None for fewer than two tokens."""
        seconds = self.total - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


class FailedRequestError(Exception):
    """One request failed; the message says how, and `status` is that of the answer, if any."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server at an address such as http://head:8002; `/v1` at its end is taken off."""

    def __init__(self, url: str, *, model: str | None, key: str | None, timeout: float) -> None:
        try:
            is_http = urlsplit(url).scheme in ("http", "https")
        except ValueError:  # such as http://[
            is_http = False
        if not is_http:
            raise UsageError(f"{scrub(url)}: expected http://HOST:PORT, found another address")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = scrub(self.url)
        self._timeout = (CONNECT_TIMEOUT, timeout)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._extra: dict[str, object] = {"ignore_eos": True}
        self.model = model or self._first_model()

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page. Raises EngineError."""
        end = time.perf_counter() + self._timeout[1]
        body = bytearray()
        try:
            with requests.get(self.url + path, headers=self._headers, timeout=self._timeout,
                              stream=True) as reply:  # fmt: skip
                for chunk in reply.iter_content(1 << 16):
                    body += chunk
                    if len(body) > _LARGEST or time.perf_counter() > end:
                        raise EngineError(f"{self.name}{path}: expected a page, found no end of it")
                return reply.status_code, bytes(body)
        except requests.RequestException as error:
            raise EngineError(f"{self.name}: expected a server that answers {path}, found that "
                              f"{_reason(error)}", hint="is it up? its status page and log say "
                              "so") from error  # fmt: skip

    def _first_model(self) -> str:
        status, body = self._get("/v1/models")
        if status == 401:
            raise UsageError(f"{self.name}: expected an API key, found none or a wrong one",
                             hint="set OPENAI_API_KEY, or name --api-key-file")  # fmt: skip
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise EngineError(
                f"{self.name}/v1/models: expected a model, found status {status}",
                hint="name one with --model",
            ) from error

    def settle(self, prompt: str) -> bool:
        """Sends one short request; returns whether the server can be made to ignore end tokens.

        Raises:
            EngineError: it does not answer even a plain request.
        """
        try:
            self.ask(prompt, 4)
        except FailedRequestError as error:
            if error.status not in (400, 422):  # a server that is busy refuses no parameter
                raise EngineError(f"{self.name}: expected an answer, found that {error}") from error
            self._extra = {}
            try:
                self.ask(prompt, 4)
            except FailedRequestError:
                raise EngineError(f"{self.name}: expected an answer, found that {error}") from error
        return bool(self._extra)

    def ask(self, prompt: str, tokens: int) -> Answer:
        """Streams one answer of at most `tokens` tokens. Raises FailedRequestError."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        start = time.perf_counter()
        first = last = None
        events = 0
        counted: int | None = None

        def check() -> None:
            # Bytes without a token, such as pings, keep the connection's own limit from counting.
            if time.perf_counter() - (last or start) > self._timeout[1]:
                raise FailedRequestError("it sent no token in time")
            if events > 2 * tokens + 64:
                raise FailedRequestError(f"it does not end after the {tokens} tokens asked for")

        try:
            with requests.post(f"{self.url}/v1/chat/completions", json=body, stream=True,
                               headers=self._headers, timeout=self._timeout) as reply:  # fmt: skip
                if reply.status_code != 200:
                    start_of = next(reply.iter_content(2000), b"").decode("utf-8", "replace")
                    said = " ".join(start_of.split())[:200]
                    raise FailedRequestError(f"it answers {reply.status_code}: {said}",
                                             reply.status_code)  # fmt: skip
                for event in _events(_lines(reply, check)):
                    counted = _counted(event, counted)
                    if _has_token(event):
                        last = time.perf_counter()
                        first = first or last
                        events += 1
        except requests.RequestException as error:
            raise FailedRequestError(_reason(error)) from error
        if first is None or last is None:
            raise FailedRequestError("it answers without a token")
        is_counted = counted is not None
        return Answer(
            first - start, last - start, events if counted is None else counted, is_counted
        )

    def drafts(self) -> tuple[float, float] | None:
        """Accepted draft tokens and drafts so far; None where the server does not say them."""
        try:
            text = self._get("/metrics")[1].decode("utf-8", "replace")
        except EngineError:
            return None
        accepted, drafts = _metric(text, _ACCEPTED), _metric(text, _DRAFTS)
        return None if accepted is None or drafts is None else (accepted, drafts)


def _lines(reply: requests.Response, check: Callable[[], None]) -> Iterator[bytes]:
    """Lines of a body as they come; `check` is called with every piece, and may raise."""
    parts: list[bytes] = []
    for chunk in reply.iter_content(1024):
        check()
        first, *more = chunk.split(b"\n")
        parts.append(first)
        if more:
            yield b"".join(parts)
            yield from more[:-1]
            parts = [more[-1]]
        if len(parts) > _LARGEST // 1024:
            raise FailedRequestError("it sends a line without end")
    yield b"".join(parts)


def _counted(event: dict[str, object], before: int | None) -> int | None:
    """Output tokens by the server's own count, where this event says it."""
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(count, int) and not isinstance(count, bool) and 0 < count < _MOST_TOKENS:
        return count
    return before


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, object]]:
    """The JSON of each server-sent event, until [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FailedRequestError(f"it sends no JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise FailedRequestError(f"it sends {data[:80]!r}")
        if "error" in event:
            raise FailedRequestError(f"it answers {str(event['error'])[:200]}")
        yield event
    raise FailedRequestError("its stream ends without [DONE]")


def _has_token(event: dict[str, object]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    return isinstance(delta, dict) and any(delta.get(name) for name in names)


def _metric(text: str, name: str) -> float | None:
    """Sum of a Prometheus counter over its labels."""
    number = r"[0-9]{1,18}(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?"
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ({number})\s*$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return "it accepts no connection"
    if isinstance(error, requests.exceptions.Timeout):
        return "it sent nothing in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "its stream breaks off"
    if isinstance(error, requests.exceptions.ConnectionError):
        return "it cannot be reached or broke off"
    return f"the request failed ({type(error).__name__})"
