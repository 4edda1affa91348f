"""The interpreter agrees with Python where it answers, and answers nothing that it cannot know."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.patching.interpret import Interpreter, Opaque, Raised
from imagebuild.patching.structure import NotThere, find

PLAIN = [
    "1 + 2 * 3 - 4 // 2", "7 % 4", "-3", "not 0", "~5", "5 & 3 | 8", "1 < 2 <= 2 < 3", "2 < 1 < x_",
    "'a' in 'cat'", "'x' not in 'cat'", "3 in (1, 2, 3)", "3 not in [1, 2]", "None is None",
    "1 if 0 else 2", "[1, *(2, 3)]", "(1, 'a')", "{'k': 1}['k']", "[10, 20][1]", "len((1, 2))",
    "max(1, 5)", "0 or '' or 'z'", "1 and 0 and x_", "bool('')", "float('0.5')", "'A'.lower()",
    "isinstance('a', str)", "int('12') // 5", "(4, 5)[0] == 4",
]  # fmt: skip


def value(text, names=None, module="", methods=None):
    node = ast.parse(text, mode="eval").body
    return Interpreter(ast.parse(module), names, methods).value(node)


def call(source, /, function="f", names=None, **arguments):
    module = ast.parse(source)
    return Interpreter(module, names).call(find(module, function), **arguments)


@pytest.mark.parametrize("text", PLAIN)
def test_agrees_with_python(text):
    expected = eval(text)
    assert (value(text), type(value(text))) == (expected, type(expected))


@given(
    st.recursive(
        st.sampled_from(["0", "1", "2", "True", "False", "a", "b"]),
        lambda inner: st.one_of(
            st.tuples(
                inner,
                st.sampled_from(["and", "or", "<", "==", "!=", "in (0,", "not in (1,"]),
                inner,
            ).map(lambda t: f"({t[0]} {t[1]} {t[2]}{')' if '(' in t[1] else ''})"),
            inner.map(lambda t: f"(not {t})"),
            st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        ),
        max_leaves=12,
    ),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_agrees_with_python_on_conditions(text, a, b):
    assert value(text, {"a": a, "b": b}) == eval(text, {"a": a, "b": b})


@pytest.mark.parametrize(
    "text",
    ["x", "x.y", "x + 1", "not x", "f(1)", "x[0]", "[*x]", "x > 1", "x == 1", "1 in x", "x is None",
     "1 if x else 2", "x and 1", "x or 0", "lambda: 1", "[i for i in (1, 2)]", "{**x}", "f'{x}'",
     "(1, 2) * 3", "'a' * 9", "bool(x)", "len(x)", "(lambda: 1)()", "2 ** 9", "getattr(x, 'y')",
     "[x] == 1 and x"],
)  # fmt: skip
def test_the_unknown_stays_unknown(text):
    if text == "[x] == 1 and x":
        assert value(text) is False
        return
    found = value(text)
    assert isinstance(found, Opaque)
    with pytest.raises(NotThere, match="not known here"):
        bool(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("x and 0", 0), ("0 and x", 0), ("x or 5", 5), ("1 or x", 1), ("x > 1 and 1 > 2", False)],
)
def test_an_operand_that_settles_it_settles_it(text, expected):
    assert value(text) == expected


def test_names_are_equal_to_themselves_only():
    assert value("torch.uint8 == torch.uint8") is True
    assert value("torch.uint8 == torch.int8") is False
    assert value("E.A in [E.B, E.A]") is True
    assert value("E.A in [E.B, 1]") == Opaque("E.A in [E.B, 1]", named=False)
    # Two calls that look alike may differ.
    assert isinstance(value("f() == f()"), Opaque)


def test_imports_give_names_their_origin():
    module = "from pkg.mod import thing as alias\nimport os"
    assert value("alias", module=module) == Opaque("pkg.mod.thing")
    assert value("alias", {"pkg.mod.thing": 3}, module) == 3
    assert value("os.environ.get('A')", {"os.environ.get": {"A": "7"}.get}, module) == "7"


def test_module_constants_and_functions_are_followed():
    module = "LIMITS = (9, 10)\ndef ok(m, extra=1):\n    return m in LIMITS and extra"
    assert value("ok(9)", module=module) == 1
    assert value("ok(12, extra=5)", module=module) is False


def test_a_constant_that_is_set_twice_is_unknown():
    assert value("N", module="N = 1\nN = 2") == Opaque("N")


def test_private_names_of_python_are_closed():
    assert isinstance(value("a.__class__", {"a": (1,)}), Opaque)
    assert isinstance(value("getattr(a, '__class__')", {"a": (1,)}), Opaque)
    assert value("a._mine", {"a": SimpleNamespace(_mine=4)}) == 4


def test_methods_are_given_by_name():
    assert value("(3 + 1).to(torch.int8)", methods={"to": lambda item, kind: item}) == 4


FUNCTION = """
def f(kind, limit=3, **words):
    '''doc'''
    import local.mod
    from local.names import pick
    low, high = words.get("pair", (0, 0))
    if kind == "raise":
        raise ValueError("no")
    elif kind == "list":
        found = [1]
        found.insert(0, pick)
        return found
    try:
        number = float(kind)
    except ValueError:
        number = -1.0
    else:
        high = high + 1
    if number < 0:
        return low, limit
    return number + high
