"""Brings a site-packages folder to the state a series asks for, and back.

`apply` is declarative: it computes every file from the pristine content (kept originals where the
tree is patched already) and writes what differs, so a second run changes nothing and a changed
series replaces the old one in one step. Verdicts are `imagebuild.patching.evaluate`'s.
"""

from __future__ import annotations

import site
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import (
    BrokenError,
    IntegrityError,
    ReviewError,
    UsageError,
    raise_collected,
)
from imagebuild.patching import compiled, record, transaction
from imagebuild.patching.compiled import ByteCode
from imagebuild.patching.evaluate import Evaluation, Fingerprints, PatchReport, evaluate
from imagebuild.patching.manifest import (
    FOLDER,
    JOURNAL,
    MANIFEST,
    FileEntry,
    Manifest,
    PatchEntry,
    read_manifest,
    read_original,
    sha256,
)
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.series import Series
from imagebuild.patching.transaction import Change
from imagebuild.patching.tree import VLLM, DirTree, Identity, OverlayTree, Tree, identify


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        evaluation: the verdicts; None for a revert.
        written: files that changed on disk, empty when nothing was to do.
    """

    evaluation: Evaluation | None
    written: tuple[str, ...]


def pristine(root: Path, project: str = VLLM) -> tuple[Tree, Manifest | None]:
    """A view of a tree as it was before we patched it, and the manifest if there is one.

    `project` is the one whose version the tree has.

    Raises:
        BrokenError: an interrupted change, or a file that is not as the manifest says.
        IntegrityError: the manifest or an original is unreadable.
    """
    if (root / JOURNAL).exists():
        raise BrokenError(f"{root}: a change of this tree was interrupted",
                          hint="build.py patches apply or revert completes it")  # fmt: skip
    manifest = read_manifest(root)
    tree = DirTree(root, project)
    if manifest is None:
        return tree, None
    raise_collected(BrokenError, f"{root}: files differ from the manifest",
                    changed_files(root, manifest), hint="start from a pristine tree")  # fmt: skip
    originals = {
        path: None if entry.before is None else read_original(root, entry.before)
        for path, entry in manifest.files.items()
    }
    # Byte code that an interpreter made of a patched source is not the base's.
    made = (one for path in manifest.files for one in compiled.on_disk(root, path))
    originals |= {one: None for one in made if one not in manifest.files}
    return OverlayTree(tree, originals), manifest


def changed_files(root: Path, manifest: Manifest) -> list[str]:
    """Sentences on the files that are not as the manifest says.

    Byte code of a patched file counts as well: stale byte code runs the old code.
    """
    faults = []
    for path, entry in sorted(manifest.files.items()):
        try:
            found = sha256((root / path).read_bytes())
        except FileNotFoundError:
            found = None
        except OSError as error:
            faults.append(f"{path}: cannot be read: {error.strerror}")
            continue
        came_back = entry.after is None and found != entry.before and compiled.is_own(root, path)
        if found != entry.after and not came_back:
            faults.append(f"{path}: expected {_short(entry.after)}, found {_short(found)}")
    return faults


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:12]}" if digest else "no file"


def apply(
    root: Path,
    series: Series,
    gpu_arch: GpuArch,
    fingerprints: Callable[[Identity], Callable[[str, str], Fingerprints | None]],
    *,
    recipe: str,
    bytecode: ByteCode | None = None,
    known_as: Callable[[Identity], Identity] = lambda identity: identity,
    project: str = VLLM,
) -> Result:
    """Patches the tree at `root`, all or nothing.

    Args:
        root: a site-packages folder; must hold the project.
        series: what to apply.
        gpu_arch: whose patches.
        fingerprints: for a tree's identity, what `evaluate` compares contexts with.
        recipe: name for the manifest.
        bytecode: rebuild the byte code of changed files with this interpreter, or only remove
            it; by default rebuild exactly when `root` belongs to this interpreter.
        known_as: the identity that a tree's commit is known to stand for.
        project: whose version the tree has.

    Raises:
        ReviewError: a verdict that a person must look at, and is not declared.
        BrokenError: drift, a collision, or a tree that somebody else changed.
        IntegrityError: manifest, journal or originals are no good.
    """
    with transaction.locked(root):
        transaction.recover(root)
        tree, manifest = pristine(root, project)
        identity = known_as(identify(tree, source=str(root), project=project))
        tree = OverlayTree(tree, {}, identity)
        evaluation = evaluate(series, tree, gpu_arch, fingerprints(identity))
        refuse_unless_green(evaluation, identity)
        _refuse_foreign_edits(root, tree, evaluation)
        mode = bytecode or ("rebuild" if is_own_site(root) else "remove")
        desired = _desired(root, tree, evaluation, manifest, mode)
        built = _Built(recipe, gpu_arch, series.digest, identity, manifest)
        new = _manifest(root, tree, desired, evaluation, built)
        written = _write_differences(root, desired, manifest, new)
        transaction.tidy(root)
    return Result(evaluation, written)


def revert(root: Path) -> Result:
    """Restores every byte of the base and removes `.imagebuild/`.

    Raises:
        BrokenError: a file is not as the manifest says.
        IntegrityError: what the manifest calls the base's is not what the wheels' RECORD says.
        UsageError: the tree carries no manifest: there is nothing to revert.
    """
    with transaction.locked(root):
        recovered = transaction.recover(root)
        tree, manifest = pristine(root)
        if manifest is None:
            if not recovered and not (root / FOLDER).exists():
                raise UsageError(f"{root}: expected a tree that we patched, found no {MANIFEST}",
                                 hint="there is nothing to revert")  # fmt: skip
            transaction.tidy(root)
            return Result(None, ())
        _refuse_forged_originals(root, tree, manifest)
        changes = {
            path: Change(None if entry.before is None else tree.read(path), entry.mode)
            for path, entry in manifest.files.items()
        }
        differing = _differing(root, changes)
        transaction.commit(root, differing | {MANIFEST: Change(None)}, manifest.folders)
        transaction.tidy(root)
    return Result(None, tuple(sorted(differing)))


def refuse_unless_green(evaluation: Evaluation, identity: Identity) -> None:
    """Raises the error of the gravest verdict, listing every patch that is not green."""
    code = evaluation.exit_code
    if code == 0:
        return
    problems = [f"  - {line}" for report in evaluation.reports for line in describe(report)]
    title = f"{identity.source} ({identity.title} {identity.version}): nothing was written:"
    kind = ReviewError if code == 1 else BrokenError
    names = [report.patch.name for report in evaluation.reports if report.exit_code]
    release = identity.version.partition("+")[0]
    raise kind("\n".join([title, *problems]), hint="the evidence: build.py patches check "
               f"{' '.join(names)} --against {release}")  # fmt: skip


def describe(report: PatchReport) -> Iterable[str]:
    """One sentence a finding for a patch that is not green."""
    if report.exit_code == 0:
        return
    for finding in report.findings:
        if finding.level != "info":
            place = f" ({finding.file}:{finding.line})" if finding.line else ""
            yield f"{report.patch.name}: {report.verdict.value}: {finding.message}{place}"


def is_own_site(root: Path) -> bool:
    """Whether `root` is a site-packages folder of the running interpreter."""
    own = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    return any(path and Path(path).resolve() == root.resolve() for path in own)


def _refuse_foreign_edits(root: Path, tree: Tree, evaluation: Evaluation) -> None:
    """A target whose pristine content is not what its wheel's RECORD says is somebody's edit."""
    recorded = _recorded(root, tree)
    problems = _unlike_record(tree, set(evaluation.files) & recorded.keys(), recorded)
    raise_collected(BrokenError, f"{root}: somebody else changed files that we patch", problems,
                    hint="give a fresh install of the base")  # fmt: skip


def _refuse_forged_originals(root: Path, tree: Tree, manifest: Manifest) -> None:
    """A manifest must not pass other bytes off as the base's, nor have the base's removed."""
    recorded = _recorded(root, tree)
    packages = {path.partition("/")[0] for path in recorded}
    problems = []
    for path, entry in manifest.files.items():
        if entry.before is None and path in recorded:
            where = recorded[path][1]
            problems.append(f"{path}: {where} lists it, the manifest says that the base has none")
        # RECORD lists itself without a hash, and byte code need not be in it.
        is_unlisted = entry.before is not None and path not in recorded
        if is_unlisted and path.endswith(".py") and path.partition("/")[0] in packages:
            problems.append(f"{path}: the manifest says that it is the base's, no RECORD lists it")
    known = {path for path, entry in manifest.files.items() if entry.before is not None}
    problems += _unlike_record(tree, known & recorded.keys(), recorded)
    raise_collected(IntegrityError, f"{root}: the kept originals are not the base's", problems,
                    hint="reinstall the packages from their wheels")  # fmt: skip


def _recorded(root: Path, tree: Tree) -> dict[str, tuple[str, str]]:
    """Hash, and the RECORD that says so, of each file that one of the pristine tree lists."""
    return {
        row[0]: (row[1], path)
        for path in record.paths(root)
        for row in record.rows(record.text_of(tree, path))
        if row[1].startswith("sha256=")
    }


def _unlike_record(
    tree: Tree, paths: Iterable[str], recorded: Mapping[str, tuple[str, str]]
) -> list[str]:
    """Sentences on files whose content is not as RECORD says."""
    problems = []
    for path in sorted(paths):
        said, where = recorded[path]
        if tree.exists(path) and (found := record.hash_of(tree.read(path))) != said:
            problems.append(f"{path}: {where} says {said}, found {found}")
    return problems


def _desired(
    root: Path,
    tree: Tree,
    evaluation: Evaluation,
    old: Manifest | None,
    bytecode: ByteCode,
) -> dict[str, Change]:
    """Content of every file that we own: patched ones, their byte code and RECORD."""
    desired = {path: Change(data) for path, data in evaluation.files.items()}
    sources = {path: data for path, data in evaluation.files.items() if path.endswith(".py")}
    for path in sources:
        known = old.files if old and path in old.files else compiled.on_disk(root, path)
        desired |= {one: Change(None) for one in known if compiled.source_of(one) == path}
    if bytecode == "rebuild":
        desired |= {p: Change(data) for p, data in compiled.compile_all(root, sources).items()}
    for path, data in record.all_updated(root, tree, evaluation.files).items():
        if data != tree.read(path):
            desired[path] = Change(data)
    return desired


def _manifest(
    root: Path,
    tree: Tree,
    desired: Mapping[str, Change],
    evaluation: Evaluation,
    built: _Built,
) -> Manifest:
    patches = []
    owners: dict[str, list[str]] = {}
    for report in evaluation.reports:
        variant = report.selection.variant
        paths: set[str] = set()
        if report.is_applied and variant:
            paths = {e.path for e in variant.edits} | {f.path for f in variant.files}
        for path in paths:
            owners.setdefault(path, []).append(report.patch.name)
        versions = variant.versions if variant else ""
        entry = PatchEntry(report.patch.name, report.verdict.value, versions, tuple(sorted(paths)))
        patches.append(entry)
    files = {}
    folders: set[str] = set()
    for path, change in sorted(desired.items()):
        before = sha256(tree.read(path)) if tree.exists(path) else None
        after = None if change.data is None else sha256(change.data)
        if before == after:
            continue
        if built.old and path in built.old.files:
            mode = built.old.files[path].mode  # the base's, wherever it was changed since
        else:
            mode = stat.S_IMODE((root / path).stat().st_mode) if before else change.mode
        files[path] = FileEntry(before, after, mode, tuple(owners.get(path, ())))
        if before is None:
            folders |= {parent for parent in _folders_of(path) if not (root / parent).exists()}
            folders |= _folders_of(path) & set(built.old.folders if built.old else ())
    return Manifest(
        version=built.identity.version,
        commit=built.identity.commit,
        recipe=built.recipe,
        gpu_arch=built.gpu_arch,
        series=built.series,
        patches=tuple(patches),
        files=files,
        folders=tuple(sorted(folders, key=lambda folder: (-folder.count("/"), folder))),
    )


@dataclass(frozen=True)
class _Built:
    """What the manifest says about the run, and the manifest before it."""

    recipe: str
    gpu_arch: str
    series: str
    identity: Identity
    old: Manifest | None


def _folders_of(path: str) -> set[str]:
    return {parent.as_posix() for parent in Path(path).parents} - {"."}


def _write_differences(
    root: Path, desired: Mapping[str, Change], old: Manifest | None, new: Manifest
) -> tuple[str, ...]:
    wanted = {
        path: Change(change.data, new.files[path].mode)
        for path, change in desired.items()
        if path in new.files
    }
    for path, entry in (old.files if old else {}).items():
        if path not in wanted:  # it is as in the base again
            data = None if entry.before is None else read_original(root, entry.before)
            wanted[path] = Change(data, entry.mode)
    differing = _differing(root, wanted)
    manifest = Change(new.to_bytes())
    if differing or _on_disk(root, MANIFEST) != manifest.data:
        emptied = [folder for folder in (old.folders if old else ()) if folder not in new.folders]
        transaction.commit(root, differing | {MANIFEST: manifest}, emptied)
    return tuple(sorted(differing))


def _differing(root: Path, wanted: Mapping[str, Change]) -> dict[str, Change]:
    """The changes that are still to do.

    Byte code that an interpreter made since, of a source that changes now, goes as well: with a
    clamped mtime and the same length Python would go on running it.
    """
    todo = {path: change for path, change in wanted.items() if _on_disk(root, path) != change.data}
    for path in [path for path in todo if path.endswith(".py")]:
        stale = (one for one in compiled.on_disk(root, path) if one not in wanted)
        todo |= {one: Change(None) for one in stale}
    return todo


def _on_disk(root: Path, path: str) -> bytes | None:
    try:
        return (root / path).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None  # `commit` says so where a folder or a file is in the way
