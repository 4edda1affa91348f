"""The Dockerfile's defaults are those of recipe and lock, and it obeys the rules of the docs."""

from __future__ import annotations

import dataclasses
import re

import pytest

from imagebuild import render
from imagebuild.config import ROOT, load_recipe
from imagebuild.errors import IntegrityError, UsageError
from imagebuild.lock import read_lock

RECIPE = load_recipe("glm53-flash")
BASE = read_lock(RECIPE.lock_file).base(RECIPE.base_version)
TEXT = render.dockerfile().read_text("utf-8")
STAGES = re.findall(r"^FROM (.+)$", TEXT, re.MULTILINE)


def test_generated_block_is_the_lock_s() -> None:
    wanted = render.rendered(TEXT, RECIPE, BASE)
    assert wanted == TEXT, "run: build.py render"


def test_block_has_the_digest_and_the_epoch() -> None:
    assert BASE.image is not None
    block = render.block(RECIPE, BASE)
    assert f"ARG BASE={BASE.image.repository}:v0.31.0@sha256:" in block
    assert f"ARG SOURCE_DATE_EPOCH={BASE.epoch}\n" in block


def test_changed_lock_changes_the_block_only() -> None:
    other = dataclasses.replace(BASE, epoch=BASE.epoch + 1)
    changed = render.rendered(TEXT, RECIPE, other)
    differing = [
        (one, two)
        for one, two in zip(TEXT.splitlines(), changed.splitlines(), strict=True)
        if one != two
    ]
    assert differing == [
        (f"ARG SOURCE_DATE_EPOCH={BASE.epoch}", f"ARG SOURCE_DATE_EPOCH={BASE.epoch + 1}")
    ]


def test_dockerfile_without_marks_is_refused() -> None:
    with pytest.raises(UsageError, match="marks"):
        render.rendered(TEXT.replace(render.END, ""), RECIPE, BASE)


def test_base_without_image_is_unresolved() -> None:
    with pytest.raises(IntegrityError, match=r"0\.31\.0.*unresolved") as caught:
        render.reference(dataclasses.replace(BASE, image=None))
    assert caught.value.exit_code == 4
    assert "lock update" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("version", "asked", "choice"),
    [
        ("0.31.0", None, "base"),
        ("0.33.0", None, "base"),
        ("0.30.0", None, "build"),
        ("0.31.0", "build", "build"),
        ("0.30.0", "base", "base"),
        ("0.30.0", "auto", "build"),
    ],
)
def test_flashkda_follows_the_release(version: str, asked: str | None, choice: str) -> None:
    found, why = render.flashkda_of(RECIPE, version, asked)
    assert found == choice
    assert why


def test_every_stage_that_runs_something_knows_the_epoch() -> None:
    for stage in re.split(r"^(?=FROM )", TEXT, flags=re.MULTILINE)[1:]:
        if re.search(r"^RUN ", stage, re.MULTILINE):
            head = stage.partition("\nRUN ")[0]
            assert "\nARG SOURCE_DATE_EPOCH" in head, stage.splitlines()[0]


def test_no_step_has_a_network_or_hides_a_failure() -> None:
    steps = re.findall(r"^RUN .*(?:\\\n.*)*", TEXT, re.MULTILINE)
    assert len(steps) >= 7
    for step in steps:
        assert "--network=none" in step
        assert "||" not in step
        assert not re.search(r"\b(curl|wget|apt-get|git clone)\b", step)
        assert ";" not in re.sub(r"\bif \[.*?\]; then \\\n.*; \\\n\s+fi", "", step)


def test_base_is_named_directly_and_no_frontend_is_pulled() -> None:
    assert "${BASE} AS patched" in STAGES
    assert not re.search(r"^#\s*syntax", TEXT, re.MULTILINE | re.IGNORECASE)
    for stage in STAGES:
        image = stage.removeprefix("--platform=${BUILDPLATFORM} ").partition(" AS ")[0]
        assert re.fullmatch(r"scratch|\$\{(BASE|TOOLCHAIN)\}|[\w-]+|[\w-]+-\$\{\w+\}", image), stage
    assert "python3." not in TEXT
    assert "site-packages" not in TEXT


def test_context_holds_nothing_that_no_stage_reads() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    for line in lines:
        if line.startswith("!"):
            assert (ROOT / line[1:]).exists(), line
