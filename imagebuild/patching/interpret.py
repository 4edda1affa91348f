"""A small interpreter for upstream functions: what would this code choose, given these values?

It reads the syntax tree and runs nothing of the source. What it cannot know stays `Opaque`, and
deciding on something opaque raises `NotThere`, so that a probe answers UNKNOWN instead of guessing.
"""

# ruff: noqa: ANN401 - the values of upstream code have no type of ours

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from imagebuild.patching.structure import (
    Function,
    NotThere,
    assigned,
    dotted,
    find,
    imports,
    parameters,
    statements,
)

_BUILTINS: Mapping[str, Any] = MappingProxyType(
    {
        f.__name__: f
        for f in (abs, bool, dict, float, int, isinstance, len, list, max, min, set, str, tuple)
    }
)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.BitAnd: operator.and_,
        ast.BitOr: operator.or_,
    }
)
_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = MappingProxyType(
    {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
)
_DEPTH = 12
# Loops over more items than this are not run.
_LONGEST = 32


class Raised(NotThere):
    """The interpreted code raises for these values."""


@dataclass(frozen=True)
class Opaque:
    """A value that is not known: `text` is its source; `named` where that is a dotted name.

    Two named ones are equal when their names are, as `torch.uint8` is itself and nothing else.
    """

    text: str
    named: bool = True

    def __bool__(self) -> bool:
        raise NotThere(f"the source decides on {self.text}, which is not known here")


class _Return(Exception):  # noqa: N818 - control flow
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _Interpreted:
    node: Function


def _unknown(node: ast.AST) -> Opaque:
    return Opaque(ast.unparse(node), named=False)


class Interpreter:
    """Evaluates expressions and functions of one module.

    Args:
        module: where module-level functions and imports are looked up.
        names: values by dotted name ("os.environ.get", "major"), which win over the module's own.
        methods: methods by name, for values that lack them, called with the value first.
    """

    def __init__(
        self,
        module: ast.Module,
        names: Mapping[str, Any] | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.module = module
        self.names = dict(names or {})
        self.methods = dict(methods or {})
        self.imports = imports(module)
        self._depth = 0

    def call(self, callee: Function, /, **arguments: Any) -> Any:
        """What the function returns for these arguments; others take their defaults or are opaque.

        Raises:
            NotThere: it depends on something that is not known.
            Raised: it raises.
        """
        if self._depth >= _DEPTH:
            raise NotThere(f"{callee.name} calls too deeply to be followed")
        local: dict[str, Any] = {}
        for name, default in parameters(callee).items():
            if name in arguments:
                local[name] = arguments[name]
            else:
                local[name] = Opaque(name) if default is None else self.value(default, {})
        if callee.args.kwarg is not None:
            local[callee.args.kwarg.arg] = {k: v for k, v in arguments.items() if k not in local}
        self._depth += 1
        try:
            self._block(callee.body, local)
        except _Return as result:
            return result.value
        finally:
            self._depth -= 1
        return None

    def value(self, node: ast.expr, local: dict[str, Any] | None = None) -> Any:
        """The value of an expression; `Opaque` where it cannot be known."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return _unknown(node) if method is None else method(node, {} if local is None else local)

    # Expressions.

    def _constant(self, node: ast.Constant, local: dict[str, Any]) -> Any:
        return node.value

    def _name(self, node: ast.Name, local: dict[str, Any]) -> Any:
        if node.id in local:
            return local[node.id]
        origin = self.imports.get(node.id, node.id)
        for name in (node.id, origin):
            if name in self.names:
                return self.names[name]
        found = find(self.module, node.id)
        if isinstance(found, Function):
            return _Interpreted(found)
        values = assigned(self.module, node.id)
        if len(values) == 1 and isinstance(values[0], ast.Constant | ast.Tuple | ast.List):
            return self.value(values[0], {})
        return _BUILTINS.get(node.id, Opaque(origin))

    def _attribute(self, node: ast.Attribute, local: dict[str, Any]) -> Any:
        # A value given for the whole chain wins, whatever its parts are.
        chain = dotted(node)
        if chain in self.names and chain.partition(".")[0] not in local:
            return self.names[chain]
        base = self.value(node.value, local)
        if isinstance(base, Opaque):
            text = f"{base.text}.{node.attr}"
            return self.names.get(text, Opaque(text, base.named))
        # Private names only of the records that a probe gives: others are Python's own.
        is_open = isinstance(base, SimpleNamespace) or not node.attr.startswith("_")
        if is_open and hasattr(base, node.attr):
            return getattr(base, node.attr)
        if node.attr in self.methods:
            method = self.methods[node.attr]
            return lambda *args, **words: method(base, *args, **words)
        return _unknown(node)

    def _call(self, node: ast.Call, local: dict[str, Any]) -> Any:
        target = self.value(node.func, local)
        args = [self.value(item, local) for item in node.args]
        words: dict[str | None, Any] = {}
        for word in node.keywords:
            given = self.value(word.value, local)
            words |= given if word.arg is None and isinstance(given, dict) else {word.arg: given}
        if isinstance(target, Opaque) and target.text == "getattr" and len(args) >= 2:
            target = self._getattr
        starred = any(isinstance(item, ast.Starred) for item in node.args)
        if starred or None in words or isinstance(target, Opaque):
            return _unknown(node)
        keywords = {str(name): value for name, value in words.items()}
        if isinstance(target, _Interpreted):
            order = list(parameters(target.node))
            try:
                return self.call(target.node, **dict(zip(order, args, strict=False)), **keywords)
            except Raised:
                raise
            except NotThere:
                return _unknown(node)
        if target in _BUILTINS.values() and any(isinstance(item, Opaque) for item in args):
            return _unknown(node)
        if not callable(target):
            return _unknown(node)
        try:
            return self._run(target, args, keywords)
        except Raised:
            # A stand-in that cannot take an unknown value says nothing about the source.
            unknown = Opaque | _Interpreted
            if any(isinstance(item, unknown) for item in (*args, *keywords.values())):
                return _unknown(node)
            raise

    @staticmethod
    def _run(target: Callable[..., Any], args: list[Any], words: dict[str, Any]) -> Any:
        try:
            return target(*args, **words)
        except NotThere:
            raise
        except Exception as error:
            # The interpreted source may well catch it, as its own call would have raised it.
            raise Raised(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _getattr(base: Any, name: Any, default: Any = None) -> Any:
        if isinstance(base, Opaque) or not isinstance(name, str) or name.startswith("_"):
            return Opaque(f"getattr({base}, {name!r})", named=False)
        return getattr(base, name, default)

    def _compare(self, node: ast.Compare, local: dict[str, Any]) -> Any:
        left = self.value(node.left, local)
        result: Any = True
        for op, item in zip(node.ops, node.comparators, strict=True):
            right = self.value(item, local)
            result = self._pair(op, left, right, node)
            if isinstance(result, Opaque) or not result:
                return result
            left = right
        return result

    def _pair(self, op: ast.cmpop, left: Any, right: Any, node: ast.Compare) -> Any:
        negated = isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn)
        if isinstance(op, ast.In | ast.NotIn):
            if isinstance(right, str) and isinstance(left, str):
                return (left in right) != negated
            if not isinstance(right, list | tuple | set | dict):
                return _unknown(node)
            hits = [self._equal(left, item) for item in right]
            if any(hit is True for hit in hits):
                return not negated
            return _unknown(node) if None in hits else negated
        if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            equal = self._equal(left, right)
            return _unknown(node) if equal is None else equal != negated
        if isinstance(left, Opaque) or isinstance(right, Opaque):
            return _unknown(node)
        return self._run(_ORDER[type(op)], [left, right], {})

    @staticmethod
    def _equal(left: Any, right: Any) -> bool | None:
        """Whether two values are equal, None when that cannot be known."""
        opaque = [item for item in (left, right) if isinstance(item, Opaque)]
        if not opaque or (len(opaque) == 2 and all(item.named for item in opaque)):
            return bool(left == right)
        return None

    def _boolop(self, node: ast.BoolOp, local: dict[str, Any]) -> Any:
        # An operand that settles the result settles it beside an unknown one, too.
        settles = isinstance(node.op, ast.Or)
        result: Any = not settles
        unknown: Opaque | None = None
        for item in node.values:
            try:
                result = self.value(item, local)
            except Raised:
                if unknown is None:
                    raise
                continue
            if isinstance(result, Opaque):
                unknown = _unknown(node)
            elif bool(result) is settles:
                return result
        return result if unknown is None else unknown

    def _unaryop(self, node: ast.UnaryOp, local: dict[str, Any]) -> Any:
        item = self.value(node.operand, local)
        if isinstance(item, Opaque):
            return _unknown(node)
        # Masks are plain booleans here, where ~ means not.
        invert = operator.not_ if isinstance(item, bool) else operator.invert
        chosen: dict[type[ast.unaryop], Callable[[Any], Any]] = {
            ast.USub: operator.neg,
            ast.UAdd: operator.pos,
            ast.Not: operator.not_,
            ast.Invert: invert,
        }
        return self._run(chosen[type(node.op)], [item], {})

    def _binop(self, node: ast.BinOp, local: dict[str, Any]) -> Any:
        left, right = self.value(node.left, local), self.value(node.right, local)
        apply = _ARITHMETIC.get(type(node.op))
        # Repeating a sequence is left out: upstream text must not choose how much memory we use.
        repeats = isinstance(node.op, ast.Mult) and not all(
            isinstance(item, int | float) for item in (left, right)
        )
        if apply is None or repeats or isinstance(left, Opaque) or isinstance(right, Opaque):
            return _unknown(node)
        return self._run(apply, [left, right], {})

    def _ifexp(self, node: ast.IfExp, local: dict[str, Any]) -> Any:
        test = self.value(node.test, local)
        if isinstance(test, Opaque):
            return _unknown(node)
        return self.value(node.body if test else node.orelse, local)

    def _lambda(self, node: ast.Lambda, local: dict[str, Any]) -> Any:
        own = {item.arg for item in node.args.args}
        read = {item.id for item in ast.walk(node.body) if isinstance(item, ast.Name)}
        # One that reads more would need the values around it.
        if not own or not read <= own:
            return _unknown(node)
        body: list[ast.stmt] = [ast.Return(node.body)]
        return _Interpreted(ast.FunctionDef("<lambda>", node.args, body, []))

    def _list(self, node: ast.List | ast.Tuple | ast.Set, local: dict[str, Any]) -> Any:
        items: list[Any] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = self.value(element.value, local)
                if not isinstance(inner, list | tuple | set):
                    return _unknown(node)
                items.extend(inner)
            else:
                items.append(self.value(element, local))
        return tuple(items) if isinstance(node, ast.Tuple) else items

    _tuple = _set = _list

    def _dict(self, node: ast.Dict, local: dict[str, Any]) -> Any:
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        if len(keys) != len(node.keys):
            return _unknown(node)
        return dict(zip(keys, (self.value(v, local) for v in node.values), strict=True))

    def _subscript(self, node: ast.Subscript, local: dict[str, Any]) -> Any:
        base, index = self.value(node.value, local), self.value(node.slice, local)
        if isinstance(index, Opaque) or not isinstance(base, list | tuple | dict | str):
            return _unknown(node)
        return self._run(operator.getitem, [base, index], {})

    # Statements.

    def _block(self, body: list[ast.stmt], local: dict[str, Any]) -> None:
        for statement in body:
            self._statement(statement, local)

    def _statement(self, node: ast.stmt, local: dict[str, Any]) -> None:
        match node:
            case ast.Return():
                raise _Return(None if node.value is None else self.value(node.value, local))
            case ast.Raise():
                raise Raised(ast.unparse(node))
            case ast.Expr():
                self.value(node.value, local)
            case ast.Assign():
                result = self.value(node.value, local)
                for target in node.targets:
                    self._bind(target, result, local)
            case ast.AnnAssign() if node.value is not None:
                self._bind(node.target, self.value(node.value, local), local)
            case ast.Import() | ast.ImportFrom():
                for name, origin in imports(ast.Module(body=[node], type_ignores=[])).items():
                    local[name] = self.names.get(origin, Opaque(origin))
            case ast.If():
                test = self.value(node.test, local)
                if isinstance(test, Opaque):
                    self._skip(node, local, test)
                else:
                    self._block(node.body if test else node.orelse, local)
            case ast.Try():
                self._try(node, local)
            case ast.With():
                self._block(node.body, local)
            case ast.For():
                self._loop(node, local)
            case ast.While() | ast.AugAssign() | ast.Match() | ast.AsyncFor():
                self._skip(node, local, Opaque(ast.unparse(node).partition("\n")[0], named=False))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                local[node.name] = Opaque(node.name, named=False)

    def _loop(self, node: ast.For, local: dict[str, Any]) -> None:
        """Runs a plain loop over a known sequence, and forgets what any other one may bind."""
        items = self.value(node.iter, local)
        leaves = any(isinstance(item, ast.Break | ast.Continue) for item in ast.walk(node))
        is_known = isinstance(items, list | tuple) and len(items) <= _LONGEST
        if leaves or node.orelse or not is_known:
            text = ast.unparse(node).partition("\n")[0]
            self._skip(node, local, Opaque(text, named=False))
            return
        for item in items:
            self._bind(node.target, item, local)
            self._block(node.body, local)

    def _try(self, node: ast.Try, local: dict[str, Any]) -> None:
        try:
            self._block(node.body, local)
        except Raised:
            if not node.handlers:
                raise
            self._block(node.handlers[0].body, local)
        else:
            self._block(node.orelse, local)
        self._block(node.finalbody, local)

    def _bind(self, target: ast.expr, result: Any, local: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            local[target.id] = result
        elif isinstance(target, ast.Tuple | ast.List):
            whole = isinstance(result, list | tuple) and len(result) == len(target.elts)
            for position, element in enumerate(target.elts):
                self._bind(element, result[position] if whole else _unknown(element), local)
        elif isinstance(target, ast.Attribute):
            base = self.value(target.value, local)
            if isinstance(base, SimpleNamespace):
                setattr(base, target.attr, result)

    def _skip(self, node: ast.stmt, local: dict[str, Any], test: Opaque) -> None:
        """Forgets what a statement may bind whose course is not known."""
        if any(isinstance(item, ast.Return | ast.Raise) for item in statements([node])):
            bool(test)  # raises: the function's result hangs on it
        for child in ast.walk(node):
            if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
                self._bind(child, _unknown(child), local)
