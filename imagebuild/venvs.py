"""Makes a virtual environment and installs into it by hash, with uv or pip; standard library only.

It must not decide when one is needed, nor lock: `imagebuild.bootstrap` does.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imagebuild.errors import EngineError, IntegrityError
from imagebuild.uvconf import uv_environment

# Wheels only: nothing of a package may run before its hash and ours have met.
_BY_HASH = ("--require-hashes", "--only-binary", ":all:")
_INDEX_HINT = (
    "check the network and pip's own settings (pip config list; index-url or PIP_INDEX_URL for a "
    "mirror, cert or PIP_CERT for a private certificate), then call build.py again"
)

# What uv draws before the lines of an error.
_FRAME = " \t\N{MULTIPLICATION SIGN}\N{BOX DRAWINGS LIGHT VERTICAL}"
_FRAME += "\N{BOX DRAWINGS LIGHT VERTICAL AND RIGHT}\N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}"
_FRAME += "\N{BOX DRAWINGS LIGHT HORIZONTAL}\N{BLACK RIGHT-POINTING TRIANGLE}"

Way = Callable[[Path, str, Path, int, Sequence[str]], None]


def make(
    venv: Path,
    base: str,
    requirements: Path,
    lock: int,
    stamps: Sequence[str],
    *,
    options: Sequence[str] = (),
) -> None:
    """Makes `venv` anew with `requirements` in it, by the first way that works here.

    Args:
        venv: the folder; what is there is removed, `stamps` first.
        base: interpreter to make it from.
        requirements: pinned and hashed requirements file.
        lock: descriptor that every child inherits.
        stamps: names of the files in `venv` that call it complete.
        options: more options of the installer, such as "--no-deps"; uv and pip must both know them.

    Raises:
        EngineError: no way is present, or the last one failed.
        IntegrityError: a package's hash is not the one in `requirements`.
    """
    ways = _ways(base)
    if not ways:
        raise _no_way(base)
    for number, way in enumerate(ways, start=1):
        remove(venv, stamps)
        try:
            way(venv, base, requirements, lock, options)
        except EngineError as error:
            remove(venv, stamps)
            if number == len(ways):
                raise
            sys.stderr.write(f"{error}; trying another way ...\n")
        except BaseException:
            remove(venv, stamps)
            raise
        else:
            return


def add(venv: Path, requirements: Path, lock: int, options: Sequence[str] = ()) -> None:
    """Installs `requirements` into the complete `venv`; raises as `make` does."""
    python = str(venv / "bin" / "python")
    if uv := _usable_uv():
        try:
            _uv_install(uv, python, requirements, lock, options)
        except EngineError as error:
            sys.stderr.write(f"{error}; trying pip ...\n")
        else:
            return
    _pip_install([python, "-m", "pip"], requirements, lock, options)


def _ways(base: str) -> list[Way]:
    """The ways that this machine has, best first."""
    ways: list[Way] = []
    if _usable_uv():
        ways.append(_by_uv)
    if _has(base, "ensurepip, venv"):
        ways.append(_by_venv)
    elif _has(base, "pip, venv"):
        ways.append(_by_host_pip)
    return ways


def _usable_uv() -> str | None:
    """The uv on PATH, unless pip is configured in a way that uv has no words for."""
    uv = shutil.which("uv")
    return uv if uv and uv_environment(os.environ) is not None else None


def _by_uv(venv: Path, base: str, requirements: Path, lock: int, options: Sequence[str]) -> None:
    uv = shutil.which("uv") or "uv"
    _run([uv, "venv", "--quiet", "--python", base, str(venv)], lock, uv_environment(os.environ))
    _uv_install(uv, str(venv / "bin" / "python"), requirements, lock, options)


def _uv_install(
    uv: str, python: str, requirements: Path, lock: int, options: Sequence[str]
) -> None:
    command = [uv, "pip", "install", "--quiet", "--python", python, *_BY_HASH, *options]
    _run([*command, "-r", str(requirements)], lock, uv_environment(os.environ))


def _by_venv(venv: Path, base: str, requirements: Path, lock: int, options: Sequence[str]) -> None:
    _run([base, "-m", "venv", str(venv)], lock)
    _pip_install([str(venv / "bin" / "python"), "-m", "pip"], requirements, lock, options)


def _by_host_pip(
    venv: Path, base: str, requirements: Path, lock: int, options: Sequence[str]
) -> None:
    """Debian splits ensurepip off, but a python3-pip that is there can fill a venv from outside."""
    _run([base, "-m", "venv", "--without-pip", str(venv)], lock)
    pip = [base, "-m", "pip", "--python", str(venv / "bin" / "python")]
    _pip_install(pip, requirements, lock, options)


def _pip_install(pip: Sequence[str], requirements: Path, lock: int, options: Sequence[str]) -> None:
    # --user from a pip.conf is an error inside a venv.
    environment = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [*pip, "install", "--no-input", *_BY_HASH, *options, "-r", str(requirements)]
    _run(command, lock, environment)


def _run(command: list[str], lock: int, environment: Mapping[str, str] | None = None) -> None:
    """Echoes and runs `command`; its output is kept for the error."""
    sys.stderr.write(f"+ {shlex.join(command)}\n")
    sys.stderr.flush()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(lock,),
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except OSError as error:
        raise EngineError(f"{command[0]}: expected a program, found: {error}") from error
    if done.returncode == 0:
        return
    tool = "pip" if command[1:3] == ["-m", "pip"] else Path(command[0]).name
    cause = _cause(done.stdout)
    if _is_hash_mismatch(done.stdout):
        raise IntegrityError(
            f"{tool}: expected the hashes of the requirements file, found: {cause}",
            hint="ask the owner of the index which of the two is wrong; never edit the hash",
        )
    raise EngineError(
        f"{tool}: expected the requirements to install, found exit {done.returncode}: {cause}",
        hint=_INDEX_HINT,
    )


def _is_hash_mismatch(output: str) -> bool:
    return "DO NOT MATCH THE HASHES" in output or "Hash mismatch" in output


def _cause(output: str) -> str:
    """Picks the lines of a tool's output that say why, and joins them into one."""
    lines = [line.strip(_FRAME) for line in output.splitlines()]
    lines = [line for line in lines if line]
    if _is_hash_mismatch(output):
        # The package and both hashes follow the line that names the fault.
        at = next(number for number, line in enumerate(lines) if _is_hash_mismatch(line))
        chosen = lines[at + 1 : at + 4]
    else:
        # pip names the cause in a warning only; its error says "no matching distribution".
        broken = "connection broken by "
        retries = [line.partition(broken)[2] for line in lines if broken in line][:1]
        errors = [line for line in lines if line.lower().startswith(("error", "caused by"))]
        chosen = [*retries, *errors[:2]] or lines[-2:]
    return re.sub(r"(?<=//)[^/@\s]+@", "", "; ".join(chosen or ["no output"]))[:500]


