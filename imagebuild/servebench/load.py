"""Runs levels of concurrency against one or two servers in turn, and takes medians."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from imagebuild.servebench.client import Answer, FailedRequestError, Server

# Short words of about one token each in any English vocabulary.
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
)


@dataclass(frozen=True)
class Shape:
    """What each request is like.

    Attributes:
        prompt_tokens: about how many, in words that are mostly one token.
        output_tokens: at most.
        requests: per slot of concurrency.
        repeats: of each level; medians are taken over them.
        seed: of the prompts, which never repeat, so that no prefix cache helps.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    requests: int = 2
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One repeat of one level.

    Attributes:
        ttft: median seconds to the first token.
        ttft_p99: the 99th percentile of the same.
        decode: median tokens a second of one request, after its first token.
        throughput: output tokens a second, all requests together.
        acceptance: tokens a draft step yields, its own token included; None without speculation.
        failures: what failed requests said.
    """

    ttft: float | None
    ttft_p99: float | None
    decode: float | None
    throughput: float
    acceptance: float | None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """All repeats of one concurrency on one server."""

    concurrency: int
    runs: list[Run] = field(default_factory=list)

    def median(self, name: str) -> float | None:
        """The median over repeats of a figure of `Run`; None where no repeat has it."""
        values = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return statistics.median(values) if values else None

    @property
    def failures(self) -> list[str]:
        """What failed requests said."""
        return [failure for run in self.runs for failure in run.failures]


def prompt(number: int, shape: Shape) -> str:
    """The text of request `number`: its first word differs, so nothing of it was cached before."""
    chosen = random.Random(f"{shape.seed}/{number}")  # noqa: S311  prompts, not secrets
    words = " ".join(chosen.choices(_WORDS, k=max(shape.prompt_tokens - 12, 1)))
    return f"{number} {words}\nWrite a long story with these words."


def measure(
    servers: Sequence[Server],
    concurrency: Sequence[int],
    shape: Shape,
    *,
    step: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[Level]]:
    """Levels of each server, in the order of `servers`.

    Repeats alternate between servers (A B A B ...), so that heat and traffic meet both alike.
    """
    levels = [[Level(count) for count in concurrency] for _ in servers]
    number = 0
    for place, count in enumerate(concurrency):
        for repeat in range(shape.repeats):
            for index, server in enumerate(servers):
                step(f"{server.name}: {count} at a time, repeat {repeat + 1} of {shape.repeats}")
                run = _run(server, count, shape, number, clock)
                levels[index][place].runs.append(run)
                number += count * shape.requests
    return levels


def _run(server: Server, count: int, shape: Shape, number: int, clock: Callable[[], float]) -> Run:
    total = count * shape.requests
    prompts = [prompt(number + each, shape) for each in range(total)]
    failures: list[str] = []
    lock = threading.Lock()

    def one(text: str) -> Answer | None:
        try:
            return server.ask(text, shape.output_tokens)
        except FailedRequestError as error:
            with lock:
                failures.append(str(error))
            return None

    before = server.drafts()
    start = clock()
    with ThreadPoolExecutor(max_workers=count) as pool:
        answers = [answer for answer in pool.map(one, prompts) if answer]
    seconds = clock() - start
    after = server.drafts()
    first = [answer.first for answer in answers]
    rates = [rate for answer in answers if (rate := answer.decode_rate) is not None]
    return Run(
        ttft=statistics.median(first) if first else None,
        ttft_p99=_percentile(first, 99) if first else None,
        decode=statistics.median(rates) if rates else None,
        throughput=sum(answer.tokens for answer in answers) / seconds,
        acceptance=_acceptance(before, after),
        failures=tuple(failures),
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of all are not above."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1]


def _acceptance(
    before: tuple[float, float] | None, after: tuple[float, float] | None
) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1 + (after[0] - before[0]) / (after[1] - before[1])
