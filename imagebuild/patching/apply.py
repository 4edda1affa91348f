"""Brings a site-packages folder to the state a series asks for, and back.

`apply` is declarative: it computes every file from the pristine content (kept originals where the
tree is patched already) and writes what differs, so a second run changes nothing and a changed
series replaces the old one in one step. Verdicts are `imagebuild.patching.evaluate`'s.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imagebuild.errors import BrokenError, EngineError, ReviewError, UsageError, raise_collected
from imagebuild.patching import transaction
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
from imagebuild.patching.tree import DirTree, Identity, OverlayTree, Tree, identify

ByteCode = Literal["rebuild", "remove"]
_COMPILED = re.compile(r"(?P<stem>.+?)\.[a-z]+-?\d+(\.opt-\d)?\.pyc")
# Runs in a child so that PYTHONHASHSEED orders the set constants the same on every build.
_COMPILE = """
import json, py_compile, sys
for source, name, out in json.load(sys.stdin):
    py_compile.compile(source, out, dfile=name, doraise=True, optimize=0,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        evaluation: the verdicts; None for a revert.
        written: files that changed on disk, empty when nothing was to do.
    """

    evaluation: Evaluation | None
    written: tuple[str, ...]


def pristine(root: Path) -> tuple[Tree, Manifest | None]:
    """A view of a tree as it was before we patched it, and the manifest if there is one.

    Raises:
        BrokenError: an interrupted change, or a file that is not as the manifest says.
        IntegrityError: the manifest or an original is unreadable.
    """
    if (root / JOURNAL).exists():
        raise BrokenError(f"{root}: a change of this tree was interrupted",
                          hint="build.py patches apply or revert completes it")  # fmt: skip
    manifest = read_manifest(root)
    tree = DirTree(root)
    if manifest is None:
        return tree, None
    raise_collected(BrokenError, f"{root}: files differ from the manifest",
                    changed_files(root, manifest), hint="start from a pristine tree")  # fmt: skip
    originals = {
        path: None if entry.before is None else read_original(root, entry.before)
        for path, entry in manifest.files.items()
    }
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
        if found != entry.after and not (entry.after is None and _is_own_bytecode(root, path)):
            faults.append(f"{path}: expected {_short(entry.after)}, found {_short(found)}")
    return faults


def _is_own_bytecode(root: Path, path: str) -> bool:
    """Whether a removed pyc came back because an interpreter compiled the patched source."""
    source = root / _source_of(path)
    try:
        head = (root / path).read_bytes()[:16]
        known = source.stat()
    except OSError:
        return False
    flags, mtime, size = (int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12))
    fits = mtime == int(known.st_mtime) & 0xFFFFFFFF and size == known.st_size & 0xFFFFFFFF
    # A timestamp pyc newer than the source it names was made after we wrote that source.
    return flags == 0 and fits and (root / path).stat().st_mtime_ns >= known.st_mtime_ns


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
) -> Result:
    """Patches the tree at `root`, all or nothing.

    Args:
        root: a site-packages folder; must hold vLLM.
        series: what to apply.
        gpu_arch: whose patches.
        fingerprints: for a tree's identity, what `evaluate` compares contexts with.
        recipe: name for the manifest.
        bytecode: rebuild the byte code of changed files with this interpreter, or only remove
            it; by default rebuild exactly when `root` belongs to this interpreter.
        known_as: the identity that a tree's commit is known to stand for.

    Raises:
        ReviewError: a verdict that a person must look at, and is not declared.
        BrokenError: drift, a collision, or a tree that somebody else changed.
        IntegrityError: manifest, journal or originals are no good.
    """
    with transaction.locked(root):
        transaction.recover(root)
        tree, manifest = pristine(root)
        identity = known_as(identify(tree, source=str(root)))
        tree = OverlayTree(tree, {}, identity)
        evaluation = evaluate(series, tree, gpu_arch, fingerprints(identity))
        refuse_unless_green(evaluation, identity)
        _refuse_foreign_edits(root, tree, evaluation)
        mode = bytecode or ("rebuild" if is_own_site(root) else "remove")
        desired = _desired(root, tree, evaluation, manifest, mode)
        built = _Built(recipe, gpu_arch, series.digest, identity)
        new = _manifest(root, tree, desired, evaluation, built)
        written = _write_differences(root, desired, manifest, new)
    return Result(evaluation, written)


def revert(root: Path) -> Result:
    """Restores every byte of the base and removes `.imagebuild/`.

    Raises:
        BrokenError: a file is not as the manifest says.
        UsageError: the tree carries no manifest: there is nothing to revert.
    """
    with transaction.locked(root):
        recovered = transaction.recover(root)
        tree, manifest = pristine(root)
        if manifest is None:
            if not recovered and not (root / FOLDER).exists():
                raise UsageError(f"{root}: expected a tree that we patched, found no {MANIFEST}")
            transaction.discard_folder(root)
            return Result(None, ())
        changes = {
            path: Change(None if entry.before is None else tree.read(path), entry.mode)
            for path, entry in manifest.files.items()
        }
        differing = _differing(root, changes)
        transaction.commit(root, differing | {MANIFEST: Change(None)})
        for folder in manifest.folders:
            path = root / folder
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        transaction.discard_folder(root)
    return Result(None, tuple(sorted(differing)))


def refuse_unless_green(evaluation: Evaluation, identity: Identity) -> None:
    """Raises the error of the gravest verdict, listing every patch that is not green."""
    code = evaluation.exit_code
    if code == 0:
        return
    problems = [line for report in evaluation.reports for line in describe(report)]
    kind = ReviewError if code == 1 else BrokenError
    raise_collected(kind, f"{identity.source} (vLLM {identity.version}): nothing was written",
                    problems, hint="build.py patches check NAME shows one patch")  # fmt: skip


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
    paths = set(evaluation.files)
    problems = []
    for record in _records(root):
        rows = _rows(tree.read(record))
        for row in rows:
            if row[0] in paths and row[1].startswith("sha256="):
                found = _record_hash(tree.read(row[0]))
                if found != row[1]:
                    problems.append(f"{row[0]}: {record} says {row[1]}, found {found}")
    raise_collected(BrokenError, f"{root}: somebody else changed files that we patch", problems,
                    hint="give a fresh install of the base")  # fmt: skip


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
        known = old.files if old and path in old.files else _compiled_on_disk(root, path)
        desired |= {one: Change(None) for one in known if _source_of(one) == path}
    if bytecode == "rebuild":
        desired |= {p: Change(data) for p, data in _compile(root, sources).items()}
    for record in _records(root):
        data = _new_record(tree.read(record), tree, evaluation, record)
        if data is not None:
            desired[record] = Change(data)
    return desired


def _source_of(path: str) -> str:
    """The source that a byte code file belongs to; "" for any other file."""
    folder, found, name = path.rpartition("__pycache__/")
    match = _COMPILED.fullmatch(name) if found else None
    return f"{folder}{match['stem']}.py" if match else ""


def _compiled_on_disk(root: Path, path: str) -> list[str]:
    """Byte code files of a source, whatever interpreter made them."""
    cache = (root / path).parent / "__pycache__"
    found = (item.relative_to(root).as_posix() for item in cache.glob("*.pyc"))
    return sorted(one for one in found if _source_of(one) == path)


def _compile(root: Path, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Unchecked-hash byte code of each source, as this interpreter's `__pycache__` names it."""
    import importlib.util

    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, (path, data) in enumerate(sorted(sources.items())):
            source = Path(folder) / f"{index}.py"
            source.write_bytes(data)
            jobs.append((str(source), str(root.resolve() / path), f"{folder}/{index}.pyc"))
        run = subprocess.run(
            [sys.executable, "-I", "-c", _COMPILE],
            input=json.dumps(jobs),
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise EngineError(f"{sys.executable} could not compile the patched files: "
                              f"{run.stderr.strip()[-500:]}")  # fmt: skip
        return {
            importlib.util.cache_from_source(path, optimization=""): Path(job[2]).read_bytes()
            for path, job in zip(sorted(sources), jobs, strict=True)
        }


def _records(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("*.dist-info/RECORD"))


def _rows(data: bytes) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(data.decode("utf-8"))) if len(row) == 3]


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _new_record(data: bytes, tree: Tree, evaluation: Evaluation, record: str) -> bytes | None:
    """RECORD with our files' hashes, None when none of them is in it.

    A new file goes to the RECORD that has the files of the same patch.
    """
    lines = data.decode("utf-8").splitlines(keepends=True)
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    listed: set[str] = set()
    for index, line in enumerate(lines):
        path = next(csv.reader([line]), [""])[0]
        if path in evaluation.files:
            listed.add(path)
            lines[index] = _record_line(path, evaluation.files[path]) + newline
    added = [path for path in _files_beside(listed, evaluation) if not tree.exists(path)]
    if not listed and not added:
        return None
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += newline
    at = next((i for i, line in enumerate(lines) if line.startswith(f"{record},")), len(lines))
    lines[at:at] = [_record_line(path, evaluation.files[path]) + newline for path in sorted(added)]
    return "".join(lines).encode()


