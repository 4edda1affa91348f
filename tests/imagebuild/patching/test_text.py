"""Decoding, scopes, matches and the nearest text."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.patching import text as source
from imagebuild.patching.text import ScopeMissingError, Span, TextError, decode


def lines_of(text: str, path: str, scope: str) -> list[tuple[int, int]]:
    """First and last line of each span of a scope."""
    spans = source.scope_spans(text, path, scope)
    return [(source.line_of(text, s.start), source.line_of(text, s.stop - 1)) for s in spans]


class TestDecode:
    @pytest.mark.parametrize(
        "data",
        [b"", b"a\nb\n", b"a\nb", b"a\r\nb\r\n", b"a\r\nb", b"\xef\xbb\xbfa\n", b"\tx\n\x0c\ny"],
    )
    def test_keeps_every_byte(self, data: bytes) -> None:
        decoded = decode(data)
        assert "\r" not in decoded.text
        assert decoded.encode(decoded.text) == data

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"caf\xe9\n", "is not UTF-8 (byte 3 is 0xe9)"),
            (
                b"a\r\nb\nc\n",
                "mixes line ends (1 of 3 are CRLF), so it cannot be written back",
            ),
            (b"a\rb\n", "has carriage returns that end no line, so it cannot be written back"),
            (b"a\r\r\n", "has carriage returns that end no line, so it cannot be written back"),
        ],
    )
    def test_refuses_what_it_could_not_write_back(self, data: bytes, message: str) -> None:
        with pytest.raises(TextError) as caught:
            decode(data)
        assert str(caught.value) == message

    @given(st.text(alphabet="ab\n\r\ufeffé", max_size=30))
    def test_either_refuses_or_keeps(self, text: str) -> None:
        data = text.encode()
        try:
            decoded = decode(data)
        except TextError:
            assert "\r" in text
            return
        assert decoded.encode(decoded.text) == data


PYTHON = """\
import a

@decorated(
    1,
)
class Outer(Base):
    x = 1

    @property
    def f(self): return 1

    async def g(self):
        def inner():
            pass
        return inner

    if x:
        def late(self):
            pass

try:
    import b
    def guarded():
        pass
except ImportError:
    def guarded():
        return 2
finally:
    def final(): pass

with a:
    class W:
        def m(self): pass

match a:
    case 1:
        def matched(): pass

for i in a:
    def looped(): pass
else:
    def elsed(): pass
