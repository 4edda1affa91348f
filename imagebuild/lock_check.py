"""Compares the lock with what index, registries and git hosts have now. It writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imagebuild import lock_debs, tags
from imagebuild.config import Recipe
from imagebuild.errors import EngineError, IntegrityError
from imagebuild.lock import BaseLock, Lock, same_commit
from imagebuild.lock_entries import DEBS
from imagebuild.lock_remote import (
    IMAGE,
    WHEELS,
    Remotes,
    as_recipe,
    image_host,
    resolve_source,
    revision_of,
    source_host,
)
from imagebuild.pins import ImagePin, SourcePin, WheelPin
from imagebuild.sources.http import Http
from imagebuild.sources.imageref import parse_reference
from imagebuild.sources.registry import NotFoundError
from imagebuild.upstream import Upstream

DAY = 24 * 3600
# Upstream makes a release about every three weeks; an image of half a year ago misses some eight.
OLD_AFTER = 180 * DAY
NOT_VERIFIED = "not verified"
LEVELS = {"error": 4, "warning": 1, "info": 0}


@dataclass(frozen=True)
class Finding:
    """One sentence on one entry. `level` is "error", "warning" or "info"."""

    level: str
    entry: str
    message: str


def now() -> float:
    """Seconds since 1970; tests replace it."""
    return time.time()


def check(
    recipe: Recipe, lock: Lock, upstream: Upstream, remotes: Remotes, named: list[str]
) -> list[Finding]:
    """Everything that is to be said of the entries named, or of all.

    Raises:
        EngineError: the index cannot be reached, or a named entry's host.
    """
    found: list[Finding] = []
    checker = _Checker(recipe, lock, remotes, is_named=bool(named))
    if not named or WHEELS in named:
        for base in lock.bases.values():
            found += _wheels(base, upstream)
        found += _recipes_base(recipe, lock)
    fresh = as_recipe(recipe, lock)
    if not named or IMAGE in named:
        for version, base in fresh.bases.items():
            locked = lock.bases[version].image
            found += checker.image(f"vLLM {version}, image", locked, base.image, base)
    if not named or DEBS in named:
        for version, base in fresh.bases.items():
            found += checker.debs(f"vLLM {version}, {DEBS}", base, upstream.http)
    for name, pin in fresh.images.items():
        if not named or name in named:
            found += checker.image(name, lock.images.get(name), pin, None)
    for name, source in fresh.sources.items():
        if not named or name in named:
            found += checker.source(name, lock.sources.get(name), source)
    return found


def newer_releases(lock: Lock, upstream: Upstream) -> list[str]:
    """Final releases of vLLM after the newest locked one."""
    from packaging.version import Version

    newest = max((Version(v) for v in lock.bases), default=Version("0"))
    known = (Version(v) for v in upstream.index.versions(upstream.recipe.project))
    return [str(v) for v in known if v > newest and not v.is_prerelease]


def age_of(moment: int | None) -> str:
    """How long ago, in days, such as "55 days old"; "" when it is not known."""
    return "" if moment is None else f"{max(0, int(now() - moment)) // DAY} days old"


def _recipes_base(recipe: Recipe, lock: Lock) -> Iterator[Finding]:
    if not lock.bases:
        yield Finding("error", str(lock.path), "nothing is locked")
        return
    base = lock.find(recipe.base_version)
    if base is None:
        message = f"the recipe's base {recipe.base_version} is not locked"
        yield Finding("error", str(lock.path), message)
    elif now() - base.epoch > OLD_AFTER:
        message = f"{age_of(base.epoch)}; build.py audit says what a newer one means"
        yield Finding("warning", f"{recipe.title} {base.version}", message)


def _wheels(base: BaseLock, upstream: Upstream) -> Iterator[Finding]:
    for project, pins in base.wheels.items():
        for pin in pins.values():
            yield from _file(project, pin, upstream)
    if base.sdist is not None:
        yield from _file(upstream.recipe.project, base.sdist, upstream)


def _file(project: str, pin: WheelPin, upstream: Upstream) -> Iterator[Finding]:
    files = [file for file in upstream.index.files(project) if file.filename == pin.filename]
    same = [file for file in files if file.sha256 == pin.sha256]
    known = {file.sha256 for file in files if file.sha256}
    if not files:
        yield Finding("error", pin.filename, "the index no longer offers it")
        return
    reasons = {str(file.yanked) for file in same or files if file.yanked is not False}
    if reasons:
        yield Finding("warning", pin.filename, f"upstream withdrew it: {', '.join(reasons)}")
    if not same and known:
        yield Finding("error", pin.filename, f"expected sha256 {pin.sha256}, "
                      f"found {', '.join(sorted(known))}")  # fmt: skip
    elif not same:
        yield Finding("warning", pin.filename, "the index gives no sha256 to compare")


@dataclass(frozen=True)
class _Checker:
    """Looks at one entry after the other."""

    recipe: Recipe
    lock: Lock
    remotes: Remotes
    is_named: bool

    def image(
        self, entry: str, locked: ImagePin | None, wanted: ImagePin | None, base: BaseLock | None
    ) -> Iterator[Finding]:
        """Findings on an image: as it is locked, and as the recipe wants it."""
        if wanted is None or locked != wanted:
            yield from _differs(
                entry, locked.reference if locked else None, wanted.reference if wanted else None
            )
            return
        if fault := tags.fault_of(wanted.tag):
            better = _better(wanted, self.lock, base)
            yield Finding("warning", entry, f"tag {wanted.tag} {fault}{better}")

        def look() -> list[Finding]:
            return list(_in_registry(entry, wanted, self.remotes, base))

        yield from self._ask(entry, wanted, image_host(wanted), look)

    def debs(self, entry: str, base: BaseLock, http: Http) -> Iterator[Finding]:
        """Findings on packages that were resolved: for which base, and whether they are there."""
        pin = base.debs
        if pin is None or not pin.files:
            return
        if base.image is not None and base.image.digest != pin.base:
            yield Finding("warning", entry, f"resolved for {pin.base}, the locked image is "
                          f"{base.image.digest or 'unresolved'}; build.py lock update debs"
                          )  # fmt: skip
        try:
            gone = lock_debs.gone(pin, http)
        except EngineError as error:
            if self.is_named:
                raise
            yield Finding("info", entry, f"{pin.state}, {NOT_VERIFIED}: {error}")
            return
        if gone:
            yield Finding("warning", entry, f"the archive has dropped {', '.join(gone)}; "
                          "build.py lock update debs")  # fmt: skip
        count = sum(map(len, pin.files.values()))
        yield Finding("info", entry, f"{pin.state} on {pin.seen}, {count - len(gone)} of {count} "
                      "files are there")  # fmt: skip

    def source(self, name: str, locked: SourcePin | None, wanted: SourcePin) -> Iterator[Finding]:
        """Findings on a commit: as it is locked, and as the recipe wants it."""
        if locked != wanted:
            known = f"{locked.url}#{locked.commit} ({locked.source})" if locked else None
            yield from _differs(name, known, f"{wanted.url}#{wanted.commit} ({wanted.source})")
            return
        ref = self.recipe.image.sources[name].ref

        def look() -> list[Finding]:
            resolve_source(wanted, self.remotes)
            moved = list(_ref(name, wanted, ref, self.remotes)) if ref else []
            message = f"{_state(wanted)}, {wanted.commit[:12]} is there"
            return [*moved, Finding("info", name, message)]

        yield from self._ask(name, wanted, source_host(wanted), look)

    def _ask(
        self,
        entry: str,
        pin: ImagePin | SourcePin,
        host: str,
        look: Callable[[], list[Finding]],
    ) -> Iterator[Finding]:
        try:
            yield from self.remotes.ask(host, look)
        except IntegrityError as error:
            yield Finding("error", entry, str(error))
        except EngineError as error:
            if self.is_named:
                raise
            yield Finding("info", entry, f"{_state(pin)}, {NOT_VERIFIED}: {error}")


def _differs(entry: str, locked: str | None, wanted: str | None) -> Iterator[Finding]:
    if locked or wanted:
        yield Finding("error", entry, f"recipe.toml wants {wanted or 'none'}, locked is "
                      f"{locked or 'none'}; build.py lock update")  # fmt: skip


def _in_registry(
    entry: str, pin: ImagePin, remotes: Remotes, base: BaseLock | None
) -> Iterator[Finding]:
    where = parse_reference(pin.name)
    registry = remotes.registry
    try:
        tagged = registry.manifest(where).digest
    except NotFoundError:
        tagged = ""
    if not pin.digest:
        found = f"{pin.name} is {tagged}" if tagged else f"the registry has no {pin.name}"
        yield Finding("info", entry, f"unresolved; {found}")
        return
    try:
        top = registry.manifest(where.at(pin.digest))
    except NotFoundError:
        yield Finding("error", entry, f"{pin.reference}: the registry no longer has it; nobody can "
                      "build on it who has no copy")  # fmt: skip
        return
    if not tagged:
        yield Finding("warning", entry, f"tag {pin.tag} is gone; the digest is still there, so "
                      "mirror it while it is")  # fmt: skip
    elif tagged != pin.digest:
        yield Finding("warning", entry, f"tag {pin.tag} moved: locked is {pin.digest}, it is now "
                      f"{tagged}; build.py lock update image takes it")  # fmt: skip
    children = {name: child.digest for name, child in registry.platforms(top).items()}
    for platform, digest in pin.platforms.items():
        if children.get(platform) != digest:
            yield Finding("error", entry, f"{platform}: expected {digest}, "
                          f"found {children.get(platform, 'no image')}")  # fmt: skip
            return
    platform = next(iter(pin.platforms or children))
    config = registry.config(registry.image(top, platform))
    yield from _commit(entry, revision_of(config), base)
    age = age_of(tags.seconds_of(str(config.get("created") or "")))
    verified = "as the registry has it" + (f", {age}" if age else "")
    advice = "; build.py lock update image records that" if pin.state == "cited" else ""
    yield Finding("info", entry, f"{_state(pin)}, {verified}{advice}")


def _commit(entry: str, revision: str, base: BaseLock | None) -> Iterator[Finding]:
    """The image must be of the commit that the wheel states, or its probes mean another tree."""
    if base is None or not base.commit:
        return
    if not revision:
        yield Finding("info", entry, "the image does not say from which commit it is")
    elif not same_commit(revision, base.commit):
        yield Finding("error", entry, f"expected an image of commit {base.commit}, as the wheel, "
                      f"found {revision}")  # fmt: skip


def _better(pin: ImagePin, lock: Lock, base: BaseLock | None) -> str:
    if base is None:
        return ""
    commit = tags.commit_of(pin.tag) or pin.revision
    release = tags.first_release(lock, commit, pin.created)
    return f"; {release}" if release else ""


def _state(pin: ImagePin | SourcePin) -> str:
    return f"cited ({pin.source})" if pin.state == "cited" and pin.source else pin.state


def _ref(name: str, pin: SourcePin, ref: str, remotes: Remotes) -> Iterator[Finding]:
    refs = remotes.git.refs(pin.url)
    tip = next((refs[full] for full in (ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
                if full in refs), None)  # fmt: skip
    if tip is None:
        yield Finding("warning", name, f"{ref} is gone; the commit is still there")
    elif tip != pin.commit:
        yield Finding("warning", name, f"{ref} moved: locked is {pin.commit}, it is now {tip}")
