"""Reads a Dockerfile: instructions with their lines, stages, and which stage made which layer.

It judges nothing, expands only build arguments, and runs nothing. Standard library only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# Instructions that add one layer each, as BuildKit counts them.
LAYERS = ("RUN", "COPY", "ADD", "WORKDIR")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(.+?)\s*")
_FLAG = re.compile(r"--(?P<name>[\w-]+)(?:=(?P<value>\S*))?\s+")
_HEREDOC = re.compile(r"<<-?\s*([\"']?)(\w+)\1")
_FROM = re.compile(r"(?P<image>\S+)(?:\s+as\s+(?P<name>\S+))?\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        word: such as "RUN", in capitals.
        line: where it starts, from 1.
        flags: (name, value) of each flag in front of `text`.
        text: the rest, continuation lines joined; a heredoc keeps its line ends.
        starts: (offset in `text`, line) of each line of the file that `text` came from.
    """

    word: str
    line: int
    flags: tuple[tuple[str, str], ...]
    text: str
    starts: tuple[tuple[int, int], ...] = field(repr=False, default=())

    def flag(self, name: str) -> str:
        """Value of a flag; "" when it is not given."""
        return next((value for known, value in self.flags if known == name), "")

    def line_at(self, offset: int) -> int:
        """The line of the file that holds a character of `text`."""
        index = bisect_right(self.starts, (offset, 1 << 30)) - 1
        return self.starts[index][1] if index >= 0 else self.line


@dataclass(frozen=True)
class Stage:
    """One stage. `image` is what its FROM names, as written; without a name it has its number."""

    name: str
    image: str
    line: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Step:
    """One layer over the base.

    Attributes:
        stage: that the instruction is in.
        origin: for a COPY from another stage, that stage; else "".
        text: the instruction, on one line and without its flags.
        line: in the Dockerfile.
    """

    stage: str
    origin: str
    text: str
    line: int


@dataclass(frozen=True)
class Dockerfile:
    """A whole file.

    Attributes:
        directives: (name, value, line) of the comments at its head that a frontend obeys.
        arguments: instructions before the first stage.
        stages: in their order.
    """

    directives: tuple[tuple[str, str, int], ...]
    arguments: tuple[Instruction, ...]
    stages: tuple[Stage, ...]

    def defaults(self, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """The build arguments: defaults of the file's head, with what is given in their place."""
        known: dict[str, str] = {}
        for instruction in self.arguments:
            for name, value in assignments(instruction.text):
                known[name] = (given or {}).get(name, expand(value, known))
        return known

    def steps(self, given: Mapping[str, str] | None = None, target: str = "") -> tuple[Step, ...]:
        """The layers that a target stage has over its base image, the base's own left out.

        Args:
            given: build arguments.
            target: a stage; by default the last one.
        """
        known = {**(given or {}), **self.defaults(given)}
        stages = {stage.name: stage for stage in self.stages}
        chain: list[Stage] = []
        name = target or (self.stages[-1].name if self.stages else "")
        while name in stages and stages[name] not in chain:
            chain.insert(0, stages[name])
            name = expand(stages[name].image, known)
        return tuple(
            _step(stage, one, known, stages)
            for stage in chain
            for one in stage.instructions
            if one.word in LAYERS
        )


def _step(
    stage: Stage, one: Instruction, known: Mapping[str, str], stages: Mapping[str, Stage]
) -> Step:
    source = expand(one.flag("from"), known)
    text = " ".join(f"{one.word} {one.text}".split())
    return Step(stage.name, source if source in stages else "", text, one.line)


def parse(text: str) -> Dockerfile:
    """Reads a Dockerfile; what is no instruction is left out, since the engine reports it."""
    head: list[Instruction] = []
    stages: list[tuple[str, str, int, list[Instruction]]] = []
    for one in _instructions(text.splitlines()):
        if one.word == "FROM":
            match = _FROM.fullmatch(one.text)
            image, name = (match["image"], match["name"]) if match else (one.text, None)
            stages.append((name or str(len(stages)), image, one.line, []))
        elif stages:
            stages[-1][3].append(one)
        else:
            head.append(one)
    made = tuple(Stage(name, image, line, tuple(body)) for name, image, line, body in stages)
    return Dockerfile(tuple(_directives(text.splitlines())), tuple(head), made)


def _directives(lines: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if not match:
            return
        yield match[1].lower(), match[2], number


def _instructions(lines: Sequence[str]) -> Iterator[Instruction]:
    index = 0
    while index < len(lines):
        first = index
        pieces: list[tuple[int, str]] = []
        goes_on = True
        while goes_on and index < len(lines):
            line = lines[index]
            index += 1
            if line.lstrip().startswith("#") or not line.strip():
                # Comments and blank lines inside an instruction do not end it.
                goes_on = bool(pieces)
                continue
            goes_on = line.rstrip().endswith("\\")
            pieces.append((index, line.rstrip()[:-1] if goes_on else line))
        if not pieces:
            continue
        for _quote, mark in _HEREDOC.findall(" ".join(piece for _number, piece in pieces)):
            while index < len(lines) and lines[index].strip() != mark:
                index += 1
                pieces.append((index, "\n" + lines[index - 1]))
            index += 1
        made = _instruction(pieces, first + 1)
        if made:
            yield made


def _instruction(pieces: Sequence[tuple[int, str]], line: int) -> Instruction | None:
    joined = "".join(piece for _number, piece in pieces)
    match = re.match(r"\s*([A-Za-z]+)\s*", joined)
    if not match:
        return None
    start, flags = match.end(), []
    while flag := _FLAG.match(joined, start):
        flags.append((flag["name"], flag["value"] or ""))
        start = flag.end()
    starts, offset = [], 0
    for number, piece in pieces:
        starts.append((max(0, offset - start), number))
        offset += len(piece)
    return Instruction(match[1].upper(), pieces[0][0] if pieces else line, tuple(flags),
                       joined[start:], tuple(starts))  # fmt: skip


def assignments(text: str) -> list[tuple[str, str]]:
    """The `NAME=VALUE` words of an ARG or ENV; a name alone has no entry."""
    found = re.findall(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\S*)", text)
    return [(name, value.strip("\"'")) for name, value in found]


def expand(text: str, known: Mapping[str, str]) -> str:
    """Puts build arguments in; an unknown one without a default stays as it is written."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return known.get(name) or (match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, text)
