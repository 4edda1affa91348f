"""Audits a series against releases, several at a time. It prints nothing and writes nothing."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path

from imagebuild.audit.evidence import Collector, pin_changes
from imagebuild.audit.memory import Judged, Memory
from imagebuild.audit.ray_names import ray_findings
from imagebuild.audit.results import Audit, Failure, Release
from imagebuild.audit.targets import Asked, Target, of_version, targets_of
from imagebuild.config import Recipe
from imagebuild.errors import BuildError
from imagebuild.lock import Lock
from imagebuild.patching import structure
from imagebuild.patching import text as source
from imagebuild.patching.evaluate import PatchReport, evaluate, wanted_files
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.series import Series
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.patching.versions import release
from imagebuild.sources.http import account
from imagebuild.upstream import Base, Upstream

# Releases that are read at a time: more would wait for one interpreter, and hold more in memory.
WORKERS = 4
# Held while one release is judged. Reading overlaps; judging is the interpreter's work alone, and
# the syntax trees of a release take a hundred times the room of its text.
_JUDGING = threading.Lock()
# Called with each result as it comes, how many there are, and how many there will be.
Told = Callable[[Release | Failure, int, int], None]


@dataclass(frozen=True)
class Job:
    """What every release is audited with."""

    recipe: Recipe
    lock: Lock
    series: Series
    gpu_arch: GpuArch | None
    upstream: Upstream

    @functools.cached_property
    def memory(self) -> Memory:
        """What earlier calls found."""
        return Memory(self.upstream.cache, self.recipe, self.series, self.gpu_arch)

    @property
    def project(self) -> str:
        """The project that is patched: the first of the site's."""
        return next(iter(self.recipe.site))

    @property
    def platform(self) -> str:
        """Whose wheel is read; patched files are the same on all of them, which the lock checks."""
        if self.gpu_arch:
            return self.recipe.platform(self.gpu_arch)
        return next(iter(self.recipe.platforms.values()))


def audit(
    job: Job, asked: Asked, told: Told = lambda *_: None, *, keep_going: bool = False
) -> Audit:
    """Audits everything that is named.

    Of several releases one that cannot be read is a `Failure`; a lone one raises, unless the
    caller wants to `keep_going`.

    Raises:
        BuildError: as `targets_of`, or what keeps a lone release from being read.
    """
    start = time.monotonic()
    with account() as used:
        results = audit_all(job, targets_of(asked, job.upstream), told, keep_going=keep_going)
    found = audit_of(job, (one for one in results if isinstance(one, Release)))
    return replace(
        found,
        failures=tuple(one for one in results if isinstance(one, Failure)),
        requests=used.requests,
        bytes_fetched=used.bytes_fetched,
        seconds=time.monotonic() - start,
    )


def audit_all(
    job: Job, targets: Sequence[Target], told: Told, *, keep_going: bool = False
) -> list[Release | Failure]:
    """Audits each target, in their order, several at a time; arguments and errors as `audit`."""
    if len(targets) == 1 and not keep_going:
        return [_told(told, audit_one(job, targets[0]), 1, 1)]
    if any(target.origin in ("index", "nightly") for target in targets):
        _ = job.upstream.index  # pip is asked once, before threads need it
    found: dict[int, Release | Failure] = {}
    for number, one in _side_by_side(lambda target: _attempt(job, target), targets):
        found[number] = one
        told(one, len(found), len(targets))
    return [found[number] for number in range(len(targets))]


def _side_by_side(
    work: Callable[[Target], Release | Failure], targets: Sequence[Target]
) -> Iterator[tuple[int, Release | Failure]]:
    """Results as they come, each with the number of its target.

    The threads are daemons: an interrupted call does not wait for a server that says nothing.
    """
    todo = deque(enumerate(targets))
    done: queue.SimpleQueue[tuple[int, Release | Failure | BaseException]] = queue.SimpleQueue()

    def worker() -> None:
        while todo:
            try:
                number, target = todo.popleft()
            except IndexError:  # another one was faster
                return
            try:
                done.put((number, work(target)))
            except BaseException as error:
                done.put((number, error))

    for _ in range(min(WORKERS, len(targets))):
        # Each with the context of the call, to whose account its bytes go.
        threading.Thread(target=copy_context().run, args=(worker,), daemon=True).start()
    try:
        for _ in targets:
            number, result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield number, result
    finally:
        todo.clear()