def _has(base: str, modules: str) -> bool:
    """Whether `base` can import `modules`."""
    command = [base, "-c", f"import {modules}"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _no_way(base: str) -> EngineError:
    """Says what to install, to the letter where the machine has apt."""
    command = [base, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if shutil.which("apt-get"):
        sudo = "" if os.geteuid() == 0 else "sudo "
        hint = f"{sudo}apt-get install -y python{version}-venv"
    else:
        hint = f"install the venv and ensurepip parts of Python {version}, or uv, and call again"
    found = "none of them"
    if shutil.which("uv"):
        found = "only uv, which cannot follow this machine's pip configuration"
    return EngineError(
        f"{base}: expected ensurepip, pip or uv, to make .venv with, found {found}", hint=hint
    )


def remove(venv: Path, stamps: Sequence[str]) -> None:
    """Removes `venv`, its stamps first: after a kill in between nothing looks whole."""
    if venv.is_symlink() or venv.is_file():
        venv.unlink()
        return
    for stamp in stamps:
        (venv / stamp).unlink(missing_ok=True)
    for _ in range(5):
        shutil.rmtree(venv, ignore_errors=True)
        if not venv.exists():
            return
        time.sleep(0.2)  # a dying installer may still put a file there
    shutil.rmtree(venv)
