"""One image build: from recipe and lock to a loaded or pushed image with a record of what it is.

It decides names, labels and arguments; `imagebuild.engines.docker` does the calls.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild import render
from imagebuild.config import Recipe
from imagebuild.engines import debs
from imagebuild.engines.debs import Fetch
from imagebuild.engines.docker import BaseImage, Call, Docker
from imagebuild.engines.made import Made, write_documents
from imagebuild.engines.ocitar import Archive, read_archive
from imagebuild.errors import EngineError, UsageError
from imagebuild.files import only_one, write_atomically
from imagebuild.lock import BaseLock
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.series import Series

RECORD = "image.json"
ARCHIVE = "image.tar"
IMAGES = "images.json"
# The label that tells our images from all others.
LABEL = "imagebuild.recipe"
# What an old tag becomes when a build takes its name.
PREVIOUS = "-previous"

Step = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """What is to be built.

    Attributes:
        gpu_arches: one, or all of the recipe for an index over their platforms.
        reference: the base image, for FROM.
        tag: the image's name.
        flashkda: "base" or "build".
        contexts: named build contexts, folder or source by name.
        secrets: as buildx takes them.
    """

    recipe: Recipe
    series: Series
    base: BaseLock
    gpu_arches: tuple[GpuArch, ...]
    reference: str
    tag: str
    dist: Path
    flashkda: str
    cluster: str
    contexts: Mapping[str, str]
    arguments: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    use_cache: bool = True

    @property
    def platforms(self) -> tuple[str, ...]:
        """Docker's words for the targets."""
        return tuple(self.recipe.platform(arch) for arch in self.gpu_arches)

    @property
    def folder(self) -> Path:
        """Where record and archive go."""
        name = self.gpu_arches[0] if len(self.gpu_arches) == 1 else "all"
        return self.dist / f"{self.recipe.name}-image-{name}"

    def build_arguments(self) -> dict[str, str]:
        """The Dockerfile's arguments: its defaults, with what was asked for in their place."""
        known = render.arguments(self.recipe, self.base, self.reference)
        chosen = {"FLASHKDA": self.flashkda, "CLUSTER": self.cluster}
        return {**known, **chosen, **self.arguments}

    def labels(self, base: BaseImage) -> dict[str, str]:
        """What an image says about itself; nothing in it depends on when or where it was built."""
        created = datetime.datetime.fromtimestamp(self.base.epoch, datetime.UTC)
        revision = revision_of(self.recipe.root)
        return {
            "org.opencontainers.image.base.name": self.reference.partition("@")[0],
            "org.opencontainers.image.base.digest": base.digest,
            "org.opencontainers.image.created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "org.opencontainers.image.version": self.base.version,
            **({"org.opencontainers.image.revision": revision} if revision else {}),
            LABEL: self.recipe.name,
            "imagebuild.series": self.series.digest,
            "imagebuild.kernel": kernel_digest(self.recipe.root),
            "imagebuild.flashkda": self.flashkda,
            "imagebuild.cluster": self.cluster,
        }


@dataclass(frozen=True)
class BuiltImage:
    """What a build gave.

    Attributes:
        tag: its name.
        archive: digests and layers.
        base: what it was built from.
        previous: digest that the tag had before; "" when it was new.
        pushed: the registry's digest; "" when nothing was pushed.
        seconds: of the build proper.
        folder: where the record is.
        debs: the .deb files that came from the lock, by platform.
        without_debs: why none did; "" where some did, or a context was given.
    """

    tag: str
    archive: Archive
    base: BaseImage
    previous: str
    pushed: str
    seconds: float
    folder: Path
    debs: debs.Files = field(default_factory=dict)
    without_debs: str = ""


