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
    paths = {symbol.path for symbol in (*edited, *variant.relies_on)}
    return sorted(
        f"{symbol}{ARROW}{caller}"
        for symbol in edited
        for path in paths
        for caller in _callers(tree, path, symbol)
    )


def lost_edges(tree: Tree, variant: Variant, known: list[str]) -> list[tuple[Symbol, str]]:
    """Of recorded entries, those that no longer hold: what is edited, and who used to name it."""
    edited = {str(symbol): symbol for symbol in (Symbol(e.path, e.scope) for e in variant.edits)}
    found: list[tuple[Symbol, str]] = []
    for entry in sorted(known):
        target, _, caller = entry.partition(ARROW)
        symbol = edited.get(target)
        if symbol is not None and caller not in {
            str(one) for one in _callers(tree, caller.partition("::")[0], symbol)
        }:
            found.append((symbol, caller))
    return found


def _callers(tree: Tree, path: str, symbol: Symbol) -> set[Symbol]:
    """The scopes of a file that name `symbol`, itself left out; the file alone at module level."""
    name = _called_as(symbol.scope)
    if not name or not path.endswith(".py"):
        return set()
    try:
        module = parse(tree, path)
    except (FileNotFoundError, NotThere):
        return set()
    own = symbol.scope if path == symbol.path else None
    return {
        Symbol(path, scope)
        for node, scope in _placed(module)
        if _names(node, name)
        and not (own is not None and (scope == own or scope.startswith(f"{own}.")))
    }


def _called_as(scope: str) -> str:
    """The word that a caller uses: a class for its __init__, nothing for other special methods."""
    *outer, last = scope.split(".")
    if last == "__init__" and outer:
        return outer[-1]
    return "" if last.startswith("__") else last


def _names(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)


def _placed(module: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node with the scope that it stands in."""
    todo: list[tuple[ast.AST, str]] = [(module, "")]
    while todo:
        node, scope = todo.pop()
        yield node, scope
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Definition):
                inner = f"{scope}.{child.name}" if scope else child.name
            todo.append((child, inner))
