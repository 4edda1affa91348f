"""Three-way merge of texts, by git. It resolves nothing that git leaves open."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import EngineError

# Longer than what git writes by default, so that a file with markers in it stays readable.
_MARKER = 7
# git's exit status is the number of conflicts, cut off here; above it, an error.
_MOST = 127


@dataclass(frozen=True)
class Labels:
    """What the three sides are called in a conflict."""

    base: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class Merge:
    """The outcome.

    Attributes:
        text: the merged text, with conflict markers where the sides disagree.
        conflicts: each conflict with its markers: ours, what both came from, theirs.
    """

    text: str
    conflicts: tuple[str, ...] = ()


def merge3(base: str, ours: str, theirs: str, labels: Labels) -> Merge:
    """Merges what `ours` and `theirs` each changed in `base`, line by line.

    Raises:
        EngineError: git is not there, or fails.
    """
    size = _MARKER
    while re.search(rf"^[<>|]{{{size}}}", base + "\n" + ours + "\n" + theirs, re.MULTILINE):
        size += 1
    with tempfile.TemporaryDirectory() as folder:
        names = {"ours": ours, "base": base, "theirs": theirs}
        for name, text in names.items():
            (Path(folder) / name).write_bytes(text.encode("utf-8"))
        words = ["git", "merge-file", "-p", "--diff3", f"--marker-size={size}"]
        words += [word for label in (labels.ours, labels.base, labels.theirs)
                  for word in ("-L", label)]  # fmt: skip
        ran = _git([*words, *names], folder)
    if not 0 <= ran.returncode <= _MOST:
        said = ran.stderr.decode(errors="replace").strip()
        raise EngineError(f"git merge-file failed with {ran.returncode}: {said}")
    merged = ran.stdout.decode("utf-8")
    if not ran.returncode:
        return Merge(merged)
    hunk = re.compile(rf"^<{{{size}}} .*?^>{{{size}}} [^\n]*\n?", re.MULTILINE | re.DOTALL)
    return Merge(merged, tuple(found.group() for found in hunk.finditer(merged)))


def _git(words: list[str], folder: str) -> subprocess.CompletedProcess[bytes]:
    # Nobody's configuration may choose another style of conflicts.
    quiet = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
    try:
        return subprocess.run(
            words, cwd=folder, env={**os.environ, **quiet}, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise EngineError("git: expected it on PATH for a three-way merge, found none",
                          hint="install git") from error  # fmt: skip
