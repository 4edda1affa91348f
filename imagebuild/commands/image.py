"""`plan` and `build` with `--engine docker`, and `images`."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imagebuild import lock_entries, render
from imagebuild.commands.context import Context, host_arch
from imagebuild.engines import image as engine
from imagebuild.engines.docker import Docker
from imagebuild.engines.image import BuiltImage, ImageRequest
from imagebuild.errors import UsageError
from imagebuild.sources.sdist import extract

# What of vLLM's own sources FlashKDA is compiled with.
FLASHKDA_FILES = ("csrc/flashkda_registration.cpp", "csrc/core/registration.h")


def request_of(context: Context) -> ImageRequest:
    """What the arguments ask for. Raises IntegrityError when the base is not locked."""
    arguments, recipe = context.arguments, context.recipe
    base = context.lock.base(arguments.base_version or recipe.base_version)
    asked = arguments.arch or host_arch()
    arches = tuple(recipe.platforms) if asked == "all" else (asked,)
    cluster = arguments.cluster or recipe.image.cluster
    mentat = recipe.image.artifacts.get("mentat")
    version = arguments.mentat_version or (mentat.tag if mentat else "")
    extra = {"MENTAT_VERSION": version} if version and cluster == "mentat" else {}
    extra |= {"TOOLCHAIN": arguments.toolchain} if arguments.toolchain else {}
    return ImageRequest(
        recipe=recipe,
        series=context.series,
        base=base,
        gpu_arches=arches,
        reference=arguments.base or render.reference(base),
        tag=arguments.tag or f"{recipe.name}:{base.version}-{asked}",
        dist=context.dist.absolute(),
        flashkda=render.flashkda_of(recipe, base.version, arguments.flashkda)[0],
        cluster=cluster,
        contexts=lock_entries.contexts(recipe, context.lock, cluster, version)
        | engine.parse_contexts(arguments.build_context),
        arguments=extra,
        secrets=tuple(arguments.secret),
        use_cache=not arguments.no_cache,
    )


def plan(context: Context) -> int:
    """Prints what a build would do. Asks no engine and touches nothing."""
    request = request_of(context)
    rows = list(_values(context, request))
    console = context.console
    console.table(f"plan: image of {request.recipe.name}", ("value", "is", "from"), rows)
    warnings = [sentence for sentence, _name in _unmet(context, request)]
    known = request.reference.partition("@")[2]
    warnings += engine.missing_parts(request, engine.debs_of(request, known)[1])
    for sentence in warnings:
        console.result(f"  ! {sentence}")
    console.document({
        "recipe": request.recipe.name,
        "engine": "docker",
        "gpu_arches": list(request.gpu_arches),
        "platforms": list(request.platforms),
        "base": request.reference,
        "tag": request.tag,
        "arguments": request.build_arguments(),
        "warnings": warnings,
        "values": [dict(zip(("name", "value", "source"), row, strict=True)) for row in rows],
    })  # fmt: skip
    return 0


def _values(context: Context, request: ImageRequest) -> Iterator[tuple[str, str, str]]:
    arguments, recipe = context.arguments, request.recipe
    yield "recipe", recipe.name, "flag" if arguments.recipe else "the only one"
    yield "engine", "docker", "flag"
    source = "flag" if arguments.arch else f"this machine ({host_arch()})"
    yield "gpu_arch", ", ".join(request.gpu_arches), source
    yield "platform", ", ".join(request.platforms), "recipe.toml"
    state = request.base.image.state if request.base.image else "unresolved"
    yield "base", request.reference, "flag" if arguments.base else f"lock.toml, {state}"
    yield "vLLM", f"{request.base.version} (commit {request.base.commit})", "lock.toml"
    yield "epoch", str(request.base.epoch), "lock.toml"
    choice, why = render.flashkda_of(recipe, request.base.version, arguments.flashkda)
    yield "flashkda", choice, why
    yield "cluster", request.cluster, "flag" if arguments.cluster else "recipe.toml"
    yield "tag", request.tag, "flag" if arguments.tag else "recipe, vLLM, arch"
    yield "series", request.series.digest[:12], recipe.series_file.name
    yield "kernel", engine.kernel_digest(recipe.root)[:12], "kernel/csrc"
    for name, place in request.contexts.items():
        yield f"context {name}", place, "flag"


def run(context: Context) -> int:
    """Builds the image, loads it, and pushes it when asked."""
    arguments, console = context.arguments, context.console
    if arguments.push and arguments.no_load:
        raise UsageError("--push: expected the image to be loaded, found --no-load")
    request = request_of(context)
    console.step(f"base {request.reference}")
    choice, why = render.flashkda_of(request.recipe, request.base.version, arguments.flashkda)
    console.step(f"FlashKDA: {choice}: {why}")
    lock_entries.require_met(_unmet(context, request))
    docker = Docker(console.command, arguments.builder)
    with _with_sources(context, request) as complete, context.upstream() as upstream:
        built = engine.build(complete, docker, console.step, fetch=upstream.fetch_deb,
                             is_loaded=not arguments.no_load, is_pushed=arguments.push
                             )  # fmt: skip
    for sentence in engine.missing_parts(request, built.without_debs):
        console.result(f"  ! {sentence}")
    _show(context, request, built)
    return 0


def _unmet(context: Context, request: ImageRequest) -> list[tuple[str, str]]:
    """What the build needs and has neither from the lock nor by a named context."""
    return lock_entries.unmet(
        request.recipe,
        context.lock,
        request.base,
        flashkda=request.flashkda,
        cluster=request.cluster,
        mentat_version=request.arguments.get("MENTAT_VERSION", ""),
        contexts=request.contexts,
    )


@contextlib.contextmanager
def _with_sources(context: Context, request: ImageRequest) -> Iterator[ImageRequest]:
    """The request with vLLM's part of FlashKDA as a context, from the sdist by its sha256."""
    sdist, name = request.base.sdist, lock_entries.VLLM_SOURCES
    if request.flashkda != "build" or name in request.contexts or sdist is None:
        yield request
        return
    with context.upstream() as upstream:
        path = upstream.fetch_sdist("vllm", sdist)
    with tempfile.TemporaryDirectory(prefix="imagebuild-sdist-") as folder:
        extract(path, FLASHKDA_FILES, Path(folder))
        yield dataclasses.replace(request, contexts={**request.contexts, name: folder})


