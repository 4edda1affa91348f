"""`plan` and `build`: what would be built, and building it."""

from __future__ import annotations

from collections.abc import Iterator

from imagebuild import nvcc
from imagebuild.commands import image, kernelbuild
from imagebuild.commands.context import Context, host_arch
from imagebuild.engines.tree import Built, Request, build, up_to_date
from imagebuild.errors import UsageError
from imagebuild.patching.tree import VLLM
from imagebuild.show import offsets, report_rows

_IMAGE_OPTIONS = ("base", "tag", "cluster", "mentat_version", "flashkda", "builder", "toolchain",
                  "build_context", "secret", "push", "no_load", "no_cache")  # fmt: skip


def request_of(context: Context) -> Request:
    """What the arguments ask for. Raises IntegrityError when the base is not locked."""
    _refuse_image_options(context)
    recipe = context.recipe
    version = context.arguments.base_version or recipe.base_version
    return Request(
        recipe=recipe,
        lock=context.lock,
        series=context.series,
        base=context.lock.base(version),
        gpu_arch=context.gpu_arch,
        dist=context.dist,
    )


def _refuse_image_options(context: Context) -> None:
    """Raises UsageError for an option that only an image has."""
    given = [name for name in _IMAGE_OPTIONS if getattr(context.arguments, name)]
    if context.arguments.arch == "all":
        given.append("arch all")
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')}: expected --engine docker with it, "
                         "found the tree engine", hint="add --engine docker")  # fmt: skip


def _is_for_docker(context: Context) -> bool:
    """Whether an image is asked for. Raises UsageError for a recipe of another project."""
    if context.arguments.engine != "docker":
        return False
    if context.recipe.project != VLLM:
        raise UsageError("--engine docker: expected a recipe of vLLM, found one of "
                         f"{context.recipe.project}", hint="leave it out")  # fmt: skip
    return True


def plan(context: Context) -> int:
    """Prints what `build` would do, each value with its source. Touches nothing."""
    if _is_for_docker(context):
        return image.plan(context)
    request = request_of(context)
    rows = list(_values(context, request))
    known = up_to_date(request)
    context.console.table(f"plan: {request.recipe.name}", ("value", "is", "from"), rows)
    state = "nothing to do: it is up to date" if known else "build would write it"
    context.console.result(f"{request.folder}: {state}")
    context.console.document({
        "recipe": request.recipe.name,
        "engine": "tree",
        "gpu_arch": request.gpu_arch,
        "platform": request.platform,
        "base": request.base.version,
        "folder": str(request.folder),
        "up_to_date": known is not None,
        "inputs": request.inputs,
        "patches": [patch.name for patch in request.series.patches],
        "values": [dict(zip(("name", "value", "source"), row, strict=True)) for row in rows],
    })  # fmt: skip
    return 0


def _values(context: Context, request: Request) -> Iterator[tuple[str, str, str]]:
    arguments, recipe = context.arguments, request.recipe
    yield "recipe", recipe.name, "flag" if arguments.recipe else "the only one"
    yield "engine", "tree", "flag" if arguments.engine else "default"
    source = "flag" if arguments.arch else f"this machine ({host_arch()})"
    yield "gpu_arch", request.gpu_arch, source
    yield "platform", request.platform, "recipe.toml"
    source = "flag" if arguments.base_version else "recipe.toml"
    commit = f" (commit {request.base.commit})" if request.base.commit else ""
    yield recipe.title, f"{request.base.version}{commit}", source
    for project in recipe.site:
        pin = request.base.wheel(project, request.platform)
        yield (
            project,
            f"{pin.filename}, {pin.size / 1e6:.0f} MB, sha256 {pin.sha256[:12]}",
            "lock.toml",
        )
    yield "series", request.series.digest[:12], recipe.series_file.name
    for patch in request.series.patches:
        yield "patch", patch.name, "series.toml"


def run(context: Context) -> int:
    """Builds, or says that nothing is to do."""
    if _is_for_docker(context):
        return image.run(context)
    request = request_of(context)
    built = build(request, context.upstream, context.console.step)
    if context.arguments.kernel:
        _compile(context, request)
    _show(context, request, built)
    return 0


def _compile(context: Context, request: Request) -> None:
    """Makes the kernel's library for the tree's processor, as the image build and a user do."""
    out = kernelbuild.place(request.dist, request.platform)
    kernelbuild.compiled(context, request.platform, out, nvcc.Options())
    context.console.result(f"{out}: goes to /usr/local/lib/glm53/ on the machine that serves")


def _show(context: Context, request: Request, built: Built) -> None:
    console = context.console
    rows: list[tuple[str, str, str]] = []
    if built.result and built.result.evaluation:
        rows = report_rows(built.result.evaluation.reports)
        base = f"{request.recipe.title} {request.base.version}"
        console.table(f"{request.recipe.name} {request.gpu_arch}, {base}",
                      ("patch", "verdict", "what"), rows)  # fmt: skip
        for sentence in offsets(built.result.evaluation.reports):
            console.result(f"  i {sentence}")
    done = "built" if built.did_work else "up to date, nothing done"
    for sentence in built.warnings:
        console.result(f"  ! {sentence}")
    console.verdict(f"{built.folder}: {done}", 0)
    console.result(f"layer.tar sha256 {built.layer_sha256}")
    console.document({
        "recipe": request.recipe.name,
        "engine": "tree",
        "gpu_arch": request.gpu_arch,
        "base": request.base.version,
        "folder": str(built.folder),
        "did_work": built.did_work,
        "layer_sha256": built.layer_sha256,
        "warnings": list(built.warnings),
        "patches": [{"name": name, "verdict": verdict} for name, verdict, _what in rows],
    })  # fmt: skip