def _files_beside(listed: set[str], evaluation: Evaluation) -> set[str]:
    """New files of the patches that edit one of `listed`."""
    beside: set[str] = set()
    for report in evaluation.reports:
        variant = report.selection.variant
        if report.is_applied and variant and any(edit.path in listed for edit in variant.edits):
            beside |= {file.path for file in variant.files}
    return beside


def _record_line(path: str, data: bytes) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([path, _record_hash(data), len(data)])
    return out.getvalue()


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
        mode = _mode(root / path, change.mode) if before else change.mode
        files[path] = FileEntry(before, after, mode, tuple(owners.get(path, ())))
        if before is None:
            folders |= _new_folders(root, tree, path)
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
    """What the manifest says about the run."""

    recipe: str
    gpu_arch: str
    series: str
    identity: Identity


def _mode(path: Path, default: int) -> int:
    try:
        return path.stat().st_mode & 0o7777
    except FileNotFoundError:
        return default


def _new_folders(root: Path, tree: Tree, path: str) -> set[str]:
    """Folders of `path` in which the pristine tree has no file."""
    parents = [parent.as_posix() for parent in Path(path).parents if parent != Path()]
    return {
        parent
        for parent in parents
        if not (root / parent).exists() or next(tree.iter(parent + "/"), None) is None
    }


