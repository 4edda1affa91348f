"""Compose and env files with the faults that people met, each found at its line and no other."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.config import ROOT
from imagebuild.lint import serving

SPEC = '{"method":"mtp","num_speculative_tokens":3}'


def codes(findings: list[serving.Finding]) -> list[tuple[str, int]]:
    return [(one.code, one.line) for one in findings]


@pytest.mark.parametrize(
    ("raw", "compose", "shell"),
    [
        (f"'{SPEC}'", SPEC, SPEC),
        (SPEC, SPEC, "{method:mtp,num_speculative_tokens:3}"),
        ('"a b"', "a b", "a b"),
        ("a b", "a b", None),
        ("a # note", "a", "a"),
        (" a", "a", None),
        ("", "", ""),
        ("'a", "'a", None),
        ("a\\b", "a\\b", "ab"),
    ],
)
def test_what_each_reader_makes_of_a_value(raw, compose, shell):
    assert serving.compose_value(raw) == compose
    assert serving.shell_value(raw) == shell


@pytest.mark.parametrize("raw", [f"'{SPEC}'", SPEC, '"a b"', "a # note", "a\\b"])
def test_the_shell_is_right_about_itself(raw, tmp_path):
    path = tmp_path / ".env"
    path.write_text(f"X={raw}\n")
    command = [shutil.which("bash") or "sh", "-c", f'set -a; . {path}; printf %s "$X"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == serving.shell_value(raw)


def test_env_file(tmp_path):
    text = (
        "# the box\n"
        "IMAGE=glm:1\n"
        "GLM_DEPLOYMENT=gb10-2x\n"
        f"GLM_SPECULATIVE_CONFIG={SPEC}\n"
        "GLM_MAX_NUM_SEQ=4\n"
        "GLM_BLOCK_SIZE=300\n"
        "IMAGE=glm:2\n"
        "nonsense\n"
    )
    found = serving.check_env(text, ".env")
    assert codes(found) == [
        ("env-quotes", 4), ("env-twice", 7), ("env-line", 8), ("knob", 5), ("knob", 6),
    ]  # fmt: skip
    assert "method:mtp" in found[0].message
    assert "did you mean GLM_MAX_NUM_SEQS?" in found[3].message


def test_part_of_a_configuration_is_asked_for_names_and_values_alone():
    found = serving.check_env("GLM_TP=RING4\nGLM_RING_NEX=e1\nGLM_MAX_NUM_SEQS=x\n", ".env")
    assert codes(found) == [("knob", 2), ("knob", 3)]


COMPOSE = """\
services:
  glm53:
    image: glm53-flash:0.31.0
    environment:
      GLM_DEPLOYMENT: gb10-4x
      GLM_TP:
      GLM_MAX_NUM_SEQS: ${GLM_MAX_NUM_SEQS}
"""


def test_sound_compose_file():
    assert serving.check_compose(COMPOSE, "x.yaml") == []


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (("gb10-4x", "gb10-3x"), "knob", 5),
        (("GLM_TP:", "GLM_TPP: '2'"), "knob", 6),
        (("GLM_TP:", "GLM_TP: '2'"), "knob", 6),
        (("${GLM_MAX_NUM_SEQS}", "${GLM_MAX_NUM_SEQS:-32}"), "knob-default", 7),
        ((":0.31.0", ":latest"), "image-latest", 3),
        ((":0.31.0", ""), "image-latest", 3),
        (("    environment", "    command: >\n      --a\n        \n      --b\n    environment"),
         "command-newline", 4),
        (("services:", "services: ["), "yaml", 3),
    ],
)  # fmt: skip
def test_faulty_compose_file(change, code, line):
    found = serving.check_compose(COMPOSE.replace(*change), "x.yaml")
    assert codes(found) == [(code, line)]


def test_folded_command_without_a_line_end_is_sound():
    text = COMPOSE.replace(
        "    environment", "    command: >\n      --a\n      --b\n    environment"
    )
    assert serving.check_compose(text, "x.yaml") == []


def test_list_form_and_override():
    text = (
        "services:\n  a:\n    environment:\n"
        "      - GLM_API_PORT=${GLM_API_PORT:-1}\n      - GLM_X=1\n"
    )
    assert codes(serving.check_compose(text, "x.yaml")) == [("knob", 5)]


@pytest.mark.parametrize("text", ["", "[]", "services: 5", "services: {a: 5}", "a: &x [*x]"])
def test_odd_documents_are_no_crash(text):
    assert all(one.code == "yaml" for one in serving.check_compose(text, "x.yaml"))


def test_the_repository_s_own_files_are_sound(capsys):
    assert main(["lint", "--strict", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1, "ok": True, "exit_code": 0, "findings": [],
    }  # fmt: skip
    assert len(list((ROOT / "compose").rglob("*.yaml"))) >= 3


def test_verb(tmp_path: Path, capsys):
    path = tmp_path / "box.env"
    path.write_text("GLM_FOO=1\n")
    assert main(["lint", str(path)]) == 3
    assert f"{path}:1: error knob: GLM_FOO" in capsys.readouterr().out
    loose = tmp_path / "x.yaml"
    loose.write_text("services: {a: {image: x}}\n")
    assert main(["lint", str(loose)]) == 0
    assert main(["lint", "--strict", str(loose)]) == 1
    assert main(["lint", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "Dockerfile").write_text("FROM x:1\nRUN curl x | sh\n")
    assert main(["lint", str(tmp_path / "Dockerfile")]) == 3
