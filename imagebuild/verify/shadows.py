"""Looks for what would run in place of the base's code: foreign files, stale binaries, paths.

Whatever lies in a package's folder is imported without anybody asking where it came from; the
RECORD of its wheel and our manifest say what belongs there.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.patching.manifest import Manifest
from imagebuild.verify.installed import Distribution, Row, distributions, normalise
from imagebuild.verify.report import Group

_REINSTALL = "install the base's wheel again, or start from a pristine tree"
_REMOVE = "remove it, or start from a pristine tree"
# Byte code "X.cpython-312.pyc", "X.cpython-312.opt-1.pyc".
_COMPILED = re.compile(r"(?P<stem>.+?)\.[a-z]+-?\d+(\.opt-\d)?\.pyc")
_UNCHECKED, _CHECKED_FLAGS = 1, 3


@dataclass
class Recorded:
    """What the RECORDs of the watched projects say, and what they and the manifest own."""

    rows: dict[str, Row] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


def check_record(
    found: Group,
    root: Path,
    site: Mapping[str, str],
    manifest: Manifest | None,
    *,
    full: bool,
) -> Recorded:
    """Compares the files of the watched projects with their RECORDs.

    Args:
        found: takes the findings.
        root: site-packages.
        site: the package of each watched project.
        manifest: files in it were compared already.
        full: hash every file, not Python and shared libraries alone.
    """
    recorded = Recorded()
    installed = distributions([root])
    for project in site:
        for one in installed.get(normalise(project), []):
            try:
                rows = one.rows()
            except (OSError, ValueError) as error:
                found.error("record-unreadable", f"the RECORD of {project} cannot be read: {error}",
                            file=f"{one.folder.name}/RECORD", fix=_REINSTALL)  # fmt: skip
                continue
            recorded.rows |= {row.path: row for row in rows}
    ours = manifest.files if manifest else {}
    recorded.owned = set(recorded.rows) | {p for p, entry in ours.items() if entry.after}
    missing: list[tuple[str, str]] = []
    differing: list[tuple[str, str]] = []
    hashed = 0
    for path, row in sorted(recorded.rows.items()):
        if path in ours or (path.endswith(".pyc") and not row.digest):
            continue
        try:
            is_asked = full or path.endswith((".py", ".so"))
            problem = _difference(root / path, row, is_asked=is_asked)
        except FileNotFoundError:
            missing.append((path, "its wheel's RECORD lists it, found none"))
            continue
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        hashed += is_asked and bool(row.digest)
        if problem:
            differing.append((path, problem))
    found.files("error", "record-missing", missing, fix=_REINSTALL)
    found.files("error", "record-differs", differing, fix=_REINSTALL)
    found.summary = f"{hashed} hashes of {len(recorded.rows)} files"
    return recorded


def _difference(path: Path, row: Row, *, is_asked: bool) -> str:
    """Why a file is not the one of its row, as a clause; "" when it is. Raises OSError."""
    size = path.stat().st_size
    if row.size is not None and size != row.size:
        return f"expected {row.size} bytes as its wheel's RECORD says, found {size}"
    algorithm, _, expected = row.digest.partition("=")
    if not is_asked or not expected:
        return ""
    if algorithm not in ("sha256", "sha384", "sha512"):
        return f"its wheel's RECORD gives a digest of kind {algorithm!r}, which proves nothing"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    actual = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    if actual == expected.rstrip("="):
        return ""
    return f"expected {row.digest} as its wheel's RECORD says, found {algorithm}={actual}"


def check_files(
    found: Group, root: Path, site: Mapping[str, str], recorded: Recorded, manifest: Manifest | None
) -> None:
    """Looks through the packages' folders for files that nobody lists, and for stale byte code."""
    code: list[tuple[str, str]] = []
    other: list[tuple[str, str]] = []
    twins: list[tuple[str, str]] = []
    stale: list[tuple[str, str]] = []
    seen = 0
    for package in site.values():
        for folder, names in _walk(root, package):
            seen += len(names)
            twice = dict(_twins(folder, names, recorded))
            twins += twice.items()
            for path in (f"{folder}/{name}" for name in sorted(names)):
                if path in twice:
                    continue
                if folder.endswith("/__pycache__"):
                    source = _source_of(path)
                    if source and _is_stale(root, path, source, manifest):
                        stale.append((path, f"is not the byte code of {source} as it is now, yet "
                                      "Python would run it"))  # fmt: skip
                    if source in recorded.owned:
                        continue
                if path in recorded.owned or not recorded.rows:
                    continue
                kind = code if path.endswith((".py", ".so", ".pyc")) else other
                kind.append((path, "neither its wheel nor our manifest lists this file"))
    found.files("error", "two-libraries", twins, fix=_REMOVE)
    found.files("error", "foreign-code", code, fix=_REMOVE)
    found.files("error", "stale-bytecode", stale, fix=_REMOVE)
    found.files("warning", "foreign-file", other, fix=_REMOVE)
    found.summary = f"{seen} files below {', '.join(f'{name}/' for name in site.values())}"


