"""Applies the series to the packages of the interpreter that runs it: the patched stage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagebuild.config import Recipe, load_recipe
from imagebuild.errors import UsageError
from imagebuild.lock import Lock, read_lock
from imagebuild.patching.apply import apply
from imagebuild.patching.manifest import read_manifest
from imagebuild.patching.patch import GpuArch
from imagebuild.steps.run import finish, say
from imagebuild.verify.script import own_root


def main(arguments: Sequence[str]) -> int:
    """`series --recipe NAME --platform P [--root DIR]`; the exit codes are build.py's."""
    parser = argparse.ArgumentParser(prog="series")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--platform", required=True, help="docker's word, such as linux/amd64")
    parser.add_argument("--root", help="default: this interpreter's site-packages with vLLM in it")
    options = parser.parse_args(arguments)
    return finish("series", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    recipe = load_recipe(options.recipe)
    lock = read_lock(recipe.lock_file)
    root = Path(options.root).absolute() if options.root else own_root()
    result = apply(root, recipe.series(), arch_of(recipe, options.platform), lock.fingerprints_for,
                   recipe=recipe.name, bytecode="rebuild", known_as=lock.identify,
                   project=recipe.project)  # fmt: skip
    for report in result.evaluation.reports if result.evaluation else ():
        say(f"{report.patch.name}: {report.verdict.value}")
    say(f"{root}: {len(result.written)} files written")
    for line in provenance(root, lock):
        say(line)


def provenance(root: Path, lock: Lock) -> Iterator[str]:
    """Sentences on whether the patched files were those of the locked wheel, byte for byte."""
    manifest = read_manifest(root)
    base = lock.find(manifest.version.partition("+")[0]) if manifest else None
    if manifest is None or base is None:
        return
    known = {path: entry.before for path, entry in manifest.files.items() if path in base.targets}
    others = [path for path, before in known.items() if before != base.targets[path]]
    yield f"{len(known) - len(others)} of {len(known)} were as in the wheel of vLLM {base.version}"
    for path in others:
        yield f"! {path} was not: the base changed it before"


def arch_of(recipe: Recipe, platform: str) -> GpuArch:
    """The arch that a recipe serves on a platform; what follows linux/arm64 does not matter.

    Raises:
        UsageError: it serves none there.
    """
    wanted = "/".join(platform.split("/")[:2])
    for arch, served in recipe.platforms.items():
        if served == wanted:
            return arch
    known = ", ".join(f"{platform} ({arch})" for arch, platform in recipe.platforms.items())
    raise UsageError(f"recipe {recipe.name}: expected one of {known}, found {platform!r}",
                     hint="build with --platform linux/amd64 or linux/arm64")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
