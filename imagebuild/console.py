"""What a person sees: notices on stderr, results on stdout, JSON on stdout alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from imagebuild.errors import BuildError
from imagebuild.escape import visible
from imagebuild.sources.download import Progress

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.table import Table

_SLOW = 32 << 20  # bytes; what is smaller comes in a moment: one line, once it is there
_STYLES = {0: "green", 1: "yellow", 3: "red"}


class Console:
    """Writes for one run.

    Attributes:
        is_json: results are one JSON document on stdout and nothing else goes there.
        verbose: show the cause of errors.
    """

    def __init__(self, *, output: str = "text", color: str = "auto", verbose: bool = False) -> None:
        self._out = _rich(color, stderr=False)
        self._err = _rich(color, stderr=True)
        self.is_json = output == "json"
        self.verbose = verbose

    def result(self, text: str, style: str = "") -> None:
        """One line of a result, for text output."""
        if not self.is_json:
            _print(self._out, text, style)

    def verdict(self, text: str, code: int) -> None:
        """One line in the colour of an exit code."""
        self.result(text, _STYLES.get(code, "red"))

    @property
    def width(self) -> int | None:
        """Columns of the terminal that results go to; None when they go elsewhere."""
        return self._out.width if sys.stdout.isatty() else None

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        codes: Sequence[Sequence[int | None]] | None = None,
    ) -> None:
        """A table, for text output; plain columns, a line a row, when stdout is no terminal.

        `codes` has an exit code for each cell that is to have its colour.
        """
        if self.is_json:
            return
        # Colour may be forced where nobody looks at a screen; a pipe still gets lines.
        if sys.stdout.isatty():
            self._out.print(_table(title, columns, rows, codes), soft_wrap=False)
            return
        self.result(title)
        lines = [[visible(" ".join(c.split("\n"))) for c in row] for row in [columns, *rows]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.result("  " + "  ".join(cells).rstrip())

    def document(self, content: dict[str, object]) -> None:
        """The JSON document of the run; nothing in text mode."""
        if self.is_json:
            _write(sys.stdout, json.dumps({"schema": 1, **content}, indent=2) + "\n")

    def report(self, text: str) -> None:
        """A whole result in a format of its own, to the character."""
        _write(sys.stdout, text)

    def note(self, text: str) -> None:
        """A notice on stderr."""
        _print(self._err, text)

    def step(self, text: str) -> None:
        """A step under way, on stderr."""
        _print(self._err, f"- {text}", "dim")

    def command(self, command: Sequence[str]) -> None:
        """Echoes an external command before it runs."""
        _print(self._err, f"+ {shlex.join(command)}")

    def error(self, error: BuildError) -> None:
        """An error as a sentence, with the next step."""
        _print(self._err, f"error: {error}", "red")
        if error.hint:
            _print(self._err, f"hint: {error.hint}")
        if self.verbose and error.__cause__ is not None:
            _print(self._err, f"cause: {error.__cause__!r}", "dim")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Shows downloads: bars on a terminal, else a line every quarter. Any thread may tell."""
        if sys.stderr.isatty():
            with _bars(self._err) as show:
                yield _in_turn(show)
        else:
            yield _in_turn(self._quarters())

    def _quarters(self) -> Progress:
        shown: dict[str, int] = {}

        def show(name: str, done: int, total: int | None) -> None:
            quarter = done * 4 // total if total else 0
            if total and quarter > shown.get(name, 0) and (quarter == 4 or total >= _SLOW):
                shown[name] = quarter
                size = f"{total / 1e6:.0f} MB" if total >= 10**6 else f"{-(-total // 1000)} kB"
                self.step(f"{name}: {quarter * 25} % of {size}")

        return show


def _in_turn(progress: Progress) -> Progress:
    """The same, told by one thread at a time."""
    lock = threading.Lock()

    def show(name: str, done: int, total: int | None) -> None:
        with lock:
            progress(name, done, total)

    return show


def counted(number: int, word: str, plural: str = "") -> str:
    """A number with its noun, such as "1 error" and "2 errors"."""
    return f"{number} {word if number == 1 else plural or word + 's'}"


def _rich(color: str, *, stderr: bool) -> RichConsole:
    from rich.console import Console as RichConsole

    # soft_wrap: a log keeps one line a message, whatever the width of who wrote it.
    # emoji: upstream's `x[:key:]` is no picture.
    return RichConsole(
        stderr=stderr,
        force_terminal={"always": True, "never": False, "auto": None}[color],
        no_color=True if color == "never" else None,
        highlight=False,
        soft_wrap=True,
        emoji=False,
    )


def _print(console: RichConsole, text: str, style: str = "") -> None:
    """Prints one message; without a terminal to the character, since rich replaces tabs."""
    text = visible(text)  # upstream's code may hold what a terminal obeys
    if not console.is_terminal:
        _write(sys.stderr if console.stderr else sys.stdout, text + "\n")
        return
    # A reader that went away, as `head` does: rich would end the process with code 1.
    with contextlib.suppress(SystemExit):
        console.print(text, style=style or None, markup=False)


def _write(stream: TextIO, text: str) -> None:
    """Writes now; once the reader went away, to nowhere, so that the exit code stays the verb's."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    codes: Sequence[Sequence[int | None]] | None,
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # long hashes are broken, never cut
    for index, row in enumerate(rows):
        styles = [_STYLES.get(code, "") if code is not None else "" for code in codes[index]] \
            if codes else [""] * len(row)  # fmt: skip
        cells = zip(row, styles, strict=True)
        table.add_row(*(Text(visible(cell), style) for cell, style in cells))
    return table


@contextlib.contextmanager
def _bars(console: RichConsole) -> Iterator[Progress]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    tasks: dict[str, TaskID] = {}
    with Bars(TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
              TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bars:  # fmt: skip

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield show
