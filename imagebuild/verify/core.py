"""The checks in their order; each collects its problems and none stops the others."""

from __future__ import annotations

import sys
from pathlib import Path

from imagebuild.config import ROOT, Recipe
from imagebuild.errors import UsageError
from imagebuild.lock import BaseLock, Lock
from imagebuild.patching.patch import GPU_ARCHES, GpuArch
from imagebuild.patching.tree import VLLM, DirTree, Identity, identify
from imagebuild.verify import deep, flashkda, patches, plugin, shadows, versions
from imagebuild.verify.patches import Subject
from imagebuild.verify.report import VerifyReport


def verify(
    root: Path,
    recipe: Recipe,
    lock: Lock,
    *,
    gpu_arch: str | None,
    in_base: bool,
    full: bool = True,
) -> VerifyReport:
    """Checks a patched site-packages and collects every problem. It writes nothing.

    Args:
        root: the tree.
        recipe: what it was built from.
        lock: the recipe's lock.
        gpu_arch: what it must be for; None takes the manifest's word.
        in_base: `root` belongs to the running interpreter, in the image: every watched project
            must be installed, and imports must resolve into `root`.
        full: hash every file that a RECORD lists, not Python and shared libraries alone.

    Raises:
        UsageError: `root` holds no vLLM and no manifest, or recipe or series are malformed.
    """
    if gpu_arch is not None and gpu_arch not in GPU_ARCHES:
        raise UsageError(f"--gpu-arch: expected one of {', '.join(GPU_ARCHES)}, "
                         f"found {gpu_arch!r}")  # fmt: skip
    asked: GpuArch | None = next((arch for arch in GPU_ARCHES if arch == gpu_arch), None)
    report = VerifyReport(root, recipe.name, gpu_arch=gpu_arch or "", title=recipe.title)
    about = report.group("manifest")
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none",
                         hint=f"name that of {recipe.site[recipe.project]}/")  # fmt: skip
    manifest = patches.read(about, root)
    try:
        identity = lock.identify(identify(DirTree(root), source=str(root), project=recipe.project))
    except UsageError as error:
        if manifest is None:
            raise
        identity = Identity("", "", str(root))
        about.error("no-vllm", str(error), file="vllm/_version.py", fix=error.hint or "")
    report.version, report.commit = identity.version, identity.commit
    subject = Subject(root, recipe.name, recipe.series(), lock, identity, manifest)
    is_sound = patches.check_manifest(about, subject, asked)
    built_for = next((a for a in GPU_ARCHES if manifest and a == manifest.gpu_arch), None)
    arch = asked or built_for
    report.gpu_arch = arch or ""

    _check_patches(report, subject, arch, is_sound=is_sound)
    base = _check_base(report, subject)
    _check_files(report, subject, recipe, base, in_base=in_base, full=full)
    about = report.group("FlashKDA")
    if recipe.project == VLLM:
        flashkda.check(about, root, arch, recipe.platforms)
    else:
        about.skip("it is a part of vLLM")
    about = report.group("plug-in")
    if recipe.project == VLLM:
        plugin.check(about, root, arch, in_base=in_base)
    else:
        about.skip("it is one of vLLM")
    record = base.deep if base else None
    series = manifest.series if manifest else None
    deep.check_record(report.group("deep probes"), record, series, root)
    return report


def _check_patches(
    report: VerifyReport, subject: Subject, gpu_arch: GpuArch | None, *, is_sound: bool
) -> None:
    about = report.group("series")
    evaluation = patches.recompute(about, subject) if is_sound else None
    if evaluation is None:
        about.skip("there is no sound manifest of this series")
    else:
        about.summary = f"{len(evaluation.reports)} patches"
        patches.check_drops(about, evaluation)
    effects = report.group("effects")
    # Without any manifest every effect is missing: one sentence has said so.
    is_unreadable = any(f.code == "manifest-unreadable" for f in report.findings)
    if subject.manifest is None and not is_unreadable:
        effects.skip("the tree was not patched")
    elif not subject.identity.version:
        effects.skip("the tree holds no vLLM")
    else:
        patches.check_effects(effects, subject, gpu_arch)
    fixes = report.group("upstream fixes")
    if subject.identity.version:
        patches.check_fixes(fixes, subject)
    else:
        fixes.skip("the tree holds no vLLM")
    patches.check_sources(report.group("sources"), subject)


def _check_base(report: VerifyReport, subject: Subject) -> BaseLock | None:
    """Finds the locked release of the tree."""
    identity = subject.identity
    base = subject.lock.bases.get(identity.version.partition("+")[0])
    about = report.group("base")
    if base is None:
        known = ", ".join(subject.lock.bases) or "none"
        about.error("base-not-locked", f"vLLM {identity.version or '(unknown)'} is not in "
                    f"{subject.lock.path.name} (locked: {known})",
                    fix="build.py lock update --base-version VERSION")  # fmt: skip
        return None
    about.summary = f"{identity.title} {base.version} at {identity.commit or 'no commit'}"
    if identity.commit and base.commit[:7] != identity.commit[:7]:
        about.error("base-commit", f"vLLM {base.version}: expected commit {base.commit} as locked, "
                    f"found {identity.commit}", file="vllm/_version.py",
                    fix="use the locked base, or run build.py lock update")  # fmt: skip
    return base


def _check_files(
    report: VerifyReport,
    subject: Subject,
    recipe: Recipe,
    base: BaseLock | None,
    *,
    in_base: bool,
    full: bool,
) -> None:
    root = subject.root
    # What only this run put on the path: the folder of verify-base.py.
    own = [ROOT, Path(sys.argv[0]).resolve().parent] if in_base else []
    folders = _folders(root, own) if in_base else (root,)
    about = report.group("versions")
    if base is None:
        about.skip("the base is not locked")
    else:
        versions.check(about, root, recipe, base, in_base=in_base, folders=folders)
    recorded = shadows.check_record(
        report.group("wheel files"), root, recipe.site, subject.manifest, full=full
    )
    found = report.group("foreign files")
    shadows.check_files(found, root, recipe.site, recorded, subject.manifest)
    found = report.group("installed")
    shadows.check_projects(found, folders, recipe.site)
    shadows.check_startup(found, folders)
    if in_base:
        shadows.check_path(found, root, recipe.site, own)


def _folders(root: Path, ignored: list[Path]) -> tuple[Path, ...]:
    """`root` and the other folders that this interpreter imports packages from, in its order."""
    places = [Path(place) for place in shadows.search_path(ignored)]
    seen: dict[Path, Path] = {}
    for place in [*places, root]:
        if place.is_dir():
            seen.setdefault(place.resolve(), root if place.resolve() == root.resolve() else place)
    return tuple(seen.values())
