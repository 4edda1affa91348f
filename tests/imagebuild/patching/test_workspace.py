"""Every state of an edit, reached on purpose, with its message, file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.patching.patch import Edit, Patch
from imagebuild.patching.tree import DirTree
from imagebuild.patching.workspace import EditReport, State, Workspace, overall
from tests.support import site, toy
from tests.support.toy import CEILING, CONFIG, DEFAULT, ENGINE


def run(root: Path, *patches: Patch, new: dict[str, bytes] | None = None) -> list[EditReport]:
    """The reports of the last patch, after all of them ran in one workspace."""
    workspace = Workspace(DirTree(root))
    reports: list[EditReport] = []
    for patch in patches:
        reports = workspace.run(
            patch, patch.variants[0], new if patch is patches[-1] and new else {}
        )
    return reports


def only(root: Path, edit: Edit, **files: str) -> EditReport:
    [report] = run(root, toy.patch("vllm_a_b", edit))
    return report


def seen(report: EditReport) -> tuple[State, int, str]:
    return report.state, report.line, report.message


def changed_engine(tmp_path: Path, old: str, new: str) -> Path:
    assert site.ENGINE.count(old) == 1
    return site.make_site(tmp_path, {ENGINE: site.ENGINE.replace(old, new)})


class TestOneEdit:
    def test_pending(self, tmp_path: Path) -> None:
        report = only(site.make_site(tmp_path), CEILING)
        assert report == EditReport("ceiling", ENGINE, "Engine.limit", State.PENDING, 3)

    def test_applied(self, tmp_path: Path) -> None:
        root = changed_engine(tmp_path, "ceiling = 12", "ceiling = 90")
        assert seen(only(root, CEILING)) == (State.APPLIED, 3, "the new text is already there")

    def test_applied_insertion_keeps_its_anchor(self, tmp_path: Path) -> None:
        for kind, text in (("insert_before", "        floor = 1\n"),
                           ("insert_after", "        floor = 2\n")):  # fmt: skip
            edit = replace(CEILING, kind=kind, text=text)
            root = tmp_path / kind
            site.make_site(root)
            assert only(root, edit).state is State.PENDING
            changed = site.ENGINE.replace(edit.anchor, edit.result)
            site.make_site(root, {ENGINE: changed})
            line = 3
            assert seen(only(root, edit)) == (State.APPLIED, line, "the new text is already there")

    def test_drifted_names_the_closest_line(self, tmp_path: Path) -> None:
        root = changed_engine(tmp_path, "ceiling = 12\n", "ceiling = 13\n")
        report = only(root, CEILING)
        assert seen(report) == (
            State.DRIFTED,
            3,
            "expected the anchor once, found it 0 times in Engine.limit; closest text is at line 3",
        )
        assert report.candidate is not None
        assert (report.candidate.path, report.candidate.text) == (ENGINE, "        ceiling = 13")

    def test_drifted_when_it_matches_too_often(self, tmp_path: Path) -> None:
        root = changed_engine(
            tmp_path, "        ceiling = 12\n", "        ceiling = 12\n        ceiling = 12\n"
        )
        assert seen(only(root, CEILING)) == (
            State.DRIFTED,
            3,
            "expected the anchor once, found it twice in Engine.limit (lines 3, 4)",
        )
        assert only(root, replace(CEILING, count=2)).state is State.PENDING
        assert only(root, replace(CEILING, count=3)).message == (
            "expected the anchor 3 times, found it twice in Engine.limit (lines 3, 4)"
        )

    def test_drifted_when_old_and_new_text_are_both_there(self, tmp_path: Path) -> None:
        root = changed_engine(
            tmp_path, "        ceiling = 12\n", "        ceiling = 12\n        ceiling = 90\n"
        )
        assert seen(only(root, CEILING)) == (
            State.DRIFTED,
            3,
            "expected the anchor once, found it once and the new text once in Engine.limit "
            "(lines 3)",
        )

    def test_drifted_in_a_file_that_does_not_parse(self, tmp_path: Path) -> None:
        root = changed_engine(tmp_path, "ceiling = 12\n", "ceiling = (12\n")
        report = only(root, CEILING)
        assert (report.state, report.line) == (State.DRIFTED, 3)
        assert report.message.startswith(f"{ENGINE} does not parse as Python (line ")
        assert report.message.endswith("; closest text is at line 3")

    @pytest.mark.parametrize(
        ("data", "clause"),
        [
            (b"caf\xe9\n", "is not UTF-8 (byte 3 is 0xe9)"),
            (b"a\r\nb\n", "mixes line ends (1 of 2 are CRLF), so it cannot be written back"),
        ],
    )
    def test_drifted_in_a_file_that_is_no_text(
        self, tmp_path: Path, data: bytes, clause: str
    ) -> None:
        root = site.make_site(tmp_path, {ENGINE: data})
        assert seen(only(root, CEILING)) == (State.DRIFTED, 0, f"{ENGINE} {clause}")

    def test_moved_out_of_its_scope(self, tmp_path: Path) -> None:
        moved = site.ENGINE.replace("        ceiling = 12\n", "").replace(
            '        return "engine"\n', '        ceiling = 12\n        return "engine"\n'
        )
        root = site.make_site(tmp_path, {ENGINE: moved})
        report = only(root, CEILING)
        assert seen(report) == (
            State.MOVED,
            6,
            "expected the anchor once, found it 0 times in Engine.limit; "
            "it stands outside of it, at line 6",
        )

    def test_moved_with_a_renamed_function(self, tmp_path: Path) -> None:
        root = changed_engine(tmp_path, "def limit(", "def capped(")
        report = only(root, CEILING)
        assert seen(report) == (
            State.MOVED,
            3,
            f"{ENGINE} has no Engine.limit; its anchor stands at {ENGINE}:3",
        )
        assert report.candidate is not None
        assert (report.candidate.path, report.candidate.similarity) == (ENGINE, 1.0)

    @pytest.mark.parametrize("home", ["vllm/core/motor.py", "vllm/v2/engine.py"])
    def test_moved_to_another_file(self, tmp_path: Path, home: str) -> None:
        root = site.make_site(tmp_path, {home: site.ENGINE})
        (root / ENGINE).unlink()
        assert seen(only(root, CEILING)) == (
            State.MOVED,
            3,
            f"{ENGINE} does not exist; its anchor stands at {home}:3",
        )

    def test_moved_while_its_text_stays_in_another_function(self, tmp_path: Path) -> None:
        home = "vllm/core/motor.py"
        renamed = site.ENGINE.replace("def limit(", "def capped(")
        root = site.make_site(tmp_path, {ENGINE: renamed, home: "\n" + site.ENGINE})
        assert seen(only(root, CEILING)) == (
            State.MOVED,
            4,
            f"{ENGINE} has no Engine.limit; its anchor stands at {home}:4",
        )

    def test_moved_and_changed(self, tmp_path: Path) -> None:
        home = "vllm/core/motor.py"
        root = site.make_site(tmp_path, {home: "\n" + site.ENGINE.replace("= 12", "= 13")})
        (root / ENGINE).unlink()
        report = only(root, CEILING)
        assert seen(report) == (
            State.MOVED,
            3,
            f"{ENGINE} does not exist; Engine.limit stands at {home}:3",
        )
        assert report.candidate is not None
        assert report.candidate.line == 4

    def test_missing(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        (root / ENGINE).unlink()
        report = only(root, CEILING)
        assert (report.state, report.message) == (State.MISSING, f"{ENGINE} does not exist")

    def test_missing_names_the_closest_text(self, tmp_path: Path) -> None:
        changed = site.ENGINE.replace("def limit(", "def capped(").replace("= 12", "= 13")
        root = site.make_site(tmp_path, {ENGINE: changed})
        assert seen(only(root, CEILING)) == (
            State.MISSING,
            3,
            f"{ENGINE} has no Engine.limit; closest text is at {ENGINE}:3",
        )


class TestSeveralPatches:
    FIRST = toy.patch("vllm_first_edit", CEILING)

    def second(self, *edits: Edit, needs: tuple[str, ...] = ()) -> Patch:
        return toy.patch("vllm_second_edit", *edits, needs=needs)

    def test_the_same_span_collides(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        wide = replace(CEILING, anchor="ceiling = 12\n        return", text="return 1 +")
        [report] = run(root, self.FIRST, self.second(wide))
        assert seen(report) == (
            State.COLLISION,
            0,
            "vllm_first_edit changes the same text, and is not in `needs`",
        )

    def test_the_same_edit_twice_collides(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        [report] = run(root, self.FIRST, self.second(CEILING))
        assert seen(report) == (
            State.COLLISION,
            0,
            "vllm_first_edit changes the same text, and is not in `needs`",
        )

    def test_two_insertions_at_one_anchor_collide(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        before = replace(CEILING, kind="insert_before", text="        a = 1\n")
        after = replace(CEILING, kind="insert_after", text="        b = 1\n")
        [report] = run(root, toy.patch("vllm_first_edit", before), self.second(after))
        assert seen(report) == (
            State.COLLISION,
            4,
            "vllm_first_edit edits the same text, and is not in `needs`",
        )
        needing = self.second(after, needs=("vllm_first_edit",))
        [report] = run(root, toy.patch("vllm_first_edit", before), needing)
        assert report.state is State.PENDING

    def test_an_anchor_in_anothers_output_needs_it(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        chained = replace(CEILING, anchor="ceiling = 90", text="ceiling = 91")
        [report] = run(root, self.FIRST, self.second(chained))
        assert seen(report) == (
            State.COLLISION,
            3,
            "the anchor lies in text of vllm_first_edit, which is not in `needs`",
        )
        workspace = Workspace(DirTree(root))
        for one in (self.FIRST, self.second(chained, needs=("vllm_first_edit",))):
            [report] = workspace.run(one, one.variants[0], {})
            assert report.state is State.PENDING
        assert workspace.changed() == {
            ENGINE: site.ENGINE.replace("ceiling = 12", "ceiling = 91").encode()
        }

    def test_a_second_anchor_made_by_another_patch_collides(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        copies = Edit(
            label="copy", path=ENGINE, scope="Engine.limit", kind="insert_after",
            anchor="        return min(tokens, ceiling)\n", text="        ceiling = 12\n",
        )  # fmt: skip
        [report] = run(root, toy.patch("vllm_first_edit", copies), self.second(CEILING))
        assert seen(report) == (
            State.COLLISION,
            0,
            "vllm_first_edit changes the same text, and is not in `needs`",
        )

    def test_a_scope_that_another_patch_renamed_collides(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        renames = Edit(label="r", path=ENGINE, anchor="def limit(", text="def capped(")
        [report] = run(root, toy.patch("vllm_first_edit", renames), self.second(CEILING))
        assert report.state is State.COLLISION

    def test_upstreams_fault_is_no_collision(self, tmp_path: Path) -> None:
        changed = site.ENGINE.replace(
            "        ceiling = 12\n", "        ceiling = 12\n        ceiling = 90\n"
        )
        root = site.make_site(tmp_path, {ENGINE: changed})
        other = Edit(label="o", path=ENGINE, scope="helper", anchor="x + 1", text="x + 2")
        [report] = run(root, toy.patch("vllm_first_edit", other), self.second(CEILING))
        assert report.state is State.DRIFTED

    def test_two_edits_of_one_patch_at_one_place(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        again = replace(CEILING, label="again", kind="insert_after", text="        b = 1\n")
        before = replace(CEILING, kind="insert_before", text="        a = 1\n")
        reports = run(root, toy.patch("vllm_first_edit", before, again))
        assert [one.state for one in reports] == [State.PENDING, State.COLLISION]
        assert reports[1].message == "another edit of this patch has the same text"

    def test_an_unrelated_file_keeps_the_place(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        [report] = run(root, self.FIRST, self.second(DEFAULT))
        assert report == EditReport("default", CONFIG, "default", State.PENDING, 6)

    def test_a_patch_that_fails_leaves_nothing_behind(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        gone = replace(DEFAULT, anchor="return 77\n")
        workspace = Workspace(DirTree(root))
        bad = toy.patch("vllm_bad_edit", CEILING, gone)
        states = [r.state for r in workspace.run(bad, bad.variants[0], {"vllm/new.py": b"x = 1\n"})]
        assert states == [State.PENDING, State.DRIFTED, State.PENDING]
        assert workspace.changed() == {}
        [report] = workspace.run(self.FIRST, self.FIRST.variants[0], {})
        assert report.state is State.PENDING
        assert list(workspace.changed()) == [ENGINE]

    def test_edits_before_a_span_move_it(self, tmp_path: Path) -> None:
        """Outputs stay where they are when an earlier part of the file grows."""
        root = site.make_site(tmp_path)
        grows = Edit(label="g", path=ENGINE, anchor="class Engine:\n",
                     text=f"# {'one' * 20}\n# two\nclass Engine:\n")  # fmt: skip
        chained = replace(CEILING, anchor="ceiling = 90", text="ceiling = 91")
        grow = toy.patch("vllm_grow_edit", grows)
        [report] = run(root, self.FIRST, grow, self.second(chained))
        assert seen(report)[:2] == (State.COLLISION, 5)
        untouched = replace(DEFAULT, path=ENGINE, scope="helper", anchor="x + 1", text="x + 2")
        [report] = run(root, self.FIRST, grow, self.second(untouched))
        assert report.state is State.PENDING


class TestNewFiles:
    def one(self, root: Path, path: str, data: bytes, *before: Patch) -> EditReport:
        workspace = Workspace(DirTree(root))
        for patch in before:
            workspace.run(patch, patch.variants[0], {path: b"first\n"})
        patch = toy.patch("vllm_new_file")
        [report] = workspace.run(patch, patch.variants[0], {path: data})
        return report

    def test_states(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path, {"vllm/there.py": "x = 1\n"})
        assert self.one(root, "vllm/new.py", b"x = 1\n").state is State.PENDING
        assert seen(self.one(root, "vllm/there.py", b"x = 1\n")) == (
            State.APPLIED, 0, "vllm/there.py is there with the same content",
        )  # fmt: skip
        assert seen(self.one(root, "vllm/there.py", b"x = 2\n")) == (
            State.DRIFTED, 0, "vllm/there.py exists upstream with other content",
        )  # fmt: skip
        assert seen(self.one(root, "vllm/new.py", b"x\n", toy.patch("vllm_first_file"))) == (
            State.COLLISION, 0, "vllm/new.py is also added by vllm_first_file",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], State.PENDING),
        ([State.PENDING, State.PENDING], State.PENDING),
        ([State.APPLIED, State.APPLIED], State.APPLIED),
        ([State.PENDING, State.APPLIED], State.PARTIAL),
        ([State.PENDING, State.APPLIED, State.DRIFTED], State.DRIFTED),
        ([State.DRIFTED, State.COLLISION], State.DRIFTED),
        ([State.MOVED, State.DRIFTED], State.MOVED),
        ([State.MISSING, State.MOVED], State.MISSING),
    ],
)
def test_overall(states: list[State], expected: State) -> None:
    reports = [EditReport("e", "p", "", state) for state in states]
    assert overall(reports) is expected
