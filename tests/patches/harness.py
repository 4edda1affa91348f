"""What every patch must show, once: subclass `PatchContract` in tests/patches/test_<patch>.py.

`extract` runs single upstream functions with stand-ins, so that behaviour is tested and not text.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from imagebuild.patching import text as source
from imagebuild.patching.evaluate import Evaluation, Verdict, ask, evaluate, fingerprint_of
from imagebuild.patching.evaluate import contexts_of as contexts
from imagebuild.patching.patch import Edit, Outcome, Patch, Variant
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series, load_series
from imagebuild.patching.structure import find
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.patching.workspace import State, Workspace

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches" / "glm53_flash"
RUNTIME = ROOT / "image" / "runtime"
VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
# A replacement in one file, by regular expression in multi-line mode: (path, pattern, text).
Change = tuple[str, str, str]


def with_needs(name: str) -> list[str]:
    """A patch and before it all that it needs, each once."""
    needs: tuple[str, ...] = importlib.import_module(f"patches.glm53_flash.{name}").PATCH.needs
    return list(dict.fromkeys([*(before for need in needs for before in with_needs(need)), name]))


@functools.cache
def series_of(name: str) -> Series:
    """A series of one patch behind those that it needs, loaded as the product does it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "series.toml"
        file.write_text(f"patches = {json.dumps(with_needs(name))}\n", "utf-8")
        return load_series(file, PATCHES, RUNTIME)


def run(name: str, tree: Tree) -> Evaluation:
    """Evaluates one patch, last, with the context of `tree` as the locked one."""

    def fingerprints(one: str, versions: str) -> Mapping[str, str]:
        variants = series_of(name).patch(one).variants
        variant = next(variant for variant in variants if variant.versions == versions)
        found = {str(symbol): fingerprint_of(tree, symbol) for symbol in contexts(variant)}
        missing = [symbol for symbol, value in found.items() if value is None]
        assert not missing, f"the tree has no {missing}"
        return {symbol: value for symbol, value in found.items() if value is not None}

    return evaluate(series_of(name), tree, None, fingerprints)


def variant_of(patch: Patch, tree: Tree) -> Variant:
    chosen = select(patch, tree.identity, None).variant
    assert chosen is not None
    return chosen


@functools.lru_cache(maxsize=64)
def patched(name: str, tree: Tree) -> OverlayTree:
    """The tree after the patch, which must be applicable; one result a tree object."""
    evaluation = run(name, tree)
    assert {report.verdict for report in evaluation.reports} == {Verdict.OK}
    return OverlayTree(tree, evaluation.files)


def changed(tree: Tree, changes: Iterable[Change]) -> OverlayTree:
    """The tree with some text replaced; each pattern must match, or the test tests nothing."""
    files: dict[str, bytes | None] = {}
    for path, pattern, replacement in changes:
        before = (files.get(path) or tree.read(path)).decode()
        after, count = re.subn(pattern, replacement, before, flags=re.MULTILINE)
        assert count, f"{path}: {pattern!r} matches nothing"
        if path.endswith(".py"):
            ast.parse(after)
        files[path] = after.encode()
    return OverlayTree(tree, files)


def damaged(tree: Tree, edit: Edit) -> OverlayTree:
    """The tree with one character more at the end of the edit's anchor; still valid Python."""
    text = tree.read(edit.path).decode()
    for span in source.scope_spans(text, edit.path, edit.scope):
        at = text.find(edit.anchor, span.start, span.stop)
        if at >= 0:
            last = max(i for i, letter in enumerate(edit.anchor) if letter.isalnum())
            cut = at + last + 1
            broken = text[:cut] + "0" + text[cut:]
            if edit.path.endswith(".py"):
                ast.parse(broken)
            return OverlayTree(tree, {edit.path: broken.encode()})
    raise AssertionError(f"{edit.label}: its anchor is not in {edit.path}")


class Recorder(OverlayTree):
    """A tree that remembers which files were read."""

    def __init__(self, base: Tree) -> None:
        super().__init__(base, {})
        self.seen: set[str] = set()

    def read(self, path: str) -> bytes:
        self.seen.add(path)
        return super().read(path)


