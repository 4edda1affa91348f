"""Servers that nobody here knows: an audit gives the right result, or ends with one sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.index_server import Faults
from tests.support.product import Product, Ran

ARGUMENTS = ("audit", "--since", "0.32.0", "--format", "json")


def found(ran: Ran) -> list[tuple[Any, ...]]:
    """What an audit is for: verdicts, evidence and pins, whatever it cost."""
    return [
        (release["version"], release["commit"], release["pins"], release["patches"])
        for release in ran.json["releases"]
    ]


@pytest.fixture
def expected(product: Product) -> list[tuple[Any, ...]]:
    """By a server that does everything right; the next call starts with an empty cache."""
    ran = product.run(*ARGUMENTS)
    assert ran.code == 0
    product.extra["IMAGEBUILD_CACHE"] = str(product.folder / "cache of the test")
    return found(ran)


def html(faults: Faults) -> None:
    faults.html_only = faults.relative = True


def bare(faults: Faults) -> None:
    html(faults)
    faults.hashes = faults.sizes = faults.etag = False


def no_ranges(faults: Faults) -> None:
    faults.ranges = False


def no_suffixes(faults: Faults) -> None:
    """The size is not in an HTML page, so the end must be asked for by its length."""
    html(faults)
    faults.suffix_ranges = False


def no_length(faults: Faults) -> None:
    faults.length = False


def busy(faults: Faults) -> None:
    faults.busy, faults.busy_status = 3, 429


def busy_until(faults: Faults) -> None:
    busy(faults)
    faults.retry_after = "Sun, 29 Nov 2026 00:00:00 GMT"  # the other form; it is past


def cut_now_and_then(faults: Faults) -> None:
    faults.drop_after = [40, 0, 300]


def slow(faults: Faults) -> None:
    faults.dribble = 700


@pytest.mark.parametrize(
    "fault",
    [html, bare, no_ranges, no_suffixes, no_length, busy, busy_until, cut_now_and_then, slow],
)
def test_the_result_is_the_same(
    product: Product, expected: list[tuple[Any, ...]], fault: Callable[[Faults], None]
) -> None:
    product.retries = 4
    fault(product.server.faults)
    ran = product.run(*ARGUMENTS)
    assert ran.code == 0, ran
    assert found(ran) == expected


def test_a_login_in_the_index_is_enough(product: Product, expected: list[tuple[Any, ...]]) -> None:
    product.server.faults.auth = ("me", "s3cret")
    product.index_url = product.server.url.replace("://", "://me:s3cret@")
    ran = product.run(*ARGUMENTS)
    assert (ran.code, found(ran)) == (0, expected)
    assert "s3cret" not in ran.out + ran.err


def no_login(faults: Faults) -> None:
    faults.auth = ("me", "s3cret")


def always_busy(faults: Faults) -> None:
    faults.busy, faults.busy_status = -1, 429


def always_cut(faults: Faults) -> None:
    faults.drop_after = [40] * 999


def short(faults: Faults) -> None:
    """Without ranges, and each file ends too early."""
    faults.ranges, faults.cut = False, 9


def changed(faults: Faults) -> None:
    faults.flip = 300


def portal(faults: Faults) -> None:
    html(faults)
    faults.page = b"<html><body>please log in</body></html>"


def nonsense(faults: Faults) -> None:
    faults.page = b"{}"


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (no_login, 5, "found status 401"),
        (always_busy, 5, "found status 429"),
        (always_cut, 5, "the connection broke off"),
        (short, 4, "bytes, found"),
        (changed, 4, "expected an intact wheel, found: Bad CRC-32"),
        (portal, 5, "expected the project vllm, found no file of it"),
        (nonsense, 5, "expected a simple index page of vllm, found 2 bytes of"),
    ],
)
def test_or_one_sentence_says_why_not(
    product: Product, fault: Callable[[Faults], None], code: int, said: str
) -> None:
    fault(product.server.faults)
    ran = product.run("audit", "--against", "0.33.0")
    assert (ran.code, ran.out) == (code, ""), ran
    errors = [line for line in ran.err.split("\n") if line.startswith("error: ")]
    assert len(errors) == 1
    assert "expected" in errors[0]
    assert said in errors[0]


def test_a_server_that_says_nothing_is_given_up(product: Product) -> None:
    product.timeout = 0.2
    product.server.faults.hold = threading.Event()
    ran = product.run("audit", "--against", "0.33.0")
    assert ran.code == 5
    assert "it sent nothing for 0.2 s" in ran.err
    assert "hint: raise `timeout` in pip's configuration" in ran.err


def test_of_a_grid_the_releases_that_can_be_read_are_shown(product: Product) -> None:
    """A server that fails for one file only."""
    wheel = next(product.wheels.glob("vllm-0.32.0-*x86_64.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-9])
    ran = product.run(*ARGUMENTS)
    assert [release["version"] for release in ran.json["releases"]] == ["0.33.0"]
    assert [failure["name"] for failure in ran.json["failures"]] == ["0.32.0"]
    assert ran.code == ran.json["failures"][0]["exit_code"] == 4
