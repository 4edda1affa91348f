"""The RECORD of installed wheels: hashes of what we change. Standard library only."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

from imagebuild.errors import BrokenError
from imagebuild.patching.tree import Tree


def paths(root: Path) -> list[str]:
    """Every RECORD of a site-packages folder, sorted."""
    return sorted(path.relative_to(root).as_posix() for path in root.glob("*.dist-info/RECORD"))


def text_of(tree: Tree, record: str) -> str:
    """A RECORD's text. Raises BrokenError when it is not UTF-8."""
    try:
        return tree.read(record).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenError(f"{record}: expected UTF-8, found byte 0x{error.object[error.start]:02x}",
                          hint="give a fresh install of the base") from error  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """Path, hash and size of each line that has these three."""
    return [row for row in csv.reader(io.StringIO(text)) if len(row) == 3]


def hash_of(data: bytes) -> str:
    """The hash of a file as RECORD writes it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def all_updated(root: Path, tree: Tree, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Each RECORD of the pristine `tree` at `root`, as it is once `files` are written."""
    added = {path for path in files if not tree.exists(path)}
    return {path: updated(text_of(tree, path), files, added, path).encode() for path in paths(root)}


def updated(text: str, files: Mapping[str, bytes], added: set[str], record: str) -> str:
    """RECORD with our files' hashes.

    It takes from `added` the new files below a top folder that it lists files of.
    """
    lines = text.split("\n")
    ending = "\r" if lines[0].endswith("\r") else ""
    tops: set[str] = set()
    for index, line in enumerate(lines):
        path = "".join(next(csv.reader([line]), [])[:1])
        tops.add(path.partition("/")[0])
        if path in files:
            lines[index] = _line(path, files[path]) + ("\r" if line.endswith("\r") else "")
            added.discard(path)
    mine = sorted(path for path in added if path.partition("/")[0] in tops)
    added.difference_update(mine)
    last = len(lines) - (lines[-1] == "")
    at = next((i for i, line in enumerate(lines) if line.startswith(f"{record},")), last)
    lines[at:at] = [_line(path, files[path]) + ending for path in mine]
    return "\n".join(lines)


def _line(path: str, data: bytes) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([path, hash_of(data), len(data)])
    return out.getvalue()
