"""The lock: resolved facts of every supported base, read here and written by `lock_update`.

Standard library only: verify reads it inside the base.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.deep.record import DeepRecord
from imagebuild.errors import IntegrityError
from imagebuild.patching.evaluate import Fingerprints
from imagebuild.patching.tree import Identity
from imagebuild.patching.versions import VersionRange, is_release_known, release

SCHEMA = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class WheelPin:
    """One wheel by its hash. `size` is in bytes."""

    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ImagePin:
    """The base image of one release.

    Attributes:
        repository: as a FROM names it, such as "vllm/vllm-openai".
        tag: a comment; the digest decides.
        digest: of the index over all platforms, "sha256:...".
        platforms: digest of each platform's own manifest.
        state: "resolved" by us, or "cited" from a public document: the pull itself verifies it.
        source: who says so.
    """

    repository: str
    tag: str
    digest: str
    platforms: Mapping[str, str]
    state: str
    source: str

    @property
    def reference(self) -> str:
        """What `FROM` takes."""
        return f"{self.repository}:{self.tag}@{self.digest}"


@dataclass(frozen=True)
class BaseLock:
    """What the lock holds for one vLLM release.

    Attributes:
        version: the release.
        commit: hex digits that its wheel states, abbreviated as there.
        epoch: seconds since 1970 when its wheel was published: the time of all that we write.
        wheels: pins by project and platform ("any" for a wheel without native code).
        versions: version of each project in `wheels`.
        pins: exact versions that the wheels require, by project.
        fingerprints: by patch, then by symbol.
        image: the image of this release; None as long as nobody has named its digest.
        deep: what deep probes found on a patched tree of this release; None before they ran.
    """

    version: str
    commit: str
    epoch: int
    wheels: Mapping[str, Mapping[str, WheelPin]]
    versions: Mapping[str, str]
    pins: Mapping[str, str]
    fingerprints: Mapping[str, Fingerprints] = field(default_factory=dict)
    image: ImagePin | None = None
    deep: DeepRecord | None = None

    def wheel(self, project: str, platform: str) -> WheelPin:
        """The pin for a platform. Raises IntegrityError when it is not locked."""
        pins = self.wheels.get(project, {})
        pin = pins.get(platform) or pins.get("any")
        if pin is None:
            raise IntegrityError(
                f"lock: no wheel of {project} for {platform} under vLLM {self.version}",
                hint=f"build.py lock update --base-version {self.version}",
            )
        return pin


@dataclass(frozen=True)
class Lock:
    """All locked bases, in the order of their versions.

    Attributes:
        path: the file.
        bases: by version.
        requires: pins that another wheel makes, by "project==version", such as torch's NCCL.
    """

    path: Path
    bases: Mapping[str, BaseLock]
    requires: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def base(self, version: str) -> BaseLock:
        """The table of a release. Raises IntegrityError when it is not locked."""
        base = self.find(version)
        if base is None:
            known = ", ".join(self.bases) or "none"
            raise IntegrityError(
                f"{self.path}: vLLM {version} is not locked (locked: {known})",
                hint=f"build.py lock update --base-version {version}",
            )
        return base

    def find(self, version: str) -> BaseLock | None:
        """The table of a release, None when there is none; "0.32" finds "0.32.0"."""
        wanted = _without_zeros(version)
        return next((self.bases[v] for v in self.bases if _without_zeros(v) == wanted), None)

    def identify(self, identity: Identity) -> Identity:
        """The identity with the release that a known commit stands for.

        A build between releases may name a version that says nothing; the commit decides.
        """
        for base in self.bases.values():
            if _same_commit(base.commit, identity.commit):
                return Identity(base.version, identity.commit, identity.source)
        return identity

    def nearest(self, identity: Identity, versions: str) -> str | None:
        """The locked base in a range that a tree is compared with.

        That is the last one not after the tree's version, else the first one in the range.
        """
        inside = [version for version in self.bases if version in VersionRange.parse(versions)]
        if is_release_known(identity.version):
            own = release(identity.version)
            before = [version for version in inside if release(version) <= own]
            inside = before[-1:] or inside[:1]
        return inside[-1] if inside else None

    def fingerprints_for(self, identity: Identity) -> Callable[[str, str], Fingerprints | None]:
        """A lookup (patch, variant range) -> fingerprints of the nearest base in that range."""

        def look_up(patch: str, versions: str) -> Fingerprints | None:
            version = self.nearest(identity, versions)
            return self.bases[version].fingerprints.get(patch) if version else None

        return look_up


def _without_zeros(version: str) -> str:
    """The one spelling of a final release; any other version stays as it is."""
    is_final = re.fullmatch(r"\d+(\.\d+)*", version)
    return re.sub(r"(\.0+)+$", "", version) if is_final else version


def _same_commit(one: str, other: str) -> bool:
    """Whether two possibly abbreviated commits agree; seven digits at least."""
    length = min(len(one), len(other))
    return length >= 7 and one[:length] == other[:length]


def read_lock(path: Path) -> Lock:
    """Reads a lock; an absent file is an empty lock.

    Raises:
        IntegrityError: unreadable or malformed.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Lock(path, {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{path}: expected a lock in TOML, found: {error}",
                             hint="restore it with git") from error  # fmt: skip
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, expected {SCHEMA}")
        tables = content.get("base", {})
        bases = {v: _base(v, tables[v]) for v in sorted(tables, key=release)}
        requires = {
            str(wheel): {project: str(pin) for project, pin in pins.items()}
            for wheel, pins in content.get("requires", {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise IntegrityError(f"{path}: the lock is malformed: {what}",
                             hint="restore it with git, or delete it and run build.py lock update "
                             "--base-version V for each release") from error  # fmt: skip
    return Lock(path, bases, requires)


def _base(version: str, table: Mapping[str, Any]) -> BaseLock:
    wheels = {
        project: {platform: _pin(pin) for platform, pin in entry["files"].items()}
        for project, entry in table["wheels"].items()
    }
    return BaseLock(
        version=version,
        commit=str(table["commit"]),
        epoch=int(table["epoch"]),
        wheels=wheels,
        versions={project: str(entry["version"]) for project, entry in table["wheels"].items()},
        pins={project: str(pin) for project, pin in table["pins"].items()},
        fingerprints={
            patch: {symbol: str(value) for symbol, value in entries.items()}
            for patch, entries in table.get("fingerprints", {}).items()
        },
        image=image_pin(table["image"]) if "image" in table else None,
        deep=DeepRecord.read(table["deep"]) if "deep" in table else None,
    )


def image_pin(table: Mapping[str, Any]) -> ImagePin:
    """Reads an image's table. Raises KeyError or ValueError when it is malformed."""
    platforms = {str(platform): str(digest) for platform, digest in table["platforms"].items()}
    for digest in (table["digest"], *platforms.values()):
        if not _SHA256.fullmatch(str(digest).removeprefix("sha256:")):
            raise ValueError(f"image: expected sha256:<64 hex digits>, found {digest!r}")
    if table["state"] not in ("resolved", "cited"):
        raise ValueError(f"image.state: expected resolved or cited, found {table['state']!r}")
    texts = {name: str(table[name]) for name in ("repository", "tag", "digest", "state", "source")}
    return ImagePin(platforms=platforms, **texts)


def _pin(entry: Mapping[str, Any]) -> WheelPin:
    digest = str(entry["sha256"])
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"sha256: expected 64 lower-case hex digits, found {digest!r}")
    return WheelPin(str(entry["filename"]), digest, int(entry["size"]))