def _walk(root: Path, package: str) -> Iterator[tuple[str, list[str]]]:
    """Folders of a package with their files; a link to a folder counts as a file."""
    for at, folders, files in os.walk(root / package):
        folder = Path(at).relative_to(root).as_posix()
        links = [name for name in folders if (Path(at) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links)
        yield folder, [*files, *links]


def _twins(folder: str, names: Iterable[str], recorded: Recorded) -> Iterator[tuple[str, str]]:
    """A shared library that hides another one of its module, where the wheel does not ship both.

    A wheel may ship one library for each Python version; no interpreter sees two of those.
    """
    modules: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".so"):
            modules.setdefault(name.partition(".")[0], []).append(name)
    for module, libraries in sorted(modules.items()):
        first, *rest = sorted(libraries, key=_rank)
        is_foreign = any(f"{folder}/{name}" not in recorded.owned for name in libraries)
        if rest and (is_foreign or _rank(first)[0] != _rank(rest[-1])[0]):
            yield f"{folder}/{first}", f"hides {', '.join(rest)} when {module} is imported"


def _rank(name: str) -> tuple[int, str]:
    """The order in which Python tries the endings of an extension module."""
    tag = name.partition(".")[2]
    if tag.startswith(("cpython-", "pypy", "graalpy")):
        return 0, name
    return (1 if tag.startswith("abi3") else 2), name


def _source_of(path: str) -> str:
    folder, _, name = path.rpartition("__pycache__/")
    match = _COMPILED.fullmatch(name)
    return f"{folder}{match['stem']}.py" if match else ""


def _is_stale(root: Path, path: str, source: str, manifest: Manifest | None) -> bool:
    """Whether Python would run byte code that is not its source's.

    Unchecked byte code runs whatever the source says. Byte code by time runs when time and size
    fit, so one that is older than a source that we patched was made from the unpatched one.
    """
    ours = manifest.files if manifest else {}
    try:
        data = (root / path).read_bytes()
        head = data[:16]
        if head[:4] != importlib.util.MAGIC_NUMBER:
            return False  # another interpreter's
        flags = int.from_bytes(head[4:8], "little")
        if flags & _CHECKED_FLAGS == _UNCHECKED:
            text = (root / source).read_bytes()
            is_other = importlib.util.source_hash(text) != head[8:16]
            # Ours was compiled by this interpreter: its code says more than its head.
            return is_other or (path in ours and _is_other_code(data[16:], text, path))
        if flags or source not in ours or path in ours:
            return False
        known = (root / source).stat()
        mtime, size = (int.from_bytes(head[i : i + 4], "little") for i in (8, 12))
        fits = mtime == int(known.st_mtime) & 0xFFFFFFFF and size == known.st_size & 0xFFFFFFFF
        return fits and (root / path).stat().st_mtime_ns < known.st_mtime_ns
    except OSError:
        return False  # no source: Python does not import byte code from __pycache__ then


