"""Rebases whole upstream files that somebody changed: new = target + (fork - base), file by file.

It reads two releases and a folder, and computes; what cannot be merged keeps its markers.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.errors import UsageError
from imagebuild.patching import text as source
from imagebuild.patching.fork import FORK
from imagebuild.patching.structure import NotThere, module_names, parse, statements
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.porting.merge import Labels, merge3
from imagebuild.porting.place import neighbours


class Fate(enum.Enum):
    """What became of one file."""

    KEPT = "kept"  # upstream did not change it
    CLEAN = "clean"  # merged without a conflict
    NEW = "new"  # upstream has it in neither release
    IDENTICAL = "identical"  # it is upstream's, of one release or the other: no fork is needed
    CONFLICT = "conflict"  # both sides changed the same lines, or the merge is no Python
    DELETED = "deleted"  # the new release has no such file
    MOVED = "moved"  # the new release has it elsewhere


OPEN = frozenset([Fate.CONFLICT, Fate.DELETED, Fate.MOVED])


@dataclass(frozen=True)
class Rebased:
    """One file.

    Attributes:
        path: relative to site-packages.
        fate: see `Fate`.
        data: its new content; None when it is open, or no longer needed.
        conflict: the merge with markers; "" when there is none.
        conflicts: how many.
        note: a clause, such as where it went.
        lost: names that it imports and that are not there any more, as `module.name`, with lines.
    """

    path: str
    fate: Fate
    data: bytes | None = None
    conflict: str = ""
    conflicts: int = 0
    note: str = ""
    lost: tuple[tuple[str, int], ...] = field(default=())

    @property
    def is_open(self) -> bool:
        """Whether a person must finish it."""
        return self.fate in OPEN or bool(self.lost)


def files_of(folder: Path) -> dict[str, bytes]:
    """The forks of a folder, by path. Raises UsageError when there are none."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder of forked files, found none")
    left_out = {"__pycache__", ".git"}
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not left_out & set(path.parts) and path.name != FORK
    }
    marked = [path for path in found if path.endswith(".conflict")]
    if marked:
        raise UsageError(f"{folder}: {marked[0]} is a conflict that nobody has resolved",
                         hint="put the resolved file beside it and delete it")  # fmt: skip
    if not found:
        raise UsageError(f"{folder}: expected forked files such as vllm/config.py, found none")
    return found


def rebase(forks: Mapping[str, bytes], base: Tree, target: Tree, labels: Labels) -> list[Rebased]:
    """Rebases each file, then looks for names that the results import and that are gone.

    Args:
        forks: content by path.
        base: the release that they were forked from.
        target: the release to bring them to.
        labels: of the sides in a conflict.
    """
    for tree in (base, target):
        tree.prefetch(path for path in forks if tree.exists(path))
    done = [_file(path, data, base, target, labels) for path, data in forks.items()]
    new: dict[str, bytes | None] = {one.path: one.data for one in done if one.data is not None}
    merged = OverlayTree(target, new)
    checked = []
    for one in done:
        lost = tuple(_lost(one.path, merged)) if one.data is not None else ()
        checked.append(Rebased(one.path, one.fate, one.data, one.conflict, one.conflicts,
                               one.note, lost))  # fmt: skip
    return checked


def _file(path: str, fork: bytes, base: Tree, target: Tree, labels: Labels) -> Rebased:
    old = base.read(path) if base.exists(path) else None
    new = target.read(path) if target.exists(path) else None
    if fork in (old, new):
        which = labels.base if fork == old else labels.theirs
        return Rebased(path, Fate.IDENTICAL, note=f"it is the file of {which}")
    if old is None and new is None:
        return Rebased(path, Fate.NEW, fork)
    if new is None:
        return _gone(path, old or b"", target, labels)
    if old == new:
        return Rebased(path, Fate.KEPT, fork)
    try:
        # A file that upstream added since has no common ancestor: all of it is in conflict.
        texts = [source.decode(data or b"") for data in (old, fork, new)]
    except source.TextError as error:
        return Rebased(path, Fate.CONFLICT, note=f"one side {error}")
    merge = merge3(texts[0].text, texts[1].text, texts[2].text, labels)
    if merge.conflicts:
        return Rebased(path, Fate.CONFLICT, None, merge.text, len(merge.conflicts))
    if path.endswith(".py") and (fault := _fault(merge.text)):
        return Rebased(path, Fate.CONFLICT, None, merge.text, note=f"the merge {fault}")
    return Rebased(path, Fate.CLEAN, texts[2].encode(merge.text))


def _fault(text: str) -> str:
    try:
        source.scopes(text, "python")
    except source.TextError as error:
        return str(error)
    return ""


def _gone(path: str, old: bytes, target: Tree, labels: Labels) -> Rebased:
    """A file that the target lacks: moved when most of what it defined is in one other place."""
    wanted = _defined(old) if path.endswith(".py") else set()
    best, share = "", 0.0
    for other in neighbours(target, path):
        found = len(wanted & _defined(target.read(other))) / len(wanted) if wanted else 0.0
        if found > share:
            best, share = other, found
    if share > 0.5:
        note = f"{share:.0%} of what it defines is in {best} of {labels.theirs}"
        return Rebased(path, Fate.MOVED, note=note)
    near = f"; the nearest is {best}" if best else ""
    return Rebased(path, Fate.DELETED, note=f"{labels.theirs} has no such file{near}")


def _defined(data: bytes) -> set[str]:
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {one.name for one in statements(body) if isinstance(one, kinds)}


def _lost(path: str, tree: Tree) -> Iterator[tuple[str, int]]:
    """What a file imports from packages of the tree that they do not have."""
    if not path.endswith(".py"):
        return
    try:
        module = parse(tree, path)
    except NotThere:
        return
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(tree, alias.name) and not _module(tree, alias.name):
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            name = _absolute(path, node)
            if not _is_ours(tree, name):
                continue
            file = _module(tree, name)
            known = _offered(tree, file) if file else set()
            for alias in node.names:
                below = _module(tree, f"{name}.{alias.name}")
                if known is not None and alias.name not in {*known, "*"} and not below:
                    yield f"{name}.{alias.name}", node.lineno


def _absolute(path: str, node: ast.ImportFrom) -> str:
    """The dotted name of the module that is imported from."""
    if not node.level:
        return node.module or ""
    parts = path.removesuffix(".py").split("/")
    above = parts[: len(parts) - node.level]
    return ".".join([*above, *([node.module] if node.module else [])])


def _is_ours(tree: Tree, name: str) -> bool:
    """Whether the name's top package is in the tree."""
    return tree.exists(f"{name.partition('.')[0]}/__init__.py")


def _module(tree: Tree, name: str) -> str:
    """The file of a module; for a compiled one or a folder without __init__.py the first below."""
    plain = name.replace(".", "/")
    for path in (f"{plain}.py", f"{plain}/__init__.py"):
        if tree.exists(path):
            return path
    below = (*tree.iter(f"{plain}/"), *(p for p in tree.iter(f"{plain}.") if p.endswith(".so")))
    return next(iter(below), "")


def _offered(tree: Tree, path: str) -> set[str] | None:
    """The names of a module; None when they cannot be told: a star import, or a `__getattr__`."""
    if not path.endswith(".py"):
        return None
    try:
        module = parse(tree, path)
    except NotThere:
        return None
    names = module_names(module)
    bound = {node.id for node in ast.walk(module)
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    return None if {"*", "__getattr__"} & names else names | bound
