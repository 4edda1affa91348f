"""Evidence: changed tokens with their lines, places that may be the one, pins, lost callers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imagebuild.audit.candidates import candidates
from imagebuild.audit.results import TokenChange
from imagebuild.audit.tokens import is_layout, scope_text, shown, token_changes
from imagebuild.patching.patch import Edit
from imagebuild.patching.tree import DirTree
from tests.imagebuild.audit.test_grid import newer
from tests.support.product import GREETER, PLAN, TAGS, Product, release_files

OLD = """\
import os
LIMIT = 12


class Gate:
    def admits(self, value, *, strict=False):
        # Comments do not count.
        if strict:
            return value < LIMIT
        return value <= LIMIT
"""


def changes(new: str, scope: str = "Gate.admits", path: str = "a.py", old: str = OLD) -> Any:
    return token_changes(scope_text(old, path, scope), scope_text(new, path, scope))


class TestTokens:
    def test_layout_and_comments_are_no_change(self) -> None:
        new = OLD.replace("# Comments do not count.", "# None.\n").replace("value,", "value ,")
        assert changes("\n" + new) == ()

    def test_a_change_has_its_line_on_both_sides(self) -> None:
        new = "\n\n" + OLD.replace("strict=False", "strict=True").replace("<= LIMIT", "< LIMIT")
        assert changes(new) == (
            TokenChange(("False",), ("True",), 6, 8),
            TokenChange(("=",), (), 10, 12),
        )

    def test_an_insertion_stands_where_it_is(self) -> None:
        new = OLD.replace("        if strict:", "        value = int(value)\n        if strict:")
        (change,) = changes(new)
        assert (change.old, change.new_line) == ((), 8)
        assert shown(change.new) == "value = int ( value ) ⏎"

    def test_what_a_scope_stands_on_is_part_of_it(self) -> None:
        (change,) = changes(OLD.replace("LIMIT = 12", "LIMIT = 90"))
        assert (change.old, change.new, change.old_line) == (("12",), ("90",), 0)

    def test_a_new_level_is_layout_and_told(self) -> None:
        new = OLD.replace("            return value < LIMIT\n", "            return value < LIMIT\n"
                          "    ")  # fmt: skip
        found = changes(new)
        assert found
        assert all(is_layout(change) for change in found)

    def test_cpp_and_plain_files(self) -> None:
        old = "int f(int a) {\n  return a + 1;\n}\n"
        new = "// new\nint f(int a) {\n  return a + 2;\n}\n"
        assert changes(new, "f", "a.cu", old) == (TokenChange(("1",), ("2",), 2, 3),)
        assert changes("b = 2\n", "", "a.toml", "b = 1\n") == (
            TokenChange(("b = 1",), ("b = 2",), 1, 1),
        )


MANY = "".join(f"    step_{n} = prepare(step_{n}, scale, offset)\n" for n in range(5))
BODY = f"{MANY}    answer = combine(step_0, step_1)\n    return answer * scale\n"
EDIT = Edit(label="scale", path="vllm/core/plan.py", scope="make_plan",
            anchor="    answer = combine(step_0, step_1)\n", text="    answer = 1\n")  # fmt: skip


class TestCandidates:
    def tree(self, folder: Path, files: dict[str, str]) -> DirTree:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return DirTree(folder)

    @pytest.fixture
    def old(self, tmp_path: Path) -> DirTree:
        text = f"def make_plan(scale, offset):\n{BODY}"
        return self.tree(tmp_path / "old", {"vllm/core/plan.py": text})

    def test_a_renamed_function_in_another_file(self, tmp_path: Path, old: DirTree) -> None:
        moved = BODY.replace("combine(step_0, step_1)", "merge(step_0, step_1, axis=0)")
        new = self.tree(tmp_path / "new", {
            "vllm/core/plan.py": "def other():\n    return 1\n",
            "vllm/core/planning.py": f"class Planner:\n    def draft(self):\n        pass\n\n\n"
                                     f"def build(scale, offset):\n{moved}",
        })  # fmt: skip
        found = candidates(new, old, EDIT)
        assert (found.label, found.path, found.scope) == ("scale", EDIT.path, "make_plan")
        best = found.candidates[0]
        assert (best.path, best.line, best.scope) == ("vllm/core/planning.py", 12, "build")
        assert best.why == "build is like make_plan was"
        assert 0.9 < best.similarity < 1
        assert "merge(step_0, step_1, axis=0)" in best.text

    def test_without_a_reference_the_lines_alone_are_looked_at(
        self, tmp_path: Path, old: DirTree
    ) -> None:
        new = self.tree(tmp_path / "new", {
            "vllm/core/plan.py": "x = 1\n", "vllm/core/deep/plan.py": old.read(EDIT.path).decode(),
        })  # fmt: skip
        (best,) = candidates(new, None, EDIT).candidates
        assert (best.path, best.line, best.similarity) == ("vllm/core/deep/plan.py", 7, 1.0)
        assert (best.scope, best.why) == ("make_plan", "the lines are alike")

    def test_what_is_like_nothing_has_none(self, tmp_path: Path, old: DirTree) -> None:
        new = self.tree(tmp_path / "new", {"vllm/core/plan.py": "def other():\n    return 1\n"})
        assert candidates(new, old, EDIT).candidates == ()

    def test_files_that_are_no_text_or_no_python_are_passed_over(
        self, tmp_path: Path, old: DirTree
    ) -> None:
        new = self.tree(tmp_path / "new", {
            "vllm/core/plan.py": "def (:\n", "vllm/core/planning.py": old.read(EDIT.path).decode(),
        })  # fmt: skip
        (tmp_path / "new" / "vllm" / "core" / "binary.py").write_bytes(b"\xff\xfe\x00")
        assert candidates(new, old, EDIT).candidates[0].path == "vllm/core/planning.py"


def patch_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    (release,) = document["releases"]
    return next(patch for patch in release["patches"] if patch["name"] == name)


def test_a_review_shows_tokens(product: Product) -> None:
    text = release_files("0.33.0", "linux/amd64")["vllm/greeter.py"]
    newer(product.wheels, "0.33.1", {"vllm/greeter.py": b"# new\n" + text.replace(b"True", b"1")})
    ran = product.run("audit", "--against", "0.33.1", "--format", "json")
    (scope,) = patch_of(ran.json, GREETER)["evidence"]["scopes"]
    assert (scope["path"], scope["scope"], scope["line"], scope["reference"]) == (
        "vllm/greeter.py", "Greeter.greet", 3, "0.33.0",
    )  # fmt: skip
    assert scope["tokens"] == [{"old": ["True"], "new": ["1"], "old_line": 3, "new_line": 4}]
    assert "        line 4: True => 1\n" in product.run("audit", "--against", "0.33.1").out


def test_a_drifted_edit_shows_the_scope_and_a_moved_one_its_new_place(product: Product) -> None:
    text = release_files("0.33.0", "linux/amd64")["vllm/greeter.py"]
    newer(product.wheels, "0.33.1", {"vllm/greeter.py": text.replace(b'"hello"', b'"hello!"')})
    ran = product.run("audit", "--against", "0.33.1", "--format", "json")
    evidence = patch_of(ran.json, GREETER)["evidence"]
    assert [scope["tokens"][0]["new"] for scope in evidence["scopes"]] == [['"hello!"']]
    assert evidence["candidates"][0]["candidates"][0]["line"] == 4
    newer(product.wheels, "0.33.2", {"vllm/greeter.py": b"X = 1\n", "vllm/welcome.py": text})
    ran = product.run("audit", "--against", "0.33.2", "--format", "json")
    patch = patch_of(ran.json, GREETER)
    assert (ran.code, patch["verdict"]) == (3, "moved")
    near = patch["evidence"]["candidates"][0]["candidates"][0]
    assert (near["path"], near["scope"], near["similarity"]) == (
        "vllm/welcome.py", "Greeter.greet", 1.0,
    )  # fmt: skip


def test_a_pin_says_how_many_patches_edit_what_it_is_of(product: Product) -> None:
    ran = product.run("audit", "--against", "0.33.0", "--format", "json")
    assert ran.json["releases"][0]["pin_changes"] == [{
        "project": "flashinfer-python", "locked": "0.7.0", "found": "0.7.2", "patches": [PLAN],
        "sentence": "flashinfer-python 0.7.0 -> 0.7.2: 1 patch edits it",
    }]  # fmt: skip


def test_a_caller_that_is_gone_is_review_though_no_fingerprint_changed(product: Product) -> None:
    """What the lock holds of `helper`'s file is untouched but for who calls what is edited."""
    extra = b"\n\ndef use():\n    from vllm.greeter import Greeter\n    return Greeter().greet()\n"
    util = release_files("0.33.0", "linux/amd64")["vllm/util.py"]
    for platform in TAGS:
        newer(product.wheels, "0.33.1", {"vllm/util.py": util + extra}, platform=platform)
    newer(product.wheels, "0.33.2", {"vllm/util.py": util})
    locked = product.run("lock", "update", "wheels", "--base-version", "0.33.1", "--accept", "all")
    assert locked.code == 0, locked
    ran = product.run("audit", "--against", "0.33.2", "--format", "json")
    patch = patch_of(ran.json, GREETER)
    assert patch["verdict"] == "review"
    assert [f["code"] for f in patch["findings"]] == ["caller-lost"]
    assert all(c["locked"] == c["found"] for c in patch["contexts"])
    message = "vllm/util.py::use no longer reaches vllm/greeter.py::Greeter.greet"
    assert patch["findings"][0]["message"] == message
