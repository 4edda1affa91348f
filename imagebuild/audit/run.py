"""Audits a series against releases, wheels and folders. It prints nothing and writes nothing."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from imagebuild.audit.results import Audit, Release
from imagebuild.config import Recipe
from imagebuild.errors import BuildError, UsageError
from imagebuild.lock import Lock
from imagebuild.patching import text as source
from imagebuild.patching.apply import pristine
from imagebuild.patching.evaluate import Evaluation, PatchReport, evaluate
from imagebuild.patching.patch import GpuArch, Symbol
from imagebuild.patching.series import Series
from imagebuild.patching.tree import Identity, OverlayTree, Tree
from imagebuild.patching.versions import release
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Base, Upstream


@dataclass(frozen=True)
class Job:
    """What every release is audited with."""

    recipe: Recipe
    lock: Lock
    series: Series
    gpu_arch: GpuArch | None
    upstream: Upstream

    @property
    def platform(self) -> str:
        """Whose wheel is read; patched files are the same on all of them, which the lock checks."""
        if self.gpu_arch:
            return self.recipe.platform(self.gpu_arch)
        return next(iter(self.recipe.platforms.values()))


def versions_of(spec: str, upstream: Upstream) -> list[str]:
    """The releases that an exact version or a range such as ">=0.31,<0.33" names, oldest first.

    A range leaves out pre-releases, and what upstream withdrew unless it is locked.

    Raises:
        UsageError: neither, or the index has no release in the range.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        version = str(Version(spec))
        locked = upstream.lock.find(version)
        return [locked.version if locked else version]
    except InvalidVersion:
        pass
    try:
        wanted = SpecifierSet(spec)
    except InvalidSpecifier:
        wanted = SpecifierSet()
    if not wanted:
        raise UsageError("--against: expected a version such as 0.32.0 or a range such as "
                         f"'>=0.31,<0.33', found {spec!r}")  # fmt: skip
    offered = {file.version for file in upstream.index.files("vllm")
               if file.yanked is False and file.filename.endswith(".whl")}  # fmt: skip
    offered |= set(upstream.lock.bases)
    found = sorted(wanted.filter(offered), key=Version)
    if not found:
        raise UsageError(f"--against: the index has no vLLM release in {spec!r}")
    return found


def audit_version(job: Job, version: str) -> Release:
    """Audits one release of the index. Raises as `Upstream.open`."""
    return _timed(job, version, lambda: job.upstream.open(version, job.platform))


def audit_wheel(job: Job, path: Path) -> Release:
    """Audits a vLLM wheel on disk."""
    if not path.is_file():
        raise UsageError(f"{path}: expected a wheel, found no such file")
    wheel = WheelTree(path, platform=job.platform)
    version = wheel.identity.version
    return _timed(job, str(path), lambda: job.upstream.beside(wheel, version, job.platform))


def audit_tree(job: Job, root: Path) -> Release:
    """Audits a site-packages folder; one that we patched is seen as it was before."""
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none")
    tree, _manifest = pristine(root)
    return _timed(job, str(root), lambda: Base(tree.identity.version, tree, {}))


def _timed(job: Job, name: str, opener: Callable[[], Base]) -> Release:
    before = job.upstream.traffic
    start = time.monotonic()
    base = opener()
    identity = job.lock.identify(base.tree.identity)
    tree = OverlayTree(base.tree, {}, identity)
    evaluation = evaluate(job.series, tree, job.gpu_arch, job.lock.fingerprints_for(identity))
    diffs = _diffs(job, evaluation, tree)
    after = job.upstream.traffic
    return Release(
        name=name,
        identity=identity,
        pins=base.pins,
        changed_pins=_changed_pins(job, base.pins),
        evaluation=evaluation,
        diffs=diffs,
        requests=after[0] - before[0],
        bytes_fetched=after[1] - before[1],
        seconds=time.monotonic() - start,
    )


def _changed_pins(job: Job, pins: dict[str, str]) -> dict[str, tuple[str, str]]:
    locked = job.lock.bases.get(job.recipe.base_version)
    if locked is None or not pins:
        return {}
    known = {**locked.pins}
    return {
        project: (known.get(project, ""), pins.get(project, ""))
        for project in job.recipe.pins
        if known.get(project, "") != pins.get(project, "")
    }


def _diffs(job: Job, evaluation: Evaluation, tree: Tree) -> dict[str, dict[str, str]]:
    """What changed in each scope whose fingerprint is not the locked one, or is not locked."""
    identity = tree.identity
    diffs: dict[str, dict[str, str]] = {}
    for report in evaluation.reports:
        changed = [c.symbol for c in report.contexts if c.found != c.locked]
        reference = _reference(job, report, identity) if changed else None
        if reference is None:
            continue
        name, old = reference
        try:
            old.prefetch({symbol.path for symbol in changed})
            found = {str(s): _diff(s, (name, old), (identity.version, tree)) for s in changed}
        except BuildError as error:
            job.upstream.notice(f"{report.patch.name}: no diff against vLLM {name}: {error}")
            continue
        if any(found.values()):
            diffs[report.patch.name] = {symbol: text for symbol, text in found.items() if text}
    return diffs


def _reference(job: Job, report: PatchReport, identity: Identity) -> tuple[str, Tree] | None:
    """The locked base that a patch's context is compared with; None when there is none at hand.

    A variant for releases of which none is locked is compared with the last base before them.
    """
    variant = report.selection.variant
    version = job.lock.nearest(identity, variant.versions) if variant else None
    version = version or job.lock.nearest(identity, ">=0")
    if version is None:
        return None
    try:
        return version, job.upstream.open(version, job.platform).tree
    except BuildError as error:  # the verdict stands without the diff; offline it cannot be had
        job.upstream.notice(f"{report.patch.name}: no diff against vLLM {version}: {error}")
        return None


def _diff(symbol: Symbol, old: tuple[str, Tree], new: tuple[str, Tree]) -> str:
    lines = difflib.unified_diff(
        _scope_lines(old[1], symbol),
        _scope_lines(new[1], symbol),
        f"{old[0]}/{symbol}",
        f"{new[0]}/{symbol}",
        lineterm="",
    )
    return "\n".join(lines)


def _scope_lines(tree: Tree, symbol: Symbol) -> list[str]:
    try:
        text = source.decode(tree.read(symbol.path)).text
        spans = source.scope_spans(text, symbol.path, symbol.scope)
        standing = source.standing(text, symbol.path, symbol.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return []
    lines = "".join(text[span.start : span.stop] for span in spans).split("\n")
    return [*lines, *(" ".join(clause) for clause in standing)]


def audit_of(job: Job, releases: Iterable[Release]) -> Audit:
    """The releases as one result, by version."""
    return Audit(
        recipe=job.recipe.name,
        base_version=job.recipe.base_version,
        gpu_arch=job.gpu_arch or "",
        releases=tuple(order(list(releases))),
    )


def order(releases: list[Release]) -> list[Release]:
    """By version; folders and files keep their places among equals."""
    return sorted(releases, key=lambda r: release(r.identity.version))


def only(one: Release, names: list[str]) -> Release:
    """The same audit, of some patches."""
    reports = tuple(r for r in one.evaluation.reports if r.patch.name in names)
    return replace(one, evaluation=replace(one.evaluation, reports=reports))
