"""Imports every patched module, and the modules of the tree that import one of them.

A broken edit often compiles and dies when it is imported, or takes a name away that another module
imports. Importers are found by reading the tree, one step far: further out everything imports
everything, and what a patch breaks shows in the first step.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from imagebuild.deep.base import About, require, tree

ABOUT = About(
    claim="every patched module imports, and so does every module that imports one",
    seconds=600,
)
MANIFEST = Path(".imagebuild") / "manifest.json"


def probe() -> str:
    """Imports them all, and counts those that this environment cannot import."""
    root = tree()
    patched = patched_modules(root)
    require(bool(patched), "the tree has no manifest that names a patched module")
    faults: list[str] = []
    missing: list[str] = []
    around = importers(root, patched)
    for name in [*patched, *around]:
        kind, why = _import(name, patched)
        if kind == "fault":
            faults.append(f"{name}: {why}")
        elif kind == "missing":
            missing.append(f"{name.rpartition('.')[2]} ({why})")
    require(not faults, f"{len(faults)} modules fail: {'; '.join(faults[:3])}")
    lacking = f"; not importable here: {', '.join(missing)}" if missing else ""
    done = len(around) - len(missing)
    return f"{len(patched)} patched modules and {done} of {len(around)} importers{lacking}"


def patched_modules(root: Path) -> list[str]:
    """Names of the Python modules that the manifest says were changed or added."""
    try:
        files = json.loads((root / MANIFEST).read_text("utf-8"))["files"]
    except FileNotFoundError:
        return []
    return sorted(_name_of(path) for path in files if path.endswith(".py"))


def importers(root: Path, targets: list[str]) -> list[str]:
    """Modules of the tree that import one of `targets` at their top level, sorted."""
    wanted = set(targets)
    words = re.compile("|".join(sorted({re.escape(t.rpartition(".")[2]) for t in wanted})).encode())
    packages = sorted({name.partition(".")[0] for name in wanted})
    found = set()
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            name = _name_of(relative)
            data = path.read_bytes()
            if name in wanted or not words.search(data):
                continue
            is_package = path.name == "__init__.py"
            if wanted & set(_imported(ast.parse(data), name, is_package=is_package)):
                found.add(name)
    return sorted(found)


def _name_of(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(module: ast.Module, name: str, *, is_package: bool) -> Iterator[str]:
    """Every module that importing this one imports; functions and type checks do not count."""
    for node in _at_import(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            above = name.split(".")[: -(node.level - is_package) or None]
            base = ".".join([*above, *([base] if base else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _at_import(scope: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(node)


def _import(name: str, patched: Collection[str]) -> tuple[str, str]:
    """Says "ok", "missing" with what this environment lacks, or "fault" with the error.

    Upstream has modules that need Ray, a card or a library that is not here. They are a fault
    only where they are patched, or where the error leads to a patched module.
    """
    try:
        importlib.import_module(name)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = {str(vars(module).get("__file__")) for module in map(sys.modules.get, patched)
                if module is not None}  # fmt: skip
        if name in patched or last in ours or any(one in str(error) for one in patched):
            return "fault", repr(error)[:300]
        lacking = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        return "missing", (lacking or type(error).__name__).partition(".")[0]
    return "ok", ""
