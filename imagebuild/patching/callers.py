"""Who calls what a patch edits, as far as the files go that the patch knows. It reads Python alone.

An edit may fit, in a scope that nobody touched, and yet do nothing: its last caller went. So the
lock keeps, beside the fingerprints, each place that names an edited function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from imagebuild.patching.patch import Symbol, Variant
from imagebuild.patching.structure import Definition, NotThere, parse
from imagebuild.patching.tree import Tree

ARROW = " <- "
CALLED = "called"  # what the lock says of such an entry, in the place of a digest


def edges_of(tree: Tree, variant: Variant) -> list[str]:
    """Entries "edited <- caller" for every place that names an edited function, sorted.

    Only the files are searched that the variant edits or relies on.
    """
    edited = {Symbol(edit.path, edit.scope) for edit in variant.edits}
    files = _Files(tree)
    return sorted(
        f"{symbol}{ARROW}{caller}"
        for path in {symbol.path for symbol in (*edited, *variant.relies_on)}
        for symbol in edited
        for caller in files.callers(path, symbol)
    )


def lost_edges(tree: Tree, variant: Variant, known: list[str]) -> list[tuple[Symbol, str]]:
    """Of recorded entries, those that no longer hold: what is edited, and who used to name it."""
    edited = {str(symbol): symbol for symbol in (Symbol(e.path, e.scope) for e in variant.edits)}
    files = _Files(tree)
    found: list[tuple[Symbol, str]] = []
    for entry in sorted(known):
        target, _, caller = entry.partition(ARROW)
        symbol = edited.get(target)
        path = caller.partition("::")[0]
        if symbol and caller not in {str(one) for one in files.callers(path, symbol)}:
            found.append((symbol, caller))
    return found


class _Files:
    """Who names what, by file; each file is gone through once."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._scopes: dict[str, dict[str, set[str]]] = {}

    def callers(self, path: str, symbol: Symbol) -> set[Symbol]:
        """The scopes of a file that name `symbol`, itself left out; the file at module level."""
        name = _called_as(symbol.scope)
        if not name or not path.endswith(".py"):
            return set()
        own = symbol.scope if path == symbol.path else None
        return {
            Symbol(path, scope)
            for scope in self._read(path).get(name, ())
            if own is None or not (scope == own or scope.startswith(f"{own}."))
        }

    def _read(self, path: str) -> dict[str, set[str]]:
        """The scopes in which each name or attribute of a file is read."""
        if path not in self._scopes:
            found = self._scopes[path] = {}
            try:
                module = parse(self._tree, path)
            except (FileNotFoundError, NotThere):
                return found
            for name, scope in _named(module):
                found.setdefault(name, set()).add(scope)
        return self._scopes[path]


def _called_as(scope: str) -> str:
    """The word that a caller uses: a class for its __init__, nothing for other special methods."""
    *outer, last = scope.split(".")
    if last == "__init__" and outer:
        return outer[-1]
    return "" if last.startswith("__") else last


def _named(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Every name and attribute that is read, with the scope that it stands in."""
    todo: list[tuple[ast.AST, str]] = [(module, "")]
    while todo:
        node, scope = todo.pop()
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield (node.id if isinstance(node, ast.Name) else node.attr), scope
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Definition):
                inner = f"{scope}.{child.name}" if scope else child.name
            todo.append((child, inner))
