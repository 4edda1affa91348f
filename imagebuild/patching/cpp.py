"""Reads constants of C++ headers by their tokens: would this template get 16 or 32 here?

For probes only. It knows integers, booleans, comparisons, arithmetic, `?:`, and the names and
calls that it is given; anything else is `NotThere`, so that a probe answers UNKNOWN.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from imagebuild.patching import lexer
from imagebuild.patching import text as source
from imagebuild.patching.structure import NotThere
from imagebuild.patching.tree import Tree

Value = int | bool
# A constant, or a function of constants; templates by their spelling: "std::is_same_v<A,B>".
Names = Mapping[str, Value | Callable[..., Value]]

_OPENING, _CLOSING = "([{<", ")]}>"
_TWO = ("::", "<=", ">=", "==", "!=", "&&", "||")
_LEVELS: tuple[Mapping[str, Callable[[Value, Value], Value]], ...] = (
    MappingProxyType({"||": lambda a, b: bool(a) or bool(b)}),
    MappingProxyType({"&&": lambda a, b: bool(a) and bool(b)}),
    MappingProxyType({"==": operator.eq, "!=": operator.ne}),
    MappingProxyType({"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}),
    MappingProxyType({"+": operator.add, "-": operator.sub}),
    MappingProxyType({"*": operator.mul, "/": operator.floordiv, "%": operator.mod}),
)


def tokens(tree: Tree, path: str, scope: str = "") -> list[str]:
    """The tokens of one scope, with operators of two characters joined.

    Raises:
        FileNotFoundError: the tree has no such file.
        NotThere: the file has no such scope, or more than one.
    """
    return list(_tokens(source.decode(tree.read(path)).text, path, scope))


@functools.lru_cache(maxsize=32)
def _tokens(text: str, path: str, scope: str) -> tuple[str, ...]:
    try:
        spans = source.scope_spans(text, path, scope)
    except source.ScopeMissingError as error:
        raise NotThere(f"{path} has no {scope}") from error
    if len(spans) != 1:
        raise NotThere(f"{path} defines {scope} {len(spans)} times")
    found: list[str] = []
    end = -1
    for token, at in lexer.cpp_spans(text[spans[0].start : spans[0].stop]):
        if found and end == at and found[-1] + token in _TWO:
            found[-1] += token
        else:
            found.append(token)
        end = at + len(token)
    return tuple(found)


def macro(words: Sequence[str], name: str) -> list[str]:
    """The body of the only `#define` of a macro with parameters, without its parameters.

    Raises:
        NotThere: it is not defined, or several times.
    """
    places = [
        at for at in range(len(words) - 3) if list(words[at : at + 4]) == ["#", "define", name, "("]
    ]
    if len(places) != 1:
        raise NotThere(f"expected one definition of the macro {name}, found {len(places)}")
    begin = _matching(words, places[0] + 3) + 1
    return list(words[begin : list(words).index(lexer.NEWLINE, begin)])


def constants(words: Sequence[str]) -> dict[str, list[str]]:
    """The expression of each `constexpr TYPE NAME = ...;`; the first one where a name recurs."""
    found: dict[str, list[str]] = {}
    for at, word in enumerate(words):
        if word == "constexpr" and ";" in words[at:] and "=" in words[at:]:
            equals, end = list(words).index("=", at), list(words).index(";", at)
            if equals < end:
                found.setdefault(words[equals - 1], list(words[equals + 1 : end]))
    return found


def branches(words: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Condition and body of each `if (...) {...}` in order; what an `else` alone holds is left out.

    Raises:
        NotThere: a branch has no braces, or brackets do not match.
    """
    found: list[tuple[list[str], list[str]]] = []
    at = 0
    while "if" in words[at:]:
        at = list(words).index("if", at) + 1
        close = _matching(words, at) if list(words[at : at + 1]) == ["("] else len(words)
        if list(words[close + 1 : close + 2]) != ["{"]:
            raise NotThere("a branch is not written as `if (...) {...}`")
        end = _matching(words, close + 1)
        found.append((list(words[at + 1 : close]), list(words[close + 2 : end])))
        at = end + 1
    return found


