"""Checks what we did to a tree: manifest, patched files, effects, and the upstream fixes we need.

Everything is computed again from the kept originals, by the code that judged and applied the
series; the manifest's word is never taken for it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imagebuild.errors import BrokenError, IntegrityError
from imagebuild.lock import Lock
from imagebuild.patching import compiled, record
from imagebuild.patching.apply import changed_files
from imagebuild.patching.evaluate import Evaluation, ask, evaluate
from imagebuild.patching.manifest import (
    JOURNAL,
    MANIFEST,
    Manifest,
    read_manifest,
    read_original,
    sha256,
)
from imagebuild.patching.patch import GPU_ARCHES, GpuArch, Outcome
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series
from imagebuild.patching.tree import DirTree, Identity, OverlayTree, Tree
from imagebuild.patching.versions import is_release_known, release
from imagebuild.verify.report import Group

_PRISTINE = "start from a pristine tree"
_APPLY = "build.py patches apply --tree {root}"


@dataclass(frozen=True)
class Subject:
    """What is looked at.

    Attributes:
        root: site-packages.
        recipe: the recipe's name.
        series: its series.
        lock: its lock.
        identity: what the tree is, by its commit where the lock knows it.
        manifest: as far as it can be read.
    """

    root: Path
    recipe: str
    series: Series
    lock: Lock
    identity: Identity
    manifest: Manifest | None

    @property
    def tree(self) -> Tree:
        """The tree as it is now."""
        return OverlayTree(DirTree(self.root), {}, self.identity)


def read(found: Group, root: Path) -> Manifest | None:
    """Reads the manifest; what keeps it from being read becomes a finding."""
    if (root / JOURNAL).exists():
        found.error("interrupted", "a change of this tree was interrupted", file=JOURNAL,
                    fix="build.py patches apply or revert completes it")  # fmt: skip
    try:
        manifest = read_manifest(root)
    except IntegrityError as error:
        found.error("manifest-unreadable", str(error), file=MANIFEST, fix=error.hint or "")
        return None
    except OSError as error:
        found.error("manifest-unreadable", f"cannot be read: {error.strerror}", file=MANIFEST,
                    fix=_PRISTINE)  # fmt: skip
        return None
    if manifest is None:
        found.error("not-patched", f"expected {MANIFEST}, found none: this tree was not patched",
                    fix=_APPLY.format(root=root))  # fmt: skip
    return manifest


def check_manifest(found: Group, subject: Subject, gpu_arch: GpuArch | None) -> bool:
    """Compares the manifest with itself, the tree and the recipe.

    Returns:
        Whether the files can be computed again from it: it is sound, and of this series.
    """
    manifest = subject.manifest
    if manifest is None:
        found.summary = "none that can be used"
        return False
    faults = list(_inconsistencies(manifest))
    for fault in faults:
        found.error("manifest-inconsistent", fault, file=MANIFEST, fix=_PRISTINE)
    identity = subject.identity
    if (manifest.version, manifest.commit) != (identity.version, identity.commit):
        found.error(
            "other-base",
            f"expected the base that the manifest names, vLLM {manifest.version} "
            f"({manifest.commit or 'no commit'}), found {identity.version} "
            f"({identity.commit or 'no commit'})",
            file=MANIFEST,
            fix="vLLM was installed over a patched tree: " + _PRISTINE,
        )
    if manifest.recipe != subject.recipe:
        found.error("other-recipe", f"expected recipe {subject.recipe!r}, "
                    f"found {manifest.recipe!r}", file=MANIFEST,
                    fix=f"verify it with --recipe {manifest.recipe}")  # fmt: skip
    if gpu_arch is not None and manifest.gpu_arch != gpu_arch:
        found.error("other-arch", f"expected a tree for {gpu_arch}, found {manifest.gpu_arch}",
                    file=MANIFEST, fix=f"build it with --arch {gpu_arch}")  # fmt: skip
    is_same = manifest.series == subject.series.digest
    if not is_same:
        found.error(
            "other-series",
            f"built from another series: expected {subject.series.digest[:12]}, "
            f"found {manifest.series[:12]}",
            file=MANIFEST,
            fix="check out the commit that built it, or apply this series: "
            + _APPLY.format(root=subject.root),
        )
    problems = [(line.partition(": ")[0], line) for line in changed_files(subject.root, manifest)]
    found.files("error", "file-changed", problems, fix=_PRISTINE)
    found.summary = f"{len(manifest.files)} files"
    return is_same and not faults


def _inconsistencies(manifest: Manifest) -> list[str]:
    """What a manifest of ours cannot say."""
    faults = []
    names = [patch.name for patch in manifest.patches]
    faults += [f"names the patch {name} twice" for name in sorted(set(names))
               if names.count(name) > 1]  # fmt: skip
    for path, entry in manifest.files.items():
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path:
            faults.append(f"names {path!r}, expected a path below site-packages")
        if entry.before == entry.after:
            faults.append(f"lists {path} as changed, with the same content before and after")
        for name in entry.patches:
            owner = next((patch for patch in manifest.patches if patch.name == name), None)
            if owner is None or path not in owner.files:
                faults.append(f"says that {name} changed {path}, but its patch does not say so")
    for patch in manifest.patches:
        for path in patch.files:
            if patch.name not in manifest.files[path].patches:
                faults.append(f"says that {patch.name} changed {path}, but that file does not")
    if manifest.gpu_arch not in GPU_ARCHES:
        faults.append(f"expected gpu_arch of {', '.join(GPU_ARCHES)}, found {manifest.gpu_arch!r}")
    return faults


def recompute(found: Group, subject: Subject) -> Evaluation | None:
    """Judges the series on the kept originals and compares its result with the tree.

    Call it with a manifest that `check_manifest` found sound.
    """
    manifest = subject.manifest
    if manifest is None or manifest.gpu_arch not in GPU_ARCHES:
        return None
    originals: dict[str, bytes | None] = {}
    for path, entry in sorted(manifest.files.items()):
        try:
            known = entry.before is not None
            originals[path] = read_original(subject.root, entry.before or "") if known else None
        except IntegrityError as error:
            found.error("original-lost", str(error), file=path, fix=error.hint or "")
    if any(finding.code == "original-lost" for finding in found.findings):
        return None
    pristine = OverlayTree(subject.tree, originals, subject.identity)
    arch: GpuArch = "sm_120" if manifest.gpu_arch == "sm_120" else "sm_121"
    fingerprints = subject.lock.fingerprints_for(subject.identity)
    evaluation = evaluate(subject.series, pristine, arch, fingerprints)
    _check_verdicts(found, evaluation, manifest)
    for path, data in sorted(evaluation.files.items()):
        entry_now = manifest.files.get(path)
        if entry_now is None:
            found.error("file-not-in-manifest", "the series changes it, but the manifest does not "
                        "list it", file=path, fix=_PRISTINE)  # fmt: skip
        elif entry_now.after != sha256(data):
            found.error("not-from-series", "the manifest says other content than what the series "
                        "makes of the base", file=path, fix=_PRISTINE)  # fmt: skip
    _check_rest(found, subject, manifest, pristine, evaluation)
    return evaluation


def _check_rest(
    found: Group, subject: Subject, manifest: Manifest, pristine: Tree, evaluation: Evaluation
) -> None:
    """Refuses what a manifest lists beside patched files, their byte code and RECORD.

    What it lists counts as ours everywhere else, so it must not make room for anything.
    """
    try:
        records = record.all_updated(subject.root, pristine, evaluation.files)
    except BrokenError as error:
        found.error("record-unreadable", str(error), fix=error.hint or "")
        return
    for path, entry in sorted(manifest.files.items()):
        if path in evaluation.files or compiled.source_of(path) in evaluation.files:
            continue
        if path not in records:
            found.error("file-not-of-series", "the manifest lists it, but no patch of the series "
                        "changes it", file=path, fix=_PRISTINE)  # fmt: skip
        elif entry.after != sha256(records[path]):
            found.error("not-from-series", "the manifest says another RECORD than what the series "
                        "makes of the base's", file=path, fix=_PRISTINE)  # fmt: skip


def _check_verdicts(found: Group, evaluation: Evaluation, manifest: Manifest) -> None:
    entries = {patch.name: patch for patch in manifest.patches}
    for report in evaluation.reports:
        name = report.patch.name
        if report.exit_code:
            for finding in report.findings:
                if finding.level != "info":
                    found.error(finding.code, f"{name}: {report.verdict.value}: {finding.message}",
                                file=finding.file, line=finding.line, fix=finding.fix)  # fmt: skip
        entry = entries.pop(name, None)
        variant = report.selection.variant
        expected = (report.verdict.value, variant.versions if variant else "")
        if entry is None:
            found.error("patch-missing", f"{name}: expected it in the manifest as the series asks "
                        "for it, found none", file=MANIFEST, fix=_PRISTINE)  # fmt: skip
        elif (entry.verdict, entry.variant) != expected:
            found.error(
                "patch-differs",
                f"{name}: expected {' '.join(expected)}, found {entry.verdict} {entry.variant}",
                file=MANIFEST,
                fix=_PRISTINE,
            )
    for name in entries:
        found.error("patch-unknown", f"{name}: in the manifest, but not in the series",
                    file=MANIFEST, fix=_PRISTINE)  # fmt: skip


def check_effects(found: Group, subject: Subject, gpu_arch: GpuArch | None) -> None:
    """Asks the effect probe of each patch that is meant to be in, on the tree as it is now."""
    manifest = subject.manifest
    applied = {p.name for p in manifest.patches if p.files} if manifest else set()
    held = 0
    for patch in subject.series.patches:
        selected = select(patch, subject.identity, gpu_arch)
        if selected.variant is None or (manifest and patch.name not in applied):
            continue
        answer = ask(patch.effect, subject.tree)
        if answer.outcome is Outcome.HOLDS:
            held += 1
            continue
        found.error(
            "no-effect",
            f"{patch.name}: it {answer.outcome.value} that {patch.effect.claim}: {answer.evidence}",
            file=patch.effect.paths[0] if patch.effect.paths else "",
            fix=f"build.py patches check {patch.name}",
        )
    found.summary = f"{held} hold"


def check_drops(found: Group, evaluation: Evaluation) -> None:
    """Counts the declared drops; one that is not proven is a verdict, found by `recompute`."""
    dropped = [report for report in evaluation.reports if report.selection.drop]
    proven = [report for report in dropped if report.exit_code == 0]
    for report in proven:
        for finding in report.findings:
            found.info(finding.code, f"{report.patch.name}: {finding.message}")
    found.summary += f", {len(proven)} of {len(dropped)} drops proven"


def check_fixes(found: Group, subject: Subject) -> None:
    """Asks whether the upstream fixes that the series relies on are in the tree."""
    version = subject.identity.version
    held = 0
    for fix in subject.series.fixes:
        if is_release_known(version) and release(version) < release(fix.since):
            found.info("fix-not-asked", f"{fix.upstream}: only from vLLM {fix.since} on")
            continue
        answer = ask(fix.probe, subject.tree)
        if answer.outcome is Outcome.HOLDS:
            held += 1
            continue
        found.error(
            "fix-missing",
            f"{fix.name} ({fix.upstream}): it {answer.outcome.value} that {fix.probe.claim}: "
            f"{answer.evidence}",
            file=fix.probe.paths[0] if fix.probe.paths else "",
            fix=f"use a base of vLLM {fix.since} or newer that has it",
        )
    found.summary = f"{held} hold"
    if not subject.series.fixes:
        found.skip("the series names none")


def check_sources(found: Group, subject: Subject) -> None:
    """Compiles every patched Python file in memory, with the running interpreter."""
    manifest = subject.manifest
    paths = [
        path
        for path, entry in sorted((manifest.files if manifest else {}).items())
        if path.endswith(".py") and entry.after is not None
    ]
    compiled = 0
    for path in paths:
        try:
            data = (subject.root / path).read_bytes()
        except OSError:
            continue  # `check_manifest` said so
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(data, path, "exec", dont_inherit=True)
            compiled += 1
        except (SyntaxError, ValueError) as error:
            line = (getattr(error, "lineno", 0) or 0) if isinstance(error, SyntaxError) else 0
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            found.error("syntax", f"does not compile: {what}", file=path, line=line,
                        fix=_PRISTINE)  # fmt: skip
    found.summary = f"{compiled} of {len(paths)} compile"
