"""Entries of the lock from registries and git hosts: taken from the recipe, then resolved.

It writes nothing. What cannot be reached keeps its state, and a sentence says so; what answers with
something else than it should is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from imagebuild.config import GitSource, ImageName, Recipe
from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.lock import BaseLock, Lock, same_commit
from imagebuild.lock_entries import DEBS
from imagebuild.pins import DebsPin, ImagePin, SourcePin, read_image
from imagebuild.sources.git import Git, NoCommitError
from imagebuild.sources.http import UnreachableError
from imagebuild.sources.imageref import parse_reference
from imagebuild.sources.registry import Registry

_Pin = TypeVar("_Pin")
WHEELS, IMAGE = "wheels", "image"
# Where vLLM's images state their commit, most telling first. A revision label may be of a parent.
_REVISION_ENV = "VLLM_BUILD_COMMIT"
_REVISION_LABEL = "org.opencontainers.image.revision"


@dataclass
class Remotes:
    """What answers for entries that are not wheels.

    Attributes:
        registry: for images.
        git: for sources.
        today: "2026-11-29".
        dead: hosts that did not answer; none is asked twice.
    """

    registry: Registry
    git: Git
    today: str
    dead: set[str] = field(default_factory=set)

    def ask(self, host: str, question: Callable[[], _Pin]) -> _Pin:
        """Asks unless the host is known to be out of reach. Raises what `question` does."""
        if host in self.dead:
            raise UnreachableError(f"{host or 'the registry'} did not answer before")
        try:
            return question()
        except UnreachableError:
            self.dead.add(host)
            raise


@dataclass(frozen=True)
class Resolved:
    """What `resolve` gave: the lock, sentences on what moved, and those on what kept its state."""

    lock: Lock
    moved: tuple[str, ...]
    kept: tuple[str, ...]


def words(recipe: Recipe) -> tuple[str, ...]:
    """What may be named: wheels, base image, packages, and each artifact and source."""
    return (WHEELS, IMAGE, DEBS, *recipe.image.artifacts, *recipe.image.sources)


def require_words(recipe: Recipe, named: list[str]) -> None:
    """Raises UsageError for a word that names no entry."""
    known = words(recipe)
    for word in named:
        if word not in known:
            raise UsageError(f"lock: expected an entry, found {word!r}",
                             hint=f"entries: {', '.join(known)}")  # fmt: skip


def as_recipe(recipe: Recipe, lock: Lock) -> Lock:
    """The lock with exactly the images, sources and packages that the recipe names.

    An entry that is resolved keeps its value as long as the recipe means the same thing by it.

    Raises:
        UsageError: what the recipe cites is malformed.
    """
    bases = {
        version: replace(base, image=base_image(recipe, base, version), debs=_debs(recipe, base))
        for version, base in lock.bases.items()
    }
    images = {
        name: _kept_image(lock.images.get(name), _unresolved(wanted))
        for name, wanted in recipe.image.artifacts.items()
    }
    sources = {
        name: _source(lock.sources.get(name), wanted)
        for name, wanted in recipe.image.sources.items()
    }
    return replace(lock, bases=bases, images=images, sources=sources)


def base_image(recipe: Recipe, known: BaseLock | None, version: str) -> ImagePin | None:
    """What is resolved already, else what the recipe cites, else only its name."""
    cited = recipe.image.cited.get(version)
    if cited is None and recipe.image.base is None:
        return None
    try:
        wanted = read_image({**cited, "state": "cited"}) if cited else _unresolved(
            recipe.image.base, version)  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"recipe {recipe.name}: image.cited.{version} is malformed: "
                         f"{error}") from error  # fmt: skip
    return _kept_image(known.image if known else None, wanted)


def _unresolved(name: ImageName | None, version: str = "") -> ImagePin:
    if name is None:
        raise KeyError("base")
    return ImagePin(name.repository, name.tag.replace("{version}", version))


def _kept_image(known: ImagePin | None, wanted: ImagePin) -> ImagePin:
    is_same = known is not None and known.state == "resolved" and known.name == wanted.name
    return known if known is not None and is_same else wanted


def _source(known: SourcePin | None, wanted: GitSource) -> SourcePin:
    if known is not None and known.state == "resolved" and (known.url, known.commit) == (
        wanted.url, wanted.commit):  # fmt: skip
        return replace(known, source=wanted.source)
    return SourcePin(wanted.url, wanted.commit, "cited", wanted.source)


def _debs(recipe: Recipe, base: BaseLock) -> DebsPin | None:
    packages = recipe.image.debs
    if base.debs is not None and base.debs.packages == packages:
        return base.debs
    return DebsPin(packages) if packages else None


def resolve(
    recipe: Recipe, lock: Lock, remotes: Remotes, named: list[str], versions: list[str]
) -> Resolved:
    """Asks registry and git hosts anew.

    Args:
        recipe: names the entries.
        lock: as `as_recipe` gives it.
        remotes: who is asked.
        named: entries to ask for; one that cannot be reached is then an error. Empty: all.
        versions: bases whose image is asked for.

    Raises:
        IntegrityError: an image of another commit than the wheels, or a commit that is not there.
        EngineError: a named entry cannot be reached.
    """
    kept: list[str] = []
    bases, images, sources = dict(lock.bases), dict(lock.images), dict(lock.sources)

    def ask(name: str, host: str, question: Callable[[], _Pin]) -> _Pin | None:
        try:
            return remotes.ask(host, question)
        except EngineError as error:
            if named:
                raise
            kept.append(f"{name} keeps its state: {error}")
            return None

    platforms = _platforms(recipe)
    for version in versions if not named or IMAGE in named else ():
        base, image = bases[version], bases[version].image
        if image is not None:
            question = functools.partial(_resolve_base, base, image, platforms, remotes)
            found = ask(f"image of vLLM {version}", image_host(image), question)
            bases[version] = replace(base, image=found or image)
    for name, pin in lock.images.items():
        if not named or name in named:
            question = functools.partial(resolve_image, pin, platforms, remotes)
            images[name] = ask(f"image {name}", image_host(pin), question) or pin
    for name, source in lock.sources.items():
        if not named or name in named:
            look = functools.partial(resolve_source, source, remotes)
            sources[name] = ask(f"source {name}", source_host(source), look) or source
    fresh = replace(lock, bases=bases, images=images, sources=sources)
    return Resolved(fresh, tuple(_moved(lock, fresh)), tuple(kept))


def _resolve_base(
    base: BaseLock, pin: ImagePin, platforms: list[str], remotes: Remotes
) -> ImagePin:
    found = resolve_image(pin, platforms, remotes)
    if found.revision and base.commit and not same_commit(found.revision, base.commit):
        raise IntegrityError(
            f"image {found.name}: expected it to be built from commit {base.commit}, as the wheel "
            f"of vLLM {base.version} is, found {found.revision}",
            hint="name the image of that release in recipe.toml, image.base or image.cited",
        )
    return found


def resolve_image(pin: ImagePin, platforms: list[str], remotes: Remotes) -> ImagePin:
    """What the registry has under the pin's tag now.

    Raises:
        UsageError: no image for one of `platforms`.
        EngineError, IntegrityError: as `Registry.manifest`.
    """
    top = remotes.registry.manifest(parse_reference(pin.name))
    found = remotes.registry.platforms(top)
    missing = [platform for platform in platforms if platform not in found]
    if missing:
        raise UsageError(f"image {pin.name}: expected images for {' and '.join(missing)}, "
                         f"found {', '.join(found) or 'none'}")  # fmt: skip
    config = remotes.registry.config(remotes.registry.image(top, platforms[0]))
    return ImagePin(
        repository=pin.repository,
        tag=pin.tag,
        digest=top.digest,
        platforms={platform: found[platform].digest for platform in platforms},
        state="resolved",
        source=pin.source if pin.digest == top.digest else "",
        revision=revision_of(config),
        created=str(config.get("created") or ""),
        seen=pin.seen if pin.digest == top.digest and pin.seen else remotes.today,
    )


def revision_of(config: Mapping[str, Any]) -> str:
    """The commit that an image's configuration states, or ""."""
    inner = config.get("config") or {}
    pairs = (str(entry).partition("=") for entry in inner.get("Env") or ())
    environment = {name: value for name, _, value in pairs}
    labels = inner.get("Labels") or {}
    for value in (environment.get(_REVISION_ENV), labels.get(_REVISION_LABEL)):
        text = str(value or "").lower()
        if len(text) >= 7 and set(text) <= set("0123456789abcdef"):
            return text
    return ""


