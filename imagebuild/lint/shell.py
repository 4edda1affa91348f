"""Splits the shell text of a RUN into commands, loops and the operators between them.

It knows quoting, reserved words and heredocs' line ends, and expands nothing. Not a shell: what it
cannot split, such as a here document inside a loop, it reads as plain words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|\\\n)"
    r"|(?P<comment>(?<![^\s;&|()])#[^\n]*)"
    r"|(?P<redirect>\d*(?:&>>?|>>|>&|<&|<<<|<>|>\||<|>)(?:&?\d+-?(?![^\s;&|()]))?)"
    r"|(?P<operator>&&|\|\||;;|\|&|[;&|()\n])"
    r"|(?P<word>(?:\$\{[^}]*\}|[^\s;&|()<>'\"\\`]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`)+)",
    re.DOTALL,
)
_INNER = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_LOOPS = ("for", "while", "until", "select")
# Words after which another command starts.
_OPENERS = ("if", "then", "elif", "else", "do", "while", "until", "{", "!", "time")
_CLOSERS = ("fi", "done", "esac", "}")


@dataclass
class Command:
    """One simple command.

    Attributes:
        words: as written, quotes taken off; redirections left out.
        offset: of its first word in the text.
        before, after: the operators around it: "", "\\n", ";", "&&", "||", "|", "&", "(", ")", or a
            reserved word.
        loops: offsets of the loops whose body it is in, outermost first.
        depth: of groups, loops, conditionals and cases around it.
        is_condition: its failure is what an `if`, `while` or `until` asks for.
    """

    words: list[str]
    offset: int
    before: str
    after: str = ""
    loops: tuple[int, ...] = ()
    depth: int = 0
    is_condition: bool = False


@dataclass
class Loop:
    """One loop. `after` is the operator that follows its `done`."""

    word: str
    offset: int
    after: str = ""
    is_condition: bool = False


@dataclass
class Script:
    """What a text holds. `pipes` are offsets of pipe signs."""

    commands: list[Command] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    pipes: list[int] = field(default_factory=list)


@dataclass
class _Open:
    """A construct that has begun. `part` is the reserved word of its part under way."""

    word: str
    offset: int
    part: str


class _Reader:
    """One pass over the tokens."""

    def __init__(self) -> None:
        self.script = Script()
        self.stack: list[_Open] = []
        self.command: Command | None = None
        self.last: Command | Loop | None = None
        self.before = ""
        self.skips_word = False

    def read(self, text: str, base: int) -> None:
        for kind, token, offset in _tokens(text, base):
            if kind == "redirect":
                self.skips_word = not re.search(r"\d-?$", token) or token[-1] in "<>"
            elif kind == "operator":
                self._operator(token, offset)
            elif self.skips_word:
                self.skips_word = False
            else:
                self._word(token, offset)
            if kind == "word" and '"' in token:
                for match in _INNER.finditer(token):
                    inner = parse(
                        match[1] or match[2] or "", offset + match.start(1 if match[1] else 2)
                    )
                    self.script.commands += inner.commands
                    self.script.loops += inner.loops
                    self.script.pipes += inner.pipes
        self._end("")

    def _operator(self, token: str, offset: int) -> None:
        top = self.stack[-1] if self.stack else None
        if top and top.word == "case" and top.part == "pattern":
            if token == ")":
                top.part = "body"
                self.before = ")"
            return
        self._end(token)
        if token in ("|", "|&"):
            self.script.pipes.append(offset)
        if token == "(":
            self.stack.append(_Open("(", offset, "("))
        elif token == ")" and top and top.word == "(":
            self.stack.pop()
        elif token == ";;" and top and top.word == "case":
            top.part = "pattern"
        self.before = token

    def _word(self, token: str, offset: int) -> None:
        top = self.stack[-1] if self.stack else None
        if top and top.part == "head":  # `for NAME in ...`, `case WORD in`
            if token == "in" and top.word == "case":
                top.part = "pattern"
            elif token == "do":
                top.part = "do"
                self.before = "do"
            return
        if top and top.word == "case" and top.part == "pattern" and token != "esac":
            return
        if self.command is None and self._reserved(token, offset, top):
            return
        if self.command is None:
            self.command = Command(
                [], offset, self.before,
                loops=tuple(o.offset for o in self.stack if o.word in _LOOPS and o.part == "do"),
                depth=len(self.stack), is_condition=self._in_condition(),
            )  # fmt: skip
        self.command.words.append(_unquoted(token))

    def _reserved(self, token: str, offset: int, top: _Open | None) -> bool:
        if token in ("for", "select", "case"):
            self.stack.append(_Open(token, offset, "head"))
        elif token in ("if", "while", "until", "{"):
            self.stack.append(_Open(token, offset, token))
        elif token in ("then", "elif", "else", "do") and top:
            self._mark(token)
            top.part = token
        elif token in _CLOSERS and top:
            self._mark(token)
            self.stack.pop()
            if top.word in _LOOPS:
                self.last = Loop(top.word, top.offset, is_condition=self._in_condition())
                self.script.loops.append(self.last)
            else:
                self.last = None
        elif token not in _OPENERS:
            return False
        self.before = token
        return True

    def _mark(self, token: str) -> None:
        """A `; done` after a command ends its list: nothing follows that could hide a failure."""
        if isinstance(self.last, Command) and self.last.after in (";", "\n"):
            self.last.after = token

    def _in_condition(self) -> bool:
        return any(o.part in ("if", "elif", "while", "until") for o in self.stack)

    def _end(self, token: str) -> None:
        if self.command is not None:
            self.command.after = token
            self.script.commands.append(self.command)
            self.last, self.command = self.command, None
        elif isinstance(self.last, Loop) and not self.last.after:
            self.last.after = token
        self.skips_word = False
        if not token:
            self._mark("")


def parse(text: str, base: int = 0) -> Script:
    """Splits a text; `base` is added to every offset."""
    reader = _Reader()
    reader.read(text, base)
    return reader.script


def _tokens(text: str, base: int) -> Iterator[tuple[str, str, int]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:  # an unbalanced quote: one character of a word
            yield "word", text[position], base + position
            position += 1
            continue
        kind = match.lastgroup or "word"
        if kind not in ("space", "comment"):
            yield kind, match[0], base + position
        position = match.end()


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)|[\"']", r"\1", word)
