"""`init-recipe`: a recipe, a series and a lock for any project that is on the package index."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping

from imagebuild import lock_update
from imagebuild.commands.context import Context
from imagebuild.config import PLATFORMS, Recipe, load_recipe
from imagebuild.errors import UsageError
from imagebuild.files import write_atomically
from imagebuild.lock import Lock
from imagebuild.patching.patch import GPU_ARCHES
from imagebuild.patching.series import Series
from imagebuild.upstream import Upstream

_SPEC = re.compile(r"(?P<project>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)\s*==\s*(?P<version>\S+)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_RECIPE = """\
# What is built: facts that a person decides. Resolved values are in lock.toml.
schema = 1
name = "{name}"
description = "Patches on {project}"
series = "series.toml"
patches = "patches/{folder}"

[base]
# The release that a build uses unless --base-version names another locked one.
version = "{version}"
# Where the packages go below the root of an image; layer.tar unpacks there.
site_packages = "usr/local/lib/python3.12/dist-packages"
python = "3.12"

[wheels]
# Projects whose versions are part of every audit, such as "numpy".
pins = []

# The wheels that make up `site`, each with the package that it installs. The first one is patched.
[wheels.site]
{project} = "{package}"

[image_pins]

# The platforms whose wheels are locked; where a wheel is for any, both are the same.
[gpu_arch]
{arches}
"""
_SERIES = """\
# The patches in the order in which they are applied: NAME for patches/{folder}/NAME.py, NAME.patch
# for a unified diff there, NAME/ for a folder of forks.
patches = []
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of init-recipe asks for."""

    project: str
    version: str
    name: str

    @property
    def folder(self) -> str:
        """Of the patches: a name that Python can import."""
        return self.name.replace("-", "_")


def run(context: Context) -> int:
    """Makes the recipe, or nothing."""
    asked = _asked(context)
    root = context.root
    places = [root / "image" / asked.name, root / "patches" / asked.folder]
    for place in places:
        if place.exists():
            raise UsageError(f"{place}: expected no such folder yet, found one",
                             hint="name another: --name NAME")  # fmt: skip
    draft = _draft(context, asked)
    with _session(context, draft) as upstream:
        console = context.console
        console.step(f"read {asked.project} {asked.version} from the index")
        wheels = _wheels(upstream, asked)
        package = context.arguments.package or _package(upstream, asked, next(iter(wheels)))
        recipe = dataclasses.replace(
            draft,
            site={asked.project: package},
            platforms={arch: platform for arch, platform in _ARCHES.items() if platform in wheels},
        )
    with _session(context, recipe) as upstream:
        lock = Lock(recipe.lock_file, {})
        series = Series((), {}, (), context.root / "image" / "runtime")
        lock = lock_update.resolve(recipe, lock, series, asked.version, upstream).lock
    try:
        _write(recipe, asked, package)
        lock_update.write(lock)
        made = load_recipe(asked.name, root)
    except BaseException:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        raise
    _tell(context, made, asked)
    return 0


_ARCHES = dict(zip(GPU_ARCHES, PLATFORMS, strict=True))


def _asked(context: Context) -> Asked:
    text = context.arguments.spec
    match = _SPEC.fullmatch(text.strip())
    if not match:
        raise UsageError(f"init-recipe: expected PROJECT==VERSION, found {text!r}")
    project = re.sub(r"[-_.]+", "-", match["project"]).lower()
    name = context.arguments.name or project
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name: expected small letters, digits and -, found {name!r}")
    return Asked(project, match["version"], name)


def _draft(context: Context, asked: Asked) -> Recipe:
    """The recipe as far as it can be told before a wheel was read."""
    root = context.root
    return Recipe(
        root=root,
        name=asked.name,
        description=f"Patches on {asked.project}",
        series_file=root / "image" / asked.name / "series.toml",
        patches_dir=root / "patches" / asked.folder,
        base_version=asked.version,
        site_packages="usr/local/lib/python3.12/dist-packages",
        python="3.12",
        site={asked.project: asked.project.replace("-", "_")},
        pins=(),
        image_pins={},
        platforms=_ARCHES,
    )


def _session(context: Context, recipe: Recipe) -> Upstream:
    return Upstream(recipe, Lock(recipe.lock_file, {}), offline=context.arguments.offline,
                    notice=context.console.note)  # fmt: skip


def _wheels(upstream: Upstream, asked: Asked) -> Mapping[str, str]:
    """The wheel's file name by platform, where the index has one. Raises UsageError."""
    found: dict[str, str] = {}
    problem: UsageError | None = None
    for platform in PLATFORMS:
        try:
            found[platform] = upstream.file(asked.project, asked.version, platform).filename
        except UsageError as error:
            problem = error
    if not found:
        raise problem or UsageError(f"{asked.project} {asked.version}: the index has no wheel")
    return found


def _package(upstream: Upstream, asked: Asked, platform: str) -> str:
    """The one package that the wheel installs. Raises UsageError when there are several."""
    tree = upstream.open(asked.version, platform, by_lock=False).tree
    tops = sorted({path.partition("/")[0] for path in tree.iter() if path.endswith("/__init__.py")})
    tops = [top for top in tops if tree.exists(f"{top}/__init__.py")]
    wanted = asked.project.replace("-", "_")
    if wanted in tops or len(tops) == 1:
        return wanted if wanted in tops else tops[0]
    what = ", ".join(tops) or "none"
    raise UsageError(f"{asked.project} {asked.version}: expected one package in the wheel, found "
                     f"{what}", hint="name it: --package NAME")  # fmt: skip


def _write(recipe: Recipe, asked: Asked, package: str) -> None:
    arches = "\n".join(f'{arch} = "{platform}"' for arch, platform in recipe.platforms.items())
    text = _RECIPE.format(name=asked.name, project=asked.project, folder=asked.folder,
                          version=asked.version, package=package, arches=arches)  # fmt: skip
    write_atomically(recipe.folder / "recipe.toml", text.encode("utf-8"))
    write_atomically(recipe.series_file, _SERIES.format(folder=asked.folder).encode("utf-8"))
    recipe.patches_dir.mkdir(parents=True)


def _tell(context: Context, recipe: Recipe, asked: Asked) -> None:
    console = context.console
    root = context.root
    for path in (recipe.folder / "recipe.toml", recipe.series_file, recipe.lock_file):
        console.result(f"written: {path.relative_to(root)}")
    console.verdict(f"recipe {recipe.name}: {recipe.project} {asked.version}, package "
                    f"{recipe.site[recipe.project]}", 0)  # fmt: skip
    folder, series = (p.relative_to(root) for p in (recipe.patches_dir, recipe.series_file))
    console.result(f"next: put a diff or a module into {folder}, name it in {series}, and try it: "
                   f"build.py patches check --recipe {recipe.name}")  # fmt: skip
    console.document({
        "recipe": recipe.name,
        "project": recipe.project,
        "package": recipe.site[recipe.project],
        "version": asked.version,
        "written": [str(recipe.folder), str(recipe.patches_dir)],
    })  # fmt: skip
