"""The source text of ported edits: what was ported, within the width, as a formatter has it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagebuild.config import ROOT
from imagebuild.patching.patch import Edit
from imagebuild.porting.module import edit_code

PATH = "vllm/some/long/folder/with/a/module.py"
LINES = st.lists(
    st.text(alphabet="abc \t\"'\\{}é\u2028=()#", max_size=150).map(lambda line: f"{line}\n"),
    min_size=1,
    max_size=4,
)


def as_source(edit: Edit) -> str:
    return f"EDIT = (\n    {edit_code(edit, 4, {PATH: '_PATH'})},\n)\n"


def edit_of(anchor: str, text: str, **more: object) -> Edit:
    return Edit(label="a label", path=PATH, anchor=anchor, text=text, **more)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(anchor=LINES, text=LINES)
def test_it_means_the_same_edit(anchor: list[str], text: list[str]) -> None:
    edit = edit_of("".join(anchor), "".join(text), scope="Some.method", count=2)
    names: dict[str, object] = {"Edit": Edit, "_PATH": PATH}
    source = as_source(edit)
    exec(source, names)
    assert names["EDIT"] == (edit,)
    assert max(len(line) for line in source.split("\n")) <= 100


@pytest.mark.parametrize(
    "edit",
    [
        edit_of("    return 1\n", "    return 2\n"),
        edit_of("    a = 1\n" * 9, "    b = 2\n" * 9, kind="insert_after"),
        edit_of("x" * 180 + "\n", "    call(" + "word, " * 40 + ")\n", scope="f"),
        edit_of('    say("it\'s")\n', "    say('\"' + \"'\")\n" * 5, count=3),
        edit_of("    'a'\n    'b'\n", '    "a"\n    "b"\n'),
        edit_of("if a:\n    b\n", "if c:\n    d\n"),
    ],
    ids=range(6),
)
def test_formatters_leave_it_alone(edit: Edit) -> None:
    source = as_source(edit)
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--config", str(ROOT / "pyproject.toml"), "-"],
        input=source, capture_output=True, text=True, check=True)  # fmt: skip
    assert ran.stdout == source