def template_arguments(words: Sequence[str], name: str) -> list[list[str]]:
    """What stands between the angle brackets behind the first `name <`, argument by argument.

    Raises:
        NotThere: there is no such use.
    """
    for at in range(len(words) - 1):
        if words[at] == name and words[at + 1] == "<":
            return _split(words[at + 2 : _matching(words, at + 1)])
    raise NotThere(f"there is no {name}<...>")


def evaluate(words: Sequence[str], names: Names) -> Value:
    """The value of a constant expression.

    Raises:
        NotThere: it holds a name that is not given, or syntax that is not known here.
    """
    parser = _Parser(words, names)
    result = parser.ternary()
    if parser.at != len(words):
        raise NotThere(f"cannot read {' '.join(words)!r} behind {' '.join(words[: parser.at])!r}")
    return result


def _matching(words: Sequence[str], at: int) -> int:
    """Index of the bracket that closes the one at `at`; only its own kind counts."""
    opening, depth = words[at], 0
    closing = _CLOSING[_OPENING.index(opening)]
    for index in range(at, len(words)):
        depth += (words[index] == opening) - (words[index] == closing)
        if depth == 0:
            return index
    raise NotThere(f"the {words[at]} is never closed")


def _split(words: Sequence[str]) -> list[list[str]]:
    """Splits at the commas outside of brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word in _OPENING) - (word in _CLOSING)
        if word == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


class _Parser:
    """Recursive descent over tokens; both arms of `?:` are read and one is taken."""

    def __init__(self, words: Sequence[str], names: Names) -> None:
        self.words, self.names, self.at = list(words), names, 0

    def _peek(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def _take(self, word: str) -> None:
        if self._peek() != word:
            raise NotThere(f"expected {word!r} in {' '.join(self.words)!r}, found {self._peek()!r}")
        self.at += 1

    def ternary(self) -> Value:
        test = self._binary(0)
        if self._peek() != "?":
            return test
        self._take("?")
        first = self.ternary()
        self._take(":")
        second = self.ternary()
        return first if test else second

    def _binary(self, level: int) -> Value:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            apply = _LEVELS[level][self._peek()]
            self.at += 1
            right = self._binary(level + 1)
            try:
                left = apply(left, right)
            except ZeroDivisionError as error:
                raise NotThere(f"{' '.join(self.words)!r} divides by zero") from error
            if left < 0:  # an unsigned type would wrap, and types are not known here
                raise NotThere(f"{' '.join(self.words)!r} goes below zero")
        return left

    def _unary(self) -> Value:
        word = self._peek()
        if word == "!":
            self.at += 1
            return not self._unary()
        if word == "(":
            self.at += 1
            value = self.ternary()
            self._take(")")
            return value
        if word[:1].isdigit():
            self.at += 1
            try:
                return int(word.replace("'", "").rstrip("uUlL"), 0)
            except ValueError as error:
                raise NotThere(f"cannot read the number {word}") from error
        return self._named()

    def _named(self) -> Value:
        name = self._peek()
        if not name.isidentifier():
            raise NotThere(f"cannot read {' '.join(self.words)!r} at {name!r}")
        self.at += 1
        while self._peek() == "::":
            name += "::" + "".join(self.words[self.at + 1 : self.at + 2])
            self.at += 2
        if self._peek() == "<" and name not in self.names:
            end = _matching(self.words, self.at)
            name += "".join(self.words[self.at : end + 1])
            self.at = end + 1
        value = self.names.get(name, {"true": True, "false": False}.get(name))
        if value is None:
            raise NotThere(f"the value of {name} is not known here")
        if not callable(value):
            return value
        end = _matching(self.words, self.at) if self._peek() == "(" else self.at
        arguments = [evaluate(part, self.names) for part in _split(self.words[self.at + 1 : end])]
        self.at = end + 1
        return value(*arguments)
