"""The edits of the chat template, on stand-ins for what checkpoints ship.

Text only: what the edited templates render is asked by `imagebuild/deep/parser_contract.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.deep.glm_stand_in import OPENINGS, template
from imagebuild.errors import BrokenError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "image" / "runtime" / "glm_chat_template.py"
_spec = importlib.util.spec_from_file_location("glm_chat_template", SOURCE)
edits = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = edits
_spec.loader.exec_module(edits)

EFFORT = "reasoning_effort in ['low', 'high'] else 'max'"


def tail(text):
    """What opens the assistant's turn."""
    return text.rpartition("add_generation_prompt -%}")[2]


@pytest.mark.parametrize("opening", OPENINGS)
def test_thinking_off_is_low_effort_and_the_block_stays_open(opening):
    before = template(opening)
    after = edits.apply_template(before)
    assert "else ('low' if (thinking is defined and thinking is not none and not thinking)" in after
    assert "</think>" not in tail(after)
    assert "<think>" in tail(after)
    # Nothing else changed: the history before the prompt is the checkpoint's.
    assert after.splitlines()[2:-8] == before.splitlines()[2:-8]


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_second_application_changes_nothing(opening):
    once = edits.apply_template(template(opening))
    assert edits.apply_template(once) == once


def test_the_model_s_own_opening_is_kept():
    assert tail(edits.apply_template(template("own"))) == tail(template("own"))


def test_the_recipe_s_own_template_is_taken():
    """One that follows the rule already, with a variable of its own."""
    text = template("own").replace(
        EFFORT, "reasoning_effort in ['low', 'high'] else ('low' if thinking_off else 'max')"
    )
    assert edits.apply_template(text) == text


def test_line_ends_are_kept():
    text = template("switched").replace("\n", "\r\n")
    assert edits.apply_template(text) == edits.apply_template(template("switched")).replace(
        "\n", "\r\n"
    )


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize(
    "newer", ["reasoning_effort in ['low', 'mid', 'high'] else 'max'", "", EFFORT + " " + EFFORT]
)
def test_another_effort_line_stops_the_start(opening, newer):
    with pytest.raises(BrokenError) as stopped:
        edits.apply_template(template(opening).replace(EFFORT, newer))
    (_title, problem) = str(stopped.value).splitlines()
    assert problem.startswith("  - glm_template_effort / 'default effort")
    assert f"once, found it {newer.count(EFFORT)} times; the nearest line is 2: " in problem
    assert stopped.value.hint


@pytest.mark.parametrize(
    ("opening", "label", "line"),
    [
        (
            "    <|assistant|>{{- '</think>' if enable_thinking is false else '<think>' -}}\n",
            "opened always",
            27,
        ),
        # The history opens a block, too.
        ("    <|assistant|>\n", "opened always", 12),
        (OPENINGS["own"] * 2, "opened always", 27),
        (
            OPENINGS["switched"].replace(" is not defined", " is undefined"),
            "opened unless switched off",
            27,
        ),
        (OPENINGS["glm-5.2"].replace("and not enable", "and enable"), "opened always", 27),
    ],
)
def test_another_opening_stops_the_start(opening, label, line):
    with pytest.raises(BrokenError) as stopped:
        edits.apply_template(template("own").replace(OPENINGS["own"], opening))
    (_title, problem) = str(stopped.value).splitlines()
    assert problem.startswith(f"  - glm_template_opening / '{label}")
    assert f"the nearest line is {line}: " in problem


def test_a_second_place_that_closes_stops_the_start():
    """Every anchor fits, and the block is closed all the same."""
    text = template("own") + "{{ '</think>' }}\n"
    line = len(text.splitlines())
    with pytest.raises(BrokenError, match=rf"line {line} closes the think block of the prompt"):
        edits.apply_template(text)


@pytest.mark.parametrize("text", ["a\rb", "a\r\nb\n", "\ud800"])
def test_a_text_that_could_not_be_written_back_stops_the_start(text):
    with pytest.raises(BrokenError, match=r"^the chat template cannot be edited: it "):
        edits.apply_template(text)


def test_both_misses_are_told_at_once():
    with pytest.raises(BrokenError) as stopped:
        edits.apply_template("{{ messages }}")
    problems = str(stopped.value).splitlines()[1:]
    assert ["glm_template_effort" in problems[0], "glm_template_opening" in problems[1]] == [
        True
    ] * 2
    assert len(problems) == 2


@pytest.mark.parametrize("patch", [edits._EFFORT, edits._OPENING], ids=lambda patch: patch.name)
def test_the_reason_holds_before_and_the_effect_after(patch):
    before = edits._OneText(template("glm-5.2"))
    after = edits._OneText(edits.apply_template(template("glm-5.2")))
    assert patch.reason.check(before).outcome.value == "holds"
    assert patch.effect.check(before).outcome.value == "fails"
    assert patch.reason.check(after).outcome.value == "fails"
    assert patch.effect.check(after).outcome.value == "holds"


def test_the_engine_in_the_image_is_two_parts_of_the_project(tmp_path):
    """What the image must carry beside the module: no dependency, no other part of imagebuild."""
    package = tmp_path / "imagebuild"
    shutil.copytree(ROOT / "imagebuild" / "patching", package / "patching")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / "imagebuild" / name, package / name)
    shutil.copy(SOURCE, tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from glm_chat_template import apply_template\n"
        "sys.stdout.write(apply_template(sys.stdin.read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        input=template("switched"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == edits.apply_template(template("switched"))