def _is_other_code(code: bytes, text: bytes, path: str) -> bool:
    """Whether byte code is not what this interpreter makes of a source."""
    level = next((number for number in (1, 2) if path.endswith(f".opt-{number}.pyc")), 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = compile(text, path, "exec", dont_inherit=True, optimize=level)
        return bool(marshal.loads(code) != made)  # noqa: S302 - builds the code and runs nothing
    except (EOFError, SyntaxError, TypeError, ValueError):
        return True


def check_projects(found: Group, folders: tuple[Path, ...], site: Mapping[str, str]) -> None:
    """Looks for a project that is installed twice."""
    installed = distributions(folders)
    for project, several in sorted(installed.items()):
        by_folder: dict[Path, list[Distribution]] = {}
        for one in several:
            by_folder.setdefault(one.folder.parent, []).append(one)
        for at, here in by_folder.items():
            if len(here) > 1:
                names = " and ".join(one.folder.name for one in here)
                found.error(
                    "two-versions",
                    f"{project} is installed twice in {at}: {names}",
                    file=here[-1].folder.name,
                    fix="install it once: which of the two the files are from is anybody's guess",
                )
        if len(by_folder) > 1 and project in {normalise(name) for name in site}:
            places = " and ".join(f"{here[0].version} in {at}" for at, here in by_folder.items())
            found.error("two-versions", f"{project} is installed in two folders: {places}",
                        fix="remove one of them")  # fmt: skip
    found.summary = f"{len(installed)} projects"


def check_startup(found: Group, folders: tuple[Path, ...]) -> None:
    """Looks for files that change every start of Python and that no RECORD lists."""
    listed: set[Path] = set()
    for several in distributions(folders).values():
        for one in several:
            try:
                listed |= {one.folder.parent / row.path for row in one.rows()
                           if "/" not in row.path}  # fmt: skip
            except (OSError, ValueError):
                continue
    for folder in folders:
        for path in sorted(folder.glob("*.pth")):
            if path not in listed:
                _judge_pth(found, path)
        for name in ("sitecustomize.py", "usercustomize.py"):
            if (folder / name).is_file() and folder / name not in listed:
                found.warning("startup-code", f"{folder / name} runs at every start of Python, and "
                              "no package lists it", file=name, fix=_REMOVE)  # fmt: skip


def _judge_pth(found: Group, path: Path) -> None:
    try:
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    except OSError:
        return
    used = [line for line in lines if line.strip() and not line.startswith("#")]
    code = [line for line in used if line.startswith(("import ", "import\t"))]
    if used:
        what = "runs code at every start of Python" if code else f"adds {used[0]!r} to the path"
        found.warning("startup-path", f"{path} {what}, and no package lists it", file=path.name,
                      fix=_REMOVE)  # fmt: skip


def check_path(found: Group, root: Path, site: Mapping[str, str], ignored: Iterable[Path]) -> None:
    """Asks this interpreter where it would import the packages from; imports none of them.

    Args:
        found: takes the findings.
        root: where they must come from.
        site: the package of each watched project.
        ignored: folders on the path that only this run put there.
    """
    for package in site.values():
        for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            folder = Path(place or ".").resolve()
            is_there = (folder / package).is_dir() or (folder / f"{package}.py").is_file()
            if place and is_there and folder != root.resolve():
                found.error(
                    "shadow-path",
                    f"PYTHONPATH names {place}, which holds another {package}",
                    fix=f"unset PYTHONPATH, or remove {place}/{package}",
                )
        origin = _origin(package, {path.resolve() for path in ignored})
        if origin is None:
            found.error(
                "not-importable",
                f"this interpreter ({sys.executable}) finds no {package}",
                fix=f"start verify with the interpreter that {root} belongs to",
            )
        elif origin != (root / package).resolve():
            found.error("shadow-import", f"import {package}: expected {root / package}, "
                        f"found {origin}", fix=f"remove {origin}")  # fmt: skip


def search_path(ignored: Iterable[Path]) -> list[str]:
    """This interpreter's path for imports, without folders that only this run put there."""
    skipped = {path.resolve() for path in ignored}
    return [place for place in sys.path if place and Path(place).resolve() not in skipped]


def _origin(package: str, ignored: set[Path]) -> Path | None:
    """The folder (or file) that importing a top-level package would take."""
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder:
            spec = importlib.machinery.PathFinder.find_spec(package, search_path(ignored))
        else:
            find = getattr(finder, "find_spec", None)
            spec = find(package, None) if find else None
        if spec is not None:
            places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
            return Path(places[0]).resolve()
    return None
