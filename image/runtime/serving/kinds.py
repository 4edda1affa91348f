"""The types of knobs: how the text of an environment variable becomes a value, or a sentence.

Nothing of what is read here ever passes through a shell.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

# What a knob holds: text, int, float, bool, a tuple of texts, or what JSON gives.
Value = object

_INTEGER = re.compile(r"[0-9]{1,15}")
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_HCA = re.compile(r"[=^]?[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
_DEEPEST = 20


@dataclass(frozen=True)
class Kind:
    """A type of knob.

    Attributes:
        name: for the table of knobs.
        parse: turns text, which is not empty, into a value; raises ValueError with what was
            expected.
    """

    name: str
    parse: Callable[[str], Value]


def text(pattern: re.Pattern[str], name: str, expected: str) -> Kind:
    """Text that matches a pattern as a whole."""

    def parse(value: str) -> Value:
        if not pattern.fullmatch(value):
            raise ValueError(expected)
        return value

    return Kind(name, parse)


NAME = text(_NAME, "name", "letters, digits and ._:/- (up to 128)")
INTERFACE = text(_INTERFACE, "interface", "the name of a network interface")
SCALE = text(
    re.compile(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}=[0-9]{1,9}(\.[0-9]{0,12})?([eE][+-]?[0-9]{1,2})?"
    ),
    "CHECKPOINT=SCALE",
    "CHECKPOINT=SCALE with a number, such as GLM-5.3-Flash-NVFP4=1.6e-3",
)
HCA = text(_HCA, "HCAs", "RDMA devices with commas between them, such as rocep1s0f0,rocep1s0f1")
HOST = text(_HOST, "host", "an IP address or a host name")


def _path(value: str) -> Value:
    if not value.startswith("/") or any(ord(letter) < 32 for letter in value):
        raise ValueError("an absolute path")
    return value


PATH = Kind("path", _path)


def integer(low: int, high: int, *words: str) -> Kind:
    """A whole number from `low` to `high`, or one of some words, which stay text."""
    expected = f"a whole number from {low} to {high}" + "".join(f", or {word}" for word in words)

    def parse(value: str) -> Value:
        if value in words:
            return value
        if not _INTEGER.fullmatch(value) or not value.isascii() or not low <= int(value) <= high:
            raise ValueError(expected)
        return int(value)

    return Kind(f"{low}..{high}" + "".join(f" or {word}" for word in words), parse)


PORT = integer(1, 65535)
SECONDS = integer(1, 86400)


def fraction(low: float, high: float) -> Kind:
    """A decimal number from `low` to `high`."""

    def parse(value: str) -> Value:
        if not _NUMBER.fullmatch(value) or not low <= float(value) <= high:
            raise ValueError(f"a number from {low} to {high}, such as {high}")
        return float(value)

    return Kind(f"{low}..{high}", parse)


def _switch(value: str) -> Value:
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


SWITCH = Kind("0 or 1", _switch)


def choice(*words: str) -> Kind:
    """One of some words."""

    def parse(value: str) -> Value:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value

    return Kind(" ".join(words), parse)


def _subnets(value: str) -> Value:
    try:
        return tuple(str(ipaddress.ip_network(part)) for part in value.split(","))
    except ValueError:
        raise ValueError("subnets with commas between them, such as 10.0.1.0/24") from None


SUBNETS = Kind("subnets", _subnets)


def _hosts(value: str) -> Value:
    parts = tuple(value.split(","))
    if not all(_HOST.fullmatch(part) for part in parts) or len(set(parts)) < len(parts):
        raise ValueError("different hosts with commas between them")
    return parts


HOSTS = Kind("hosts", _hosts)


def json_object(value: str) -> Value:
    """A JSON object."""
    found = _json(value, "a JSON object")
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return found


def _words(value: str) -> Value:
    expected = 'a JSON list of texts, such as ["--max-logprobs", "5"]'
    found = _json(value, expected)
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError(expected)
    if any("\0" in word for word in found):
        raise ValueError(f"{expected}, without NUL")
    return tuple(found)


JSON = Kind("JSON object", json_object)
WORDS = Kind("JSON list", _words)


def _json(value: str, expected: str) -> Value:
    def once(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def no_constant(word: str) -> Value:
        raise ValueError(f"{word} is no JSON")

    if value[:1] in "'\"" and value[-1:] == value[:1] and value[1:2] in "{[":
        raise ValueError(f"{expected}; the quotes around it are part of the value: leave them out")
    try:
        found: Value = json.loads(value, object_pairs_hook=once, parse_constant=no_constant)
        depth = _depth(found)
    except RecursionError:
        depth = _DEEPEST + 1
        found = None
    except ValueError as error:
        quotes = "" if '"' in value else "; a shell has taken its quotes: put '...' around it"
        raise ValueError(f"{expected} ({_reason(error)}){quotes}") from None
    if depth > _DEEPEST:
        raise ValueError(f"{expected} at most {_DEEPEST} deep")
    return found


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error).partition(";")[0]


def _depth(value: Value) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0
