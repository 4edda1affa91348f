"""What a person sees: notices on stderr, results on stdout, JSON on stdout alone."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from imagebuild.errors import BuildError
from imagebuild.sources.download import Progress

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.table import Table

_STYLES = {0: "green", 1: "yellow", 3: "red"}


class Console:
    """Writes for one run.

    Attributes:
        is_json: results are one JSON document on stdout and nothing else goes there.
        verbose: show the cause of errors.
    """

    def __init__(self, *, output: str = "text", color: str = "auto", verbose: bool = False) -> None:
        from rich.console import Console as RichConsole

        forced = {"always": True, "never": False, "auto": None}[color]
        no_color = color == "never"
        # soft_wrap: a log keeps one line a message, whatever the width of who wrote it.
        self._out: RichConsole = RichConsole(force_terminal=forced, no_color=no_color,
                                             highlight=False, soft_wrap=True)  # fmt: skip
        self._err: RichConsole = RichConsole(stderr=True, force_terminal=forced, no_color=no_color,
                                             highlight=False, soft_wrap=True)  # fmt: skip
        self.is_json = output == "json"
        self.verbose = verbose

    def result(self, text: str, style: str = "") -> None:
        """One line of a result, for text output."""
        if not self.is_json:
            self._out.print(text, style=style or None, markup=False)

    def verdict(self, text: str, code: int) -> None:
        """One line in the colour of an exit code."""
        self.result(text, _STYLES.get(code, "red"))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, for text output; plain columns when stdout is no terminal."""
        if self.is_json:
            return
        if not self._out.is_terminal:
            self.result(title)
            widths = [
                max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))
            ]
            for row in [columns, *rows]:
                cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                self.result("  " + "  ".join(cells).rstrip())
            return
        self._out.print(_table(title, columns, rows), soft_wrap=False)

    def document(self, content: dict[str, object]) -> None:
        """The JSON document of the run; nothing in text mode."""
        if self.is_json:
            sys.stdout.write(json.dumps({"schema": 1, **content}, indent=2) + "\n")

    def note(self, text: str) -> None:
        """A notice on stderr."""
        self._err.print(text, markup=False)

    def step(self, text: str) -> None:
        """A step under way, on stderr."""
        self._err.print(f"- {text}", markup=False, style="dim")

    def command(self, command: Sequence[str]) -> None:
        """Echoes an external command before it runs."""
        self._err.print(f"+ {shlex.join(command)}", markup=False)

    def error(self, error: BuildError) -> None:
        """An error as a sentence, with the next step."""
        self._err.print(f"error: {error}", markup=False, style="red")
        if error.hint:
            self._err.print(f"hint: {error.hint}", markup=False)
        if self.verbose and error.__cause__ is not None:
            self._err.print(f"cause: {error.__cause__!r}", markup=False, style="dim")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Shows downloads: bars on a terminal, else a line every quarter."""
        if self._err.is_terminal:
            with _bars(self._err) as show:
                yield show
        else:
            yield self._quarters()

    def _quarters(self) -> Progress:
        shown: dict[str, int] = {}

        def show(name: str, done: int, total: int | None) -> None:
            quarter = done * 4 // total if total else 0
            if total and quarter > shown.get(name, 0):
                shown[name] = quarter
                self.step(f"{name}: {quarter * 25} % of {total / 1e6:.0f} MB")

        return show


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
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
