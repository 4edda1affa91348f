"""C++ constants by their tokens: what is known has C++'s value, the rest is not guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.patching import cpp
from imagebuild.patching.structure import NotThere
from imagebuild.patching.tree import OverlayTree, UnionTree

FP8 = "std::is_same_v<DTypeKV,__nv_fp8_e4m3>"
HEADER = """
#define PICK(limit, TILE, ...)   \\
  if (limit >= 1000) {           \\
    constexpr uint32_t TILE = 64; \\
    __VA_ARGS__;                 \\
  }
#define OTHER 1
template <bool A_, uint32_t TILE_, typename T_> struct Traits { int x; };
void launch() {
  constexpr uint32_t N = 2;  // constexpr uint32_t N = 3;
  constexpr bool IS = std::is_same_v<DTypeKV, __nv_fp8_e4m3>;
  using K = Traits<true, N + 1, Pair<int, long>>;
}
void twice() {}
void twice(int) {}
"""


def tree(text=HEADER):
    return OverlayTree(UnionTree([]), {"a.cuh": text.encode()})


def value(text, **names):
    words = cpp.tokens(tree(text), "a.cuh")
    return cpp.evaluate(words, {FP8: True, "std::min": min, **names})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 : TILE", 32),
        ("std::is_same_v<DTypeKV, __nv_fp8_e4m3> && TILE > 32 ? 32 : TILE", 16),
        ("!std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 : TILE", 16),
        ("TILE < 32 ? TILE : 32", 16),
        ("std::min(TILE, 32u)", 16),
        ("std::min((TILE + 1) * 2, 64)", 34),
        ("TILE >= 16 && (TILE == 8 || TILE != 9)", True),
        ("false ? 1 : true ? 2 : 3", 2),
        ("0x20 - 1'0 % 7", 29),
    ],
)
def test_value(text, expected):
    assert value(text, TILE=16) == expected


@given(st.integers(0, 99), st.integers(0, 99), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
def test_comparisons_and_precedence_agree_with_python(a, b, sign):
    assert value(f"A + 2 * B {sign} 3 * B + 1", A=a, B=b) is eval(f"a + 2 * b {sign} 3 * b + 1")


@pytest.mark.parametrize(
    "text",
    ["UNKNOWN", "std::is_same_v<DTypeKV, int>", "std::max(1, 2)", "1 +", "(1", "1 2", "1 ? 2",
     "1.5", "8 / 0", "1 - 2", "-1", "sizeof(int)", "std::min", '"text"', "std::", ""],
)  # fmt: skip
def test_what_is_not_known_is_not_guessed(text):
    with pytest.raises(NotThere):
        value(text)


def test_a_macro_body_ends_with_its_directive():
    body = cpp.macro(cpp.tokens(tree(), "a.cuh"), "PICK")
    assert body[:5] == ["if", "(", "limit", ">=", "1000"]
    assert cpp.constants(body) == {"TILE": ["64"]}
    for name in ("OTHER", "NONE"):
        with pytest.raises(NotThere, match=f"one definition of the macro {name}, found 0"):
            cpp.macro(cpp.tokens(tree(), "a.cuh"), name)


def test_branches_in_order():
    words = cpp.tokens(tree("if (a < 2) { x = f(1); } else if (a) { { y; } } else { z; }"), "a.cuh")
    assert [("".join(test), "".join(body)) for test, body in cpp.branches(words)] == [
        ("a<2", "x=f(1);"),
        ("a", "{y;}"),
    ]
    for text in ("if (a) b;", "if a { b; }", "if (a) { b;", "if"):
        with pytest.raises(NotThere):
            cpp.branches(cpp.tokens(tree(text), "a.cuh"))


def test_constants_and_template_arguments_of_a_scope():
    words = cpp.tokens(tree(), "a.cuh", "launch")
    assert cpp.constants(words)["N"] == ["2"]
    assert cpp.evaluate(cpp.constants(words)["IS"], {FP8: False}) is False
    arguments = cpp.template_arguments(words, "Traits")
    assert arguments == [["true"], ["N", "+", "1"], ["Pair", "<", "int", ",", "long", ">"]]
    with pytest.raises(NotThere):
        cpp.template_arguments(words, "Other")


def test_parameters_stand_in_the_scope_of_their_struct():
    words = cpp.tokens(tree(), "a.cuh", "Traits")
    assert [part[-1] for part in cpp.template_arguments(words, "template")] == ["A_", "TILE_", "T_"]


def test_scopes_that_are_absent_or_ambiguous():
    with pytest.raises(NotThere, match="has no nothing"):
        cpp.tokens(tree(), "a.cuh", "nothing")
    with pytest.raises(NotThere, match="defines twice 2 times"):
        cpp.tokens(tree(), "a.cuh", "twice")
