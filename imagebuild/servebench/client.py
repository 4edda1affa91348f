"""One streamed chat request, timed token by token; and what a server says of itself."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources.pipconf import scrub

CONNECT_TIMEOUT = 10.0  # seconds
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
    """One request failed; the message says how."""


class Server:
    """A server at an address such as http://head:8002; `/v1` at its end is taken off."""

    def __init__(self, url: str, *, model: str | None, key: str | None, timeout: float) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"{scrub(url)}: expected http://HOST:PORT, found another address")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = scrub(self.url)
        self._timeout = (CONNECT_TIMEOUT, timeout)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._extra: dict[str, object] = {"ignore_eos": True}
        self.model = model or self._first_model()

    def _get(self, path: str) -> requests.Response:
        try:
            return requests.get(self.url + path, headers=self._headers, timeout=self._timeout)
        except requests.RequestException as error:
            raise EngineError(f"{self.name}: expected a server that answers {path}, found that "
                              f"{_reason(error)}", hint="is it up? its status page and log say "
                              "so") from error  # fmt: skip

    def _first_model(self) -> str:
        reply = self._get("/v1/models")
        if reply.status_code == 401:
            raise UsageError(f"{self.name}: expected an API key, found none or a wrong one",
                             hint="set OPENAI_API_KEY, or name --api-key-file")  # fmt: skip
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"{self.name}/v1/models: expected a model, found status {reply.status_code}",
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
        try:
            with requests.post(f"{self.url}/v1/chat/completions", json=body, stream=True,
                               headers=self._headers, timeout=self._timeout) as reply:  # fmt: skip
                if reply.status_code != 200:
                    said = " ".join(reply.text.split())[:200]
                    raise FailedRequestError(f"it answers {reply.status_code}: {said}")
                for event in _events(reply):
                    usage = event.get("usage")
                    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
                        counted = usage["completion_tokens"]
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
            text = self._get("/metrics").text
        except EngineError:
            return None
        accepted, drafts = _metric(text, _ACCEPTED), _metric(text, _DRAFTS)
        return None if accepted is None or drafts is None else (accepted, drafts)


def _events(reply: requests.Response) -> Iterator[dict[str, object]]:
    """The JSON of each server-sent event, until [DONE]."""
    for line in reply.iter_lines(chunk_size=1024):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
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
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+]+)\s*$", text, re.MULTILINE)
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
