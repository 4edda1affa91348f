"""Lookups by structure, on small sources written here."""

from __future__ import annotations

import ast

import pytest

from imagebuild.patching import structure
from imagebuild.patching.structure import NotThere
from imagebuild.patching.tree import DirTree

SOURCE = """
import os.path
import torch.cuda as tc
from pkg.sub import name as other, plain
from . import here

LIMIT = 3
TABLE: dict = {"a": (1, "x"), "b": two, 3: 4}

try:
    def probe(): return "first"
except ImportError:
    def probe(): return "second"

class Base: ...

class Child(Base, Generic[T], pkg.Mixin):
    size: int = 4

    def method(self, a, b=2, *, c=LIMIT, d):
        x = tc.empty(a).view(b)
        if a:
            y: int = x
        y.fill_(self.run(a, *b, c=1))
        self.kept = y
        return run(c, k=tc.empty(b))

def twice(flag):
    if flag:
        return 1
    return 2
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "m.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("def f(:\n")
    return DirTree(tmp_path)


def method(tree):
    return structure.function(tree, "m.py", "Child.method")


def test_equal_content_is_parsed_once(tree):
    assert structure.parse(tree, "m.py") is structure.parse(tree, "m.py")


def test_what_is_absent_says_so(tree):
    with pytest.raises(FileNotFoundError):
        structure.parse(tree, "none.py")
    with pytest.raises(NotThere, match=r"bad\.py is not Python"):
        structure.parse(tree, "bad.py")
    with pytest.raises(NotThere, match=r"m\.py defines no Child\.other"):
        structure.definition(tree, "m.py", "Child.other")
    with pytest.raises(NotThere, match=r"Child in m\.py is a class"):
        structure.function(tree, "m.py", "Child")


def test_the_last_definition_wins(tree):
    assert ast.unparse(structure.returned(structure.function(tree, "m.py", "probe"))) == "'second'"


def test_a_nested_function_is_not_a_module_function(tree):
    assert structure.find(structure.parse(tree, "m.py"), "method") is None


def test_several_returns_are_not_guessed(tree):
    with pytest.raises(NotThere, match="twice has 2 return values"):
        structure.returned(structure.function(tree, "m.py", "twice"))


def test_calls_by_last_part_in_source_order(tree):
    found = structure.calls(method(tree), "empty")
    assert [ast.unparse(call) for call in found] == ["tc.empty(a)", "tc.empty(b)"]
    assert [ast.unparse(call.func) for call in structure.calls(method(tree), "fill_")] == [
        "y.fill_"
    ]
    # A name that merely ends the same is another one.
    assert structure.calls(method(tree), "pty") == []
    assert len(structure.calls(method(tree), "view")) == 1


def test_only_call(tree):
    assert structure.only_call(method(tree), "fill_").lineno
    with pytest.raises(NotThere, match="expected one call of empty, found 2"):
        structure.only_call(method(tree), "empty")
    with pytest.raises(NotThere, match="expected one call of absent, found 0"):
        structure.only_call(method(tree), "absent")


def test_parameters_and_defaults(tree):
    found = structure.parameters(method(tree))
    shown = {name: value and ast.unparse(value) for name, value in found.items()}
    assert shown == {"self": None, "a": None, "b": "2", "c": "LIMIT", "d": None}
    with pytest.raises(NotThere, match="no parameter d with a default"):
        structure.parameter_default(method(tree), "d")
    assert ast.unparse(structure.parameter_default(method(tree), "b")) == "2"


def test_argument_by_position_and_by_name(tree):
    call = ast.parse("Child().method(p, q, d=r)").body[0].value
    by_name = {n: ast.unparse(structure.argument(call, method(tree), n)) for n in ("a", "b", "d")}
    assert by_name == {"a": "p", "b": "q", "d": "r"}
    with pytest.raises(NotThere, match="passes nothing readable for c"):
        structure.argument(call, method(tree), "c")


def test_argument_behind_a_star_is_not_guessed(tree):
    call = ast.parse("Child().method(*both, q)").body[0].value
    with pytest.raises(NotThere):
        structure.argument(call, method(tree), "b")


def test_assignments_of_names_and_attributes(tree):
    scope = method(tree)
    assert [ast.unparse(v) for v in structure.assigned(scope, "self.kept")] == ["y"]
    assert ast.unparse(structure.resolve(scope, ast.Name("y", ast.Load()))) == "tc.empty(a).view(b)"
    assert ast.unparse(structure.resolve(scope, ast.Name("a", ast.Load()))) == "a"


def test_resolve_ends_on_a_circle():
    scope = ast.parse("a = b\nb = a")
    assert isinstance(structure.resolve(scope, ast.Name("a", ast.Load())), ast.Name)


def test_module_level_names(tree):
    module = structure.parse(tree, "m.py")
    assert structure.imports(module) == {
        "os": "os", "tc": "torch.cuda", "other": "pkg.sub.name", "plain": "pkg.sub.plain",
        "here": "..here",
    }  # fmt: skip
    assert {"LIMIT", "TABLE", "probe", "Child", "tc"} <= structure.module_names(module)
    assert "x" not in structure.module_names(module)


def test_bases_and_tables(tree):
    child = structure.definition(tree, "m.py", "Child")
    assert isinstance(child, ast.ClassDef)
    assert structure.bases(child) == ["Base", "Generic", "pkg.Mixin"]
    found = structure.table(structure.parse(tree, "m.py"), "TABLE")
    assert {key: ast.unparse(value) for key, value in found.items()} == {
        "a": "(1, 'x')",
        "b": "two",
    }
    with pytest.raises(NotThere, match="nothing binds LIMIT to a dict"):
        structure.table(structure.parse(tree, "m.py"), "LIMIT")
