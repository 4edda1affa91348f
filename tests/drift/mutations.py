"""Changes that upstream might make to a real file, chosen by a seed: the kinds of docs/audit.md.

Each mutator gets a target and a source of chance, and gives the files that it changes, or None when
the target has nothing of that kind. What it gives is Python that parses.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from imagebuild.patching import text as source
from imagebuild.patching.patch import Symbol, Variant
from imagebuild.patching.structure import Definition, Function, calls, dotted, find, parameters
from imagebuild.patching.text import Span
from imagebuild.patching.tree import Tree

Files = dict[str, str]
Mutator = Callable[["Target", random.Random], "Files | None"]
_FLIPS = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


@dataclass(frozen=True)
class Target:
    """What is to be changed.

    Attributes:
        tree: the release.
        variant: the patch's shape on it.
        symbol: the scope to change: one that is edited, or that the patch relies on.
    """

    tree: Tree
    variant: Variant
    symbol: Symbol

    @property
    def text(self) -> str:
        return self.tree.read(self.symbol.path).decode()

    @property
    def span(self) -> Span:
        return source.scope_spans(self.text, self.symbol.path, self.symbol.scope)[0]

    @property
    def node(self) -> Definition | None:
        """The scope's definition; None for C++ and whole files."""
        if not self.symbol.scope or not self.symbol.path.endswith(".py"):
            return None
        return find(_parsed(self.text), self.symbol.scope)

    @property
    def function(self) -> Function | None:
        node = self.node
        return None if isinstance(node, ast.ClassDef) else node

    def anchors(self) -> list[Span]:
        """Where the patch's edits match in the file."""
        found = []
        for edit in self.variant.edits:
            if edit.path == self.symbol.path:
                spans = source.scope_spans(self.text, edit.path, edit.scope)
                starts = source.find_all(self.text, edit.anchor, spans)
                found += [Span(at, at + len(edit.anchor)) for at in starts]
        return found

    def changed(self, edits: list[tuple[int, int, str]]) -> Files | None:
        """The file with some ranges replaced, when it still parses."""
        text = self.text
        for start, stop, put in sorted(edits, reverse=True):
            text = text[:start] + put + text[stop:]
        if text == self.text or not parses(self.symbol.path, text):
            return None
        return {self.symbol.path: text}

    def offset(self, line: int, column: int = 0) -> int:
        """Offset of a place in `ast`'s lines and columns (the files are ASCII where it matters)."""
        return source._line_starts(self.text)[line - 1] + column

    def where(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def parses(path: str, text: str) -> bool:
    if not path.endswith(".py"):
        return True
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def rename(target: Target, _chance: random.Random) -> Files | None:
    """The scope has another name, in its file as a whole."""
    name = target.symbol.scope.rpartition(".")[2]
    if not name or name == "__init__":
        return None
    text = re.sub(rf"\b{re.escape(name)}\b", f"{name}_v2", target.text)
    return {target.symbol.path: text} if parses(target.symbol.path, text) else None


def move(target: Target, _chance: random.Random) -> Files | None:
    """The top-level definition went to a new file beside this one, which imports it."""
    top = target.symbol.scope.partition(".")[0]
    if target.node is None:
        return None
    span = source.scope_spans(target.text, target.symbol.path, top)[0]
    folder, _, name = target.symbol.path.rpartition("/")
    module = f"{name.removesuffix('.py')}_impl"
    body = target.text[span.start : span.stop]
    rest = f"from .{module} import {top}  # noqa\n"
    files = {
        target.symbol.path: target.text[: span.start] + rest + target.text[span.stop :],
        f"{folder}/{module}.py": f"from .{name.removesuffix('.py')} import *\n\n\n{body}",
    }
    return files if all(parses(path, text) for path, text in files.items()) else None


def reindent(target: Target, _chance: random.Random) -> Files | None:
    """The body stands one level deeper, under a condition."""
    node = target.function
    if node is None:
        return None
    start, stop = target.offset(node.body[0].lineno), target.span.stop
    body = target.text[start:stop]
    if '"""' in body or "'''" in body:
        first = node.body[0]
        is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if not is_doc or len(node.body) < 2:
            return None
        start = target.offset(node.body[1].lineno)
        body = target.text[start:stop]
        if '"""' in body or "'''" in body:
            return None
    margin = " " * (node.body[0].col_offset)
    deeper = "".join(f"    {ln}" if ln.strip() else ln for ln in body.splitlines(keepends=True))
    return target.changed([(start, stop, f"{margin}if torch_is_there():\n{deeper}")])


def decorate(target: Target, chance: random.Random) -> Files | None:
    """The scope got a decorator."""
    node = target.node
    if node is None:
        return None
    name = chance.choice(["functools.cache", "torch.inference_mode()", "deprecated", "traced"])
    at = target.offset(node.lineno)
    return target.changed([(at, at, " " * node.col_offset + f"@{name}\n")])


def reorder(target: Target, chance: random.Random) -> Files | None:
    """Two parameters changed places."""
    node = target.function
    if node is None:
        return None
    plain = [item for item in node.args.args if item.arg not in ("self", "cls")]
    first = len(plain) - len(node.args.defaults)
    pairs = [*itertools.pairwise(plain[:first])]
    if not pairs:
        return None
    one, other = chance.choice(pairs)
    spans = [target.where(item) for item in (one, other)]
    texts = [target.text[a:b] for a, b in spans]
    return target.changed([(*spans[0], texts[1]), (*spans[1], texts[0])])


def default(target: Target, chance: random.Random) -> Files | None:
    """A parameter has another default."""
    node = target.function
    if node is None:
        return None
    anchors = target.anchors()
    found = [
        value
        for value in parameters(node).values()
        if value is not None and not _inside(Span(*target.where(value)), anchors)
    ]
    if not found:
        return None
    value = chance.choice(found)
    was = target.text[slice(*target.where(value))]
    now = {"None": "0", "True": "False", "False": "True"}.get(was, f"({was}, )[-1] or 1")
    return target.changed([(*target.where(value), now)])


def uncalled(target: Target, chance: random.Random, symbols: list[Symbol]) -> Files | None:
    """One of these callers no longer calls the scope: the call is a None."""
    name = target.symbol.scope.rpartition(".")[2]
    if not name or name.startswith("__"):
        name = target.symbol.scope.rpartition(".")[0]
    if not name:
        return None
    found: list[tuple[Target, ast.expr]] = []
    for symbol in symbols:
        caller = Target(target.tree, target.variant, symbol)
        node = caller.node
        if node is None or symbol == target.symbol:
            continue
        found += [(caller, call) for call in calls(node, name)]
        # A kernel is launched as f[grid](...).
        launched = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
        subscripts = [part for part in launched if isinstance(part, ast.Subscript)]
        found += [(caller, one) for one in subscripts if dotted(one.value) == name]
    if not found:
        return None
    caller, call = chance.choice(found)
    return caller.changed([(*caller.where(call), "None")])


def callers_named(target: Target, chance: random.Random) -> Files | None:
    """A caller that the patch relies on no longer calls the scope."""
    return uncalled(target, chance, list(target.variant.relies_on))


def callers_of_the_file(target: Target, chance: random.Random) -> Files | None:
    """A function of the same file, which the patch does not name, no longer calls the scope."""
    path = target.symbol.path
    if not path.endswith(".py"):
        return None
    known = {*target.variant.relies_on, target.symbol}
    known |= {Symbol(edit.path, edit.scope) for edit in target.variant.edits}
    scopes = source.scopes(target.text, "python")
    others = [Symbol(path, name) for name, spans in scopes.items() if len(spans) == 1]
    outer = [one for one in others if not any(_holds(one, other) for other in known)]
    if Symbol(path) in known:
        return None
    return uncalled(target, chance, outer)


def _holds(one: Symbol, other: Symbol) -> bool:
    """Whether one of the two lies in the other."""
    a, b = f"{one.scope}.", f"{other.scope}."
    return one.path == other.path and (a.startswith(b) or b.startswith(a))


def semantic(target: Target, chance: random.Random) -> Files | None:
    """A comparison, a number or a condition of the scope is another one, beside the anchors."""
    anchors = target.anchors()
    found = [one for one in _changes(target) if not _inside(Span(one[0], one[1]), anchors)]
    chance.shuffle(found)
    for one in found[:8]:
        files = target.changed([one])
        if files:
            return files
    return None


def _changes(target: Target) -> Iterator[tuple[int, int, str]]:
    span = target.span
    if not target.symbol.path.endswith(".py"):
        for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", target.text[span.start : span.stop]):
            start = span.start + match.start()
            line = target.text[target.text.rfind("\n", 0, start) + 1 : start]
            if "//" not in line and "*" not in line.lstrip()[:1]:
                yield start, span.start + match.end(), str(int(match.group()) + 1)
        return
    node = target.node or _parsed(target.text)
    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and len(part.ops) == 1:
            start = target.where(part.left)[1]
            stop = target.where(part.comparators[0])[0]
            between = target.text[start:stop]
            sign = between.strip()
            if sign in _FLIPS:
                yield start, stop, between.replace(sign, _FLIPS[sign])
        elif isinstance(part, ast.Constant) and type(part.value) is int:
            start, stop = target.where(part)
            yield start, stop, str(part.value + 1)
        elif isinstance(part, ast.If):
            start, stop = target.where(part.test)
            yield start, stop, f"not ({target.text[start:stop]})"
        elif isinstance(part, ast.Return) and part.value is not None:
            start, stop = target.where(part.value)
            yield start, stop, f"wrapped({target.text[start:stop]})"


def _inside(span: Span, others: list[Span]) -> bool:
    return any(span.overlaps(other) for other in others)


def rebind(target: Target, chance: random.Random) -> Files | None:
    """The name is bound to something else at the end of the file, or taken from elsewhere."""
    scope = target.symbol.scope
    if target.node is None:
        return None
    top = scope.partition(".")[0]
    puts = [f"\n{scope} = optimised({scope})\n", f"\nfrom .fast import {top}\n",
            f"\nif FAST:\n    {top} = None\n"]  # fmt: skip
    if isinstance(find(_parsed(target.text), top), Function):
        puts.append(f"\n\ndef {top}(*args, **kwargs):\n    return None\n")
    end = len(target.text)
    return target.changed([(end, end, chance.choice(puts))])


def origin(target: Target, chance: random.Random) -> Files | None:
    """A name that the scope uses is imported from another module."""
    node = target.node
    if node is None:
        return None
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    found = [
        one
        for one in _parsed(target.text).body
        if isinstance(one, ast.ImportFrom) and used & {a.asname or a.name for a in one.names}
    ]
    if not found:
        return None
    one = chance.choice(found)
    start, stop = target.where(one)
    was = target.text[start:stop]
    return target.changed([(start, stop, was.replace(" import", "_next import", 1))])


def attribute(target: Target, chance: random.Random) -> Files | None:
    """The class gives another value to an attribute that the method reads."""
    node, outer = target.function, target.symbol.scope.rpartition(".")[0]
    owner = find(_parsed(target.text), outer) if node and outer else None
    if node is None or not isinstance(owner, ast.ClassDef):
        return None
    reads = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
             and dotted(part.value) in ("self", "cls", owner.name)}  # fmt: skip
    found = [
        one.value
        for one in owner.body
        if isinstance(one, ast.Assign | ast.AnnAssign)
        and one.value is not None
        and reads & {dotted(to) for to in getattr(one, "targets", None) or [one.target]}  # type: ignore[union-attr]
    ]
    if not found:
        return None
    value = chance.choice(found)
    was = target.text[slice(*target.where(value))]
    return target.changed([(*target.where(value), f"other({was})")])


