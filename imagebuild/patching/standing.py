"""What a scope stands on: all in its file, outside of its own text, that decides what it does.

A definition may be untouched and yet be dead: its name is bound again below it, it stands under a
condition, a subclass overrides it, or its class got another base. Or the names that it uses come
from elsewhere. Fingerprints take this in. It reads one file and decides nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from imagebuild.patching import lexer
from imagebuild.patching.structure import Definition, bases, dotted, imports

# Tokens of one thing that a scope stands on; the first says what it is.
Clause = list[str]
# A statement, and the tokens of the conditions that it stands under.
_Placed = tuple[ast.stmt, tuple[str, ...]]
_BLOCKS = ("body", "orelse", "finalbody")
_OPENING = ("if", "ifdef", "ifndef")
_TURNING = ("elif", "else", "elifdef", "elifndef")


def python_standing(text: str, module: ast.Module, scope: str) -> Iterator[Clause]:
    """Yields what `scope` stands on.

    Args:
        text: the source, without a byte order mark.
        module: its syntax tree.
        scope: such as `Class.method`.
    """
    parts = scope.split(".")
    body = module.body
    owners: list[Definition] = []
    found: list[Definition] = []
    for depth, name in enumerate(parts):
        owners, found = found, []
        for statement, conditions in _placed(text, body):
            if isinstance(statement, Definition) and statement.name == name:
                found.append(statement)
                if conditions:
                    yield ["<under>", *conditions]
                if depth < len(parts) - 1:
                    yield ["<in>", *_head(text, statement)]
            elif not {name, "*"}.isdisjoint(_bound(statement)):
                yield ["<bound>", *conditions, *_tokens(text, statement)]
        body = [statement for one in found for statement in one.body]
    if len(parts) > 1:
        yield from _from_outside(text, module, parts)
        yield from _overrides(text, module, parts)
        yield from _attributes(text, owners, found)
    yield from _used(text, module, found)


def cpp_standing(text: str, starts: list[int]) -> Iterator[Clause]:
    """Yields the preprocessor conditions that the definitions at these offsets stand under."""
    stack: list[list[str]] = []
    line: list[str] | None = None
    wanted = sorted(starts)
    for token, at in lexer.cpp_spans(text):
        while wanted and at >= wanted[0]:
            wanted.pop(0)
            yield from (["<under>", *condition] for condition in stack)
        if line is None:
            line = [] if token == "#" else None
        elif token == lexer.NEWLINE:
            _turn(stack, line)
            line = None
        else:
            line.append(token)


def _turn(stack: list[list[str]], directive: list[str]) -> None:
    """Applies one preprocessor line to the conditions that are open."""
    word = directive[0] if directive else ""
    if word in _OPENING:
        stack.append(directive)
    elif word in _TURNING and stack:
        stack[-1] = [*stack[-1], *directive]
    elif word == "endif" and stack:
        stack.pop()


def _placed(text: str, body: list[ast.stmt], conditions: tuple[str, ...] = ()) -> Iterator[_Placed]:
    """Every statement of a scope, those in if, try, with and loops as well."""
    for statement in body:
        yield statement, conditions
        if isinstance(statement, Definition):
            continue
        blocks = {field: getattr(statement, field, []) for field in _BLOCKS}
        for number, part in enumerate(getattr(statement, "handlers", [])):
            blocks[f"except {number}"] = part.body
        for number, part in enumerate(getattr(statement, "cases", [])):
            blocks[f"case {number}"] = part.body
        if any(blocks.values()):
            kind = f"<{type(statement).__name__.lower()}>"
            head = (kind, *_head(text, statement)) if blocks["body"] else (kind,)
            for field, block in blocks.items():
                yield from _placed(text, block, (*conditions, *head, field))


def _head(text: str, statement: ast.stmt) -> list[str]:
    """Tokens of a compound statement up to its block: decorators, bases, condition."""
    first = getattr(statement, "body", [statement])[0]
    return _between(text, _start(statement), _start(first))


def _tokens(text: str, statement: ast.stmt) -> list[str]:
    start = _start(statement)
    stop = (statement.end_lineno or start[0], statement.end_col_offset or start[1])
    return _between(text, start, stop)


def _start(statement: ast.stmt) -> tuple[int, int]:
    """Where a statement begins; a decorator takes its line from the start."""
    decorators = getattr(statement, "decorator_list", [])
    first = min((one.lineno for one in decorators), default=0)
    return (first, 0) if first else (statement.lineno, statement.col_offset)


def _between(text: str, start: tuple[int, int], stop: tuple[int, int]) -> list[str]:
    """Tokens from one place to another, in `ast`'s lines and UTF-8 columns."""
    lines = [line.encode() for line in text.split("\n")[start[0] - 1 : stop[0]]]
    lines[-1] = lines[-1][: stop[1]]
    lines[0] = lines[0][start[1] :]
    return list(lexer.python_tokens(b"\n".join(lines).decode()))


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement by itself binds or deletes; a star import may bind any."""
    if isinstance(statement, Definition):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    own = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
    nodes = [node for one in own for node in ast.walk(one)]
    return {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _from_outside(text: str, module: ast.Module, parts: list[str]) -> Iterator[Clause]:
    """Statements of the module that set an attribute on the way: `Class.method = other`."""
    chains = {".".join(parts[:depth]) for depth in range(2, len(parts) + 1)}
    for statement, conditions in _placed(text, module.body):
        nodes = [statement] if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign) else []
        for node in (inner for one in nodes for inner in ast.walk(one)):
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            named = dotted(node) if stored else _set_by_call(node)
            if named in chains:
                yield ["<set>", *conditions, *_tokens(text, statement)]


def _set_by_call(node: ast.AST) -> str:
    """The chain that `setattr(Class, "method", other)` sets, else ""."""
    if isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) > 1:
        owner, name = node.args[:2]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return f"{dotted(owner)}.{name.value}"
    return ""


def _overrides(text: str, module: ast.Module, parts: list[str]) -> Iterator[Clause]:
    """Members of the same name in classes of the module that derive from the scope's class."""
    family = {".".join(parts[:-1])}
    for statement, conditions in _placed(text, module.body):
        if not isinstance(statement, ast.ClassDef):
            continue
        if family.isdisjoint(bases(statement)):
            continue
        family.add(statement.name)
        for member, inner in _placed(text, statement.body):
            if parts[-1] in _bound(member):
                where = ["<override>", *conditions, statement.name, *inner]
                yield [*where, *_tokens(text, member)]


def _attributes(text: str, owners: list[Definition], scopes: list[Definition]) -> Iterator[Clause]:
    """What the class gives to attributes that the scope reads: `self.LIMIT` of `LIMIT = 12`."""
    objects = {"self", "cls", *(owner.name for owner in owners)}
    read = {
        node.attr
        for scope in scopes
        for node in ast.walk(scope)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and dotted(node.value) in objects
    }
    for owner in owners:
        for statement, conditions in _placed(text, owner.body):
            plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
            if plain and not read.isdisjoint(_bound(statement)):
                yield ["<attribute>", *conditions, *_tokens(text, statement)]


def _used(text: str, module: ast.Module, scopes: list[Definition]) -> Iterator[Clause]:
    """Where the names that a scope reads come from: imports and constants of the module."""
    read = {
        node.id
        for scope in scopes
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    origins = imports(module)
    for name in sorted(read & origins.keys()):
        yield ["<import>", name, origins[name]]
    for statement, conditions in _placed(text, module.body):
        plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
        if plain and not read.isdisjoint(_bound(statement)):
            yield ["<constant>", *conditions, *_tokens(text, statement)]
