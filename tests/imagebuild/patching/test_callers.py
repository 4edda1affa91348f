"""Recorded callers: found by structure, asked for again, and `review` once one is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.patching.callers import ARROW, CALLED, edges_of, lost_edges
from imagebuild.patching.evaluate import Verdict, contexts_of, evaluate, fingerprint_of
from imagebuild.patching.patch import Edit, Symbol
from imagebuild.patching.tree import DirTree
from tests.support import toy

A, B = "vllm/a.py", "vllm/b.py"
EDITED = """\
class Gate:
    def __init__(self, limit):
        self.limit = limit

    def admits(self, value):
        return value < 12


def admit(value):
    return Gate(12).admits(value)


def again(value):
    return again(value - 1)


DEFAULT = admit
"""
OTHER = """\
import vllm.a
from vllm.a import admit


class Server:
    def serve(self, value):
        def inner():
            return vllm.a.admit(value)
        return inner()

    admit = None
"""
EDIT = Edit(label="twelve", path=A, scope="Gate.admits", anchor="        return value < 12\n",
            text="        return value < 90\n")  # fmt: skip
PATCH = toy.patch("vllm_gate_admits_more", EDIT, relies_on=(Symbol(B, "Server.serve"),))


def tree(root: Path, edited: str = EDITED, other: str = OTHER) -> DirTree:
    (root / "vllm").mkdir(exist_ok=True)
    version = "__version__ = '0.31.0'\n"
    for name, text in (("a", edited), ("b", other), ("_version", version)):
        (root / "vllm" / f"{name}.py").write_text(text)
    return DirTree(root)


def edges(root: Path, scope: str) -> list[str]:
    edit = Edit(label="x", path=A, scope=scope, anchor="x", text="y")
    variant = toy.patch("p", edit, relies_on=(Symbol(B),)).variants[0]
    return [entry.partition(ARROW)[2] for entry in edges_of(tree(root), variant)]


@pytest.mark.parametrize(
    ("scope", "callers"),
    [
        ("Gate.admits", [f"{A}::admit"]),
        ("Gate.__init__", [f"{A}::admit"]),  # by its class's name
        ("Gate", [f"{A}::admit"]),
        # Module level, and a nested function of another file; an import or an assignment is none.
        ("admit", [A, f"{B}::Server.serve.inner"]),
        ("again", []),  # itself does not count
        ("Gate.__eq__", []),
        ("", []),
    ],
)
def test_who_calls(tmp_path: Path, scope: str, callers: list[str]) -> None:
    assert edges(tmp_path, scope) == callers


def test_a_file_that_is_no_python_has_no_callers(tmp_path: Path) -> None:
    assert edges_of(tree(tmp_path, edited="def (:\n"), PATCH.variants[0]) == []


def test_what_is_lost(tmp_path: Path) -> None:
    variant = PATCH.variants[0]
    known = edges_of(tree(tmp_path), variant)
    assert lost_edges(tree(tmp_path), variant, known) == []
    gone = EDITED.replace("Gate(12).admits(value)", "value < 12")
    assert lost_edges(tree(tmp_path, gone), variant, known) == [
        (Symbol(A, "Gate.admits"), f"{A}::admit")
    ]
    # What an older variant edited is not asked about any more.
    assert lost_edges(tree(tmp_path, gone), variant, [f"{A}::admit{ARROW}{B}"]) == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_lost_caller_is_review(tmp_path: Path, is_gone: bool) -> None:
    """The edited scope and all it relies on are untouched; only who calls it went."""
    variant = PATCH.variants[0]
    before = tree(tmp_path)
    locked = {str(s): fingerprint_of(before, s) or "" for s in contexts_of(variant)}
    locked |= dict.fromkeys(edges_of(before, variant), CALLED)
    text = EDITED.replace("Gate(12).admits(value)", "value < 12") if is_gone else EDITED
    series = toy.series(PATCH)
    (report,) = evaluate(series, tree(tmp_path, text), None, lambda *_: locked).reports
    assert report.verdict is (Verdict.REVIEW if is_gone else Verdict.OK)
    found = [(f.code, f.message, f.file) for f in report.findings]
    assert found == [
        ("caller-lost", f"{A}::admit no longer reaches {A}::Gate.admits", A)
    ] * is_gone  # fmt: skip
