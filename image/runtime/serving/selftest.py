"""The self-test: a conversation with the API that shows sound answers before a user asks.

What it is for, each a fault that people met: answers that repeat one word (a zeroed MoE, or a wrong
attention route), replies that are empty or hold tags (parser and template disagree), tool calls
that are mere text, long prompts that lose their start, and equal prompts with different answers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import smallfile
from serving.chat import Api, ApiError, Reply
from serving.errors import CheckError

# The indexer keeps this many keys: only a longer prompt is attended to sparsely.
SPARSE_FROM = 2048
_LONG_WORDS = 6000
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>")
_DRAFTS = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total(?:\{[^}]*\})? "
                     r"([0-9]{1,18}(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?)\s*$",
                     re.MULTILINE)  # fmt: skip
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Result:
    """One check.

    Attributes:
        name: of the check.
        ok: whether it holds.
        seconds: that it took.
        text: what was found; for a failure also what was expected.
    """

    name: str
    ok: bool
    seconds: float
    text: str


class _FailedError(Exception):
    """A check does not hold; the message says what was expected and found."""


class SelfTest:
    """The checks against one API.

    Attributes:
        model: the name that is served.
        drafts: tokens that are speculated at a time; 0 for none.
        is_deterministic: whether equal prompts must give equal answers.
    """

    def __init__(
        self, api: Api, *, model: str, drafts: int = 0, is_deterministic: bool = True
    ) -> None:
        self._api = api
        self.model = model
        self.drafts = drafts
        self.is_deterministic = is_deterministic

    def checks(self) -> Iterable[tuple[str, Callable[[], str]]]:
        """Name and function of each check; a function returns what it found."""
        yield "model", self._model
        yield "answer", self._answer
        yield "arithmetic", self._arithmetic
        yield "thinking off", self._thinking_off
        yield "streamed answer", self._streamed
        yield "tool call", lambda: self._tool_call(stream=False)
        yield "streamed tool call", lambda: self._tool_call(stream=True)
        yield "long prompt", self._long_prompt
        if self.is_deterministic:
            yield "same answer twice", self._same_twice
        if self.drafts:
            yield "speculation", self._speculation

    def run(self, report: Callable[[Result], None]) -> list[Result]:
        """Runs all checks, also after one has failed, since together they say more."""
        results = []
        for name, check in self.checks():
            start = time.monotonic()
            try:
                ok, text = True, check()
            except _FailedError as error:
                ok, text = False, str(error)
            except ApiError as error:
                ok, text = False, f"expected an answer, found that {error}"
            results.append(Result(name, ok, time.monotonic() - start, text))
            report(results[-1])
        return results

    def _chat(self, text: str, *, stream: bool = False, **fields: object) -> Reply:
        body: Mapping[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 800,
            **fields,
        }
        reply = self._api.chat(body, stream=stream)
        for part, said in (("content", reply.content), ("reasoning", reply.reasoning)):
            if tag := next((tag for tag in _TAGS if tag in said), None):
                raise _FailedError(f"expected no tags in {part}, found {tag}: the parsers and the "
                                   "chat template disagree")  # fmt: skip
            if unit := repeated(said):
                raise _FailedError(f"expected an answer, found {unit!r} over and over in {part}: "
                                   "the model computes nonsense; try another GLM_MLA_ROUTE, and "
                                   "check the MoE backend")  # fmt: skip
        if "reasoning_content" in reply.keys:
            raise _FailedError("expected the thinking in the field reasoning, found it in "
                               "reasoning_content")  # fmt: skip
        return reply

    def _model(self) -> str:
        names = self._api.models()
        if self.model not in names:
            raise _FailedError(f"expected {self.model}, found {', '.join(names) or 'no model'}")
        return self.model

    def _answer(self) -> str:
        reply = self._chat("What is the capital of France? Answer in one sentence.")
        if not reply.reasoning:
            raise _FailedError("expected thinking in the field reasoning, found none: the parser "
                               f"does not see it; content is {reply.content[:60]!r}")  # fmt: skip
        return _holds(reply, "Paris")

    def _arithmetic(self) -> str:
        return _holds(self._chat("What is 17 times 23? End with the number."), "391")

    def _thinking_off(self) -> str:
        reply = self._chat("What is the capital of Japan? Answer in one word.",
                           chat_template_kwargs={"enable_thinking": False})  # fmt: skip
        return _holds(reply, "Tokyo")

    def _streamed(self) -> str:
        reply = self._chat("What is the capital of Italy? One sentence.", stream=True)
        return _holds(reply, "Rome")

    def _tool_call(self, *, stream: bool) -> str:
        reply = self._chat("What is the weather in Oslo now? Use the tool.", stream=stream,
                           tools=[_WEATHER], tool_choice="auto")  # fmt: skip
        if len(reply.calls) != 1:
            raise _FailedError(f"expected one call of get_weather, found {len(reply.calls)}; "
                               f"content is {reply.content[:80]!r}")  # fmt: skip
        [(name, arguments)] = reply.calls
        try:
            city = json.loads(arguments)["city"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _FailedError(
                f"expected arguments with a city, found {arguments[:80]!r}"
            ) from None
        if name != "get_weather" or "oslo" not in str(city).lower():
            raise _FailedError(f"expected get_weather for Oslo, found {name} for {city!r}")
        if reply.finish != "tool_calls":
            raise _FailedError(f"expected that it ends with tool_calls, found {reply.finish!r}")
        return f"{name}({arguments})"

    def _long_prompt(self) -> str:
        reply = self._long("a", tokens=800)
        if reply.prompt_tokens <= SPARSE_FROM:
            found = f"{reply.prompt_tokens}: sparse attention was not tried"
            raise _FailedError(
                f"expected a prompt of more than {SPARSE_FROM} tokens, found {found}"
            )
        return f"{_holds(reply, 'marigold')} ({reply.prompt_tokens} tokens)"

    def _same_twice(self) -> str:
        # Another salt: the second prompt is computed, too, instead of read from the prefix cache.
        first, second = (self._long(salt, tokens=128) for salt in ("b", "c"))
        said = [reply.reasoning + reply.content for reply in (first, second)]
        if not said[0]:
            raise _FailedError("expected an answer, found none")
        if said[0] != said[1]:
            place = next((i for i, (a, b) in enumerate(zip(*said, strict=False)) if a != b),
                         min(map(len, said)))  # fmt: skip
            raise _FailedError(f"expected the same answer to the same long prompt, found that they "
                               f"differ from character {place} on")  # fmt: skip
        return f"{len(said[0])} characters alike"

    def _long(self, salt: str, *, tokens: int) -> Reply:
        return self._chat(long_prompt(), max_tokens=tokens, cache_salt=f"self-test-{salt}")

    def _speculation(self) -> str:
        counts = {name: float(value) for name, value in _DRAFTS.findall(self._api.get("/metrics"))}
        drafts = counts.get("drafts", 0.0)
        if not drafts:
            raise _FailedError("expected drafts, found that none was made: speculation is off")
        length = 1 + counts.get("accepted_tokens", 0.0) / drafts
        least = 1 + self.drafts * 0.05
        if length < least:
            raise _FailedError(f"expected at least {least:.2f} tokens a step, found {length:.2f}: "
                               "the drafter does not fit the model")  # fmt: skip
        return f"{length:.2f} tokens a step"


def _holds(reply: Reply, word: str) -> str:
    """The content, which must hold a word."""
    said = " ".join(reply.content.split())
    if not said:
        hint = f"; it ended with {reply.finish!r}" if reply.finish else ""
        raise _FailedError(f"expected {word!r} in the content, found none{hint}")
    if word.lower() not in said.lower():
        raise _FailedError(f"expected {word!r} in the content, found {said[:80]!r}")
    return said[:80]


def long_prompt() -> str:
    """A text of over 2,048 tokens by any tokenizer, whose answer stands near its start."""
    lines = [f"Entry {number}: crate {number * 37 % 1009} went to hall {number * 11 % 97}."
             for number in range(_LONG_WORDS // 8)]  # fmt: skip
    lines.insert(7, "Note: the password of the archive is marigold.")
    return "\n".join([*lines, "What is the password of the archive? Answer in one word."])


def repeated(text: str) -> str | None:
    """What a text ends with over and over: up to 32 characters, at least 12 times; else None."""
    match = re.search(r"(.{1,32}?)\1{11,}\s*$", text[-2000:], re.DOTALL)
    # A line of dashes or dots is layout, not nonsense.
    return match[1] if match and re.search(r"\w", match[1]) else None


def check(test: SelfTest, report: Callable[[Result], None]) -> None:
    """Runs it. Raises CheckError with a sentence for each check that does not hold."""
    failed = [result for result in test.run(report) if not result.ok]
    if failed:
        raise CheckError(*(f"self-test, {result.name}: {result.text}" for result in failed))


def main(arguments: list[str] | None = None) -> int:
    """`python3 -m serving.selftest`: one line a check; 0 when all hold, 3 when one does not."""
    parser = argparse.ArgumentParser(prog="serving.selftest", description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="http://127.0.0.1:8002", help="address of the API")
    parser.add_argument("--model", default="glm53", help="the name that is served")
    parser.add_argument("--api-key-file", help="where an API key stands")
    parser.add_argument("--drafts", type=int, default=0, help="tokens speculated at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    parser.add_argument("--allow-different", action="store_true",
                        help="equal prompts may give different answers")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    asked = parser.parse_args(arguments)
    try:
        file = asked.api_key_file
        key = smallfile.read(Path(file), smallfile.KEY_BYTES).decode("ascii") if file else ""
        key = key.strip()
        if len(key.split()) > 1:  # an error about the header would show it
            raise ValueError(f"{file}: expected one key on one line")
        api = Api(asked.base, key=key, timeout=asked.timeout)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    test = SelfTest(api, model=asked.model, drafts=asked.drafts,
                    is_deterministic=not asked.allow_different)  # fmt: skip
    results = test.run((lambda _: None) if asked.json else _print)
    if asked.json:
        found = {
            "schema": 1,
            "ok": all(r.ok for r in results),
            "checks": [vars(r) for r in results],
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if all(result.ok for result in results) else CheckError.exit_code


def _print(result: Result) -> None:
    mark = "ok  " if result.ok else "FAIL"
    sys.stdout.write(f"{mark} {result.name} ({result.seconds:.1f} s): {result.text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
