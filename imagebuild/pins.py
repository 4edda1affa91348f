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
_DEB = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._~%:-]*\.deb")


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
class DebPin:
    """One .deb file by its hash; `url` is where the base's own apt finds it, `size` in bytes."""

    filename: str
    url: str
    sha256: str
    size: int


@dataclass(frozen=True)
class DebsPin:
    """Packages that a base gets.

    Attributes:
        packages: as the recipe names them; `files` has what they depend on as well.
        state: "resolved" or "unresolved".
        base: digest of the image whose apt resolved them: another one may lack what they need.
        seen: day on which it did.
        files: by platform.
    """

    packages: tuple[str, ...]
    state: str = "unresolved"
    base: str = ""
    seen: str = ""
    files: Mapping[str, tuple[DebPin, ...]] = field(default_factory=dict)

    def to_toml(self) -> dict[str, Any]:
        """Its table in the lock."""
        files = {name: [vars(one) for one in found] for name, found in sorted(self.files.items())}
        table = {**_without_empty(self), "packages": list(self.packages)}
        return {**table, "files": files} if files else table


def _without_empty(pin: object) -> dict[str, Any]:
    return {name: value for name, value in vars(pin).items() if value not in ("", {}, ())}


def read_file(entry: Mapping[str, Any]) -> WheelPin:
    """Reads a wheel's or an sdist's table. Raises KeyError or ValueError when it is malformed."""
    sha256 = read_sha256(entry["sha256"])
    return WheelPin(str(entry["filename"]), sha256, _positive(entry, "size"))


def read_sha256(value: object) -> str:
    """Reads a file's hash. Raises ValueError when it is none."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"sha256: expected 64 lower-case hex digits, found {value!r}")
    return value


def _positive(entry: Mapping[str, Any], key: str) -> int:
    value = entry[key]
    if type(value) is not int or value <= 0:
        raise ValueError(f"{key}: expected a number above 0, found {value!r}")
    return value


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
        str(platform): tuple(map(_read_deb, found))
        for platform, found in table.get("files", {}).items()
    }
    state, base = _state(table, "debs"), str(table.get("base", ""))
    if (state == "unresolved") == bool(files) or bool(files) != bool(base):
        raise ValueError(f"debs: expected {'no files' if state == 'unresolved' else 'files'} and "
                         f"the base that they are for, since its state is {state}")  # fmt: skip
    return DebsPin(tuple(map(str, table["packages"])), state, base, str(table.get("seen", "")),
                   files)  # fmt: skip


def _read_deb(entry: Mapping[str, Any]) -> DebPin:
    name, url = str(entry["filename"]), str(entry["url"])
    if not _DEB.fullmatch(name):
        raise ValueError(f"debs: expected the name of a .deb file, found {name!r}")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"debs: expected url = http(s)://..., found {url!r}")
    return DebPin(name, url, read_sha256(entry["sha256"]), _positive(entry, "size"))


def _state(table: Mapping[str, Any], what: str) -> str:
    if table["state"] not in STATES:
        raise ValueError(f"{what}.state: expected {' or '.join(STATES)}, found {table['state']!r}")
    return str(table["state"])
