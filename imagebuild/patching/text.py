"""Files as text, the scopes in them and their fingerprints. Reads and computes; decides nothing.

A scope is named `Class.method`, `outer.inner` or `function`; in C++ and CUDA files it is a function
or a struct found by matching braces; "" is the whole file.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from imagebuild.patching import lexer
from imagebuild.patching.standing import Clause, cpp_standing, python_standing

Language = Literal["python", "cpp", "other"]
_CPP_SUFFIXES = (".cuh", ".cu", ".h", ".hpp", ".cpp", ".cc", ".c", ".inl")
_CPP_BLOCKS = ("struct", "class", "namespace", "union", "enum")
# Kind, name and start of an open block.
_Block = tuple[str, str, int]
# How many equally good lines `nearest` compares in full.
_ALIKE = 50
# Words that stand before `(` without naming a function.
_CPP_NO_NAMES = frozenset(
    [
        "if",
        "for",
        "while",
        "switch",
        "catch",
        "return",
        "sizeof",
        "alignas",
        "decltype",
        "noexcept",
        "requires",
        "final",
        "__launch_bounds__",
        "__attribute__",
        "__align__",
        "__declspec",
    ]
)


@dataclass
class _If:
    """An open `#if` in C++.

    Attributes:
        before: the blocks that were open before it.
        first: those that are open behind its first branch, once that has ended.
    """

    before: list[_Block]
    first: list[_Block] | None = None


class TextError(Exception):
    """The bytes cannot be patched as text; the message is a clause such as "is not UTF-8"."""


class ScopeMissingError(Exception):
    """The file has no scope of that name."""


@dataclass(frozen=True)
class SourceText:
    """One file's text with "\\n" line ends.

    Attributes:
        text: decoded content; a byte order mark stays as its first character.
        newline: how lines end on disk.
    """

    text: str
    newline: Literal["\n", "\r\n"]

    def encode(self, text: str) -> bytes:
        """Bytes of `text` in this file's conventions."""
        return text.replace("\n", self.newline).encode("utf-8")


@dataclass(frozen=True)
class Span:
    """Half-open range of character offsets."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Whether the two share a character; empty spans touch nothing."""
        return self.start < other.stop and other.start < self.stop


def decode(data: bytes) -> SourceText:
    """Decodes a file for patching.

    Raises:
        TextError: not UTF-8, or a mixture of line ends that could not be written back as it was.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})"
        ) from error
    pairs = text.count("\r\n")
    if text.count("\r") != pairs:
        raise TextError("has carriage returns that end no line, so it cannot be written back")
    if pairs and pairs != text.count("\n"):
        raise TextError(
            f"mixes line ends ({pairs} of {text.count(chr(10))} are CRLF), "
            "so it cannot be written back"
        )
    return SourceText(text.replace("\r\n", "\n"), "\r\n" if pairs else "\n")


def language(path: str) -> Language:
    """Which lexer and scope rules apply to a file."""
    if path.endswith(".py"):
        return "python"
    return "cpp" if path.endswith(_CPP_SUFFIXES) else "other"


def scope_spans(text: str, path: str, scope: str) -> tuple[Span, ...]:
    """Where a scope stands; more than one span when it is defined more than once.

    Raises:
        ScopeMissingError: there is no such scope.
        TextError: the file does not parse, so its scopes cannot be told.
    """
    if not scope:
        return (Span(0, len(text)),)
    found = scopes(text, language(path)).get(scope)
    if not found:
        raise ScopeMissingError(scope)
    return found


@functools.lru_cache(maxsize=256)
def scopes(text: str, kind: Language) -> dict[str, tuple[Span, ...]]:
    """Every named scope of a file. Raises TextError when Python source does not parse."""
    found: dict[str, list[Span]] = {}
    if kind == "python":
        _python_scopes(text, found)
    elif kind == "cpp":
        _cpp_scopes(text, found)
    return {name: tuple(spans) for name, spans in found.items()}


@functools.lru_cache(maxsize=64)
def _module(text: str) -> ast.Module:
    """The syntax tree of a source without byte order mark. Raises TextError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's own, such as invalid escapes
            return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line}: {getattr(error, 'msg', error)})" if line else ""
        raise TextError(f"does not parse as Python{where}") from error


