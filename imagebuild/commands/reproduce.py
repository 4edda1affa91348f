"""`reproduce`: whether a build gives the same bytes twice, and if not, what differs and why."""

from __future__ import annotations

import re
from pathlib import Path

from imagebuild.commands import build, image
from imagebuild.commands.context import Context
from imagebuild.engines import reproduce as engine
from imagebuild.engines.compare import Comparison, Grade
from imagebuild.engines.docker import Docker
from imagebuild.engines.layers import Layout
from imagebuild.engines.workplace import workplace
from imagebuild.errors import UsageError

_SHOWN = 60
# Options of `build` that a rebuild takes as they are.
_PASSED = ("mentat_version", "builder", "toolchain")


def run(context: Context) -> int:
    """Builds twice, or rebuilds the image that is named, and shows the grade."""
    arguments = context.arguments
    dist = context.dist.absolute()
    if arguments.image and arguments.engine == "tree":
        raise UsageError(f"--engine tree: expected no image with it, found {arguments.image}")
    with workplace(dist, context.root, is_kept=arguments.keep) as work:
        if arguments.image:
            name, found = "docker", _again(context, work)
        elif arguments.engine == "docker":
            name, found = "docker", _twice(context, work)
        else:
            name, found = "tree", _trees(context, work)
        _show(context, name, found, work)
    return found.grade.exit_code


def _trees(context: Context, work: Path) -> Comparison:
    request = build.request_of(context)
    options = ["--arch", request.gpu_arch, "--base-version", request.base.version]
    return engine.trees(context.root, [*_common(context), *options], work, context.console.step)


def _twice(context: Context, work: Path) -> Comparison:
    request = image.request_of(context)
    arch = request.gpu_arches[0] if len(request.gpu_arches) == 1 else "all"
    options = ["--arch", arch, "--base-version", request.base.version, "--base", request.reference,
               "--flashkda", request.flashkda, "--cluster", request.cluster]  # fmt: skip
    given = [*_common(context), *options, *_image_options(context)]
    return engine.twice(context.root, given, work, context.console.step)


def _again(context: Context, work: Path) -> Comparison:
    console, named = context.console, context.arguments.image
    path = Path(named)
    if not path.exists():
        docker = Docker(console.command, context.arguments.builder)
        docker.engine_version()
        path = work / "given.tar"
        docker.save(named, path)
    with Layout(path.absolute()) as given:
        return engine.again(context.root, given, _image_options(context), work,
                            echo=console.command, step=console.step)  # fmt: skip


def _common(context: Context) -> list[str]:
    return ["--recipe", context.recipe.name, *(["--offline"] if context.arguments.offline else [])]


def _image_options(context: Context) -> list[str]:
    """What a rebuild cannot know by itself; paths are made whole, since it runs elsewhere."""
    arguments = context.arguments
    found: list[str] = []
    for name in _PASSED:
        if getattr(arguments, name):
            found += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    for word in arguments.build_context:
        name, _, place = word.partition("=")
        place = str(Path(place).absolute()) if Path(place).exists() else place
        found += ["--build-context", f"{name}={place}"]
    for word in arguments.secret:
        found += ["--secret", re.sub(r"(?<=src=)[^,]+", lambda m: str(Path(m[0]).absolute()), word)]
    return found


def _show(context: Context, name: str, found: Comparison, work: Path) -> None:
    console, grade = context.console, found.grade
    for one in found.differences[:_SHOWN]:
        console.result(f"  {one.line()}")
    if len(found.differences) > _SHOWN:
        console.result(f"  and {len(found.differences) - _SHOWN} more; --format json has all")
    digests = dict.fromkeys(found.digests)
    console.verdict(f"{grade.words}: {' against '.join(digests)}", grade.exit_code)
    if context.arguments.keep:
        console.result(f"both builds are kept in {work}")
    console.document({
        "engine": name,
        "grade": grade.words,
        "identical": grade is Grade.IDENTICAL,
        "digests": list(found.digests),
        "files": list(found.files),
        "differences": [one.to_json() for one in found.differences],
        "kept": str(work) if context.arguments.keep else None,
    })  # fmt: skip
