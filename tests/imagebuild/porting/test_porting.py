"""Merging, finding scopes again, and cutting merged text into edits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagebuild.errors import EngineError
from imagebuild.patching.patch import Edit, Symbol
from imagebuild.patching.text import Span
from imagebuild.patching.tree import DirTree, Identity, OverlayTree
from imagebuild.porting import merge, place, recut
from imagebuild.porting.edits import How, PortedEdit, Sides, port_edit, port_symbol
from imagebuild.porting.merge import Labels, merge3

LABELS = Labels("1.0", "ours", "2.0")
PATH = "pkg/engine.py"
OLD = """\
import os


class Engine:
    def limit(self, tokens):
        start = 0
        ceiling = 12
        stop = min(tokens, ceiling)
        return stop

    def other(self):
        ceiling = 12
        return ceiling
"""
EDIT = Edit(
    label="ceiling", path=PATH, scope="Engine.limit",
    anchor="        start = 0\n        ceiling = 12\n        stop = min(tokens, ceiling)\n",
    text="        start = 0\n        ceiling = 90\n        stop = min(tokens, ceiling)\n",
)  # fmt: skip


def tree(files: Mapping[str, str], version: str = "1.0") -> OverlayTree:
    encoded: dict[str, bytes | None] = {path: text.encode() for path, text in files.items()}
    return OverlayTree(DirTree(Path("/nonexistent")), encoded, Identity(version))


def ported(new: str | Mapping[str, str], edit: Edit = EDIT, old: str = OLD) -> PortedEdit:
    files = {PATH: new} if isinstance(new, str) else new
    return port_edit(edit, Sides(tree({PATH: old}), tree(files, "2.0"), LABELS))


def after(new: str, found: PortedEdit) -> str:
    return recut.applied(new, found.new)


class TestMerge:
    def test_takes_what_each_side_changed(self) -> None:
        merged = merge3("a\nb\nc\nd\n", "A\nb\nc\nd\n", "a\nb\nc\nD\n", LABELS)
        assert merged == merge.Merge("A\nb\nc\nD\n")

    def test_keeps_both_sides_of_a_conflict(self) -> None:
        merged = merge3("a\nb\nc\n", "a\nB\nc\n", "a\nX\nc\n", LABELS)
        (conflict,) = merged.conflicts
        assert conflict == ("<<<<<<< ours\nB\n||||||| 1.0\nb\n=======\nX\n>>>>>>> 2.0\n")
        assert merged.text == f"a\n{conflict}c\n"

    def test_markers_in_the_text_are_no_conflict(self) -> None:
        text = "<<<<<<< here\na\n=======\n>>>>>>> there\n"
        assert merge3(text, text, text + "b\n", LABELS).conflicts == ()
        both = merge3(text + "b\n", text + "c\n", text + "d\n", LABELS)
        assert len(both.conflicts) == 1
        assert both.conflicts[0].startswith("<<<<<<<< ours\n")

    def test_every_conflict_counts(self) -> None:
        base = "".join(f"{n}\n" for n in range(40))
        merged = merge3(base, base.replace("5\n", "o\n"), base.replace("5\n", "t\n"), LABELS)
        assert len(merged.conflicts) == 4

    def test_without_git_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(EngineError) as caught:
            merge3("a", "b", "c", LABELS)
        assert caught.value.hint == "install git"

    def test_nobody_chooses_the_style(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".gitconfig").write_text("[merge]\nconflictStyle = merge\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert "||||||| 1.0\n" in merge3("b\n", "B\n", "X\n", LABELS).conflicts[0]


class TestEdits:
    def test_one_that_fits_stays_as_it_is(self) -> None:
        new = OLD.replace("import os\n", "import os\nimport sys\n")
        found = ported(new)
        assert (found.how, found.new, found.line) == (How.SAME, (EDIT,), 7)

    def test_a_neighbour_changed(self) -> None:
        new = OLD.replace("        start = 0\n", "        begin = 0\n", 1)
        found = ported(new)
        assert found.how is How.NARROWED
        assert after(new, found) == new.replace("ceiling = 12", "ceiling = 90", 1)
        assert found.new[0].anchor == "        ceiling = 12\n"

    def test_a_line_further_off_changed(self) -> None:
        wide = Edit(
            label="wide", path=PATH, scope="Engine.limit",
            anchor=OLD[OLD.index("        start") : OLD.index("\n    def other")],
            text=OLD[OLD.index("        start") : OLD.index("\n    def other")].replace(
                "start = 0", "start = 1"
            ),
        )  # fmt: skip
        new = OLD.replace("        return stop\n", "        return int(stop)\n")
        found = ported(new, wide)
        assert (found.how, found.new[0].anchor) == (How.MERGED, "        start = 0\n")
        assert after(new, found) == new.replace("start = 0", "start = 1")

    def test_the_same_line_changed_is_a_conflict_with_both_sides(self) -> None:
        found = ported(OLD.replace("ceiling = 12", "ceiling = 64", 1))
        assert (found.how, found.new, found.line) == (How.CONFLICT, (), 6)
        (conflict,) = found.conflicts
        assert "ceiling = 90" in conflict
        assert "ceiling = 12" in conflict
        assert "ceiling = 64" in conflict

    def test_upstream_has_it(self) -> None:
        found = ported(OLD.replace("ceiling = 12", "ceiling = 90", 1))
        assert (found.how, found.new) == (How.THERE, ())

    def test_another_layout_of_the_same_tokens(self) -> None:
        edit = Edit(label="all", path=PATH, scope="f", anchor="    return g(1, 2)\n",
                    text="    if x:\n        return 3\n    return g(1, 2)\n")  # fmt: skip
        new = "def f(x):\n    with lock:\n        return g(\n            1, 2\n        )\n"
        found = ported(new, edit, "def f(x):\n    return g(1, 2)\n")
        assert found.how is How.LAID_OUT
        wanted = "def f(x):\n    with lock:\n        if x:\n            return 3\n"
        assert after(new, found) == f"{wanted}        return g(1, 2)\n"

    def test_where_an_insertion_belongs_is_not_guessed(self) -> None:
        edit = Edit(label="in", path=PATH, scope="f", anchor="    a()\n    b()\n",
                    text="    a()\n    new()\n    b()\n")  # fmt: skip
        new = "def f(x):\n    a()\n    with lock:\n        b()\n"
        assert ported(new, edit, "def f(x):\n    a()\n    b()\n").how is How.CONFLICT

    def test_a_layout_with_a_comment_is_no_match(self) -> None:
        edit = Edit(label="all", path=PATH, scope="f", anchor="    g(1, 2)\n", text="    h()\n")
        new = "def f(x):\n    g(\n        1,  # why\n        2)\n"
        assert ported(new, edit, "def f(x):\n    g(1, 2)\n").how is How.CONFLICT

    def test_moved_to_another_file(self) -> None:
        new = {PATH: "import os\n", "pkg/planning.py": OLD}
        found = ported(new)
        assert found.how is How.SAME
        assert found.new[0].path == "pkg/planning.py"
        assert found.note == "moved from pkg/engine.py to pkg/planning.py"

    def test_in_two_other_files_nothing_is_sure(self) -> None:
        found = ported({PATH: "import os\n", "pkg/a.py": OLD, "pkg/b.py": OLD})
        assert (found.how, found.new) == (How.LOST, ())
        assert found.nearest is not None
        assert found.nearest.similarity == 1.0

    def test_renamed(self) -> None:
        found = ported(OLD.replace("def limit(", "def bound("))
        assert (found.how, found.new[0].scope) == (How.SAME, "Engine.bound")
        assert found.note.startswith("Engine.limit is taken to be Engine.bound now (likeness 0.")

    def test_one_that_is_defined_twice_is_not_looked_for_elsewhere(self) -> None:
        twice = OLD + "\n\nclass Engine:\n    def limit(self):\n        return 1\n"
        found = ported({PATH: twice, "pkg/b.py": OLD})
        assert (found.how, found.new) == (How.LOST, ())

    def test_of_two_that_look_alike_none_is_taken(self) -> None:
        body = OLD[OLD.index("    def limit") : OLD.index("\n    def other")]
        new = OLD.replace(body, body.replace("limit", "one") + body.replace("limit", "two"))
        assert ported(new).how is How.LOST

    def test_whole_file_scope_becomes_the_smallest(self) -> None:
        old = "def f():\n    x = 1\n    y = 1\n\n\ndef g():\n    y = 1\n"
        edit = Edit(
            label="y", path=PATH, anchor="    x = 1\n    y = 1\n", text="    x = 1\n    y = 2\n"
        )
        new = old.replace("x = 1", "x = 5")
        found = ported(new, edit, old)
        assert (found.how, found.new[0].scope) == (How.NARROWED, "f")
        assert after(new, found) == new.replace("y = 1", "y = 2", 1)

    def test_one_that_does_not_fit_its_own_release(self) -> None:
        found = ported(OLD, old=OLD.replace("ceiling", "roof"))
        assert found.how is How.LOST
        assert "it does not fit 1.0" in found.note

    def test_several_places(self) -> None:
        old = "def f():\n    a(1)\n    b()\n    a(1)\n    c()\n"
        edit = Edit(
            label="a", path=PATH, scope="f", anchor="    a(1)\n", text="    a(2)\n", count=2
        )
        same = ported(old + "\n", edit, old)
        assert (same.how, same.new) == (How.SAME, (edit,))
        new = old + "    a(1)\n"
        found = ported(new, edit, old)
        assert found.how is How.MERGED
        assert [one.label for one in found.new] == ["a 1", "a 2"]
        assert after(new, found) == old.replace("a(1)", "a(2)") + "    a(1)\n"

    def test_a_symbol_moves_or_is_gone(self) -> None:
        sides = Sides(tree({PATH: OLD}), tree({PATH: "", "pkg/b.py": OLD}, "2.0"), LABELS)
        symbol = Symbol(PATH, "Engine.other")
        assert port_symbol(symbol, sides).new == Symbol("pkg/b.py", "Engine.other")
        gone = Sides(tree({PATH: OLD}), tree({PATH: "x = 1\n"}, "2.0"), LABELS)
        found = port_symbol(symbol, gone)
        assert (found.new, found.note) == (None, "pkg/engine.py::Engine.other is not in 2.0")


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "    d\n", "\n"]), max_size=12)


class TestRecut:
    @settings(max_examples=150, deadline=None)
    @given(old=LINES, new=LINES)
    def test_either_makes_exactly_the_merged_text_or_gives_up(
        self, old: list[str], new: list[str]
    ) -> None:
        text, merged = "".join(old), "".join(new)
        edit = Edit(label="x", path="a.txt", anchor="?", text="!")
        edits = recut.cut(text, Span(0, len(text)), merged, edit)
        if edits is not None:
            assert recut.applied(text, edits) == merged
            assert all(text.count(one.anchor) >= 1 for one in edits)

    def test_the_anchor_is_as_short_as_it_can_be(self) -> None:
        text = "a\nb\nc\nb\n"
        edit = Edit(label="x", path="a.txt", anchor="?", text="!")
        (found,) = recut.cut(text, Span(0, len(text)), "a\nX\nc\nb\n", edit) or ()
        assert (found.anchor, found.text) == ("a\nb\n", "a\nX\n")

    def test_an_insertion_stays_one(self) -> None:
        edit = Edit(label="x", path="a.txt", anchor="?", text="!", kind="insert_before")
        (found,) = recut.cut("a\nb\n", Span(0, 4), "a\nX\nb\n", edit) or ()
        assert (found.kind, found.anchor, found.text) == ("insert_before", "b\n", "X\n")


def test_a_namesake_must_look_alike() -> None:
    """Another __init__.py of the package is not the file that went."""
    new = tree({"pkg/a/__init__.py": "y = 2\n", "pkg/b/__init__.py": "x = 1\nz = 3\n"})
    assert place.find(new, "pkg/__init__.py", "", "q = 1\n") is None
    found = place.find(new, "pkg/c/__init__.py", "", "x = 1\nz = 3\n")
    assert found is not None
    assert found.path == "pkg/b/__init__.py"
