"""Turns an error of a step into an exit code and lines that stand at the end of a build's log."""

from __future__ import annotations

import sys
from collections.abc import Callable

from imagebuild.errors import BuildError


def finish(name: str, step: Callable[[], None]) -> int:
    """Runs a step; returns its exit code. Errors are a sentence and a hint on stderr."""
    try:
        step()
    except BuildError as error:
        sys.stdout.flush()
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"{name}: error: {error}{hint}\n")
        return error.exit_code
    return 0


def say(text: str) -> None:
    """One line of a step's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