def forget() -> None:
    """Drops the scopes and syntax trees that are kept."""
    scopes.cache_clear()
    _module.cache_clear()


def _python_scopes(text: str, found: dict[str, list[Span]]) -> None:
    module = _module(text.removeprefix("\ufeff"))
    starts = _line_starts(text)

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                last = child.end_lineno or child.lineno
                found.setdefault(name, []).append(Span(starts[first - 1], starts[last]))
                walk(child, name + ".")
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                walk(child, prefix)

    walk(module, "")


def _line_starts(text: str) -> list[int]:
    """Offset of each line, and the end of the text last; only "\\n" ends a line, as for `ast`."""
    starts = [0]
    while (at := text.find("\n", starts[-1])) >= 0:
        starts.append(at + 1)
    return [*starts, len(text)]


def _cpp_scopes(text: str, found: dict[str, list[Span]]) -> None:
    """Finds functions and structs by matching braces; statements inside functions are skipped."""
    tokens = list(lexer.cpp_spans(text))
    blocks: list[_Block] = []
    open_ifs: list[_If] = []
    head = 0  # index of the first token of the declaration under way
    directive: list[str] | None = None  # braces of a macro's body need not balance
    for index, (token, start) in enumerate(tokens):
        if directive is not None or token == "#":
            if directive is not None and token == lexer.NEWLINE:
                blocks = _cpp_branch(directive, blocks, open_ifs)
                directive = None
                head = head if _in_function(blocks) else index + 1
            else:
                directive = [*(directive or []), token]
            continue
        if token == ";" and not _in_function(blocks):
            head = index + 1
        elif token == "{":
            kind, name = ("", "") if _in_function(blocks) else _cpp_block(tokens[head:index])
            begin = tokens[head][1] if head < index else start
            blocks.append((kind, name, text.rfind("\n", 0, begin) + 1))
            head = index + 1
        elif token == "}" and blocks:
            kind, name, begin = blocks.pop()
            if name and kind in ("function", "struct"):
                outer = [n for k, n, _start in blocks if k == "struct" and n]
                stop = text.find("\n", start)
                spans = found.setdefault(".".join([*outer, name]), [])
                # Each branch of an `#if` may close it; it is still one.
                spans[:] = [span for span in spans if span.start != begin]
                spans.append(Span(begin, len(text) if stop < 0 else stop + 1))
            head = index + 1


def _in_function(blocks: list[_Block]) -> bool:
    return any(kind == "function" for kind, _name, _start in blocks)


def _cpp_branch(directive: list[str], blocks: list[_Block], open_ifs: list[_If]) -> list[_Block]:
    """The open blocks behind a preprocessor line.

    Each branch of an `#if` starts from what was open before it, since a compiler takes one of them:
    where every branch opens a brace, one brace is open behind them. The first branch decides.
    """
    word = directive[1] if len(directive) > 1 else ""
    if word in ("if", "ifdef", "ifndef"):
        open_ifs.append(_If(list(blocks)))
    elif word in ("else", "elif", "elifdef", "elifndef") and open_ifs:
        one = open_ifs[-1]
        one.first = list(blocks) if one.first is None else one.first
        return list(one.before)
    elif word == "endif" and open_ifs:
        first = open_ifs.pop().first
        return blocks if first is None else first
    return blocks


def _cpp_block(declaration: list[tuple[str, int]]) -> tuple[str, str]:
    """Kind (function, struct, namespace, "") and name of the block that a declaration opens."""
    words = [token for token, _start in declaration]
    parens = angles = 0
    for index, word in enumerate(words):
        before = words[index - 1] if index and word == "(" and not (parens or angles) else ""
        if before.isidentifier() and before not in _CPP_NO_NAMES:
            return "function", before
        parens += (word == "(") - (word == ")")
        if not parens:  # inside them it compares: `template <bool B = (N > 1)>`
            angles = max(0, angles + (word == "<") - (word == ">"))
    for kind in _CPP_BLOCKS:
        if kind in words:
            after = [word for word in words[words.index(kind) + 1 :] if word.isidentifier()]
            named = [word for word in after if word not in _CPP_NO_NAMES]
            return ("namespace" if kind == "namespace" else "struct"), named[0] if named else ""
    return "", ""


