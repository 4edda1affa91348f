"""Where an audit's reports go: one format to stdout, and any number of files in the same run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.audit.report import FORMATS, About, json_report, render, text_report
from imagebuild.audit.results import Audit
from imagebuild.config import Recipe
from imagebuild.console import Console
from imagebuild.errors import UsageError
from imagebuild.files import write_atomically
from imagebuild.patching.series import Series


@dataclass(frozen=True)
class Output:
    """One file: `name` is a format."""

    name: str
    file: Path


def outputs_of(asked: Sequence[str]) -> tuple[Output, ...]:
    """What `--report FORMAT=FILE` asks for, checked before an audit takes its time.

    Raises:
        UsageError: no format of ours, no file, a folder, or one file twice.
    """
    found: list[Output] = []
    for text in asked:
        name, equals, file = text.partition("=")
        if not equals or not file or name not in FORMATS:
            raise UsageError(f"--report: expected FORMAT=FILE, found {text!r}",
                             hint=f"formats: {', '.join(FORMATS)}")  # fmt: skip
        path = Path(file)
        # A file is replaced, which nobody means to do to /dev/stdout.
        if file.endswith("/") or (path.exists() and not path.is_file()):
            what = "a folder" if path.is_dir() or file.endswith("/") else "a device or pipe"
            raise UsageError(f"--report: {file}: expected a file, found {what}",
                             hint="one report goes to stdout by --format")  # fmt: skip
        if path.resolve() in [other.file.resolve() for other in found]:
            raise UsageError(f"--report: {file}: expected a file a report, found it twice")
        found.append(Output(name, path))
    return tuple(found)


def about_of(recipe: Recipe, series: Series) -> About:
    """What reports say of the patches beside the verdicts."""
    names = [patch.name for patch in series.patches]
    return About(
        patch_files={
            name: recipe.patch_file(name).relative_to(recipe.root).as_posix() for name in names
        },
        titles={name: series.docs[name].strip().partition("\n")[0] for name in names},
        lock_file=recipe.lock_file.relative_to(recipe.root).as_posix(),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def deliver(
    console: Console, audit: Audit, about: About, name: str, files: Sequence[Output]
) -> None:
    """Writes the files, then prints the report in format `name`.

    Raises:
        EngineError: a file cannot be written.
    """
    for output in files:
        write_atomically(output.file, _rendered(output.name, audit, about).encode())
        console.step(f"{output.name} report: {output.file}")
    if name == "text":
        text_report(console, audit)
    elif name == "json":
        console.document(json_report(audit))
    else:
        console.report(render(name, audit, about))


def _rendered(name: str, audit: Audit, about: About) -> str:
    if name != "text":
        return render(name, audit, about)
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        text_report(Console(color="never"), audit)
    return stream.getvalue()