def resolve_source(pin: SourcePin, remotes: Remotes) -> SourcePin:
    """The pin, once its host has shown that it has the commit.

    Raises:
        IntegrityError: the repository has no such commit.
        EngineError: the host cannot be reached.
    """
    if pin.commit not in remotes.git.refs(pin.url).values():
        try:
            remotes.git.require_commit(pin.url, pin.commit)
        except NoCommitError as error:
            raise IntegrityError(
                f"{pin.url}: expected commit {pin.commit}, found that the repository has no such "
                "commit",
                hint="correct it in recipe.toml, image.sources",
            ) from error
    seen = pin.seen if pin.state == "resolved" and pin.seen else remotes.today
    return replace(pin, state="resolved", seen=seen)


def _platforms(recipe: Recipe) -> list[str]:
    return sorted(set(recipe.platforms.values()))


def image_host(pin: ImagePin) -> str:
    """Who is asked for an image; "" for the default registry."""
    return parse_reference(pin.name).host


def source_host(pin: SourcePin) -> str:
    """Who is asked for a source."""
    return urlsplit(pin.url).netloc or pin.url


def _moved(before: Lock, after: Lock) -> Iterator[str]:
    pairs: list[tuple[str, ImagePin | None, ImagePin | None]] = [
        (f"image of vLLM {version}", before.bases[version].image, base.image)
        for version, base in after.bases.items()
    ]
    pairs += [(f"image {name}", before.images[name], pin) for name, pin in after.images.items()]
    for name, old, new in pairs:
        if old is not None and new is not None and old.digest != new.digest:
            yield f"{name}: digest was {old.digest or 'unresolved'}, is {new.digest}"
