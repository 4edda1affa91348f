"""The lock as a list of entries with their states, and which of them a build cannot do without.

It asks nobody and writes nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagebuild.config import Recipe
from imagebuild.errors import IntegrityError, raise_collected
from imagebuild.lock import BaseLock, Lock
from imagebuild.pins import DebsPin, ImagePin, SourcePin

# Named contexts of the Dockerfile that stand in for an entry.
DEBS, FLASHKDA_SOURCES, VLLM_SOURCES = "debs", "flashkda-src", "vllm-src"


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        base: the release it is for; "" for all of them.
        name: such as "image" or "flashkda".
        state: "resolved", "cited" or "unresolved".
        value: what is locked, in words.
        source: who says so.
    """

    base: str
    name: str
    state: str
    value: str
    source: str = ""


def entries(recipe: Recipe, lock: Lock) -> list[Entry]:
    """Every entry; what the recipe names and the lock lacks is unresolved."""
    found: list[Entry] = []
    for version, base in lock.bases.items():
        found += _of_base(recipe, version, base)
    for name, wanted in recipe.image.artifacts.items():
        pin = image_of(recipe, lock, name)
        unknown = ImagePin(wanted.repository, wanted.tag)
        found.append(_image("", name, pin or unknown))
    for name, commit in recipe.image.sources.items():
        source = source_of(recipe, lock, name)
        where = f"{commit.url}#{commit.commit}"
        found.append(Entry("", name, source.state if source else "unresolved", where,
                           (source.source if source else "") or commit.source))  # fmt: skip
    return found


def _of_base(recipe: Recipe, version: str, base: BaseLock) -> Iterator[Entry]:
    index = "package index"
    count = sum(len(pins) for pins in base.wheels.values())
    yield Entry(version, "wheels", "resolved", f"{count} files by sha256", index)
    if base.sdist is not None:
        yield Entry(version, "sdist", "resolved", base.sdist.filename, index)
    elif recipe.image.sources:
        yield Entry(version, "sdist", "unresolved", "no sdist by sha256")
    day = datetime.datetime.fromtimestamp(base.epoch, datetime.UTC).date()
    yield Entry(version, "epoch", "resolved", f"{base.epoch} ({day})", index)
    if base.image is not None:
        yield _image(version, "image", base.image)
    if base.debs is not None:
        yield _debs(version, base.debs)
    elif recipe.image.debs:
        yield Entry(version, "debs", "unresolved", ", ".join(recipe.image.debs))


def _debs(version: str, pin: DebsPin) -> Entry:
    names = ", ".join(pin.packages)
    counts = ", ".join(f"{len(found)} for {platform}" for platform, found in pin.files.items())
    says = f"apt of {pin.base[:19]}, {pin.seen}" if pin.files else ""
    return Entry(version, DEBS, pin.state, f"{names} ({counts})" if counts else names, says)


def _image(base: str, name: str, pin: ImagePin) -> Entry:
    says = f"registry, {pin.seen}" if pin.state == "resolved" else pin.source
    return Entry(base, name, pin.state, pin.reference, says)


def image_of(recipe: Recipe, lock: Lock, name: str) -> ImagePin | None:
    """An artifact image as it is locked; None when the recipe names another one by now."""
    pin, wanted = lock.images.get(name), recipe.image.artifacts.get(name)
    is_same = pin and wanted and (pin.repository, pin.tag) == (wanted.repository, wanted.tag)
    return pin if is_same else None


def source_of(recipe: Recipe, lock: Lock, name: str) -> SourcePin | None:
    """A source as it is locked; None when the recipe names another commit by now."""
    pin, wanted = lock.sources.get(name), recipe.image.sources.get(name)
    return pin if pin and wanted and (pin.url, pin.commit) == (wanted.url, wanted.commit) else None


def contexts(recipe: Recipe, lock: Lock, cluster: str, version: str) -> dict[str, str]:
    """Named contexts that the lock gives: the image of mentat, when that `version` is locked."""
    pin = image_of(recipe, lock, "mentat") if cluster == "mentat" else None
    if pin is None or not pin.digest or pin.tag != version:
        return {}
    return {"mentat": f"docker-image://{pin.reference}"}


def unmet(
    recipe: Recipe,
    lock: Lock,
    base: BaseLock,
    *,
    flashkda: str,
    cluster: str,
    mentat_version: str,
    contexts: Mapping[str, str],
) -> list[tuple[str, str]]:
    """What an image build needs and has neither from the lock nor by a named context.

    Args:
        recipe: names the entries.
        lock: has their values.
        base: the release to build on.
        flashkda: "base" or "build".
        cluster: "none", "ray" or "mentat".
        mentat_version: tag that is asked for.
        contexts: named contexts that were given.

    Returns:
        For each a sentence, and the name of the context that would do instead.
    """
    found = []
    if cluster == "mentat" and "mentat" not in contexts:
        wanted = recipe.image.artifacts.get("mentat")
        name = f"{wanted.repository}:{mentat_version}" if wanted else "an image"
        found.append((f"cluster mentat: {name}, with mentatd and mentatd-probe-machine, "
                      "is unresolved", "mentat"))  # fmt: skip
    if flashkda == "build":
        if FLASHKDA_SOURCES not in contexts:
            found += [
                (f"FlashKDA: the sources of {name} are not locked", FLASHKDA_SOURCES)
                for name in ("flashkda", "cutlass")
                if source_of(recipe, lock, name) is None
            ]
        if VLLM_SOURCES not in contexts and base.sdist is None:
            found.append((f"FlashKDA: the sdist of vLLM {base.version} is unresolved",
                          VLLM_SOURCES))  # fmt: skip
    return found


def require_met(missing: list[tuple[str, str]]) -> None:
    """Raises IntegrityError that names every missing entry and what to do."""
    contexts = " ".join(f"--build-context {name}=DIR" for name in dict.fromkeys(
        name for _sentence, name in missing))  # fmt: skip
    raise_collected(IntegrityError, "the build needs what is not locked",
                    [sentence for sentence, _name in missing],
                    hint=f"build.py lock update, where their hosts can be reached, or "
                    f"{contexts}")  # fmt: skip
