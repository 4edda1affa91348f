"""`patches rebase-overlay`: whole upstream files brought to another release."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from imagebuild.config import ROOT
from imagebuild.errors import UsageError
from imagebuild.patching.evaluate import evaluate
from imagebuild.patching.tree import DirTree, Identity, OverlayTree, Tree
from imagebuild.porting.forks import Fate, Rebased, files_of, rebase
from imagebuild.porting.merge import Labels
from tests.drift.field import RECIPE
from tests.support.product import COMMITS, Product
from tests.support.product import files_of as all_files

LABELS = Labels("1.0", "forks", "2.0")
OLD = "import os\n\n\ndef one():\n    return 1\n\n\ndef two():\n    return 2\n"


def tree(files: Mapping[str, str]) -> OverlayTree:
    more = {"pkg/__init__.py": "", **files}
    data: dict[str, bytes | None] = {path: text.encode() for path, text in more.items()}
    return OverlayTree(DirTree(Path("/nonexistent")), data, Identity("1.0"))


def one(
    fork: str, old: Mapping[str, str], new: Mapping[str, str], path: str = "pkg/a.py"
) -> Rebased:
    (found,) = rebase({path: fork.encode()}, tree(old), tree(new), LABELS)
    return found


def test_both_sides_changes_are_in_the_result() -> None:
    found = one(OLD.replace("1", "10"), {"pkg/a.py": OLD}, {"pkg/a.py": OLD.replace("2", "20")})
    assert found.fate is Fate.CLEAN
    assert found.data == OLD.replace("1", "10").replace("2", "20").encode()
    assert not found.is_open


def test_line_ends_are_the_new_releases() -> None:
    new = OLD.replace("2", "20").replace("\n", "\r\n")
    found = one(OLD.replace("1", "10"), {"pkg/a.py": OLD}, {"pkg/a.py": new})
    assert found.data is not None
    assert found.data.count(b"\r\n") == found.data.count(b"\n") == 9


def test_a_conflict_keeps_both_sides() -> None:
    found = one(OLD.replace("1", "10"), {"pkg/a.py": OLD}, {"pkg/a.py": OLD.replace("1", "11")})
    assert (found.fate, found.conflicts, found.data) == (Fate.CONFLICT, 1, None)
    for word in ("<<<<<<< forks", "return 10", "||||||| 1.0", "return 11", ">>>>>>> 2.0"):
        assert word in found.conflict
    assert "def two():" in found.conflict


def test_a_merge_that_is_no_python_is_a_conflict() -> None:
    old = "def f(x):\n    a = (\n        1,\n    )\n    b = 2\n    c = 3\n    d = 4\n    return a\n"
    fork = old.replace("    return a\n", "    return (a\n    )\n")
    new = old.replace("    b = 2\n", "    b = 2 if x else (\n        3)\n").replace(
        "def f", "def f"
    )
    assert one(fork, {"pkg/a.py": old}, {"pkg/a.py": new}).fate is Fate.CLEAN
    old = "if a:\n    b()\n\nz()\nz()\nz()\n"
    broken = one(old + "q()\n", {"pkg/a.py": old}, {"pkg/a.py": old.replace("    b()\n", "")})
    assert broken.fate is Fate.CONFLICT
    assert broken.note.startswith("the merge does not parse as Python (line ")
    assert broken.conflict


@pytest.mark.parametrize("side", ["old", "new"])
def test_one_that_is_upstreams_needs_no_fork(side: str) -> None:
    new = OLD.replace("2", "20")
    found = one(OLD if side == "old" else new, {"pkg/a.py": OLD}, {"pkg/a.py": new})
    assert (found.fate, found.data) == (Fate.IDENTICAL, None)
    assert found.note == f"it is the file of {'1.0' if side == 'old' else '2.0'}"


def test_unchanged_upstream_and_new_files_are_kept() -> None:
    assert one("x = 1\n", {"pkg/a.py": OLD}, {"pkg/a.py": OLD}).fate is Fate.KEPT
    assert one("x = 1\n", {}, {}).fate is Fate.NEW


def test_a_file_that_upstream_added_meanwhile_is_a_conflict() -> None:
    assert one("x = 1\n", {}, {"pkg/a.py": "y = 2\n"}).fate is Fate.CONFLICT


def test_deleted_and_moved() -> None:
    gone = one("x = 1\n", {"pkg/a.py": OLD}, {"pkg/b.py": "def three():\n    pass\n"})
    assert (gone.fate, gone.data) == (Fate.DELETED, None)
    assert gone.note == "2.0 has no such file"
    moved = one("x = 1\n", {"pkg/a.py": OLD}, {"pkg/b.py": OLD + "def more(): ...\n"})
    assert moved.fate is Fate.MOVED
    assert moved.note == "100% of what it defines is in pkg/b.py of 2.0"
    assert moved.is_open


def test_bytes_that_are_no_text_cannot_be_merged() -> None:
    found = rebase({"pkg/a.bin": b"\xff1"}, OverlayTree(tree({}), {"pkg/a.bin": b"\xff2"}),
                   OverlayTree(tree({}), {"pkg/a.bin": b"\xff3"}), LABELS)  # fmt: skip
    assert (found[0].fate, found[0].note) == (
        Fate.CONFLICT,
        "one side is not UTF-8 (byte 0 is 0xff)",
    )


IMPORTS = """\
import pkg.gone
import pkg.b
import elsewhere.thing
from pkg.b import here, lost as kept
from . import b, c
from .b import here as again
from .sub import compiled, sub_module
from pkg.lazy import anything
from pkg.star import anything_too
"""


def test_imports_of_names_that_are_gone() -> None:
    new = {
        "pkg/b.py": "for here in (1,):\n    pass\n",
        "pkg/sub/sub_module.py": "",
        "pkg/sub/compiled.abi3.so": "",
        "pkg/lazy.py": "def __getattr__(name): ...\n",
        "pkg/star.py": "from .b import *\n",
    }
    found = one(IMPORTS, {"pkg/a.py": "x = 1\n"}, {"pkg/a.py": "x = 1\n", **new})
    assert found.fate is Fate.KEPT
    assert dict(found.lost) == {"pkg.gone": 1, "pkg.b.lost": 4, "pkg.c": 5}
    assert found.is_open


def test_a_folder_without_forks_or_with_open_conflicts(tmp_path: Path) -> None:
    for said in ("found none", "expected forked files", "is a conflict that nobody has resolved"):
        with pytest.raises(UsageError, match=said):
            files_of(tmp_path / "f")
        (tmp_path / "f").mkdir(exist_ok=True)
        if said.startswith("expected"):
            (tmp_path / "f" / "a.py.conflict").write_text("x")


class TestVerb:
    @pytest.fixture
    def forks(self, tmp_path: Path) -> Path:
        folder = tmp_path / "vllm_tiny_forks"
        (folder / "vllm").mkdir(parents=True)
        (folder / "vllm" / "greeter.py").write_text(
            'class Greeter:\n    def greet(self):\n        return "hello"\n\n'
            "    def more(self): ...\n"
        )
        (folder / "vllm" / "counter.py").write_text("def start():\n    return 5\n")
        return folder

    def test_shows_a_verdict_a_file_and_keeps_conflicts_beside(
        self, product: Product, forks: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out" / "vllm_tiny_forks"
        words = ["patches", "rebase-overlay", str(forks), "--from", "0.31.0", "--to", "0.32.0"]
        before = all_files(forks)
        ran = product.run(*words, "--out", str(out))
        assert ran.code == 3
        assert "vllm/greeter.py: clean\n" in ran.out
        assert "vllm/counter.py: conflict\n" in ran.out
        assert "to 0.32.0: 1 clean, 1 conflict\n" in ran.out
        assert all_files(forks) == before
        assert sorted(all_files(out)) == [
            "fork.toml",
            "vllm/counter.py.conflict",
            "vllm/greeter.py",
        ]
        record = tomllib.loads((out / "fork.toml").read_text())
        assert (record["version"], record["commit"]) == ("0.32.0", COMMITS["0.32.0"])
        assert list(record["files"]) == ["vllm/greeter.py"]
        text = (out / "vllm" / "greeter.py").read_text()
        assert "self.greeted = True" in text
        assert "def more" in text
        # What is open is asked for again, and the folder is not overwritten.
        assert product.run(*words, "--out", str(out)).code == 2
        ran = product.run("patches", "rebase-overlay", str(out), "--to", "0.33.0")
        assert "vllm/counter.py.conflict is a conflict that nobody has resolved" in ran.err

    def test_its_record_says_what_it_was_forked_from(
        self, product: Product, forks: Path, tmp_path: Path
    ) -> None:
        (forks / "vllm" / "counter.py").unlink()
        out = tmp_path / "out" / "vllm_tiny_forks"
        words = ["patches", "rebase-overlay"]
        assert product.run(*words, str(forks), "--to", "0.32.0").code == 2
        ran = product.run(
            *words, str(forks), "--from", "0.31.0", "--to", "0.32.0", "--out", str(out)
        )
        assert ran.code == 0
        assert product.run(*words, str(out), "--to", "0.33.0").code == 0
        assert product.run(*words, str(out), "--from", "0.31.0", "--to", "0.33.0").code == 2
        record = out / "fork.toml"
        record.write_text(record.read_text().replace(COMMITS["0.32.0"], "eeeeeee99"))
        ran = product.run(*words, str(out), "--to", "0.33.0")
        assert ran.code == 2
        assert "forked from commit eeeeeee99, 0.32.0 is bbbbbbb32" in ran.err

    def test_build_takes_a_fork_on_its_own_commit_alone(
        self, product: Product, forks: Path
    ) -> None:
        """With the series as it is, but for the patch of the forked file."""
        (forks / "vllm" / "counter.py").unlink()
        out = product.root / "patches" / "tiny" / forks.name
        ran = product.run("patches", "rebase-overlay", str(forks), "--from", "0.31.0",
                          "--to", "0.31.0", "--out", str(out))  # fmt: skip
        assert ran.code == 0, ran
        product.replace("image/tiny/series.toml", '"vllm_greeter_polite_words"', f'"{forks.name}/"')
        update = ["lock", "update", "wheels"]
        assert product.run(*update, *(w for v in COMMITS for w in ("--base-version", v))).code == 0
        ran = product.run("build", "--arch", "sm_120")
        assert ran.code == 0, ran
        site = product.root / "dist" / "tiny-sm_120" / "site"
        assert "def more" in (site / "vllm" / "greeter.py").read_text()
        assert product.run("verify", "--tree", str(site)).code == 0
        ran = product.run("build", "--arch", "sm_120", "--base-version", "0.32.0")
        assert ran.code == 3
        assert "exists upstream with other content than what was forked" in ran.err
        # The files are those of the base, and the record says another commit.
        record = out / "fork.toml"
        record.write_text(record.read_text().replace(COMMITS["0.31.0"], "eeeeeee99"))
        ran = product.run("build", "--arch", "sm_120")
        assert ran.code == 3
        assert (
            "the base is 0.31.0, commit aaaaaaa31; fork.toml says 0.31.0, commit eeeeeee99"
            in ran.err
        )


def test_our_patched_files_as_forks(real_base: Callable[[str], Tree]) -> None:
    """The files of our own series on 0.31.0, taken for forks, and brought to 0.33.0."""
    base, target = real_base("0.31.0"), real_base("0.33.0")
    forks = dict(evaluate(RECIPE.series(), base, None, lambda _name, _versions: {}).files)
    found = rebase(forks, base, target, Labels("0.31.0", "ours", "0.33.0"))
    counts = Counter(one.fate for one in found)
    said = ", ".join(f"{counts[fate]} {fate.value}" for fate in Fate if counts[fate])
    assert f"| {said} |" in (ROOT / "docs" / "audit.md").read_text("utf-8")
    for one in found:
        assert one.fate is not Fate.DELETED
        if one.fate is Fate.CONFLICT:
            assert one.conflict
