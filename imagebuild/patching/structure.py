"""Finds things in Python sources of a tree by structure: definitions, calls, assignments, defaults.

Probes are built from these, so that they answer for the code and not for our own text in it.
Nothing here imports or runs what it reads.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from imagebuild.patching.tree import Tree

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


class NotThere(Exception):  # noqa: N818 - it says what was found, nothing failed
    """What a probe asked about is not in the source; the engine reports it as UNKNOWN."""


@functools.lru_cache(maxsize=256)
def _parse(source: bytes, path: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NotThere(f"{path} is not Python that this interpreter can read: {error}") from error


def parse(tree: Tree, path: str) -> ast.Module:
    """The syntax tree of one file; equal content is parsed once, so callers must not change it.

    Raises:
        FileNotFoundError: the tree has no such file.
        NotThere: it cannot be parsed.
    """
    return _parse(tree.read(path), path)


def forget() -> None:
    """Drops the syntax trees that are kept."""
    _parse.cache_clear()


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that belongs to a block, with those nested in if, try, with and loops.

    Bodies of functions and classes are their own scopes and stay closed.
    """
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from statements(case.body)


def find(module: ast.Module, scope: str) -> Definition | None:
    """The class or function that `scope` ("Class.method") names; the last one where it recurs."""
    body: list[ast.stmt] = module.body
    found: Definition | None = None
    for name in scope.split("."):
        found = None
        for statement in statements(body):
            if isinstance(statement, Definition) and statement.name == name:
                found = statement
        if found is None:
            return None
        body = found.body
    return found


def definition(tree: Tree, path: str, scope: str) -> Definition:
    """Like `find`, for a file of a tree.

    Raises:
        NotThere: nothing of that name is defined there.
    """
    found = find(parse(tree, path), scope)
    if found is None:
        raise NotThere(f"{path} defines no {scope}")
    return found


def function(tree: Tree, path: str, scope: str) -> Function:
    """Like `definition`, for what must be a function."""
    found = definition(tree, path, scope)
    if isinstance(found, ast.ClassDef):
        raise NotThere(f"{scope} in {path} is a class, expected a function")
    return found


def dotted(node: ast.AST | None) -> str:
    """The text of a plain name or attribute chain ("torch.cuda.empty_cache"), else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        # A chain that starts at a call or subscript still has a last name: f(x).view(y).
        return dotted(call.func) or f"?.{call.func.attr}"
    return dotted(call.func)


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of `name` below `node` in source order; `name` may leave out leading parts."""
    found = [
        child
        for child in ast.walk(node)
        if isinstance(child, ast.Call)
        and (_called(child) == name or _called(child).endswith(f".{name}"))
    ]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def only_call(node: ast.AST, name: str) -> ast.Call:
    """The one call of `name` below `node`.

    Raises:
        NotThere: there is none, or there are several.
    """
    found = calls(node, name)
    if len(found) != 1:
        raise NotThere(f"expected one call of {name}, found {len(found)}")
    return found[0]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument, or None."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def argument(call: ast.Call, callee: Function, name: str, *, bound: bool = True) -> ast.expr:
    """What `call` passes for the parameter `name` of `callee`.

    Args:
        call: the call.
        callee: the function it calls, for the parameter's position.
        name: the parameter.
        bound: whether the call leaves out the first parameter (self, cls).

    Raises:
        NotThere: the call passes nothing for it, or hides it behind a star.
    """
    given = keyword(call, name)
    if given is not None:
        return given
    names = [item.arg for item in (*callee.args.posonlyargs, *callee.args.args)]
    position = names.index(name) - bound if name in names else -1
    stars = any(isinstance(item, ast.Starred) for item in call.args[: position + 1])
    if not 0 <= position < len(call.args) or stars:
        raise NotThere(f"the call at line {call.lineno} passes nothing readable for {name}")
    return call.args[position]


def parameters(callee: Function) -> dict[str, ast.expr | None]:
    """Parameter names in order, each with its default or None."""
    positional = [*callee.args.posonlyargs, *callee.args.args]
    gap = len(positional) - len(callee.args.defaults)
    defaults: list[ast.expr | None] = [*([None] * gap), *callee.args.defaults]
    found = {item.arg: value for item, value in zip(positional, defaults, strict=True)}
    for item, value in zip(callee.args.kwonlyargs, callee.args.kw_defaults, strict=True):
        found[item.arg] = value
    return found


def parameter_default(callee: Function, name: str) -> ast.expr:
    """The default value of one parameter.

    Raises:
        NotThere: there is no such parameter, or it has no default.
    """
    default = parameters(callee).get(name)
    if default is None:
        raise NotThere(f"{callee.name} has no parameter {name} with a default")
    return default


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return [statement.target]
    return []


def assignments(scope: Definition | ast.Module, name: str) -> list[ast.stmt]:
    """Statements of `scope` that bind `name` (a name or a chain such as self.x) to a value."""
    return [
        statement
        for statement in statements(scope.body)
        if any(dotted(target) == name for target in _targets(statement))
    ]


def assigned(scope: Definition | ast.Module, name: str) -> list[ast.expr]:
    """The values that `scope` binds to `name`, in source order."""
    values = [getattr(statement, "value", None) for statement in assignments(scope, name)]
    return [value for value in values if isinstance(value, ast.expr)]


def resolve(scope: Definition | ast.Module, node: ast.expr, depth: int = 8) -> ast.expr:
    """Follows a local name to the expression that it was bound to, if that is only one."""
    while isinstance(node, ast.Name) and depth:
        values = assigned(scope, node.id)
        if len(values) != 1:
            break
        node, depth = values[0], depth - 1
    return node


def returned(callee: Function) -> ast.expr:
    """The expression of the only return statement of a function.

    Raises:
        NotThere: it has none, or several.
    """
    found = [
        statement.value
        for statement in statements(callee.body)
        if isinstance(statement, ast.Return) and statement.value is not None
    ]
    if len(found) != 1:
        raise NotThere(f"{callee.name} has {len(found)} return values, expected one")
    return found[0]


def bases(node: ast.ClassDef) -> list[str]:
    """Names of the base classes, subscripts left out (`Base[T]` is Base)."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [dotted(base) for base in plain]


def imports(module: ast.Module) -> dict[str, str]:
    """Names that a module's own imports bind, each with the dotted name it stands for."""
    found: dict[str, str] = {}
    for statement in statements(module.body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                plain = alias.name.partition(".")[0]
                found[alias.asname or plain] = alias.name if alias.asname else plain
        elif isinstance(statement, ast.ImportFrom):
            origin = "." * statement.level + (statement.module or "")
            for alias in statement.names:
                found[alias.asname or alias.name] = f"{origin}.{alias.name}"
    return found


def module_names(module: ast.Module) -> set[str]:
    """Every name that a module binds at its top level."""
    found = set(imports(module))
    for statement in statements(module.body):
        if isinstance(statement, Definition):
            found.add(statement.name)
        found |= {dotted(target) for target in _targets(statement)}
    return found - {""}


def table(scope: Definition | ast.Module, name: str) -> dict[str, ast.expr]:
    """The string keys of the dict that is bound to `name`, each with its value.

    Raises:
        NotThere: `name` is not bound to a dict display.
    """
    for value in assigned(scope, name):
        if isinstance(value, ast.Dict):
            return {
                key.value: item
                for key, item in zip(value.keys, value.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
    raise NotThere(f"nothing binds {name} to a dict display")