def fingerprint(text: str, path: str, scope: str) -> str:
    """Digest of a scope's tokens (see `imagebuild.patching.lexer`) and of what it stands on.

    Raises:
        ScopeMissingError, TextError: as `scope_spans`.
    """
    parts = [text[span.start : span.stop] for span in scope_spans(text, path, scope)]
    kind = language(path)

    lex = {"python": lexer.python_tokens, "cpp": lexer.cpp_tokens, "other": _plain_tokens}[kind]
    tokens = [lex(part) for part in parts]
    return lexer.fingerprint(itertools.chain.from_iterable([*tokens, *standing(text, path, scope)]))


def standing(text: str, path: str, scope: str) -> list[Clause]:
    """What decides outside of a scope's own text what it does; nothing for a whole file.

    Raises:
        ScopeMissingError, TextError: as `scope_spans`.
    """
    spans, kind = scope_spans(text, path, scope), language(path)
    if scope and kind == "python":
        plain = text.removeprefix("\ufeff")
        return list(python_standing(plain, _module(plain), scope))
    return list(cpp_standing(text, [span.start for span in spans])) if scope else []


def _plain_tokens(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\n"))


def find_all(text: str, needle: str, spans: tuple[Span, ...]) -> list[int]:
    """Offsets of every occurrence that lies wholly inside one of the spans, without overlaps."""
    found: list[int] = []
    for span in sorted(set(spans), key=lambda s: s.start):
        at = max(span.start, found[-1] + len(needle) if found else 0)
        while needle and (at := text.find(needle, at, span.stop)) >= 0:
            found.append(at)
            at += len(needle)
    return found


def line_of(text: str, offset: int) -> int:
    """1-based line number of an offset."""
    return text.count("\n", 0, offset) + 1


@dataclass(frozen=True)
class Candidate:
    """Text that looks like a missing anchor.

    Attributes:
        path: file it stands in.
        line: 1-based first line.
        similarity: 0 to 1 by `difflib`.
        text: the lines themselves.
    """

    path: str
    line: int
    similarity: float
    text: str


def nearest(text: str, path: str, anchor: str, spans: tuple[Span, ...]) -> Candidate | None:
    """The lines inside the spans that look most like `anchor`; None when nothing is alike."""
    wanted = anchor.strip("\n").split("\n")
    best: tuple[float, int, list[str]] = (0.0, 0, [])
    # The longest line is the most telling one: look for it first, then compare whole windows.
    key = max(range(len(wanted)), key=lambda i: len(wanted[i].strip()))
    for span in spans:
        first = line_of(text, span.start)
        lines = text[span.start : span.stop].split("\n")
        matcher = difflib.SequenceMatcher(autojunk=False)
        matcher.set_seq2(wanted[key].strip())
        ranked = []
        for index, line in enumerate(lines):
            matcher.set_seq1(line.strip())
            if matcher.real_quick_ratio() > 0.4 and matcher.quick_ratio() > 0.4:
                ranked.append((matcher.ratio(), index))
        ranked.sort(reverse=True)
        for ratio, index in ranked[:_ALIKE]:
            if ratio < ranked[:5][-1][0]:
                break
            begin = max(0, index - key)
            window = lines[begin : begin + len(wanted)]
            likeness = difflib.SequenceMatcher(
                None, "\n".join(window), "\n".join(wanted), autojunk=False
            ).ratio()
            if likeness > best[0]:
                best = (likeness, first + begin, window)
    return Candidate(path, best[1], round(best[0], 3), "\n".join(best[2])) if best[2] else None
