"""The verb `test`: what it runs, under which Pythons, and what it returns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from imagebuild import testrun
from imagebuild.errors import EngineError

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = [version for version in testrun.VERSIONS if version != OWN]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would run; each ends with exit code 0."""
    commands: list[list[str]] = []

    def pytest_stub(python: Path, arguments: Sequence[str], _root: Path) -> int:
        commands.append([str(python), *arguments])
        return 0

    monkeypatch.setattr(testrun, "ensure_tests", lambda: Path("/venv/bin/python"))
    monkeypatch.setattr(testrun, "ensure", lambda *_: True)
    monkeypatch.setattr(testrun, "_pytest", pytest_stub)
    monkeypatch.setattr(testrun, "find_interpreter", lambda version: f"/usr/bin/python{version}")
    return commands


@pytest.mark.parametrize(
    ("pytest_code", "code"), [(0, 0), (1, 3), (2, 130), (3, 3), (4, 2), (5, 2)]
)
def test_exit_codes_follow_the_table(pytest_code: int, code: int) -> None:
    assert testrun.exit_code(pytest_code) == code


def test_arguments_go_to_one_pytest_run(calls: list[list[str]]) -> None:
    assert testrun.run(["-k", "lock"]) == 0
    assert calls == [["/venv/bin/python", "-k", "lock"]]


def test_engine_tests_run_under_every_other_python(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert testrun.run([], tmp_path) == 0
    assert calls[0] == ["/venv/bin/python", *testrun.PARALLEL]
    expected = [str(tmp_path / ".venv-tests" / version / "bin" / "python") for version in OTHERS]
    assert [call[0] for call in calls[1:]] == expected
    assert all(call[1] == testrun.ENGINE_TESTS for call in calls[1:])
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{OWN} in the run above" in last
    assert all(f"{version} ok" in last for version in OTHERS)


def test_absent_and_crippled_pythons_are_named(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent, crippled = OTHERS[:2]

    def find(version: str) -> str | None:
        return None if version == absent else f"/usr/bin/python{version}"

    def ensure(venv: Path, *_: object) -> bool:
        if venv.name == crippled:
            raise EngineError("/x: expected ensurepip, pip or uv, to make .venv with, found none")
        return True

    monkeypatch.setattr(testrun, "find_interpreter", find)
    monkeypatch.setattr(testrun, "ensure", ensure)
    assert testrun.run([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{absent} not present" in last
    assert f"{crippled} not run (/x: expected ensurepip" in last
    assert len(calls) == len(OTHERS) - 1


def test_other_troubles_are_errors_and_not_a_gap(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure(*_: object) -> bool:
        raise EngineError("pip: expected the requirements to install, found exit 1")

    monkeypatch.setattr(testrun, "ensure", ensure)
    with pytest.raises(EngineError):
        testrun.run([])
    assert len(calls) == 1


@pytest.mark.usefixtures("calls")
def test_failure_under_another_python_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 1, 0, 0, 0])
    monkeypatch.setattr(testrun, "_pytest", lambda *_: next(codes))
    assert testrun.run([]) == 3


def test_command_is_echoed_and_runs_in_the_root(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(testrun, "ensure_tests", lambda: Path(sys.executable))
    (tmp_path / "test_one.py").write_text("def test_one() -> None:\n    pass\n")
    assert testrun.run(["-q", "-p", "no:cacheprovider", "test_one.py"], tmp_path) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"+ {sys.executable} -m pytest -q")
    assert "1 passed" in out


def test_interpreters_are_asked_for_their_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Like pyenv's shim: there for every version, and failing for those not chosen.
    shim = tmp_path / f"python{OTHERS[0]}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert testrun.find_interpreter(OTHERS[0]) is None
    real = tmp_path / f"python{OWN}"
    real.symlink_to(sys.executable)
    assert testrun.find_interpreter(OWN) == str(real)


def test_newest_of_pyenvs_versions_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "pyenv"
    tool.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    tool.chmod(0o755)
    for name in ("9", "10"):
        python = tmp_path / "versions" / f"{OWN}.{name}" / "bin" / "python3"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert testrun.find_interpreter(OWN) == str(
        tmp_path / "versions" / f"{OWN}.10" / "bin" / "python3"
    )
