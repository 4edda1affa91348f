"""Builds a patched site-packages from wheels, without a daemon, root or the target's processor.

Nothing of the target is executed, so an sm_121 (aarch64) tree is built on any machine. The result
is a folder that is replaced in one step.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from imagebuild import plugin, verify
from imagebuild.config import Recipe
from imagebuild.engines.made import DOCUMENTS, Made, write_documents
from imagebuild.errors import BrokenError, raise_collected
from imagebuild.files import only_one, replaced_folder, write_atomically
from imagebuild.lock import BaseLock, Lock
from imagebuild.patching.apply import Result, apply, changed_files
from imagebuild.patching.manifest import FOLDER, MANIFEST, Manifest, read_manifest
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.series import Series
from imagebuild.patching.tree import VLLM
from imagebuild.sources.disk import DiskError
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Upstream

SITE = "site"
LAYER = "layer.tar"
BUILD = "build.json"
_CODE = Path(__file__).resolve().parent.parent
_DECIDING = ("patching", "sources", "verify", "engines")
# Byte code of the base image that a layer must hide: it was compiled from the unpatched source.
_OPTIMISATIONS = ("", ".opt-1", ".opt-2")

Step = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is to be built, and where."""

    recipe: Recipe
    lock: Lock
    series: Series
    base: BaseLock
    gpu_arch: GpuArch
    dist: Path

    @property
    def platform(self) -> str:
        """Docker's word for the target."""
        return self.recipe.platform(self.gpu_arch)

    @property
    def folder(self) -> Path:
        """Where the result goes."""
        return self.dist / f"{self.recipe.name}-{self.gpu_arch}"

    @property
    def inputs(self) -> dict[str, str]:
        """Everything that decides the result; equal inputs need no second build."""
        wheels = {p: self.base.wheel(p, self.platform).sha256 for p in self.recipe.site}
        base = self.base
        # What verify compares, and what edits are judged by.
        # And what the documents beside the result say.
        image = [base.image.reference, base.image.digest] if base.image else []
        said = [self.recipe.description, {v: {**p} for v, p in self.recipe.image_pins.items()}]
        fixed = json.dumps(
            [base.fingerprints, base.commit, {**base.pins}, self.recipe.pins, image, said],
            sort_keys=True,
        )
        return {
            **wheels,
            "recipe": self.recipe.name,
            "base": self.base.version,
            "gpu_arch": self.gpu_arch,
            "site_packages": self.recipe.site_packages,
            "python": self.recipe.python,
            "epoch": str(self.base.epoch),
            "series": self.series.digest,
            # Probes decide as well, and the digest of the series leaves them out.
            "patches": _digest_of(_patch_files(self.recipe.patches_dir), self.recipe.root),
            "lock": hashlib.sha256(fixed.encode()).hexdigest(),
            "tool": _tool_digest(),
            **({"plugin": self.plugin.digest} if self.plugin else {}),
        }

    @property
    def plugin(self) -> plugin.Plugin | None:
        """The plug-in that the recipe's repository has for what it patches, without the library."""
        folder = self.recipe.root / plugin.FOLDER
        if self.recipe.project != VLLM or not (folder / "pyproject.toml").is_file():
            return None
        return plugin.read(folder)


@dataclass(frozen=True)
class Built:
    """What a build gave.

    Attributes:
        folder: the result.
        layer_sha256: digest of `layer.tar`.
        did_work: False when the result was up to date.
        result: the verdicts; None when nothing was done.
        warnings: what verify wants a person to know, as sentences.
    """

    folder: Path
    layer_sha256: str
    did_work: bool
    result: Result | None
    warnings: tuple[str, ...] = ()


def build(
    request: Request, upstream: Callable[[], AbstractContextManager[Upstream]], step: Step
) -> Built:
    """Builds the tree, or finds that it is up to date.

    Args:
        request: what to build.
        upstream: opened only when something has to be read.
        step: told what is under way, one line each.

    Raises:
        ReviewError, BrokenError: the series does not fit, or verify found problems.
        IntegrityError: a wheel is not the locked one.
        EngineError: network or disk.
    """
    known = up_to_date(request)
    if known:
        return known
    with only_one(request.dist / f".{request.folder.name}.lock", f"a build of {request.folder}"):
        # Another process may have built it meanwhile.
        return up_to_date(request) or _build(request, upstream, step)


def up_to_date(request: Request) -> Built | None:
    """The result on disk when it was built from the same inputs and its layer is whole."""
    try:
        content = json.loads((request.folder / BUILD).read_bytes())
        digest = _sha256(request.folder / LAYER)
        manifest = (request.folder / "manifest.json").read_bytes()
        in_site = (request.folder / SITE / MANIFEST).read_bytes()
        told = (request.folder / f"{LAYER}.sha256").read_text("utf-8")
        documents = {name: _sha256(request.folder / name) for name in DOCUMENTS}
    except (OSError, ValueError):
        return None
    same = content == _build_record(request, digest, documents) and manifest == in_site
    same = same and told == _checksum_line(digest)
    same = same and (request.plugin is None or request.plugin.is_in(request.folder / SITE))
    if not same or changed_files(request.folder / SITE, Manifest.from_bytes(manifest, MANIFEST)):
        return None
    return Built(request.folder, digest, False, None)


