"""Names of images: every part, and what is none."""

from __future__ import annotations

import pytest

from imagebuild.errors import UsageError
from imagebuild.sources.imageref import Reference, is_loopback, parse_reference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "parts", "asked"),
    [
        ("debian", ("", "debian", "", ""), "latest"),
        ("vllm/vllm-openai:v0.31.0", ("", "vllm/vllm-openai", "v0.31.0", ""), "v0.31.0"),
        (f"a/b:1@{DIGEST}", ("", "a/b", "1", DIGEST), DIGEST),
        ("127.0.0.1:5000/a/b__c.d--e:1", ("127.0.0.1:5000", "a/b__c.d--e", "1", ""), "1"),
        ("localhost/a", ("localhost", "a", "", ""), "latest"),
        ("r.example/a:1", ("r.example", "a", "1", ""), "1"),
        ("[::1]:5000/a", ("[::1]:5000", "a", "", ""), "latest"),
        (f"a@{DIGEST}", ("", "a", "", DIGEST), DIGEST),
    ],
)
def test_a_name_in_its_parts(text: str, parts: tuple[str, ...], asked: str) -> None:
    found = parse_reference(text)
    assert (found.host, found.repository, found.tag, found.digest) == parts
    assert found.asked == asked
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "a/", "/a", "A", "a//b", "a:", "a:-1", "a:" + "x" * 129, "a b", "a@sha256:00",
        "a@", f"a@{DIGEST.upper()}", "a@md5:" + "0" * 32, "r.example:x/a", "r_x.example/a",
        "../../etc", "a/../b", "-a", "a\n", "http://r.example/a", "a?b=c", "a%2fb", "a:1:2",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_reference(text)


def test_another_digest_of_the_same_repository() -> None:
    assert Reference("h:1", "a", "1").at(DIGEST) == Reference("h:1", "a", "1", DIGEST)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:5000", True),
        ("127.9.9.9", True), ("[::1]:1", True), ("localhost.example", False),
        ("127.example", False), ("10.0.0.1", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_asked_without_tls(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
