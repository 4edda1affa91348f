"""The errors of every verb and their exit codes. Standard library only: it also runs in the base.

A message reads *where: what was expected, what was found*; `hint` is the next command or edit.
Only `imagebuild.cli.main` and the thin scripts turn an error into an exit code.
"""

from __future__ import annotations

from collections.abc import Sequence


class BuildError(Exception):
    """Root of all errors that a user may see.

    Attributes:
        exit_code: the process exit code (docs/design.md has the table).
        hint: the next command or edit, or None.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ReviewError(BuildError):
    """A person must look: an undeclared verdict or an entry that is old or moved."""

    exit_code = 1


class UsageError(BuildError):
    """Usage, configuration or a malformed recipe, series or input file."""

    exit_code = 2


class BrokenError(BuildError):
    """What was checked does not hold: drift, a collision, a failed verify."""

    exit_code = 3


class IntegrityError(BuildError):
    """Bytes, a cache entry, the lock or a manifest are not what they must be."""

    exit_code = 4


class EngineError(BuildError):
    """An engine, the network, a compiler or another tool failed."""

    exit_code = 5


def raise_collected(
    kind: type[BuildError], title: str, problems: Sequence[str], *, hint: str | None = None
) -> None:
    """Raises one `kind` that lists every problem; returns when there is none."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise kind(f"{title}:\n{lines}", hint=hint)
