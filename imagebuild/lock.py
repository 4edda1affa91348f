"""The lock: resolved facts of every supported base, read here and written by `lock_update`.

Standard library only: verify reads it inside the base.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imagebuild.deep.record import DeepRecord
from imagebuild.errors import IntegrityError
from imagebuild.patching.evaluate import Fingerprints
from imagebuild.patching.tree import Identity
from imagebuild.patching.versions import VersionRange, is_release_known, release
from imagebuild.pins import (
    DebsPin,
    ImagePin,
    SourcePin,
    WheelPin,
    read_debs,
    read_file,
    read_image,
    read_sha256,
    read_source,
)

SCHEMA = 1


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
        targets: sha256 of each file that a patch edits, as the wheel has it, by path.
        image: the image of this release; None where the recipe knows of none.
        deep: what deep probes found on a patched tree of this release; None before they ran.
        sdist: vLLM's own sources; None where the index had none.
        debs: packages for the image; None where the recipe names none.
    """

    version: str
    commit: str
    epoch: int
    wheels: Mapping[str, Mapping[str, WheelPin]]
    versions: Mapping[str, str]
    pins: Mapping[str, str]
    fingerprints: Mapping[str, Fingerprints] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    image: ImagePin | None = None
    deep: DeepRecord | None = None
    sdist: WheelPin | None = None
    debs: DebsPin | None = None

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
        images: images that stages take files from, by name.
        sources: commits that stages compile, by name.
    """

    path: Path
    bases: Mapping[str, BaseLock]
    requires: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    images: Mapping[str, ImagePin] = field(default_factory=dict)
    sources: Mapping[str, SourcePin] = field(default_factory=dict)

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

        A build between releases may name a version that says nothing; the commit decides. Of
        several releases of one commit, such as a post-release, it is the one that the tree names.
        """
        known = [v for v, base in self.bases.items() if same_commit(base.commit, identity.commit)]
        if not known:
            return identity
        named = self.find(identity.version)
        version = named.version if named and named.version in known else known[0]
        return replace(identity, version=version)

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


def same_commit(one: str, other: str) -> bool:
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
        images = {name: read_image(one) for name, one in content.get("images", {}).items()}
        sources = {name: read_source(one) for name, one in content.get("sources", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise IntegrityError(f"{path}: the lock is malformed: {what}",
                             hint="restore it with git, or delete it and run build.py lock update "
                             "--base-version V for each release") from error  # fmt: skip
    return Lock(path, bases, requires, images, sources)


def _base(version: str, table: Mapping[str, Any]) -> BaseLock:
    wheels = {
        project: {platform: read_file(pin) for platform, pin in entry["files"].items()}
        for project, entry in table["wheels"].items()
    }
    return BaseLock(
        version=version,
        commit=str(table["commit"]),
        epoch=_epoch(table["epoch"]),
        wheels=wheels,
        versions={project: str(entry["version"]) for project, entry in table["wheels"].items()},
        pins={project: str(pin) for project, pin in table["pins"].items()},
        fingerprints={
            patch: {symbol: str(value) for symbol, value in entries.items()}
            for patch, entries in table.get("fingerprints", {}).items()
        },
        targets={path: read_sha256(digest) for path, digest in table.get("targets", {}).items()},
        image=read_image(table["image"]) if "image" in table else None,
        deep=DeepRecord.read(table["deep"]) if "deep" in table else None,
        sdist=read_file(table["sdist"]) if "sdist" in table else None,
        debs=read_debs(table["debs"]) if "debs" in table else None,
    )


def _epoch(value: object) -> int:
    # Negative times cannot be packed into an archive, and text is no time.
    if type(value) is not int or value < 0:
        raise ValueError(f"epoch: expected seconds since 1970, found {value!r}")
    return value