"""


def test_statements():
    assert call(FUNCTION, kind="2", pair=(1, 4)) == 7.0
    assert call(FUNCTION, kind="x", pair=(1, 4)) == (1, 3)
    assert call(FUNCTION, kind="list") == [Opaque("local.names.pick"), 1]
    with pytest.raises(Raised, match=r"raise ValueError\('no'\)"):
        call(FUNCTION, kind="raise")


def test_attributes_of_given_records_are_set():
    record = SimpleNamespace()
    assert call("def f(self):\n    self.a: int = 2\n    self.b = self.a + 1", self=record) is None
    assert (record.a, record.b) == (2, 3)


def test_an_unknown_branch_that_returns_stops_the_answer():
    source = "def f(x):\n    if x.ready:\n        return 1\n    return 2"
    with pytest.raises(NotThere, match=r"decides on x\.ready"):
        call(source)
    assert call(source, x=SimpleNamespace(ready=True)) == 1


def test_an_unknown_branch_that_assigns_forgets():
    source = "def f(x):\n    a = b = 1\n    if x:\n        a = 2\n    return [a, b]"
    assert call(source) == [Opaque("a", named=False), 1]


def test_loops_forget_what_they_bind():
    source = "def f(x):\n    a, n = 1, 0\n    for i in x:\n        n += i\n    return [a, n]"
    assert call(source) == [1, Opaque("n", named=False)]
    with pytest.raises(NotThere):
        call("def f(x):\n    for i in x:\n        return i\n    return 0")


def test_plain_loops_over_known_sequences_run():
    source = (
        "def f(x):\n    last = 0\n    for n, ok in ((1, True), (2, x)):\n"
        "        if not ok:\n            raise ValueError(n)\n        last = n\n    return last"
    )
    assert call(source, x=True) == 2
    with pytest.raises(Raised, match="ValueError"):
        call(source, x=False)


@pytest.mark.parametrize("end", ["        break", "        continue", "    else:\n        n = 3"])
def test_other_loops_forget_what_they_bind(end):
    source = f"def f(x):\n    n = 0\n    for i in (1, 2):\n        n = i\n{end}\n    return n"
    assert call(source) == Opaque("n", named=False)


def test_a_loop_over_many_items_is_not_run():
    source = "def f(x):\n    n = 0\n    for i in x:\n        n = i\n    return n"
    assert call(source, x=[1] * 32) == 1
    assert call(source, x=[1] * 33) == Opaque("n", named=False)


def test_a_lambda_of_its_own_parameters_is_followed():
    assert call("def f(x):\n    up = lambda n: (n + 15) // 16 * 16\n    return up(x)", x=17) == 32
    closed = "def f(x):\n    up = lambda n: n + x\n    return up(1)"
    assert isinstance(call(closed, x=17), Opaque)
    key = "def f(x):\n    return min(x, key=lambda n: n.size)"
    assert isinstance(call(key, x=[SimpleNamespace(size=1)]), Opaque)


def test_known_keywords_are_spread():
    module = "def add(a, b=0):\n    return a + b"
    words = {"words": {"b": 2}}
    assert value("add(1, **words)", words, module) == 3
    assert isinstance(value("add(1, **x)", module=module), Opaque)


def test_endless_recursion_is_not_followed():
    assert isinstance(call("def f(x):\n    return f(x)", x=1), Opaque)


def test_a_stand_in_that_cannot_take_the_unknown_leaves_it_unknown():
    assert isinstance(value("half(x)", {"half": lambda n: n / 2}), Opaque)
    with pytest.raises(Raised, match="ZeroDivisionError"):
        value("half(0)", {"half": lambda n: 1 / n})
