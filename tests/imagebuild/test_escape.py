"""Text of others: what acts is shown, what is plain stays."""

from __future__ import annotations

import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.escape import one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\r\nb", "a\\r\nb"),
        ("\0\x07\x7f\x85\x9b", "\\x00\\x07\\x7f\\x85\\x9b"),
        ("if admin\u202e { \u2066// check", "if admin\\u202e { \\u2066// check"),
        ("a\u2028b\ufeffc\u200bd\ufffee", "a\\u2028b\\ufeffc\\u200bd\\ufffee"),
        (os.fsdecode(b"caf\xe9.py"), "caf\\xe9.py"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("tab\tand\nnewline, 中文, é, ✓, 🙂", "tab\tand\nnewline, 中文, é, ✓, 🙂"),
    ],
)
def test_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_one_line() -> None:
    assert one_line("  a\n\n\tb \x1b\r\nc\u2028d ") == "a b \\x1b c d"


@given(st.text(st.characters()))
def test_nothing_that_acts_is_left(text: str) -> None:
    shown = visible(text)
    shown.encode()  # no half of a pair
    assert visible(shown) == shown
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    assert len(one_line(text).splitlines()) <= 1