def comment(target: Target, _chance: random.Random) -> Files | None:
    """Comments and blank lines in the scope, none of them in an anchor."""
    if not target.symbol.path.endswith(".py"):
        at = target.span.start
        return target.changed([(at, at, "// one more line\n\n")])
    node = target.node
    if node is None or not node.body:
        return None
    at = target.offset(min([node.lineno, *(d.lineno for d in node.decorator_list)]))
    return target.changed([(at, at, "# One more line.\n")])


def unrelated(target: Target, _chance: random.Random) -> Files | None:
    """One more function at the end of the file, which nobody calls."""
    whole = {Symbol(edit.path, edit.scope) for edit in target.variant.edits}
    whole |= {*target.variant.relies_on}
    if target.node is None or Symbol(target.symbol.path) in whole:
        return None
    end = len(target.text)
    return target.changed([(end, end, "\n\ndef one_more_helper(x):\n    return x + 1\n")])


# Every case of these changes the scope, what it stands on, or who calls it.
CHANGES: dict[str, Mutator] = {
    "rename": rename,
    "move to another file": move,
    "reindent": reindent,
    "decorator": decorate,
    "order of arguments": reorder,
    "default": default,
    "semantic, anchors intact": semantic,
    "name bound elsewhere": rebind,
    "import from elsewhere": origin,
    "attribute of the class": attribute,
    "named caller gone": callers_named,
    "other caller of the file gone": callers_of_the_file,
}
NEUTRAL: dict[str, Mutator] = {"comment": comment, "unrelated function": unrelated}
