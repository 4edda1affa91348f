"""patches/README.md is what the modules say, and the page is one that renders."""

from __future__ import annotations

import re

import pytest

from imagebuild import catalogue
from imagebuild.cli import main
from imagebuild.config import ROOT, load_recipe
from tests.support.product import COUNTER, PATCHES, Product

COMMAND = "./build.py patches list --format markdown > patches/README.md"
PAGE = ROOT / "patches" / "README.md"


@pytest.fixture(scope="module")
def made() -> str:
    recipe = load_recipe("glm53-flash")
    return catalogue.markdown(recipe.name, recipe.series())


def test_the_page_is_up_to_date(made: str) -> None:
    assert PAGE.read_text("utf-8") == made, f"the patches changed: {COMMAND}"


def test_the_command_on_the_page_makes_it(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"`{COMMAND}`" in made
    assert main(["patches", "list", "--format", "markdown"]) == 0
    captured = capsys.readouterr()
    assert captured.out == made
    assert captured.err == ""


def test_every_patch_has_its_row_and_section(made: str) -> None:
    names = [patch.name for patch in load_recipe("glm53-flash").series().patches]
    assert re.findall(r"^## (.+)$", made, flags=re.MULTILINE) == names
    assert re.findall(r"^\| \[(\w+)\]\(#\1\) \|", made, flags=re.MULTILINE) == names
    for label in ("Symptom", "Upstream", "Drop when", "Cost"):
        assert made.count(f"\n**{label}:** ") == len(names)


def test_no_line_turns_into_something_else(made: str) -> None:
    """A wrapped word at the start of a line must not begin a list, a quote or a heading."""
    body = made[made.index("\n## ") :]
    plain = [line for line in body.split("\n") if not line.startswith("## ")]
    assert [line for line in plain if re.match(r"([-+*>#]|\d+[.)])(\s|$)|\s|```|\|", line)] == []
    assert max(map(len, plain)) <= 100
    assert made.endswith("\n")
    assert not made.endswith("\n\n")
    for section in body.split("\n## ")[1:]:
        assert section.count("`") % 2 == 0, section.split("\n", 1)[0]


def test_versions_knob_and_needs_of_a_small_series(product: Product) -> None:
    page = product.run("patches", "list", "--format", "markdown").out
    assert page.startswith("# The patches\n")
    assert "Recipe `tiny`, 3 patches." in page
    row = f"| [{COUNTER}](#{COUNTER}) | >=0.31,<0.32; dropped >=0.32 | "
    assert row in page
    assert "`TINY_COUNTER` |" in page
    assert page.count("\n## ") == len(PATCHES)


def test_needs_are_listed_once(made: str) -> None:
    needing = [patch for patch in load_recipe("glm53-flash").series().patches if patch.needs]
    assert needing
    for patch in needing:
        section = made.partition(f"\n## {patch.name}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\*\*Needs:\*\* (.+)$", section, flags=re.MULTILINE) == [
            ", ".join(f"`{need}`" for need in patch.needs)
        ]


def test_not_every_verb_knows_markdown(product: Product) -> None:
    ran = product.run("verify", "--format", "markdown")
    assert ran.code == 2
    assert "invalid choice: 'markdown'" in ran.err


def test_a_paragraph_is_one_line() -> None:
    doc = "Do it.\n\nSymptom: a\n    long one.\nCause: b.\nChange: c.\nUpstream: none.\n"
    doc += "Drop when: never.\nCost. much.\n"
    said = catalogue.paragraphs(doc)
    assert said["Symptom"] == "a long one."
    assert (said["Drop when"], said["Cost"]) == ("never.", "much.")
