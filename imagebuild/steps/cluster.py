"""Installs what places ranks on several machines: Ray, or mentat under Ray's name.

Stands alone, so that its stage depends on this file and the given folder only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BIN = Path("/usr/local/bin")
# mentatd answers to the name ray as well; without the probe it registers no GPU.
_MENTAT = ("mentatd", "mentatd-probe-machine")


class _StepError(Exception):
    """A sentence and an exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def main(arguments: Sequence[str]) -> int:
    """`cluster ray|mentat FOLDER [--version V]`."""
    parser = argparse.ArgumentParser(prog="cluster")
    parser.add_argument("kind", choices=["ray", "mentat"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default="")
    asked = parser.parse_args(arguments)
    try:
        if asked.kind == "ray":
            _ray(asked.folder)
        else:
            _mentat(asked.folder, asked.version)
    except _StepError as error:
        sys.stderr.write(f"cluster: error: {error}\n")
        return error.code
    return 0


def _ray(folder: Path) -> None:
    wheels = sorted(folder.rglob("*.whl"))
    if wheels:
        _install(wheels, "ray")
    elif shutil.which("ray") is None:
        raise _StepError(4, "ray: expected it in the base or as wheels, found neither\n"
                         "hint: --build-context ray=DIR with the wheels")  # fmt: skip
    told = _run(["ray", "--version"])
    if "mentat" in told.lower() or "ray" not in told.lower():
        raise _StepError(3, f"ray --version: expected Ray itself, found {told!r}")
    # What vLLM does with it; the wheels were installed without asking what they depend on.
    version = _run([sys.executable, "-c", "import ray; print(ray.__version__)"])
    if version not in told.split():
        raise _StepError(3, f"import ray: expected the version of {told!r}, found {version!r}")


def _mentat(folder: Path, version: str) -> None:
    found = {name: next(iter(sorted(folder.rglob(name))), None) for name in _MENTAT}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise _StepError(4, f"mentat: expected {' and '.join(missing)}, found none; its image is "
                         "not locked\nhint: --build-context mentat=DIR, or docker-image://REF@DIGEST"
                         )  # fmt: skip
    if not version:
        raise _StepError(4, "mentat: expected its version, found none\n"
                         "hint: --mentat-version V, that of the hosts' daemons")  # fmt: skip
    if shutil.which("ray") is not None:
        raise _StepError(2, "mentat: expected a base without Ray, found one: they share a name\n"
                         "hint: use --cluster ray, or a base without it")  # fmt: skip
    for name, path in found.items():
        if path is not None:
            shutil.copyfile(path, _BIN / name)
            (_BIN / name).chmod(0o755)
    (_BIN / "ray").symlink_to("mentatd")
    wheels = sorted(folder.rglob("*.whl"))
    if wheels:
        _install(wheels, "mentat")
    told = _run(["mentatd", "--version"])
    if version not in told.split():
        raise _StepError(3, f"mentatd --version: expected {version}, found {told!r}")
    told = _run(["ray", "--version"])
    if "mentat" not in told.lower():
        raise _StepError(3, f"ray --version: expected mentat, found {told!r}")


def _install(wheels: Sequence[Path], owner: str) -> None:
    """Installs wheels as they are, with byte code that does not depend on file times.

    What the base has already stays, whichever version the wheel is of: vLLM was built with it.
    """
    wanted = []
    for wheel in wheels:
        project = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        known = _installed(project)
        if known is None or project == owner:
            wanted.append(wheel)
        else:
            sys.stdout.write(f"{wheel.name} is left out: the base has {project} {known}\n")
    if wanted:
        _run([sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-cache-dir",
              "--break-system-packages", "--root-user-action=ignore", *map(str, wanted)]
             )  # fmt: skip


def _installed(project: str) -> str | None:
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(command: Sequence[str]) -> str:
    sys.stdout.write(f"+ {' '.join(command)}\n")
    sys.stdout.flush()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _StepError(5, f"{command[0]}: cannot be started: {error.strerror}") from error
    if done.returncode:
        raise _StepError(5, f"{command[0]}: expected exit code 0, found {done.returncode}: "
                         f"{(done.stderr or done.stdout).strip()[-500:]}")  # fmt: skip
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
