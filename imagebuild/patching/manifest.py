"""What was done to a tree: the manifest, the originals and the journal, all under `.imagebuild/`.

The manifest holds no time and no machine path, so that the same series on the same base gives the
same bytes.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.errors import IntegrityError

SCHEMA = 1
FOLDER = ".imagebuild"
MANIFEST = f"{FOLDER}/manifest.json"
JOURNAL = f"{FOLDER}/journal.json"
ORIGINALS = f"{FOLDER}/originals"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of the tree that differs from the base.

    Attributes:
        before: SHA-256 of the base's file, None when the base has none.
        after: SHA-256 now, None when the file was removed.
        mode: permission bits of the base's file (of the new one when the base has none).
        patches: whose edits are in it; empty for byte code and RECORD.
    """

    before: str | None
    after: str | None
    mode: int
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchEntry:
    """One patch as it was judged and, when green, applied."""

    name: str
    verdict: str
    variant: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The state of a patched tree.

    Attributes:
        version, commit: the base's identity.
        recipe, gpu_arch: what was built.
        series: digest of the series.
        patches: in series order.
        files: by path, with byte code and RECORD.
        folders: folders that the base does not have, deepest first.
    """

    version: str
    commit: str
    recipe: str
    gpu_arch: str
    series: str
    patches: tuple[PatchEntry, ...]
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """JSON with sorted keys and a final newline."""
        content = {
            "schema": SCHEMA,
            "base": {"version": self.version, "commit": self.commit},
            "recipe": self.recipe,
            "gpu_arch": self.gpu_arch,
            "series": self.series,
            "patches": [
                {"name": p.name, "verdict": p.verdict, "variant": p.variant, "files": list(p.files)}
                for p in self.patches
            ],
            "files": {
                path: {
                    "before": entry.before,
                    "after": entry.after,
                    "mode": entry.mode,
                    "patches": list(entry.patches),
                }
                for path, entry in sorted(self.files.items())
            },
            "folders": list(self.folders),
        }
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Manifest:
        """Reads what `to_bytes` wrote.

        Raises:
            IntegrityError: unreadable, of another schema, or inconsistent in itself.
        """
        try:
            content = json.loads(data)
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']!r}, expected {SCHEMA}")
            manifest = cls._from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(
                f"{source}: expected a manifest of this tool, found {_clause(error)}",
                hint="start from a pristine tree",
            ) from error
        named = {path for patch in manifest.patches for path in patch.files}
        lost = sorted(named - manifest.files.keys())
        if lost:
            raise IntegrityError(
                f"{source}: a patch names {lost[0]}, which its list of files lacks",
                hint="start from a pristine tree",
            )
        return manifest

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> Manifest:
        return cls(
            version=str(content["base"]["version"]),
            commit=str(content["base"]["commit"]),
            recipe=str(content["recipe"]),
            gpu_arch=str(content["gpu_arch"]),
            series=str(content["series"]),
            patches=tuple(
                PatchEntry(str(p["name"]), str(p["verdict"]), str(p["variant"]), tuple(p["files"]))
                for p in content["patches"]
            ),
            files={
                _inside(path): FileEntry(
                    _digest(e["before"]), _digest(e["after"]), _mode(e["mode"]), tuple(e["patches"])
                )
                for path, e in content["files"].items()
            },
            folders=tuple(_inside(folder) for folder in content["folders"]),
        )


def _inside(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        raise ValueError(f"the path {path!r} that leaves the tree")
    if parts[0] == FOLDER or {"", "."} & set(parts) or "\0" in path:
        raise ValueError(f"the path {path!r}, which no patch can have written")
    return path


def _digest(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} where a SHA-256 is expected")
    return value


def _mode(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= 0o7777:
        raise ValueError(f"the mode {value!r}, expected permission bits")
    return value


def _clause(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of a tree, None when it has none. Raises IntegrityError when it is no good."""
    path = root / MANIFEST
    try:
        return Manifest.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def original_path(root: Path, digest: str) -> Path:
    """Where the content with that digest is kept."""
    return root / ORIGINALS / f"{digest}.bz2"


def read_original(root: Path, digest: str) -> bytes:
    """Content kept under a digest. Raises IntegrityError when it is absent or altered."""
    path = original_path(root, digest)
    try:
        data = bz2.decompress(path.read_bytes())
    except (OSError, ValueError, EOFError) as error:
        raise IntegrityError(f"{path}: the original cannot be read: {error}",
                             hint="start from a pristine tree") from error  # fmt: skip
    if sha256(data) != digest:
        raise IntegrityError(f"{path}: expected content with that SHA-256, found {sha256(data)}",
                             hint="start from a pristine tree")  # fmt: skip
    return data
