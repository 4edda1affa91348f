"""The ordered patches of a recipe: loading, and every fault that shows before a tree is read."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, get_args

from imagebuild.errors import UsageError, raise_collected
from imagebuild.patching import unified
from imagebuild.patching.expect import Fix
from imagebuild.patching.fork import load_fork
from imagebuild.patching.manifest import FOLDER
from imagebuild.patching.patch import Edit, EditKind, Patch, Status, Variant
from imagebuild.patching.versions import VersionRange

DOC_LABELS = ("Symptom", "Cause", "Change", "Upstream", "Drop when", "Cost")
_LABEL = re.compile(rf"^({'|'.join(DOC_LABELS)})[.:]\s+", re.MULTILINE)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+){2,}")
_DIFF_NAME = re.compile(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)+")
_KEYS = {"patches", "upstream_fixes"}


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they are applied.

    Attributes:
        patches: the claims.
        docs: each patch's docstring, by name.
        fixes: what the series relies on upstream to have fixed.
        runtime: folder that the new files come from.
    """

    patches: tuple[Patch, ...]
    docs: Mapping[str, str]
    fixes: tuple[Fix, ...]
    runtime: Path

    def patch(self, name: str) -> Patch:
        """The patch of that name. Raises UsageError when the series has none."""
        import difflib

        for patch in self.patches:
            if patch.name == name:
                return patch
        names = [patch.name for patch in self.patches]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        raise UsageError(
            f"{name!r} is not a patch of this series",
            hint=f"did you mean {close[0]}?" if close else "build.py patches list",
        )

    def new_files(self, variant: Variant) -> dict[str, bytes]:
        """Content of the files a variant adds, by destination."""
        return {file.path: (self.runtime / file.source).read_bytes() for file in variant.files}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over everything that decides what the applied series looks like."""
        content = [
            [
                patch.name,
                [[v.versions, *self._variant_content(v)] for v in patch.variants],
                [drop.versions for drop in patch.drops],
                patch.gpu_arches,
            ]
            for patch in self.patches
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _variant_content(self, variant: Variant) -> list[Any]:
        edits = [[e.path, e.scope, e.kind, e.anchor, e.text, e.count] for e in variant.edits]
        added = self.new_files(variant)
        return [edits, [[p, hashlib.sha256(d).hexdigest()] for p, d in sorted(added.items())]]


def load_series(series_file: Path, patches: Path, runtime: Path) -> Series:
    """Loads and validates a series.

    Args:
        series_file: `series.toml` with the ordered names: NAME of a module, NAME.patch of a unified
            diff, NAME/ of a folder of forks.
        patches: folder with all of them.
        runtime: folder that `Variant.files` name their sources in.

    Raises:
        UsageError: the file or a module is malformed; all problems at once.
    """
    listed, fixes_name = _read_order(series_file)
    problems: list[str] = []
    loaded: list[Patch] = []
    docs: dict[str, str] = {}
    diffs = _Diffs(patches, [name for name in listed if name.endswith(unified.SUFFIX)])
    names = [name.removesuffix("/").removesuffix(unified.SUFFIX) for name in listed]
    for name, entry in zip(names, listed, strict=True):
        try:
            if entry != name:
                patch, doc = load_fork(patches / name) if entry[-1] == "/" else diffs.load(name)
            else:
                patch, doc = _from_module(patches, name)
        except UsageError as error:
            problems.append(str(error))
            continue
        loaded.append(patch)
        docs[name] = doc
        if not entry.endswith("/"):  # the record of a fork was checked
            problems += _faults(patch, name, doc, runtime)
    problems += _order_faults(loaded, names)
    fixes: tuple[Fix, ...] = ()
    if fixes_name:
        try:
            fixes = _load_fixes(patches / f"{fixes_name}.py")
        except UsageError as error:
            problems.append(str(error))
    raise_collected(UsageError, f"{series_file}: the series is malformed", problems)
    return Series(tuple(loaded), docs, fixes, runtime)


def _from_module(patches: Path, name: str) -> tuple[Patch, str]:
    """The patch of a module, and its docstring. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name}: expected a name <project>_<area>_<effect>")
    patch = getattr(_load_module(patches / f"{name}.py"), "PATCH", None)
    if not isinstance(patch, Patch):
        raise UsageError(f"{name}: expected a constant PATCH of type Patch, found {patch!r}")
    return patch, _docstring(patches / f"{name}.py")


