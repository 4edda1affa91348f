"""Where the text of an edit may be now: near lines, or the function under another name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from imagebuild.audit.results import EditCandidates, Near
from imagebuild.patching import lexer
from imagebuild.patching import text as source
from imagebuild.patching.patch import Edit
from imagebuild.patching.text import Span
from imagebuild.patching.tree import Tree

COUNT = 4  # candidates a person is shown for one edit
MAX_FILES = 60  # that are searched, those of the same name and folder first
LIKE_LINES, LIKE_FUNCTION = 0.55, 0.6  # similarity from which a place is worth a look
_WORD = re.compile(r"[A-Za-z_]\w{3,}")
_SHORT = 12  # tokens; so short a function is like too many others


def candidates(tree: Tree, reference: Tree | None, edit: Edit) -> EditCandidates:
    """The best places for one edit, most alike first.

    Args:
        tree: the release.
        reference: the locked base, where the function is as it was; None looks at lines alone.
        edit: one that found no anchor in its scope.
    """
    found = list(_by_lines(tree, edit))
    if reference is not None and edit.scope:
        found += _by_function(tree, reference, edit)
    best: dict[tuple[str, int], Near] = {}
    for near in sorted(found, key=lambda one: -one.similarity):
        best.setdefault((near.path, near.line), near)
    return EditCandidates(edit.label, edit.path, edit.scope, tuple(best.values())[:COUNT])


def _by_lines(tree: Tree, edit: Edit) -> Iterator[Near]:
    """The lines of each file that look most like the anchor."""
    words = set(_WORD.findall(edit.anchor))
    for path, text in _files(tree, edit.path):
        # A file without half of the anchor's words cannot hold it; comparing lines is slow.
        if path != edit.path and 2 * sum(word in text for word in words) < len(words):
            continue
        near = source.nearest(text, path, edit.anchor, (Span(0, len(text)),))
        if near is None or near.similarity < LIKE_LINES:
            continue
        scope = _scope_at(text, path, near.line)
        yield Near(**vars(near), scope=scope, why="the lines are alike")


def _by_function(tree: Tree, reference: Tree, edit: Edit) -> Iterator[Near]:
    """Functions whose tokens are like those of the edited one, under any name."""
    wanted = _tokens_of(reference, edit)
    if wanted.total() < _SHORT:
        return
    for path, text in _files(tree, edit.path):
        if source.language(path) != source.language(edit.path):
            continue
        for scope, spans in _scopes(text, path).items():
            if (path, scope) == (edit.path, edit.scope):
                continue
            alike = _alike(wanted, _counted("".join(text[s.start : s.stop] for s in spans), path))
            if alike < LIKE_FUNCTION:
                continue
            near = source.nearest(text, path, edit.anchor, spans)
            line = near.line if near else source.line_of(text, spans[0].start)
            shown = near.text if near else text[spans[0].start :].split("\n", 1)[0]
            yield Near(path, line, round(alike, 3), shown, scope,
                       f"{scope} is like {edit.scope} was")  # fmt: skip


def _files(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    """The file itself, its namesakes and its neighbours, as text."""
    folder, _, name = path.rpartition("/")
    suffix = name[name.rfind(".") :]
    beside = [p for p in tree.iter(folder + "/") if p.endswith(suffix)]
    near = [p for p in beside if "/" not in p[len(folder) + 1 :]]
    top = path.partition("/")[0] + "/"
    namesakes = [p for p in tree.iter(top) if p.endswith("/" + name)]
    parents = [p for p in beside if p not in near]
    paths = list(dict.fromkeys([path, *namesakes, *near, *parents]))[:MAX_FILES]
    there = [p for p in paths if tree.exists(p)]
    tree.prefetch(there)
    for one in there:
        try:
            yield one, source.decode(tree.read(one)).text
        except source.TextError:
            continue


def _scopes(text: str, path: str) -> dict[str, tuple[Span, ...]]:
    try:
        return source.scopes(text, source.language(path))
    except source.TextError:
        return {}


def _scope_at(text: str, path: str, line: int) -> str:
    """The innermost scope around a line, "" at the top level."""
    around = [
        (span.stop - span.start, scope)
        for scope, spans in _scopes(text, path).items()
        for span in spans
        if source.line_of(text, span.start) <= line <= source.line_of(text, max(0, span.stop - 1))
    ]
    return min(around)[1] if around else ""


def _tokens_of(reference: Tree, edit: Edit) -> Counter[str]:
    try:
        text = source.decode(reference.read(edit.path)).text
        spans = source.scope_spans(text, edit.path, edit.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return Counter()
    return _counted("".join(text[span.start : span.stop] for span in spans), edit.path)


def _counted(text: str, path: str) -> Counter[str]:
    lex = lexer.python_tokens if source.language(path) == "python" else lexer.cpp_tokens
    return Counter(lex(text))


def _alike(one: Counter[str], other: Counter[str]) -> float:
    """Twice the common tokens by all tokens; the order does not count."""
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 0.0
