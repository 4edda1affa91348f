"""What changed in a scope by tokens: what a fingerprint counts, and nothing that it leaves out."""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imagebuild.audit.results import TokenChange
from imagebuild.patching import lexer
from imagebuild.patching import text as source

_LAYOUT = frozenset([lexer.INDENT, lexer.DEDENT, lexer.NEWLINE])


@dataclass(frozen=True)
class ScopeText:
    """One scope of one file, as tokens.

    Attributes:
        line: 1-based line on which it starts; 0 when the file has no such scope.
        text: its own lines.
        lines: its tokens line by line, then what it stands on, one clause a line.
        numbers: the line in the file of each of `lines`; 0 for a clause.
    """

    line: int
    text: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]


NOTHING = ScopeText(0, (), (), ())


def scope_text(text: str, path: str, scope: str) -> ScopeText:
    """Cuts a scope out of a file.

    Raises:
        TextError, ScopeMissingError: as `imagebuild.patching.text.scope_spans`.
    """
    spans = source.scope_spans(text, path, scope)
    starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    found: dict[int, list[str]] = {}
    for span in spans:
        for token, at in _spans(text[span.start : span.stop], path):
            number = bisect.bisect_right(starts, span.start + at)
            found.setdefault(number, []).append(token)
    clauses = [tuple(clause) for clause in source.standing(text, path, scope)]
    own = "".join(text[span.start : span.stop] for span in spans)
    return ScopeText(
        source.line_of(text, spans[0].start),
        tuple(own.split("\n")),
        (*(tuple(tokens) for tokens in found.values()), *clauses),
        (*found, *(0 for _ in clauses)),
    )


def token_changes(old: ScopeText, new: ScopeText) -> tuple[TokenChange, ...]:
    """Every run of tokens that differs, in the order of the file."""
    found: list[TokenChange] = []
    matcher = difflib.SequenceMatcher(None, old.lines, new.lines, autojunk=False)
    for word, a, b, c, d in matcher.get_opcodes():
        if word != "equal":
            found += _inside(_flat(old, a, b), _flat(new, c, d))
    return tuple(found)


def _inside(
    old: Sequence[tuple[str, int]], new: Sequence[tuple[str, int]]
) -> Iterator[TokenChange]:
    """Changes within lines that differ."""
    before, after = [token for token, _ in old], [token for token, _ in new]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for word, a, b, c, d in matcher.get_opcodes():
        if word == "equal":
            continue
        yield TokenChange(tuple(before[a:b]), tuple(after[c:d]), _at(old, a, b), _at(new, c, d))


def _at(tokens: Sequence[tuple[str, int]], start: int, stop: int) -> int:
    """The line of a run; of an empty one that which it would stand on, as far as one is known."""
    here = tokens[start:stop] or tokens[max(0, start - 1) : start]
    return here[0][1] if here else 0


def _flat(side: ScopeText, start: int, stop: int) -> list[tuple[str, int]]:
    return [(token, side.numbers[i]) for i in range(start, stop) for token in side.lines[i]]


def _spans(text: str, path: str) -> Iterator[tuple[str, int]]:
    kind = source.language(path)
    if kind == "python":
        return lexer.python_spans(text)
    return lexer.cpp_spans(text) if kind == "cpp" else _plain(text)


def _plain(text: str) -> Iterator[tuple[str, int]]:
    at = 0
    for line in text.split("\n"):
        yield line.strip(), at
        at += len(line) + 1


def shown(tokens: Sequence[str]) -> str:
    """Tokens for people: layout as arrows, else a blank between two words."""
    words = {lexer.INDENT: "→", lexer.DEDENT: "←", lexer.NEWLINE: "⏎"}
    return " ".join(words.get(token, token) for token in tokens)


def is_layout(change: TokenChange) -> bool:
    """Whether only the depth or the end of lines changed."""
    return _LAYOUT.issuperset((*change.old, *change.new))