def last():
    return 1"""


class TestPythonScopes:
    @pytest.mark.parametrize(
        ("scope", "lines"),
        [
            ("", [(1, 44)]),
            ("Outer", [(3, 19)]),
            ("Outer.f", [(9, 10)]),
            ("Outer.g", [(12, 15)]),
            ("Outer.g.inner", [(13, 14)]),
            ("Outer.late", [(18, 19)]),
            ("guarded", [(23, 24), (26, 27)]),
            ("final", [(29, 29)]),
            ("W.m", [(33, 33)]),
            ("matched", [(37, 37)]),
            ("looped", [(40, 40)]),
            ("elsed", [(42, 42)]),
            ("last", [(43, 44)]),
        ],
    )
    def test_finds(self, scope: str, lines: list[tuple[int, int]]) -> None:
        assert lines_of(PYTHON, "a.py", scope) == lines
        if scope:
            bom = "\ufeff" + PYTHON
            assert lines_of(bom, "a.py", scope) == lines

    def test_names_every_scope_and_no_other(self) -> None:
        assert set(source.scopes(PYTHON, "python")) == {
            "Outer", "Outer.f", "Outer.g", "Outer.g.inner", "Outer.late", "guarded", "final",
            "W", "W.m", "matched", "looped", "elsed", "last",
        }  # fmt: skip

    def test_a_scope_that_is_not_there(self) -> None:
        with pytest.raises(ScopeMissingError, match=r"^Outer\.h$"):
            source.scope_spans(PYTHON, "a.py", "Outer.h")

    def test_a_file_that_does_not_parse(self) -> None:
        with pytest.raises(TextError, match=r"^does not parse as Python \(line 2: .*\)$"):
            source.scope_spans("x = 1\ndef f(:\n", "a.py", "f")

    def test_upstream_warnings_stay_upstream(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert lines_of("def f():\n    return '\\d' is 1\n", "a.py", "f") == [(1, 2)]

    def test_a_form_feed_ends_no_line(self) -> None:
        assert lines_of("x = 1\n\f\ndef f(): pass\n\fdef g(): pass\n", "a.py", "g") == [(4, 4)]


CPP = """\
#include <x>
#define OPEN namespace macro {
#define BODY(x) do { x; } while (0)
#error don't
// void commented() {
namespace a { namespace b::c {
template <typename T, int N = (1 > 0)>
__global__ void __launch_bounds__(256, 1)
    kernel(T* out, const char* s = "}{") {
  if (out) { out[0] = '}'; }
}

struct alignas(16) Vec : Base<int> {
  int x;
  __device__ __forceinline__ Vec operator+(const Vec& o) const { return o; }
  FORCE_INLINE int at(int i) const noexcept {
    auto f = [&](int j) { return j; };
    return f(i);
  }
};
enum class Kind { A, B };
static const int table[] = {1, 2};
void kernel2(int a) { for (;;) { switch (a) { default: break; } } }
void kernel2(long a) {
  R"(})";
}
}}  // namespace
extern "C" {
int plain(void) { return 1'000; }
}
auto trailing(int x) -> int { return x; }
Vec::Vec(int x) : x(x) { }
"""


class TestCppScopes:
    @pytest.mark.parametrize(
        ("scope", "lines"),
        [
            ("kernel", [(7, 11)]),
            ("Vec", [(13, 20), (32, 32)]),
            ("Vec.at", [(16, 19)]),
            ("Kind", [(21, 21)]),
            ("kernel2", [(23, 23), (24, 26)]),
            ("plain", [(29, 29)]),
            ("trailing", [(31, 31)]),
        ],
    )
    def test_finds(self, scope: str, lines: list[tuple[int, int]]) -> None:
        assert lines_of(CPP, "csrc/a.cuh", scope) == lines

    def test_other_files_have_no_scopes(self) -> None:
        with pytest.raises(ScopeMissingError):
            source.scope_spans(CPP, "a.txt", "kernel")


@pytest.mark.parametrize(
    ("path", "language"),
    [("a.py", "python"), ("a.cu", "cpp"), ("a.cuh", "cpp"), ("a.h", "cpp"), ("a.json", "other")],
)
def test_language(path: str, language: str) -> None:
    assert source.language(path) == language


class TestFingerprint:
    def test_covers_all_definitions_of_a_scope(self) -> None:
        one = source.fingerprint(PYTHON, "a.py", "guarded")
        assert one == source.fingerprint(PYTHON.replace("import b", "import bb"), "a.py", "guarded")
        assert one != source.fingerprint(PYTHON.replace("return 2", "return 3"), "a.py", "guarded")

    @pytest.mark.parametrize("scope", ["Outer.g", "Outer"])
    def test_of_a_method_ignores_its_line_but_not_its_class(self, scope: str) -> None:
        found = [
            source.fingerprint("\n\n" + PYTHON.replace("class Outer(Base):", head), "a.py", scope)
            for head in ("class Outer(Base):  # now", "class Outer(Other):")
        ]
        assert [one == source.fingerprint(PYTHON, "a.py", scope) for one in found] == [True, False]

    def test_of_cpp_ignores_comments(self) -> None:
        noted = CPP.replace("  int x;", "  int x; // why")
        assert source.fingerprint(noted, "a.h", "Vec") == source.fingerprint(CPP, "a.h", "Vec")
        changed = CPP.replace("  int x;", "  long x;")
        assert source.fingerprint(changed, "a.h", "Vec") != source.fingerprint(CPP, "a.h", "Vec")

    def test_pinned(self) -> None:
        pins = [
            source.fingerprint(PYTHON, "a.py", "Outer.g"),
            source.fingerprint(CPP, "a.cuh", "kernel"),
            source.fingerprint("a: 1\n  b: 2\n", "a.yaml", ""),
        ]
        assert pins == PINS


PINS = [
    "t1:f571ed9556e2a8311b298236",
    "t1:77ed4cf197195288b46bc8f3",
    "t1:a74cefe47a5477522edec124",
]


class TestFindAll:
    def test_only_wholly_inside_a_span_and_without_overlaps(self) -> None:
        assert source.find_all("aaaa", "aa", (Span(0, 4),)) == [0, 2]
        assert source.find_all("aaaa", "aa", (Span(1, 4),)) == [1]
        assert source.find_all("xaax", "aa", (Span(0, 2), Span(2, 4))) == []
        assert source.find_all("aabaa", "aa", (Span(3, 5), Span(0, 2))) == [0, 3]
        assert source.find_all("aa", "aa", (Span(0, 2), Span(0, 2))) == [0]
        assert source.find_all("aa", "", (Span(0, 2),)) == []

    @given(st.text(alphabet="ab", max_size=20), st.text(alphabet="ab", min_size=1, max_size=3))
    def test_is_str_count_over_the_whole(self, text: str, needle: str) -> None:
        found = source.find_all(text, needle, (Span(0, len(text)),))
        assert len(found) == text.count(needle)
        assert all(text.startswith(needle, at) for at in found)


def test_spans_overlap_only_where_they_share_a_character() -> None:
    assert Span(0, 2).overlaps(Span(1, 3))
    assert not Span(0, 2).overlaps(Span(2, 3))
    assert not Span(1, 1).overlaps(Span(0, 1))


class TestNearest:
    TEXT = "def f():\n" + "".join(f"    value_{i} = compute({i})\n" for i in range(30))

    def test_names_the_line_and_how_like_it_is(self) -> None:
        near = source.nearest(self.TEXT, "a.py", "    value_7 = compute(77)\n", (Span(0, 9999),))
        assert near is not None
        assert (near.line, near.path, near.similarity) == (9, "a.py", 0.98)
        assert near.text == "    value_7 = compute(7)"

    def test_counts_lines_from_the_start_of_the_file(self) -> None:
        start = self.TEXT.index("    value_20")
        near = source.nearest(self.TEXT, "a.py", "value_21 == compute(21)", (Span(start, 9999),))
        assert near is not None
        assert near.line == 23

    def test_tells_equal_lines_apart_by_their_neighbours(self) -> None:
        blocks = [f"if x == {i}:\n    self.very_long_line_of_code(argument)\n" for i in range(20)]
        anchor = blocks[3].replace("==", "!=")
        near = source.nearest("".join(blocks), "a.py", anchor, (Span(0, 9999),))
        assert near is not None
        assert near.line == 7

    def test_is_none_when_nothing_is_alike(self) -> None:
        assert source.nearest("x\ny\n", "a.py", "completely different", (Span(0, 4),)) is None
        assert source.nearest("", "a.py", "a", (Span(0, 0),)) is None

    @given(st.integers(0, 29), st.data())
    def test_finds_the_damaged_line(self, index: int, data: st.DataObject) -> None:
        lines = [f"    {hex(1000003 ** (i + 2))[2:12]} = compute()" for i in range(30)]
        wanted = lines[index]
        at = data.draw(st.integers(0, len(wanted) - 1))
        lines[index] = wanted[:at] + data.draw(st.sampled_from(["", "@", "@@"])) + wanted[at + 1 :]
        near = source.nearest("\n".join(lines), "a.py", wanted, (Span(0, 9999),))
        assert near is not None
        assert (near.line, near.text) == (index + 1, lines[index])


BRANCHES = """\
#if A
__global__ void first(int* p) {
#else
__global__ void first(long* p) {
#endif
  *p = 1;
#ifdef B
  if (p) {
#elif C
  for (;;) {
#else
  {
#endif
    *p = 2;
  }
}

void second() {
#if A
  work();
}
#else
  other();
}
#endif

#if A
struct S : Base {
#else
struct S {
#endif
  void member() {}
};
void last() {}
"""


def test_each_branch_of_an_if_may_open_or_close_a_brace() -> None:
    """A compiler takes one branch, so the braces of all of them together need not balance."""
    found = source.scopes(BRANCHES, "cpp")
    assert set(found) == {"first", "second", "S", "S.member", "last"}
    path = "a.cu"
    assert lines_of(BRANCHES, path, "first") == [(2, 16)]
    assert lines_of(BRANCHES, path, "second") == [(18, 24)]
    assert lines_of(BRANCHES, path, "S") == [(28, 33)]
    assert lines_of(BRANCHES, path, "S.member") == [(32, 32)]
    assert lines_of(BRANCHES, path, "last") == [(34, 34)]


def test_an_if_that_is_never_closed_does_not_hide_what_follows() -> None:
    assert set(source.scopes("#else\n#endif\n#if A\nvoid f() {}\n", "cpp")) == {"f"}