def _write_differences(
    root: Path, desired: Mapping[str, Change], old: Manifest | None, new: Manifest
) -> tuple[str, ...]:
    wanted = {path: change for path, change in desired.items() if path in new.files}
    for path, entry in (old.files if old else {}).items():
        if path not in wanted:  # it is as in the base again
            data = None if entry.before is None else read_original(root, entry.before)
            wanted[path] = Change(data, entry.mode)
    differing = _differing(root, wanted)
    manifest = Change(new.to_bytes())
    if differing or _on_disk(root, MANIFEST) != manifest.data:
        transaction.commit(root, differing | {MANIFEST: manifest})
        transaction.prune_originals(root, {e.before for e in new.files.values() if e.before})
    return tuple(sorted(differing))


def _differing(root: Path, wanted: Mapping[str, Change]) -> dict[str, Change]:
    """The changes that are still to do.

    Byte code that an interpreter made since, of a source that changes now, goes as well: with a
    clamped mtime and the same length Python would go on running it.
    """
    todo = {path: change for path, change in wanted.items() if _on_disk(root, path) != change.data}
    for path in [path for path in todo if path.endswith(".py")]:
        stale = (one for one in _compiled_on_disk(root, path) if one not in wanted)
        todo |= {one: Change(None) for one in stale}
    return todo


def _on_disk(root: Path, path: str) -> bytes | None:
    try:
        return (root / path).read_bytes()
    except FileNotFoundError:
        return None