class _Diffs:
    """The unified diffs of a series, which build on each other in its order."""

    def __init__(self, folder: Path, entries: list[str]) -> None:
        self.folder = folder
        self.names = [entry.removesuffix(unified.SUFFIX) for entry in entries]

    @functools.cached_property
    def _read(self) -> dict[str, unified.Diff | UsageError]:
        found: dict[str, unified.Diff | UsageError] = {}
        for name in self.names:
            try:
                found[name] = unified.read_diff(self.folder / f"{name}{unified.SUFFIX}")
            except UsageError as error:
                found[name] = error
        return found

    def load(self, name: str) -> tuple[Patch, str]:
        """The patch of one, with its documentation. Raises UsageError."""
        if not _DIFF_NAME.fullmatch(name):
            raise UsageError(f"{name}: expected a name <project>-<what>, in small letters")
        diff = self._read[name]
        if isinstance(diff, UsageError):
            raise diff
        at = self.names.index(name)
        earlier, later = (
            [one for other in part if isinstance(one := self._read[other], unified.Diff)]
            for part in (self.names[:at], self.names[at + 1 :])
        )
        return unified.as_patch(diff, earlier, later, self._module)

    def _module(self, name: str) -> ModuleType:
        return _load_module(self.folder / f"{name}.py")


def _load_fixes(path: Path) -> tuple[Fix, ...]:
    fixes = getattr(_load_module(path), "FIXES", None)
    if not isinstance(fixes, tuple) or not all(isinstance(fix, Fix) for fix in fixes):
        raise UsageError(f"{path.stem}: expected a constant FIXES, a tuple of Fix, found {fixes!r}")
    return fixes


