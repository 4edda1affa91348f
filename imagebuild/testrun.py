"""Runs the project's tests, and the engine's tests under every other Python that is present.

It must not decide what a test needs: that is pyproject.toml's and the tests' own part.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from imagebuild.bootstrap import ROOT, TESTS, ensure, ensure_tests
from imagebuild.errors import EngineError

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# What runs inside the base is standard library only, whichever Python the base has.
ENGINE_TESTS = "tests/imagebuild/patching"
FAILED = 3
# tests/conftest.py says which tests stay in one process. In their order, so that the engine's,
# which take longest, do not come last.
PARALLEL = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadscope", "--no-loadscope-reorder")


def run(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Runs `python -m pytest` with `arguments` in `root`; returns the exit code of the verb.

    Without arguments all of them run, as many at a time as there are processors, four at most. The
    patch engine's follow under the other Pythons from 3.11 to 3.14, each in a venv of its own below
    .venv-tests; a version that is absent, or cannot have a venv, is named.

    Raises:
        EngineError: the test tools cannot be installed.
        IntegrityError: one of them has another hash than requirements-test.txt names.
    """
    code = exit_code(_pytest(ensure_tests(), arguments or PARALLEL, root))
    if arguments or code == 130:
        return code
    own = version_of(sys.executable)
    results = {own: "in the run above"}
    for version in VERSIONS:
        if version != own:
            results[version], other = _engine_tests(version, root)
            code = code or other
    listed = ", ".join(f"{version} {result}" for version, result in sorted(results.items()))
    _say(f"engine tests by Python: {listed}")
    return code


def exit_code(pytest_code: int) -> int:
    """Maps pytest's exit code to the table of the README."""
    # 4: wrong usage, 5: the arguments chose no test.
    return {0: 0, 2: 130, 4: 2, 5: 2}.get(pytest_code, FAILED)


def find_interpreter(version: str) -> str | None:
    """Looks for Python `version` ("3.12") on PATH, then among pyenv's versions."""
    on_path = shutil.which(f"python{version}")
    for candidate in [*([on_path] if on_path else []), *_pyenv_interpreters(version)]:
        # A pyenv shim is on PATH for every version and fails for those not chosen.
        if version_of(candidate) == version:
            return candidate
    return None


def version_of(python: str) -> str | None:
    """The "3.12" of an interpreter, or None where it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _pyenv_interpreters(version: str) -> list[str]:
    """The interpreters of `version` that pyenv has, newest first."""
    if shutil.which("pyenv") is None:
        return []
    done = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    found = Path(done.stdout.strip(), "versions").glob(f"{version}.*/bin/python3")
    return [str(path) for path in sorted(found, key=_by_number, reverse=True)]


def _by_number(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.parent.name)]


def _engine_tests(version: str, root: Path) -> tuple[str, int]:
    """Runs the engine's tests under `version`; returns a word for it and its exit code."""
    base = find_interpreter(version)
    if base is None:
        return "not present", 0
    venv = root / ".venv-tests" / version
    try:
        ensure(venv, [TESTS], base)
    except EngineError as error:
        # Without an index nothing here could have run; without ensurepip only this one cannot.
        if "expected ensurepip" not in str(error):
            raise
        return f"not run ({error})", 0
    arguments = [ENGINE_TESTS, "-q", "-p", "no:cacheprovider"]
    code = exit_code(_pytest(venv / "bin" / "python", arguments, root))
    return ("ok" if code == 0 else f"failed (exit {code})"), code


def _pytest(python: Path, arguments: Sequence[str], root: Path) -> int:
    command = [str(python), "-m", "pytest", *arguments]
    _say(f"+ {shlex.join(command)}")
    return subprocess.run(command, cwd=root, check=False).returncode


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
