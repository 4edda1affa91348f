"""Where upstream files are read from: one protocol, whatever holds the bytes.

Paths are relative to site-packages and use "/" (`vllm/envs.py`). Nothing here writes.
"""

from __future__ import annotations

import ast
import email.parser
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from imagebuild.errors import EngineError, UsageError

VLLM = "vllm"


def title(project: str) -> str:
    """How a project is called in messages."""
    return "vLLM" if project == VLLM else project


@dataclass(frozen=True)
class Identity:
    """What a tree says it is.

    Attributes:
        version: of the patched project as its metadata gives it, such as "0.31.0".
        commit: hex digits of its commit, possibly abbreviated; "" when the tree does not say.
        source: where the tree was read from, for messages.
        project: which project that is.
    """

    version: str
    commit: str = ""
    source: str = ""
    project: str = VLLM

    @property
    def title(self) -> str:
        """The project's name for messages."""
        return title(self.project)


class Tree(Protocol):
    """Read access to an installed or packed site-packages."""

    @property
    def identity(self) -> Identity:
        """Version and commit of the patched project in it."""

    def read(self, path: str) -> bytes:
        """Whole content of one file. Raises FileNotFoundError when there is none."""

    def exists(self, path: str) -> bool:
        """Whether `path` is a file of the tree."""

    def iter(self, prefix: str = "") -> Iterator[str]:
        """Every file path that starts with `prefix`, sorted."""

    def prefetch(self, paths: Iterable[str]) -> None:
        """Says which files will be read soon; a hint that remote trees use to fetch together."""


class DirTree:
    """A site-packages folder on disk, for the patches of one project."""

    def __init__(self, root: Path, project: str = VLLM) -> None:
        self.root = root
        self.project = project
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        if self._identity is None:
            self._identity = identify(self, source=str(self.root), project=self.project)
        return self._identity

    def read(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(path) from error
        except PermissionError as error:
            what = f"{self.root / path}: cannot be read: {error.strerror}"
            raise EngineError(what, hint="run as the owner of the tree") from error

    def exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    def iter(self, prefix: str = "") -> Iterator[str]:
        # The prefix bounds the walk: its folder, and in there what begins with the rest.
        folder, _, rest = prefix.rpartition("/")
        start = self.root / folder
        tops = (
            [top for top in start.iterdir() if top.name.startswith(rest)] if start.is_dir() else []
        )
        files = (file for top in tops for file in (top, *top.rglob("*")) if file.is_file())
        return iter(sorted(file.relative_to(self.root).as_posix() for file in files))

    def prefetch(self, paths: Iterable[str]) -> None:
        """Does nothing: local reads are cheap."""


class OverlayTree:
    """A tree with some files replaced in memory; `None` hides a file.

    `identity`, when given, is what the tree is known to be in spite of what it says.
    """

    def __init__(
        self, base: Tree, files: Mapping[str, bytes | None], identity: Identity | None = None
    ) -> None:
        self.base = base
        self.files = files
        self._identity = identity

    @property
    def identity(self) -> Identity:
        return self._identity or self.base.identity

    def read(self, path: str) -> bytes:
        if path in self.files:
            data = self.files[path]
            if data is None:
                raise FileNotFoundError(path)
            return data
        return self.base.read(path)

    def exists(self, path: str) -> bool:
        if path in self.files:
            return self.files[path] is not None
        return self.base.exists(path)

    def iter(self, prefix: str = "") -> Iterator[str]:
        shown = {path for path in self.base.iter(prefix) if path not in self.files}
        shown |= {p for p, data in self.files.items() if data is not None and p.startswith(prefix)}
        return iter(sorted(shown))

    def prefetch(self, paths: Iterable[str]) -> None:
        self.base.prefetch(path for path in paths if path not in self.files)


class UnionTree:
    """Several trees side by side, such as the vllm and the flashinfer wheel; the first one wins."""

    def __init__(self, trees: Iterable[Tree]) -> None:
        self.trees = tuple(trees)

    @property
    def identity(self) -> Identity:
        return self.trees[0].identity

    def read(self, path: str) -> bytes:
        for tree in self.trees:
            if tree.exists(path):
                return tree.read(path)
        raise FileNotFoundError(path)

    def exists(self, path: str) -> bool:
        return any(tree.exists(path) for tree in self.trees)

    def iter(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted({path for tree in self.trees for path in tree.iter(prefix)}))

    def prefetch(self, paths: Iterable[str]) -> None:
        wanted = list(paths)
        for tree in self.trees:
            tree.prefetch(path for path in wanted if tree.exists(path))


def identify(tree: Tree, *, source: str, project: str = VLLM) -> Identity:
    """Reads version and commit of a project in `tree` from what its build wrote there.

    Raises:
        UsageError: there is no such project: for vLLM, `vllm/_version.py` is absent or names no
            version; for another one, its METADATA.
    """
    if project != VLLM:
        return _identify_by_metadata(tree, source, project)
    try:
        text = tree.read("vllm/_version.py").decode("utf-8")
        names = {
            target.id: node.value.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
    except (FileNotFoundError, ValueError, SyntaxError):
        names = {}
    version = names.get("__version__")
    if not isinstance(version, str):
        raise UsageError(
            f"{source}: expected a site-packages with vLLM in it, found no usable vllm/_version.py",
            hint="name the folder that holds vllm/, such as .../python3.12/dist-packages",
        )
    commit = names.get("__commit_id__")
    return Identity(version, commit.removeprefix("g") if isinstance(commit, str) else "", source)


def _identify_by_metadata(tree: Tree, source: str, project: str) -> Identity:
    """Version of a project as its METADATA says. Raises UsageError."""
    escaped = re.sub(r"[-_.]+", "_", project)
    # Spelled as usual; else by its letters alone, since some builders keep capitals: PyYAML-6.0.
    for prefix in (f"{escaped}-", escaped[:1].lower(), escaped[:1].upper()):
        for path in tree.iter(prefix):
            folder = path.removesuffix(".dist-info/METADATA")
            name = re.sub(r"[-_.]+", "_", folder.partition("-")[0])
            if folder == path or "/" in folder or name.lower() != escaped.lower():
                continue
            head = email.parser.BytesHeaderParser().parsebytes(tree.read(path))
            if version := str(head.get("Version", "")).strip():
                return Identity(version, "", source, project)
    raise UsageError(
        f"{source}: expected a site-packages with {project} in it, found no METADATA of it",
        hint=f"name the folder that holds {escaped}-*.dist-info",
    )