def audit_one(job: Job, target: Target) -> Release:
    """Audits one target. Raises BuildError: it cannot be read."""
    start = time.monotonic()
    with account() as used:
        found = _recall(job, target) or _judge(job, target)
    changed = _changed_pins(job, found.pins)
    return Release(
        name=target.name,
        identity=found.identity,
        pins=found.pins,
        changed_pins=changed,
        evaluation=found.evaluation,
        diffs={
            patch: {scope.symbol: scope.unified for scope in one.scopes if scope.unified}
            for patch, one in found.evidence.items()
            if any(scope.unified for scope in one.scopes)
        },
        requests=used.requests,
        bytes_fetched=used.bytes_fetched,
        seconds=time.monotonic() - start,
        origin=target.origin,
        pin_changes=pin_changes(job.recipe, job.series, changed),
        evidence=found.evidence,
        findings=found.findings,
    )


def _recall(job: Job, target: Target) -> Judged | None:
    """What an earlier call found on the very wheels that the index has now."""
    if target.origin != "index":
        return None
    upstream, platform = job.upstream, job.platform
    sha256 = upstream.sha256(job.project, target.name, platform, target.name)
    found = job.memory.recall(sha256) if sha256 else None
    for project, (version, known) in found.others.items() if found else ():
        if upstream.sha256(project, version, platform, target.name) != known:
            return None
    return found


def _judge(job: Job, target: Target) -> Judged:
    """Reads a target and judges it; keeps what it found where it can be told by hash."""
    upstream, before = job.upstream, job.upstream.notices
    base = target.open(upstream, job.platform)
    identity = job.lock.identify(base.tree.identity)
    tree = OverlayTree(base.tree, {}, identity)
    tree.prefetch(wanted_files(job.series, tree, job.gpu_arch))
    with _JUDGING:
        locked = job.lock.fingerprints_for(identity)
        evaluation = evaluate(job.series, tree, job.gpu_arch, locked)
        compare = Collector(tree, lambda report: _reference(job, report, tree), upstream.notice)
        evidence = compare.collect(evaluation)
        findings = ray_findings(job.recipe, tree)
        structure.forget()
        source.forget()
    judged = Judged(identity, base.pins, replace(evaluation, files={}), evidence, findings, {})
    # What could not be had today may be there tomorrow.
    if target.origin == "index" and upstream.notices == before:
        _keep(job, target, base, judged)
    return judged


def _keep(job: Job, target: Target, base: Base, judged: Judged) -> None:
    hashes = {
        project: upstream_hash
        for project, version in {job.project: target.name, **base.others}.items()
        if version
        and (upstream_hash := job.upstream.sha256(project, version, job.platform, target.name))
    }
    own = hashes.pop(job.project, None)
    if own is not None and hashes.keys() == base.others.keys():
        others = {project: (base.others[project], known) for project, known in hashes.items()}
        job.memory.keep(own, replace(judged, others=others))


def audit_version(job: Job, version: str) -> Release:
    """Audits one release of the index. Raises as `Upstream.open`."""
    return audit_one(job, of_version(version))


def audit_wheel(job: Job, path: Path) -> Release:
    """Audits a vLLM wheel on disk."""
    return _lone(job, Asked(wheels=(str(path),)))


def audit_tree(job: Job, root: Path) -> Release:
    """Audits a site-packages folder; one that we patched is seen as it was before."""
    return _lone(job, Asked(trees=(str(root),)))


def _lone(job: Job, asked: Asked) -> Release:
    (target,) = targets_of(asked, job.upstream)
    return audit_one(job, target)


def _attempt(job: Job, target: Target) -> Release | Failure:
    try:
        return audit_one(job, target)
    except BuildError as error:
        return Failure(target.name, str(error), error.hint or "", error.exit_code)


def _told(told: Told, one: Release | Failure, count: int, total: int) -> Release | Failure:
    told(one, count, total)
    return one


def _changed_pins(job: Job, pins: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    locked = job.lock.bases.get(job.recipe.base_version)
    if locked is None or not pins:
        return {}
    known = {**locked.pins}
    return {
        project: (known.get(project, ""), pins.get(project, ""))
        for project in job.recipe.pins
        if known.get(project, "") != pins.get(project, "")
    }


def _reference(job: Job, report: PatchReport, tree: Tree) -> tuple[str, Tree] | None:
    """The locked base that a patch is compared with; None when there is none at hand.

    A variant for releases of which none is locked is compared with the last base before them.
    """
    identity, variant = tree.identity, report.selection.variant
    version = job.lock.nearest(identity, variant.versions) if variant else None
    version = version or job.lock.nearest(identity, ">=0")
    if version is None:
        return None
    try:
        return version, job.upstream.open(version, job.platform).tree
    except BuildError as error:  # the verdict stands without the diff; offline it cannot be had
        job.upstream.notice(f"{report.patch.name}: no diff against vLLM {version}: {error}")
        return None


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