class PatchContract:
    """The tests that each patch shares.

    Attributes:
        name: the patch.
        versions: releases that a variant covers.
        upstream_fix: what upstream might have written instead.
    """

    name: ClassVar[str]
    versions: ClassVar[tuple[str, ...]] = VERSIONS
    upstream_fix: ClassVar[tuple[Change, ...]]

    @property
    def patch(self) -> Patch:
        return series_of(self.name).patch(self.name)

    def test_pristine_tree_needs_it(self, real_tree: Callable[[str], Tree], version: str) -> None:
        tree = real_tree(version)
        assert self.patch.absorbed is not None
        asked = {
            kind: ask(probe, tree).outcome
            for kind, probe in (
                ("reason", self.patch.reason),
                ("effect", self.patch.effect),
                ("absorbed", self.patch.absorbed),
            )
        }
        assert asked == {
            "reason": Outcome.HOLDS,
            "effect": Outcome.FAILS,
            "absorbed": Outcome.FAILS,
        }

    def test_applies_and_has_its_effect(
        self, real_tree: Callable[[str], Tree], version: str
    ) -> None:
        tree = real_tree(version)
        evaluation = run(self.name, tree)
        report = evaluation.reports[-1]
        assert (report.verdict, report.findings) == (Verdict.OK, self.notes(report.findings))
        after = OverlayTree(tree, evaluation.files)
        assert ask(self.patch.effect, after).outcome is Outcome.HOLDS
        variants = [variant_of(patch, tree) for patch in series_of(self.name).patches]
        expected = {edit.path for variant in variants for edit in variant.edits}
        expected |= {file.path for variant in variants for file in variant.files}
        assert evaluation.files.keys() == expected
        for path, data in evaluation.files.items():
            if path.endswith(".py"):
                compile(data, path, "exec", dont_inherit=True)

    @staticmethod
    def notes(findings: list[Any]) -> list[Any]:
        return [finding for finding in findings if finding.code == "note"]

    def test_probes_name_the_files_that_they_read(
        self, real_tree: Callable[[str], Tree], version: str
    ) -> None:
        assert self.patch.absorbed is not None
        tree = patched(self.name, real_tree(version))
        for probe in (self.patch.reason, self.patch.effect, self.patch.absorbed, *self.patch.notes):
            recorder = Recorder(tree)
            assert ask(probe, recorder).outcome is not Outcome.UNKNOWN
            assert recorder.seen == set(probe.paths), probe.claim

    def test_second_run_finds_it_applied(
        self, real_tree: Callable[[str], Tree], version: str
    ) -> None:
        tree = real_tree(version)
        variant = variant_of(self.patch, tree)
        again = Workspace(patched(self.name, tree))
        reports = again.run(self.patch, variant, series_of(self.name).new_files(variant))
        assert {report.state for report in reports} == {State.APPLIED}
        assert again.changed() == {}

    def test_each_changed_anchor_is_drift(
        self, real_tree: Callable[[str], Tree], version: str
    ) -> None:
        tree = real_tree(version)
        for edit in variant_of(self.patch, tree).edits:
            workspace = Workspace(damaged(tree, edit))
            reports = workspace.run(self.patch, variant_of(self.patch, tree), {})
            found = {report.label: report.state for report in reports}
            assert found.pop(edit.label) is State.DRIFTED, edit.label
            assert set(found.values()) <= {State.PENDING}, edit.label
            assert workspace.changed() == {}

    def test_absorbed_once_upstream_fixes_it(
        self, real_tree: Callable[[str], Tree], version: str
    ) -> None:
        tree = changed(real_tree(version), self.upstream_fix)
        report = run(self.name, tree).reports[-1]
        assert report.verdict is Verdict.ABSORBED
        assert not report.declared
        assert ask(self.patch.reason, tree).outcome is not Outcome.HOLDS


class _Anything:
    """Base class whose initialiser takes all arguments."""

    def __init__(self, *args: object, **words: object) -> None:
        self.super_arguments = (args, words)


def extract(
    tree: Tree, path: str, scope: str, names: Mapping[str, Any], also: tuple[str, ...] = ()
) -> Any:
    """Compiles one function or method of a file and returns it, or the class that holds it.

    Args:
        tree: where the file is.
        path: the file.
        scope: "function" or "Class.method"; decorators are left out.
        names: globals that it sees.
        also: module-level functions that it needs beside these.
    """
    module = ast.parse(tree.read(path))
    body: list[ast.stmt] = [
        ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    ]
    for name in (*also, scope):
        found = find(module, name)
        assert isinstance(found, ast.FunctionDef), name
        found.decorator_list = []
        owner, _, _method = name.rpartition(".")
        body.append(
            ast.ClassDef(
                name=owner, bases=[ast.Name("_Anything", ast.Load())], keywords=[],
                body=[found], decorator_list=[],
            )
            if owner
            else found
        )  # fmt: skip
    for node in body:
        if isinstance(node, ast.ClassDef):
            node.type_params = []  # a field that 3.12 and later want
    tree_of_it = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    namespace: dict[str, Any] = {"__builtins__": builtins, "_Anything": _Anything, **names}
    exec(compile(tree_of_it, path, "exec", dont_inherit=True), namespace)
    return namespace[scope.rpartition(".")[0] or scope]
