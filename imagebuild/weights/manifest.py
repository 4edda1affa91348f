"""weights.json: what a folder of weights holds and where it is from. Read and written here only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import IntegrityError, UsageError
from imagebuild.files import write_atomically
from imagebuild.weights.listing import RECORD, checked_path

NAME = RECORD


@dataclass(frozen=True)
class Manifest:
    """The record of a complete fetch.

    Attributes:
        source: where it came from.
        revision: the hub's commit, where there is one.
        licence: as the source says it.
        files: path -> (bytes, sha256).
    """

    source: str
    revision: str | None
    licence: str
    files: dict[str, tuple[int, str]]


def write(folder: Path, manifest: Manifest) -> None:
    """Writes weights.json in one step."""
    content = {
        "schema": 1,
        "source": manifest.source,
        "revision": manifest.revision,
        "licence": manifest.licence,
        "files": {
            path: {"size": size, "sha256": sha256}
            for path, (size, sha256) in sorted(manifest.files.items())
        },
    }
    write_atomically(folder / NAME, (json.dumps(content, indent=2) + "\n").encode())


def read(folder: Path) -> Manifest:
    """Reads weights.json.

    Raises:
        UsageError: there is none.
        IntegrityError: it is not what `write` writes.
    """
    path = folder / NAME
    if not path.is_file():
        raise UsageError(f"{path}: expected the record of `weights fetch`, found none",
                         hint="fetch into this folder; what is right there is kept")  # fmt: skip
    try:
        content = json.loads(path.read_bytes())
        files = {
            checked_path(name, str(path)): (_size(entry["size"]), _sha256(entry["sha256"]))
            for name, entry in content["files"].items()
        }
        if content["schema"] != 1:
            raise ValueError(f"schema {content['schema']}")
        return Manifest(str(content["source"]), content["revision"], str(content["licence"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{path}: expected the record of `weights fetch`, found that it is "
                             f"malformed ({error})", hint="fetch again") from error  # fmt: skip


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"size {value!r}")
    return value


def _sha256(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"sha256 {value!r}")
    return value
