"""Reads what `buildx build --progress plain` prints: steps with their times, and why one failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_LINE = re.compile(r"#(?P<number>\d+) (?P<text>.*)")
_LOG = re.compile(r"\d+\.\d+ (?P<text>.*)")
_DONE = re.compile(r"DONE (?P<seconds>\d+(?:\.\d+)?)s")
_EXIT = re.compile(r"exit code: (\d+)")
_FLAGS = re.compile(r"\s--(?:mount|network|chmod|from)=\S+")


@dataclass
class Vertex:
    """One step of a build, with the last lines that it printed."""

    name: str = ""
    log: list[str] = field(default_factory=list)
    error: str = ""
    is_cached: bool = False
    seconds: float | None = None

    @property
    def exit_code(self) -> int | None:
        """Of the command of a failed step; None where no command ran."""
        match = _EXIT.search(self.error)
        return int(match[1]) if match else None

    @property
    def stage(self) -> str:
        """The Dockerfile's stage, such as "patched"; "" for BuildKit's own steps."""
        match = re.match(r"\[(?:\S+ )?([\w-]+) +\d+/\d+\]", self.name)
        return match[1] if match else ""


class Progress:
    """Takes the output line by line.

    Attributes:
        vertices: by BuildKit's number.
        tail: the last lines, whatever they are.
    """

    KEPT = 40

    def __init__(self, step: Callable[[str], None]) -> None:
        self._step = step
        self.vertices: dict[int, Vertex] = {}
        self.tail: list[str] = []

    def feed(self, line: str) -> None:
        """One line of output, without its end."""
        self.tail = [*self.tail, line][-self.KEPT :]
        match = _LINE.fullmatch(line)
        if not match:
            return
        vertex = self.vertices.setdefault(int(match["number"]), Vertex())
        text = match["text"]
        if log := _LOG.fullmatch(text):
            vertex.log = [*vertex.log, log["text"]][-self.KEPT :]
        elif done := _DONE.fullmatch(text):
            self._finish(vertex, float(done["seconds"]))
        elif text == "CACHED":
            vertex.is_cached = True
            self._finish(vertex, 0.0)
        elif text.startswith("ERROR: "):
            vertex.error = text.removeprefix("ERROR: ")
        elif not vertex.name and text.startswith(("[", "exporting")):
            vertex.name = text

    def _finish(self, vertex: Vertex, seconds: float) -> None:
        # A step reports once for its result and once more when it is used.
        if vertex.seconds is None and vertex.name and not vertex.name.startswith("[internal]"):
            how = "cached" if vertex.is_cached else f"{seconds:.1f} s"
            self._step(f"{short(vertex.name)}: {how}")
        vertex.seconds = max(vertex.seconds or 0.0, seconds)

    @property
    def failed(self) -> Vertex | None:
        """The step that failed first."""
        return next((one for one in self.vertices.values() if one.error), None)

    def steps(self) -> dict[str, Vertex]:
        """Steps of the Dockerfile's stages by name, such as "patched 3/4"."""
        found = {}
        for vertex in self.vertices.values():
            match = re.match(r"\[([^\]]+)\]", vertex.name)
            if match and vertex.stage:
                found[" ".join(match[1].split())] = vertex
        return found


def short(name: str) -> str:
    """A step's name without its mounts, on one line of at most 100 characters."""
    text = " ".join(_FLAGS.sub(" ", f" {name}").split())
    return text if len(text) <= 100 else f"{text[:97]}..."