def build(
    request: ImageRequest,
    docker: Docker,
    step: Step,
    *,
    fetch: Fetch,
    is_loaded: bool,
    is_pushed: bool,
) -> BuiltImage:
    """Checks the engine, builds, loads and pushes.

    Args:
        request: what to build.
        docker: the engine.
        step: told what is under way, one line each.
        fetch: gives the file of a locked .deb.
        is_loaded: load the result; else its archive is kept.
        is_pushed: push it as well, which needs it loaded.

    Raises:
        EngineError: engine, builder, disk, base or registry are not as needed.
        BuildError: a step failed, with the code that it gave.
    """
    version = docker.engine_version()
    builder = docker.builder()
    step(f"engine {version}, builder {builder.name} ({builder.driver})")
    docker.require_platforms(builder, request.platforms)
    base = docker.base(request.reference, request.platforms, builder)
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    docker.require_space(base, request.folder.parent)
    with only_one(request.dist / f".{request.folder.name}.lock", f"a build of {request.folder}"):
        partial = request.folder.with_name(f"{request.folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            return _build(request, docker, base, partial, step, fetch=fetch,
                          is_loaded=is_loaded, is_pushed=is_pushed)  # fmt: skip
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _build(
    request: ImageRequest,
    docker: Docker,
    base: BaseImage,
    partial: Path,
    step: Step,
    *,
    fetch: Fetch,
    is_loaded: bool,
    is_pushed: bool,
) -> BuiltImage:
    output = partial / ARCHIVE
    files, without = debs_of(request, base.digest)
    debs.lay_out(files, partial / "debs", fetch)
    contexts = {**({"debs": str(partial / "debs")} if files else {}), **request.contexts}
    started = time.monotonic()
    docker.build(
        Call(
            context=request.recipe.root,
            output=output,
            name=request.tag,
            platforms=request.platforms,
            epoch=request.base.epoch,
            arguments=request.build_arguments(),
            labels=request.labels(base),
            contexts=contexts,
            secrets=request.secrets,
            use_cache=request.use_cache,
        ),
        step,
    )
    seconds = time.monotonic() - started
    archive = read_archive(output)
    previous = _load(request, docker, output, archive) if is_loaded else ""
    pushed = docker.push(request.tag) if is_pushed else ""
    if pushed and pushed != archive.digest:
        raise EngineError(f"docker push {request.tag}: expected the digest {archive.digest} as "
                          f"built, found {pushed}")  # fmt: skip
    built = BuiltImage(request.tag, archive, base, previous, pushed, seconds, request.folder,
                       files, without)  # fmt: skip
    record = json.dumps(record_of(request, built), indent=1, sort_keys=True) + "\n"
    request.folder.mkdir(exist_ok=True)
    if is_loaded:
        (request.folder / ARCHIVE).unlink(missing_ok=True)
    else:
        output.replace(request.folder / ARCHIVE)
    write_documents(request.folder, made_of(request, built))
    write_atomically(request.folder / RECORD, record.encode())
    _remember(request.dist, built)
    return built


def debs_of(request: ImageRequest, digest: str) -> tuple[debs.Files, str]:
    """The lock's .deb files for a base, by platform, or why there are none; a context beats them.

    Args:
        request: what to build.
        digest: of the base; "" where that is not known yet.
    """
    if "debs" in request.contexts:
        return {}, ""
    return debs.usable(request.base, digest, request.platforms)


def made_of(request: ImageRequest, built: BuiltImage) -> Made:
    """The image, as its documents describe it."""
    images = built.archive.platforms
    digests = {
        built.tag: built.archive.digest,
        **{name: one.digest for name, one in images.items()},
    }
    labels = request.labels(built.base)
    arguments = request.build_arguments()
    is_compiled = request.flashkda == "build" and "flashkda-src" not in request.contexts
    sources = {
        name.removesuffix("_SOURCE").lower(): value
        for name, value in arguments.items()
        if is_compiled and name.endswith("_SOURCE")
    }
    return Made(
        recipe=request.recipe,
        base=request.base,
        series=request.series,
        engine="docker",
        gpu_arches=request.gpu_arches,
        subjects={name: digest.removeprefix("sha256:") for name, digest in digests.items()},
        base_image=(built.base.reference, built.base.digest),
        inputs={
            "kernel": labels["imagebuild.kernel"],
            "flashkda": request.flashkda,
            "cluster": request.cluster,
            "contexts": " ".join(sorted(request.contexts)),
        },
        sources=sources,
        debs=tuple(dict.fromkeys(pin for found in built.debs.values() for pin in found)),
        revision=labels.get("org.opencontainers.image.revision", ""),
    )