def _show(context: Context, request: ImageRequest, built: BuiltImage) -> None:
    console = context.console
    for platform, image in built.archive.platforms.items():
        size = f"{sum(image.sizes) / 1e6:.0f} MB packed, {len(image.diff_ids)} layers"
        console.result(f"  {platform}: {image.digest}, {size}")
    if built.previous and built.previous != built.archive.digest:
        console.result(f"  before: {built.previous}, kept as {built.tag}{engine.PREVIOUS}")
    where = "pushed" if built.pushed else "written" if context.arguments.no_load else "loaded"
    console.verdict(f"{built.tag}: {where} in {built.seconds:.0f} s, {built.archive.digest}", 0)
    record = engine.record_of(request, built)
    console.document({**record, "folder": str(built.folder), "seconds": round(built.seconds, 1)})


def images(context: Context) -> int:
    """What was built from what: the engine's images and what their tags named before."""
    dist = context.dist.absolute()
    docker = Docker(context.console.command)
    docker.engine_version()
    before = {one["digest"]: one.get("previous", "") for one in engine.history(dist)}
    found = []
    for image in docker.images(engine.LABEL):
        labels = image.get("Config", {}).get("Labels") or {}
        digest = str(image["Id"])
        found.append({
            "tags": list(image.get("RepoTags") or []),
            "digest": digest,
            "recipe": labels.get(engine.LABEL, ""),
            "base": labels.get("org.opencontainers.image.base.name", ""),
            "base_digest": labels.get("org.opencontainers.image.base.digest", ""),
            "revision": labels.get("org.opencontainers.image.revision", ""),
            "series": labels.get("imagebuild.series", ""),
            "previous": before.get(digest, ""),
        })  # fmt: skip
    rows = [(", ".join(one["tags"]) or "-", one["digest"][7:19], one["base"],
             one["base_digest"][7:19], one["revision"][:12] or "-", one["series"][:12],
             one["previous"][7:19] or "-") for one in found]  # fmt: skip
    columns = ("image", "digest", "base", "base digest", "revision", "series", "before it")
    context.console.table(f"{len(rows)} images", columns, rows)
    context.console.document({"images": found})
    return 0


def render_files(context: Context) -> int:
    """Writes the generated block of the Dockerfile; says whether it changed."""
    recipe = context.recipe
    path = render.dockerfile(context.root)
    text = path.read_text("utf-8")
    wanted = render.rendered(text, recipe, context.lock.base(recipe.base_version))
    if wanted != text:
        path.write_text(wanted, "utf-8")
    state = "written" if wanted != text else "nothing changed"
    context.console.verdict(f"{path}: {state}", 0)
    context.console.document({"path": str(path), "written": wanted != text})
    return 0