def _build(
    request: Request, upstream: Callable[[], AbstractContextManager[Upstream]], step: Step
) -> Built:
    wheels: list[Path] = []
    with upstream() as session:
        for project in request.recipe.site:
            pin = request.base.wheel(project, request.platform)
            size = f"{pin.size / 1e6:.0f} MB"
            known = session.is_cached(pin)
            step(f"check {pin.filename}, cached" if known else f"fetch {pin.filename} ({size})")
            version = request.base.versions[project]
            wheels.append(session.fetch(project, version, request.platform, pin))
        try:
            with replaced_folder(request.folder) as partial:
                return _write(request, wheels, partial, step)
        except DiskError as error:
            hint = "free some space, or build elsewhere: --dist DIR"
            raise DiskError(str(error), hint=hint) from error


def _write(request: Request, wheels: list[Path], partial: Path, step: Step) -> Built:
    site = partial / SITE
    site.mkdir()
    for project, wheel in zip(request.recipe.site, wheels, strict=True):
        pin = request.base.wheel(project, request.platform)
        step(f"unpack {pin.filename}")
        with WheelTree(wheel, platform=request.platform, source=pin.filename) as tree:
            tree.extract(site, request.base.epoch)
    step("apply the series")
    result = apply(site, request.series, request.gpu_arch, request.lock.fingerprints_for,
                   recipe=request.recipe.name, bytecode="remove",
                   known_as=request.lock.identify, project=request.recipe.project)  # fmt: skip
    if request.plugin:
        plugin.write(request.plugin, site)
    step("verify")
    warnings = _verify(site, request)
    step(f"write {LAYER}")
    digest = _finish(partial, request)
    return Built(request.folder, digest, True, result, warnings)


def _verify(site: Path, request: Request) -> tuple[str, ...]:
    report = verify.verify(site, request.recipe, request.lock, gpu_arch=request.gpu_arch,
                           in_base=False)  # fmt: skip
    errors = [f"{f.code}: {f.message}" for f in report.findings if f.level == "error"]
    raise_collected(BrokenError, f"{request.folder}: verify failed, nothing was written", errors)
    return tuple(f"{f.message}; {f.fix}" for f in report.findings if f.level == "warning")


def _finish(partial: Path, request: Request) -> str:
    manifest = read_manifest(partial / SITE)
    if manifest is None:
        raise BrokenError(f"{partial}: expected a manifest after the apply, found none")
    write_atomically(partial / "manifest.json", manifest.to_bytes())
    added = request.plugin.files if request.plugin else ()
    write_layer(partial / LAYER, partial / SITE, manifest, request.recipe, request.base.epoch,
                added=added)  # fmt: skip
    digest = _sha256(partial / LAYER)
    write_atomically(partial / f"{LAYER}.sha256", _checksum_line(digest).encode())
    write_documents(partial, made_of(request, digest))
    documents = {name: _sha256(partial / name) for name in DOCUMENTS}
    record = json.dumps(_build_record(request, digest, documents), indent=1, sort_keys=True) + "\n"
    write_atomically(partial / BUILD, record.encode())
    return digest


def write_layer(
    layer: Path,
    site: Path,
    manifest: Manifest,
    recipe: Recipe,
    epoch: int,
    *,
    added: Iterable[str] = (),
) -> None:
    """Writes what differs from the base as an OCI layer: same tree, same bytes.

    Uncompressed, so that its digest is its diff_id and depends on no compressor. `added` are files
    that no manifest lists.
    """
    paths = {path for path, entry in manifest.files.items() if entry.after is not None}
    paths |= {p.relative_to(site).as_posix() for p in (site / FOLDER).rglob("*") if p.is_file()}
    paths |= set(added)
    entries: dict[str, Path | None] = {f"{recipe.site_packages}/{p}": site / p for p in paths}
    tag = f"cpython-{recipe.python.replace('.', '')}"
    for path in paths:
        if path.endswith(".py"):
            folder, _, name = path.rpartition("/")
            cache = "/".join(part for part in (recipe.site_packages, folder, "__pycache__") if part)
            for level in _OPTIMISATIONS:
                entries[f"{cache}/.wh.{name.removesuffix('.py')}.{tag}{level}.pyc"] = None
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, source in sorted(entries.items()):
            info = tarfile.TarInfo(name)
            info.mtime = epoch
            if source is None:
                tar.addfile(info)
                continue
            known = source.stat()
            info.size, info.mode = known.st_size, known.st_mode & 0o777
            with source.open("rb") as file:
                tar.addfile(info, file)


def made_of(request: Request, layer_sha256: str) -> Made:
    """The result, as its documents describe it.

    The project's commit is left out: `inputs` has digests of all that decides, and a commit that
    changes none of it must not make another result.
    """
    image = request.base.image
    return Made(
        recipe=request.recipe,
        base=request.base,
        series=request.series,
        engine="tree",
        gpu_arches=(request.gpu_arch,),
        subjects={LAYER: layer_sha256},
        base_image=(image.reference, image.digest) if image and image.digest else ("", ""),
        inputs=request.inputs,
    )


def _build_record(
    request: Request, layer_sha256: str, documents: Mapping[str, str]
) -> dict[str, object]:
    return {
        "schema": 1,
        "inputs": request.inputs,
        "layer_sha256": layer_sha256,
        "documents": {**documents},
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_line(digest: str) -> str:
    """As sha256sum writes and checks it."""
    return f"{digest}  {LAYER}\n"


def _tool_digest() -> str:
    """Digest of the code that decides what is written: another engine may give another tree."""
    folders = sorted(path for part in _DECIDING for path in (_CODE / part).rglob("*.py"))
    return _digest_of([*folders, _CODE / "catalogue.py", _CODE / "plugin.py"], _CODE)


def _patch_files(folder: Path) -> list[Path]:
    """Modules, diffs, and forks with their records."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _digest_of(paths: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