def _load(request: ImageRequest, docker: Docker, output: Path, archive: Archive) -> str:
    """Loads the archive; an image that loses its name to it keeps one, so that it stays."""
    known = docker.inspect(request.tag)
    previous = str(known["Id"]) if known else ""
    if previous and previous != archive.digest:
        docker.tag(request.tag, request.tag + PREVIOUS)
    docker.load(output)
    return previous


def record_of(request: ImageRequest, built: BuiltImage) -> dict[str, Any]:
    """The record beside the image, for people and for a later comparison."""
    return {
        "schema": 1,
        "recipe": request.recipe.name,
        "gpu_arches": list(request.gpu_arches),
        "tag": built.tag,
        "digest": built.archive.digest,
        "pushed": built.pushed,
        "previous": built.previous,
        "base": {
            "reference": built.base.reference,
            "digest": built.base.digest,
            "version": request.base.version,
        },
        "series": request.series.digest,
        "flashkda": request.flashkda,
        "cluster": request.cluster,
        "contexts": sorted(request.contexts),
        "debs": {
            platform: {pin.filename: pin.sha256 for pin in pins}
            for platform, pins in built.debs.items()
        },
        "platforms": {
            platform: {
                "digest": image.digest,
                "diff_ids": list(image.diff_ids),
                "sizes": list(image.sizes),
                "labels": dict(image.labels),
            }
            for platform, image in built.archive.platforms.items()
        },
    }


def _remember(dist: Path, built: BuiltImage) -> None:
    """Adds a line to the history of `dist`: which image had the tag before."""
    with only_one(dist / f".{IMAGES}.lock", "a build's last step"):
        entries = [one for one in history(dist) if one.get("digest") != built.archive.digest]
        entry = {
            "tag": built.tag,
            "digest": built.archive.digest,
            "previous": built.previous,
            "base": built.base.reference,
        }
        text = json.dumps([*entries, entry], indent=1, sort_keys=True) + "\n"
        write_atomically(dist / IMAGES, text.encode())


def history(dist: Path) -> list[dict[str, str]]:
    """What was built into `dist`, oldest first; empty when nothing was, or it is unreadable."""
    try:
        content = json.loads((dist / IMAGES).read_bytes())
    except (OSError, ValueError):
        return []
    return [dict(one) for one in content] if isinstance(content, list) else []


def kernel_digest(root: Path) -> str:
    """SHA-256 of what the kernel stage compiles and of how it does."""
    digest = hashlib.sha256()
    for path in [*sorted((root / "kernel" / "csrc").rglob("*")), root / "imagebuild" / "nvcc.py"]:
        if path.is_file():
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def revision_of(root: Path) -> str:
    """The commit of a repository, with "-dirty" when it was edited since; "" when it is none."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *_CONTEXT)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}-dirty" if changed else commit


# What .dockerignore lets into the build, and the Dockerfile itself.
_CONTEXT = ("Dockerfile", ".dockerignore", "imagebuild", "image", "kernel", "patches",
            "verify-base.py")  # fmt: skip


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def parse_contexts(words: list[str]) -> dict[str, str]:
    """`NAME=SOURCE` by name. Raises UsageError, also for the base, which must not come so."""
    found = {}
    for word in words:
        name, sign, source = word.partition("=")
        if not sign or not name or not source:
            raise UsageError(f"--build-context: expected NAME=DIR, found {word!r}")
        if name == "base":
            raise UsageError("--build-context base: a base given so would be recompressed",
                             hint="--base NAME:TAG or --base NAME@sha256:...")  # fmt: skip
        found[name] = source
    return found


def missing_parts(request: ImageRequest, without_debs: str) -> Iterator[str]:
    """Sentences on what an image lacks; `without_debs` says why the lock's packages are not in."""
    if without_debs:
        yield f"no .deb packages are installed: {without_debs}; --build-context debs=DIR adds some"
    locked = request.base.image
    if locked is None or request.reference != locked.reference:
        yield f"the base is not the locked one: {request.reference}"
    elif locked.state == "cited":
        yield (f"the base's digest is cited ({locked.source}); "
               "the pull itself verifies it")  # fmt: skip
