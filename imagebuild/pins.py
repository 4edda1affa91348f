"""Entries of the lock that may lack a value: images, sources by commit, packages of the base.

Standard library only: verify reads the lock inside the base. An entry is "resolved" (asked for
where it lives), "cited" (from a named public document: whatever fetches it verifies it) or
"unresolved".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STATES = ("resolved", "cited", "unresolved")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class WheelPin:
    """One wheel, or one sdist, by its hash. `size` is in bytes."""

    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ImagePin:
    """One image.

    Attributes:
        repository: as a FROM names it, such as "vllm/vllm-openai".
        tag: a comment once there is a digest, which decides.
        digest: of the index over all platforms, "sha256:..."; "" while it is unresolved.
        platforms: digest of each platform's own manifest.
        state: one of STATES.
        source: which document a cited digest is from.
        revision: commit that the image's configuration states; "" where nobody has read it.
        created: when the image was made, as its configuration says; "" where nobody has read it.
        seen: day on which the registry first gave us this digest.
    """

    repository: str
    tag: str
    digest: str = ""
    platforms: Mapping[str, str] = field(default_factory=dict)
    state: str = "unresolved"
    source: str = ""
    revision: str = ""
    created: str = ""
    seen: str = ""

    @property
    def name(self) -> str:
        """Repository and tag."""
        return f"{self.repository}:{self.tag}"

    @property
    def reference(self) -> str:
        """What FROM takes; only with a digest is it the same image tomorrow."""
        return f"{self.name}@{self.digest}" if self.digest else self.name

    def to_toml(self) -> dict[str, Any]:
        """Its table in the lock."""
        return _without_empty(self)


@dataclass(frozen=True)
class SourcePin:
    """One commit of a repository. `seen` is the day on which its git host first had it."""

    url: str
    commit: str
    state: str = "cited"
    source: str = ""
    seen: str = ""

    def to_toml(self) -> dict[str, Any]:
        """Its table in the lock."""
        return _without_empty(self)


@dataclass(frozen=True)
class DebsPin:
    """Packages that a base gets. `files` has SHA-256 by file name, by platform."""

    packages: tuple[str, ...]
    state: str = "unresolved"
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_toml(self) -> dict[str, Any]:
        """Its table in the lock."""
        return {**_without_empty(self), "packages": list(self.packages)}


def _without_empty(pin: object) -> dict[str, Any]:
    return {name: value for name, value in vars(pin).items() if value not in ("", {}, ())}


def read_file(entry: Mapping[str, Any]) -> WheelPin:
    """Reads a wheel's or an sdist's table. Raises KeyError or ValueError when it is malformed."""
    digest = str(entry["sha256"])
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"sha256: expected 64 lower-case hex digits, found {digest!r}")
    return WheelPin(str(entry["filename"]), digest, int(entry["size"]))


def read_image(table: Mapping[str, Any]) -> ImagePin:
    """Reads an image's table. Raises KeyError or ValueError when it is malformed."""
    state = _state(table, "image")
    platforms = {str(key): str(digest) for key, digest in table.get("platforms", {}).items()}
    if (state == "unresolved") == ("digest" in table):
        raise ValueError(f"image: expected {'no' if 'digest' in table else 'a'} digest, since its "
                         f"state is {state}")  # fmt: skip
    for digest in [*platforms.values(), *([table["digest"]] if "digest" in table else [])]:
        if not _SHA256.fullmatch(str(digest).removeprefix("sha256:")):
            raise ValueError(f"image: expected sha256:<64 hex digits>, found {digest!r}")
    more = ("digest", "source", "revision", "created", "seen")
    texts = {name: str(table[name]) for name in more if name in table}
    return ImagePin(str(table["repository"]), str(table["tag"]), state=state, platforms=platforms,
                    **texts)  # fmt: skip


def read_source(table: Mapping[str, Any]) -> SourcePin:
    """Reads a source's table. Raises KeyError or ValueError when it is malformed."""
    commit = str(table["commit"])
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"commit: expected 40 hex digits, found {commit!r}")
    texts = {name: str(table[name]) for name in ("source", "seen") if name in table}
    return SourcePin(str(table["url"]), commit, _state(table, "source"), **texts)


def read_debs(table: Mapping[str, Any]) -> DebsPin:
    """Reads the packages' table. Raises KeyError or ValueError when it is malformed."""
    files = {
        str(platform): {str(name): str(digest) for name, digest in entries.items()}
        for platform, entries in table.get("files", {}).items()
    }
    for digest in (digest for entries in files.values() for digest in entries.values()):
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"debs: expected 64 lower-case hex digits, found {digest!r}")
    return DebsPin(tuple(map(str, table["packages"])), _state(table, "debs"), files)


def _state(table: Mapping[str, Any], what: str) -> str:
    if table["state"] not in STATES:
        raise ValueError(f"{what}.state: expected {' or '.join(STATES)}, found {table['state']!r}")
    return str(table["state"])
