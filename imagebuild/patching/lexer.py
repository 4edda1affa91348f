"""Token streams of Python and C++ source for fingerprints, the same on every interpreter.

Comments and layout are dropped; string and f-string literals are kept whole as written; Python's
indentation is kept as relative levels, since it is meaning and not layout. `tokenize` and
`ast.dump` are not used: their output changes between Python versions, and a fingerprint in a lock
must not. The lexer never rejects: an unknown character is a token of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

INDENT, DEDENT, NEWLINE = "<indent>", "<dedent>", "<newline>"

# Not \w: which characters are letters depends on the interpreter's Unicode version.
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*")
# C++'s preprocessing number: wide on purpose, it only has to find the end.
_CPP_NUMBER = re.compile(r"(?:\d|\.\d)(?:[eEpP][+-]\d|[\w.]|'(?=\w))*", re.ASCII)
_PY_NUMBER = re.compile(
    r"0[xX][\da-fA-F_]+|0[oObB][\d_]+"
    r"|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?[jJ]?",
    re.ASCII,
)
# Only those whose characters mean something else apart from each other: `a++ + b`, `a + ++b`.
_CPP_OPERATOR = re.compile(r"\+\+|--|&&")
_PY_STRING = re.compile(r"([rRbBuUfFtT]{0,3})('''|\"\"\"|'|\")")
_CPP_RAW = re.compile(r'(?:u8|[uUL])?R"([^()\\\s]{0,16})\(')
_CPP_STRING = re.compile(r"(?:u8|[uUL])?([\"'])")
_TAB = 8


def python_tokens(text: str) -> Iterator[str]:
    """Yields the tokens of Python source; joined lines are one logical line."""
    for token, _start in python_spans(text):
        yield token


def python_spans(text: str) -> Iterator[tuple[str, int]]:
    """Yields (token, offset) pairs; the offset of a change of level is that of its line's text."""
    levels: list[int] = []
    depth = 0  # of open brackets
    fresh = True  # at the start of a logical line
    at, end = 0, len(text)
    while at < end:
        if fresh:
            at, column, blank = _margin(text, at)
            if blank:
                continue
            yield from ((token, at) for token in _relevel(levels, column))
            fresh = False
        char = text[at]
        if char == "\n":
            if depth == 0:
                yield NEWLINE, at
                fresh = True
            at += 1
        elif char in " \t\r\f\ufeff":
            at += 1
        elif char == "\\" and text[at + 1 : at + 2] == "\n":
            at += 2
        elif char == "#":
            at = _line_end(text, at)
        else:
            stop = _python_token_end(text, at)
            token = text[at:stop]
            if token in "([{":
                depth += 1
            elif token in ")]}":
                depth = max(0, depth - 1)
            yield token, at
            at = stop
    if not fresh:
        yield NEWLINE, end
    for _ in levels[1:]:
        yield DEDENT, end


