"""What every verb starts from: recipe, lock, series and console, each loaded when first used."""

from __future__ import annotations

import argparse
import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

from imagebuild.config import HOST_ARCHES, Recipe, load_recipe, recipes
from imagebuild.console import Console
from imagebuild.errors import UsageError
from imagebuild.lock import Lock, read_lock
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.series import Series
from imagebuild.upstream import Upstream


class Context:
    """One run of one verb, on the repository at `root`."""

    def __init__(self, arguments: argparse.Namespace, console: Console, root: Path) -> None:
        self.arguments = arguments
        self.console = console
        self.root = root

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe asked for, or the only one."""
        name = self.arguments.recipe
        if name is None:
            known = recipes(self.root)
            if not known:
                raise UsageError(f"{self.root / 'image'}: expected a folder with a recipe.toml, "
                                 "found none")  # fmt: skip
            if len(known) > 1:
                raise UsageError("--recipe: expected a name, since there are several",
                                 hint=f"recipes: {', '.join(known)}")  # fmt: skip
            name = known[0]
        return load_recipe(name, self.root)

    @functools.cached_property
    def lock(self) -> Lock:
        """The recipe's lock."""
        return read_lock(self.recipe.lock_file)

    @functools.cached_property
    def series(self) -> Series:
        """The recipe's patches."""
        return self.recipe.series()

    @property
    def gpu_arch(self) -> GpuArch:
        """`--arch`, or that of this machine."""
        return self.arguments.arch or host_arch()

    @property
    def dist(self) -> Path:
        """Where results go: `--dist`, else `dist` in the repository."""
        asked = self.arguments.dist
        return Path(asked) if asked else self.root / "dist"

    @contextlib.contextmanager
    def upstream(self) -> Iterator[Upstream]:
        """A session with the index, with progress shown."""
        with (
            self.console.progress() as progress,
            Upstream(
                self.recipe,
                self.lock,
                offline=self.arguments.offline,
                progress=progress,
                notice=self.console.note,
            ) as session,  # fmt: skip
        ):
            yield session


def host_arch() -> GpuArch:
    """The gpu_arch whose cards sit in a machine like this one. Raises UsageError."""
    machine = platform.machine()
    if machine not in HOST_ARCHES:
        raise UsageError(f"--arch: no default for a {machine} machine",
                         hint="add --arch sm_120 or --arch sm_121")  # fmt: skip
    return HOST_ARCHES[machine]
