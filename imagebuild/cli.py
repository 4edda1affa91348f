"""The command line: verbs, options and the one place where an error becomes an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from imagebuild import options
from imagebuild.errors import BuildError, EngineError, UsageError

INTERRUPTED = 130


_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def main(arguments: Sequence[str], *, root: Path | None = None) -> int:
    """Runs one verb; returns the exit code.

    Args:
        arguments: without the program's name.
        root: the repository that recipes, patches and results are in; by default the one that this
            code is in.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be text; it is shown escaped instead of failing the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        parsed = options.parser().parse_args(list(arguments))
    except UsageError as error:
        return _fail(error, argparse.Namespace(format=_format_of(arguments)))
    try:
        with _ended_as_by_ctrl_c():
            module, _, name = parsed.run.partition(":")
            handler = getattr(importlib.import_module(f"imagebuild.{module}"), name)
            if module == "testrun":
                code: int = handler(parsed.rest)
                return code
            return _run(handler, parsed, root)
    except BuildError as error:
        return _fail(error, parsed)
    except KeyboardInterrupt:
        return _fail(_InterruptedError("interrupted"), parsed)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(EngineError(f"{where}{error.strerror or error}"), parsed)
    except Exception as error:
        if parsed.verbose:
            raise
        hint = "run again with -v and report what it prints"
        return _fail(EngineError(f"internal error: {error!r}", hint=hint), parsed)


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end a run as Ctrl-C does, so that it clears up after itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    defaults: dict[signal.Signals, _Handler] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    # What is ignored, as under nohup, stays so.
    known = {one: default for one, default in defaults.items() if signal.getsignal(one) is default}

    def end(number: int, _frame: object) -> NoReturn:
        # A second one must not stop the clearing up, unless it is a person's.
        for one in known:
            signal.signal(one, defaults[one] if one is signal.SIGINT else signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in known:
        signal.signal(one, end)
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


class _InterruptedError(BuildError):
    """The user stopped it."""

    exit_code = INTERRUPTED


def _run(handler, parsed: argparse.Namespace, root: Path | None) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    from imagebuild.commands.context import Context
    from imagebuild.config import ROOT
    from imagebuild.console import Console

    console = Console(output=parsed.format, color=parsed.color, verbose=parsed.verbose)
    code: int = handler(Context(parsed, console, root or ROOT))
    return code


def _fail(error: BuildError, parsed: argparse.Namespace) -> int:
    from imagebuild.console import Console

    console = Console(
        output=getattr(parsed, "format", "text"),
        color=getattr(parsed, "color", "auto"),
        verbose=getattr(parsed, "verbose", False),
    )
    console.error(error)
    console.document({"error": str(error), "hint": error.hint, "exit_code": error.exit_code})
    return error.exit_code


def _format_of(arguments: Sequence[str]) -> str:
    """The output format that a call asks for which could not be parsed."""
    joined = [*arguments, ""]
    asked = [joined[i + 1] for i, word in enumerate(arguments) if word == "--format"]
    asked += [word.partition("=")[2] for word in arguments if word.startswith("--format=")]
    return "json" if "json" in asked else "text"
