"""What is to be audited: versions, ranges, wheels, folders and nightlies, from what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.audit.results import Origin
from imagebuild.errors import UsageError
from imagebuild.patching.apply import pristine
from imagebuild.sources.pipconf import scrub
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Base, Upstream

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version


@dataclass(frozen=True)
class Target:
    """One release to audit; `open` reads it, for a platform in docker's word."""

    name: str
    origin: Origin
    open: Callable[[Upstream, str], Base]


@dataclass(frozen=True)
class Asked:
    """What a call names; all of it is audited.

    Attributes:
        against: versions or ranges.
        since: a version: it and every later release; "" for none.
        latest: that many of the newest releases.
        wheels, trees: paths.
        nightlies: addresses of indexes.
    """

    against: Sequence[str] = ()
    since: str = ""
    latest: int = 0
    wheels: Sequence[str] = ()
    trees: Sequence[str] = ()
    nightlies: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is named."""
        return not any(vars(self).values())


def targets_of(asked: Asked, upstream: Upstream) -> list[Target]:
    """Everything that is named, each once: versions first, oldest first.

    Raises:
        UsageError: a malformed version or range, or one that no release is in; no such file.
        EngineError: the index cannot be read.
    """
    versions = [version for spec in asked.against for version in versions_of(spec, upstream)]
    if asked.since:
        versions += since(asked.since, upstream)
    if asked.latest:
        versions += releases(upstream)[-asked.latest :]
    found = [of_version(version) for version in in_order(versions)]
    found += [_of_wheel(Path(path)) for path in asked.wheels]
    found += [_of_tree(Path(path)) for path in asked.trees]
    found += [_of_nightly(url) for url in asked.nightlies]
    return list({(target.origin, target.name): target for target in found}.values())


def versions_of(spec: str, upstream: Upstream) -> list[str]:
    """The releases that an exact version or a range such as ">=0.31,<0.33" names, oldest first.

    A range leaves out pre-releases, and what upstream withdrew unless it is locked.

    Raises:
        UsageError: neither, or the index has no release in the range.
    """
    version = _version(spec)
    if version is not None:
        locked = upstream.lock.find(str(version))
        return [locked.version if locked else str(version)]
    wanted = _range(spec)
    if not wanted:
        raise UsageError("--against: expected a version such as 0.32.0 or a range such as "
                         f"'>=0.31,<0.33', found {spec!r}")  # fmt: skip
    found = [one for one in releases(upstream) if wanted.contains(one)]
    if not found:
        raise UsageError(f"--against: the index has no {upstream.recipe.title} release in {spec!r}")
    return found


def since(spec: str, upstream: Upstream) -> list[str]:
    """A version and every release after it. Raises UsageError."""
    from packaging.version import Version

    first = _version(spec)
    if first is None:
        raise UsageError(f"--since: expected a version such as 0.30.0, found {spec!r}")
    found = [one for one in releases(upstream) if Version(one) >= first]
    if not found:
        raise UsageError(
            f"--since: the index has no {upstream.recipe.title} release from {spec} on"
        )
    return found


def releases(upstream: Upstream) -> list[str]:
    """Every final release that upstream offers as a wheel and has not withdrawn, or that is locked.

    Oldest first. Raises EngineError: the index cannot be read.
    """
    from packaging.version import Version

    offered = {
        file.version
        for file in upstream.index.files(upstream.recipe.project)
        if file.yanked is False and file.filename.endswith(".whl")
    }
    final = {version for version in offered if not Version(version).is_prerelease}
    return in_order([*final, *upstream.lock.bases])


def in_order(versions: Sequence[str]) -> list[str]:
    """Each once, oldest first."""
    from packaging.version import Version

    return sorted(dict.fromkeys(versions), key=Version)


def of_version(version: str) -> Target:
    """One release of the index."""
    return Target(version, "index", lambda upstream, platform: upstream.open(version, platform))


def _of_wheel(path: Path) -> Target:
    if not path.is_file():
        raise UsageError(f"{path}: expected a wheel, found no such file")

    def opener(upstream: Upstream, platform: str) -> Base:
        wheel = WheelTree(path, platform=platform)
        recipe = upstream.recipe
        if wheel.project != recipe.project:
            wheel.close()
            raise UsageError(f"{path}: expected a wheel of {recipe.title}, found one of "
                             f"{wheel.project}")  # fmt: skip
        return upstream.beside(wheel, wheel.identity.version, platform)

    return Target(str(path), "wheel", opener)


def _of_tree(root: Path) -> Target:
    """One that we patched is seen as it was before."""
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none")

    def opener(upstream: Upstream, _platform: str) -> Base:
        tree, _manifest = pristine(root, upstream.recipe.project)
        return Base(tree.identity.version, tree, {})

    return Target(str(root), "tree", opener)


def _of_nightly(url: str) -> Target:
    if "://" not in url:
        raise UsageError(f"--nightly: expected the address of an index, found {url!r}")

    def opener(upstream: Upstream, platform: str) -> Base:
        wheel = upstream.nightly(url, platform)
        return upstream.beside(wheel, wheel.identity.version, platform)

    return Target(scrub(url), "nightly", opener)


def _version(spec: str) -> Version | None:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(spec)
    except InvalidVersion:
        return None


def _range(spec: str) -> SpecifierSet:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(spec)
    except InvalidSpecifier:
        return SpecifierSet()
