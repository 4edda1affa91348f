"""Compares versions of the base's packages with the lock and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.lock import BaseLock
from imagebuild.verify.installed import Distribution, distributions, fits, is_range, normalise
from imagebuild.verify.report import Group


def check(
    found: Group,
    root: Path,
    recipe: Recipe,
    base: BaseLock,
    *,
    in_base: bool,
    folders: tuple[Path, ...],
) -> None:
    """Compares each watched project.

    Args:
        found: takes the findings.
        root: site-packages.
        recipe: names the watched projects, and what the image ships instead of the lock's pin.
        base: the locked release.
        in_base: every project must be installed, and the image's own versions count. Else a
            project that is not installed is compared by what the vLLM wheel requires.
        folders: where packages are installed, in the order of imports; `root` is one of them.
    """
    installed = distributions(folders)
    vllm = next(
        (one for one in installed.get(normalise(recipe.project), []) if one.folder.parent == root),
        None,
    )
    required = vllm.requirements() if vllm else {}
    compared = 0
    for name in dict.fromkeys([*recipe.site, *recipe.pins]):
        expected, origin = _expected(name, recipe, base, in_base=in_base)
        actual, where = _actual(name, installed, required, in_base=in_base)
        if name in recipe.site and normalise(name) not in installed:
            actual = ""  # what vLLM requires is no proof of what is there
        if not expected:
            found.info("version-not-locked", f"{name}: found {actual or 'none'} ({where}), "
                       f"the lock has no version for vLLM {base.version}")  # fmt: skip
        elif actual:
            compared += 1
            sentence = f"{name}: expected {expected} ({origin}), found {actual} ({where})"
            # What is required must be what was locked; what is installed must fit it.
            if expected == actual or (not is_range(actual) and fits(actual, expected)):
                found.info("version", sentence)
            else:
                found.error("version-differs", sentence, fix=_fix(name, base))
        elif in_base or name in recipe.site:
            found.error("version-missing", f"{name}: expected {expected} ({origin}), "
                        "found none installed", fix=_fix(name, base))  # fmt: skip
        else:
            found.info("version-not-checked", f"{name}: expected {expected} ({origin}); it is not "
                       "in this tree and vLLM's METADATA does not name it")  # fmt: skip
    found.summary = f"{compared} compared"


def _expected(name: str, recipe: Recipe, base: BaseLock, *, in_base: bool) -> tuple[str, str]:
    image: Mapping[str, str] = recipe.image_pins.get(base.version, {})
    if in_base and name in image:
        return image[name], f"recipe, image_pins of {base.version}"
    if name in base.versions:
        return base.versions[name], "lock, wheels"
    return base.pins.get(name, ""), "lock, pins"


def _actual(
    name: str,
    installed: Mapping[str, list[Distribution]],
    required: Mapping[str, str],
    *,
    in_base: bool,
) -> tuple[str, str]:
    project = normalise(name)
    if project in installed:
        first = installed[project][0]
        return first.version or "no version", f"installed, {first.folder.name}"
    if in_base:
        return "", "not installed"
    return required.get(project, ""), "required by vLLM's METADATA"


def _fix(name: str, base: BaseLock) -> str:
    return (
        f"use the base of vLLM {base.version} unchanged; where {name} was changed on purpose, "
        "state it in the recipe's image_pins or run build.py lock update"
    )