def _margin(text: str, at: int) -> tuple[int, int, bool]:
    """Skips a line's margin: where its text starts, at which column, and whether it has none."""
    column = 0
    while at < len(text) and text[at] in " \t\f\ufeff":
        if text[at] == "\t":
            column = (column // _TAB + 1) * _TAB
        elif text[at] == " ":
            column += 1
        elif text[at] == "\f":
            column = 0
        at += 1
    stop = at
    if text[stop : stop + 1] == "#":
        stop = _line_end(text, stop)
    if text[stop : stop + 1] == "\r":
        stop += 1
    if stop >= len(text):
        return stop, column, True
    if text[stop] == "\n":
        return stop + 1, column, True
    return at, column, False


def _relevel(levels: list[int], column: int) -> Iterator[str]:
    if not levels:
        levels.append(column)
    elif column > levels[-1]:
        levels.append(column)
        yield INDENT
    while len(levels) > 1 and column < levels[-1]:
        levels.pop()
        yield DEDENT


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _python_token_end(text: str, at: int) -> int:
    string = _PY_STRING.match(text, at)
    if string:
        prefix, quote = string.group(1).lower(), string.group(2)
        if "f" in prefix or "t" in prefix:
            return _fstring_end(text, string.end(), quote, raw="r" in prefix)
        return _string_end(text, string.end(), quote)
    found = _WORD.match(text, at) or _PY_NUMBER.match(text, at)
    return found.end() if found else at + 1


def _string_end(text: str, at: int, quote: str) -> int:
    """End of a plain literal whose body starts at `at`; of the line or text when never closed."""
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        elif text[at] == "\n" and len(quote) == 1:
            return at  # such as the apostrophe in `#error don't`
        else:
            at += 1
    return len(text)


def _fstring_end(text: str, at: int, quote: str, *, raw: bool) -> int:
    """End of an f-string body; quotes inside replacement fields do not close it (PEP 701)."""
    while at < len(text):
        char = text[at]
        if char == "\\":
            named = not raw and text.startswith("N{", at + 1)
            if named:
                at = text.find("}", at) + 1 or len(text)
            else:
                at += 1 if text[at + 1 : at + 2] in ("{", "}") else 2
        elif text.startswith(quote, at):
            return at + len(quote)
        elif text.startswith(("{{", "}}"), at):
            at += 2
        elif char == "{":
            at = _field_end(text, at + 1, quote, raw=raw)
        else:
            at += 1
    return len(text)


def _field_end(text: str, at: int, quote: str, *, raw: bool) -> int:
    """End of a replacement field whose expression starts at `at`."""
    depth = 0
    while at < len(text):
        char = text[at]
        if depth == 0 and char == "}":
            return at + 1
        if depth == 0 and char == ":":
            return _spec_end(text, at + 1, quote, raw=raw)
        if depth == 0 and char == "!" and text[at + 1 : at + 2] != "=":
            at += 1
        elif char == "#":
            at = _line_end(text, at)
        elif char.isspace():
            at += 1
        elif len(quote) == 1 and char == quote and not _closes(text, at, quote):
            return at  # before PEP 701 the quote ends the whole literal, broken or not
        else:
            depth += (char in "([{") - (char in ")]}")
            at = _python_token_end(text, at)
    return len(text)


def _closes(text: str, at: int, quote: str) -> bool:
    """Whether a string that starts at `at` ends on the same line."""
    return quote in text[at + 1 : _line_end(text, at)]


def _spec_end(text: str, at: int, quote: str, *, raw: bool) -> int:
    """End of a field whose format specification starts at `at`."""
    while at < len(text):
        if text[at] == "{":
            at = _field_end(text, at + 1, quote, raw=raw)
        elif text[at] == "}":
            return at + 1
        elif text.startswith(quote, at):
            return at
        else:
            at += 1
    return len(text)


def cpp_tokens(text: str) -> Iterator[str]:
    """Yields the tokens of C++ or CUDA source; a preprocessor line ends with NEWLINE."""
    for token, _start in cpp_spans(text):
        yield token


def cpp_spans(text: str) -> Iterator[tuple[str, int]]:
    """Yields (token, offset) pairs; comments and white space are left out."""
    at, end = 0, len(text)
    directive = False
    fresh = True
    while at < end:
        char = text[at]
        if char == "\n":
            if directive:
                yield NEWLINE, at
            directive, fresh = False, True
            at += 1
        elif char.isspace() or char == "\ufeff":
            at += 1
        elif char == "\\" and text[at + 1 : at + 2] == "\n":
            at += 2
        elif text.startswith("//", at):
            at = _line_end(text, at)
        elif text.startswith("/*", at):
            found = text.find("*/", at + 2)
            at = end if found < 0 else found + 2
        else:
            directive = directive or (fresh and char == "#")
            fresh = False
            stop = _cpp_token_end(text, at)
            yield text[at:stop], at
            at = stop


def _cpp_token_end(text: str, at: int) -> int:
    raw = _CPP_RAW.match(text, at)
    if raw:
        closing = f'){raw.group(1)}"'
        close = text.find(closing, raw.end())
        return len(text) if close < 0 else close + len(closing)
    string = _CPP_STRING.match(text, at)
    if string:
        return _string_end(text, string.end(), string.group(1))
    found = _WORD.match(text, at) or _CPP_NUMBER.match(text, at) or _CPP_OPERATOR.match(text, at)
    return found.end() if found else at + 1


def fingerprint(tokens: Iterator[str]) -> str:
    """Digest of a token stream, as the lock keeps it: `t1:` and 24 hex digits."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return f"t1:{digest.hexdigest()[:24]}"