def _read_order(series_file: Path) -> tuple[list[str], str]:
    try:
        content = tomllib.loads(series_file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{series_file}: expected a series, found: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{series_file}: expected TOML, found: {error}") from error
    unknown = sorted(set(content) - _KEYS)
    if unknown:
        raise UsageError(f"{series_file}: unknown key {unknown[0]!r}",
                         hint=f"known keys: {', '.join(sorted(_KEYS))}")  # fmt: skip
    names = content.get("patches")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{series_file}: expected `patches = ["NAME", ...]`, found {names!r}')
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{series_file}: {twice[0]} is listed twice")
    fixes = content.get("upstream_fixes", "")
    if not isinstance(fixes, str):
        raise UsageError(f'{series_file}: expected `upstream_fixes = "NAME"`, found {fixes!r}')
    return names, fixes


def _load_module(path: Path) -> ModuleType:
    """Imports one data module by path, without byte code and without touching sys.path."""
    if not path.is_file():
        raise UsageError(f"{path.stem}: expected {path}, found no such file")
    spec = importlib.util.spec_from_file_location(f"_series_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.stem}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a data module may fail in any way; the message says which
        # str() has the line; repr() repeats the source.
        what = f"SyntaxError: {error}" if isinstance(error, SyntaxError) else repr(error)
        raise UsageError(f"{path.stem}: {path} fails to load: {what}") from error
    finally:
        sys.dont_write_bytecode = before
    return module


def _docstring(path: Path) -> str:
    """A module's docstring by its text: under -OO Python keeps none."""
    return ast.get_docstring(ast.parse(path.read_bytes()), clean=False) or ""


def _faults(patch: Patch, name: str, doc: str, runtime: Path) -> Iterator[str]:
    if patch.name != name:
        yield f"{name}: PATCH.name is {patch.name!r}; it must equal the module's name"
    if patch.status not in get_args(Status):
        yield f"{name}: expected a status of {get_args(Status)}, found {patch.status!r}"
    first = doc.strip().split("\n", 1)[0]
    if not first or len(first) > 72:
        yield f"{name}: the docstring's first line must have 1 to 72 characters"
    labels = tuple(_LABEL.findall(doc))
    if labels != DOC_LABELS:
        yield f"{name}: the docstring needs {', '.join(DOC_LABELS)} in this order, found {labels}"
    if not patch.variants and not patch.drops:
        yield f"{name}: has neither a variant nor a drop"
    yield from _range_faults(patch)
    for variant in patch.variants:
        where = f"{name} {variant.versions}"
        if not variant.edits and not variant.files:
            yield f"{where}: the variant changes nothing"
        for edit in variant.edits:
            yield from _edit_faults(edit, f"{where} / {edit.label!r}")
        labels_seen = [edit.label for edit in variant.edits]
        if len(set(labels_seen)) != len(labels_seen):
            yield f"{where}: two edits share a label"
        for file in variant.files:
            yield from _path_faults(file.path, f"{where} / {file.path}")
            if PurePosixPath(file.source).is_absolute() or ".." in PurePosixPath(file.source).parts:
                yield f"{where}: expected a source below {runtime}, found {file.source!r}"
            elif not (runtime / file.source).is_file():
                yield f"{where}: expected {runtime / file.source}, found no such file"


def _range_faults(patch: Patch) -> Iterator[str]:
    """Variants and drops must follow each other: no overlap, no gap, variants closed above."""
    spans: list[tuple[VersionRange, str]] = []
    ranges = [v.versions for v in patch.variants] + [d.versions for d in patch.drops]
    for text in ranges:
        try:
            spans.append((VersionRange.parse(text), text))
        except ValueError as error:
            yield f"{patch.name}: {error}"
            return
    for variant in patch.variants:
        if VersionRange.parse(variant.versions).high is None:
            yield f"{patch.name}: the variant {variant.versions} must be closed above"
    lows = [span.low for span, _text in spans[: len(patch.variants)]]
    if lows != sorted(lows):
        yield f"{patch.name}: the variants must stand in the order of their versions"
    spans.sort(key=lambda item: item[0].low)
    for (one, one_text), (two, two_text) in itertools.pairwise(spans):
        if one.overlaps(two):
            yield f"{patch.name}: {one_text} and {two_text} overlap"
        elif one.high != two.low:
            yield f"{patch.name}: no release between {one_text} and {two_text} may be left out"


def _edit_faults(edit: Edit, where: str) -> Iterator[str]:
    yield from _path_faults(edit.path, where)
    if edit.kind not in get_args(EditKind):
        yield f"{where}: expected a kind of {get_args(EditKind)}, found {edit.kind!r}"
    if not edit.anchor.strip():
        yield f"{where}: the anchor is empty"
    if edit.count < 1:
        yield f"{where}: count must be at least 1, found {edit.count}"
    if not edit.text:
        yield f"{where}: the new text is empty, so nothing could tell that it was applied"
    elif edit.result == edit.anchor:
        yield f"{where}: the new text equals the anchor"
    elif edit.result in edit.anchor:
        yield f"{where}: the anchor contains the new text, so pending and applied look alike"
    elif edit.result.count(edit.anchor) > 1:
        yield f"{where}: the new text repeats its own anchor, so a second run could not tell"
    if "\r" in edit.anchor + edit.text:
        yield f"{where}: write line ends as \\n; a file's own are kept"


def _path_faults(path: str, where: str) -> Iterator[str]:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path:
        yield f"{where}: expected a path below site-packages, found {path!r}"
    if pure.parts[:1] == (FOLDER,):
        yield f"{where}: {FOLDER}/ is ours"


def _order_faults(patches: list[Patch], names: list[str]) -> Iterator[str]:
    for patch in patches:
        before = names[: names.index(patch.name)] if patch.name in names else names
        for need in patch.needs:
            if need not in before:
                yield f"{patch.name}: needs {need}, which must stand before it in the series"
