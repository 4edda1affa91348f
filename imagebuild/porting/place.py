"""Finds where a scope of one release stands in another: in place, in another file, or renamed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from imagebuild.patching import text as source
from imagebuild.patching.text import Span
from imagebuild.patching.tree import Tree

# A scope of another name is taken for the same one from this likeness on, if no other is near it.
_ALIKE, _AHEAD = 0.6, 0.15


@dataclass(frozen=True)
class Place:
    """Where a scope is now.

    Attributes:
        path, scope: its place.
        text: the file.
        span: of the scope.
        note: how it differs from the old place, as a clause; "" when it is the same.
    """

    path: str
    scope: str
    text: str
    span: Span
    note: str = ""


def scope_text(tree: Tree, path: str, scope: str) -> str:
    """The text of a scope. Raises FileNotFoundError, ScopeMissingError and TextError."""
    text = source.decode(tree.read(path)).text
    return "".join(text[s.start : s.stop] for s in source.scope_spans(text, path, scope))


def find(tree: Tree, path: str, scope: str, old: str) -> Place | None:
    """Where the scope whose text was `old` stands in `tree`; None when nothing is surely it."""
    here = _at(tree, path, scope)
    if here or is_defined(tree, path, scope):
        return here
    others = list(_others(tree, path, scope, old))
    if len(others) == 1:
        return others[0]
    return _renamed(tree, path, scope, old) if scope and not others else None


def _at(tree: Tree, path: str, scope: str, note: str = "") -> Place | None:
    """The place, when the scope is defined there once."""
    try:
        text = source.decode(tree.read(path)).text
        spans = source.scope_spans(text, path, scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return None
    return Place(path, scope, text, spans[0], note) if len(spans) == 1 else None


def is_defined(tree: Tree, path: str, scope: str) -> bool:
    """Whether the scope is in its file, be it more than once."""
    try:
        return bool(scope_text(tree, path, scope))
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return False


def _others(tree: Tree, path: str, scope: str, old: str) -> Iterator[Place]:
    """The same scope in files of the folder or of the same name; for a whole file, its namesake."""
    for other in neighbours(tree, path):
        found = _at(tree, other, scope, f"moved from {path} to {other}")
        if found and (scope or (_is_namesake(path, other) and _likeness(found.text, old) > _ALIKE)):
            yield found


def _is_namesake(path: str, other: str) -> bool:
    return path.rpartition("/")[2] == other.rpartition("/")[2]


def neighbours(tree: Tree, path: str) -> list[str]:
    """Files of the folder, and files of the same name in the package, without the file itself."""
    folder, _, name = path.rpartition("/")
    suffix = name[name.rfind(".") :]
    beside = [p for p in tree.iter(folder + "/") if "/" not in p[len(folder) + 1 :]]
    namesakes = [p for p in tree.iter(path.partition("/")[0] + "/") if p.endswith("/" + name)]
    found = [p for p in dict.fromkeys([*namesakes, *beside]) if p.endswith(suffix) and p != path]
    tree.prefetch(found)
    return found


def _renamed(tree: Tree, path: str, scope: str, old: str) -> Place | None:
    """The scope of the same file that looks most like the old one, when it is far ahead."""
    try:
        text = source.decode(tree.read(path)).text
        scopes = source.scopes(text, source.language(path))
    except (FileNotFoundError, source.TextError):
        return None
    ranked = sorted(
        (
            (_likeness(text[spans[0].start : spans[0].stop], old), name, spans[0])
            for name, spans in scopes.items()
            if len(spans) == 1 and name.count(".") == scope.count(".")
        ),
        reverse=True,
    )
    ahead = ranked[0][0] - ranked[1][0] if len(ranked) > 1 else 1.0
    if not ranked or ranked[0][0] < _ALIKE or ahead < _AHEAD:
        return None
    likeness, name, span = ranked[0]
    note = f"{scope} is taken to be {name} now (likeness {likeness:.2f})"
    return Place(path, name, text, span, note)


def _likeness(one: str, other: str) -> float:
    matcher = difflib.SequenceMatcher(None, one.split("\n"), other.split("\n"), autojunk=False)
    if matcher.real_quick_ratio() < _ALIKE / 2:
        return 0.0
    return matcher.ratio()
