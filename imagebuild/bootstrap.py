"""Makes sure of the .venv beside build.py; standard library only.

Every call of build.py comes through here, so it must import nothing slow: what makes a venv is in
`imagebuild.venvs` and is imported only when there is one to make.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagebuild.errors import BuildError, EngineError

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# A layer is (stamp, requirements); the first one makes the venv, the next ones add to it.
RUNTIME = (".stamp", ROOT / "requirements.txt")
TESTS = (".stamp-tests", ROOT / "requirements-test.txt")

Layer = tuple[str, Path]


def main(argv: Sequence[str]) -> int:
    """Hands `argv` to the command line in the .venv; returns only where it runs there already."""
    try:
        made = ensure(VENV, [RUNTIME])
    except BuildError as error:
        return report(error)
    except KeyboardInterrupt:
        return 130
    python = VENV / "bin" / "python"
    if made or os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        sys.stderr.flush()
        # build.py itself again, not -m: the caller's folder must not get onto sys.path.
        os.execv(python, [str(python), str(ROOT / "build.py"), *argv])  # noqa: S606
    try:
        from imagebuild.cli import main as cli_main

        return cli_main(list(argv))
    except KeyboardInterrupt:  # while Python still imports
        return 130


def report(error: BuildError) -> int:
    """Writes `error` and its hint to stderr; returns its exit code."""
    say(f"build.py: error: {error}")
    if error.hint:
        say(f"hint: {error.hint}")
    return error.exit_code


def say(line: str) -> None:
    """Writes one line to stderr; stdout belongs to the verb."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def ensure_tests() -> Path:
    """Adds the test tools to the .venv where they are missing; returns its interpreter."""
    ensure(VENV, [RUNTIME, TESTS])
    return VENV / "bin" / "python"


def ensure(
    venv: Path, layers: Sequence[Layer], base: str | None = None, options: Sequence[str] = ()
) -> bool:
    """Makes `venv` hold exactly what `layers` ask for, once, however many calls come at a time.

    Args:
        venv: folder of the virtual environment; "<venv>.lock" beside it serialises the calls.
        layers: (stamp, requirements) in order.
        base: interpreter that makes it; the running one's base where None.
        options: more options of the installer.

    Returns:
        Whether anything had to be done.

    Raises:
        EngineError: no tool to make it, no index, or the folder cannot be written.
        IntegrityError: a downloaded package has another hash than the requirements name.
    """
    if not any(flaw(venv, layer) for layer in layers):
        return False
    base = base or getattr(sys, "_base_executable", None) or sys.executable
    try:
        with _locked(venv) as lock:
            return _prepare(venv, layers, base, lock, options)
    except OSError as error:
        raise EngineError(
            f"{error.filename or venv}: expected to be able to write it, "
            f"found: {error.strerror or error}",
            hint=f"give this user the folder {venv.parent}, or clone into one that it may write",
        ) from error


def flaw(venv: Path, layer: Layer) -> str | None:
    """Says in words why `layer` is not complete in `venv`, or None where it is.

    The stamp is written last, so a venv without one was interrupted. Nothing is executed: the
    interpreter's resolved path carries its version, and so shows an upgraded or removed one.
    """
    stamp, requirements = layer
    if not venv.exists():
        return "first call"
    if not os.access(venv / "bin" / "python", os.X_OK) or not (venv / "pyvenv.cfg").exists():
        return "its Python is gone"
    try:
        found = (venv / stamp).read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"{requirements.name} is not all installed"
    if found == (wanted := _stamp_text(venv, requirements)):
        return None
    changed = [
        new.partition("=")[0]
        for old, new in zip(found.splitlines(), wanted.splitlines(), strict=False)
        if old != new
    ]
    words = {"requirements": f"{requirements.name} changed", "location": "the folder moved"}
    return words.get(changed[0], "its Python changed") if changed else "its stamp is damaged"


def _stamp_text(venv: Path, requirements: Path) -> str:
    """Names all that a complete layer depends on."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    python = os.path.realpath(venv / "bin" / "python")
    return f"requirements={digest}\npython={python}\nlocation={os.path.realpath(venv)}\n"


@contextlib.contextmanager
def _locked(venv: Path) -> Iterator[int]:
    """Holds the lock beside `venv`; gives its descriptor, which the installers must inherit.

    A call that was killed leaves its installer running; while that one still has the descriptor
    the lock stays taken, so nobody makes a venv under its hands.
    """
    venv.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(venv.with_name(venv.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another call that prepares {_shown(venv)} ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _prepare(
    venv: Path, layers: Sequence[Layer], base: str, lock: int, options: Sequence[str]
) -> bool:
    """Does under the lock what is still missing; a layer that fails leaves nothing half made."""
    from imagebuild import venvs

    done = False
    for layer in layers:
        why = flaw(venv, layer)
        if why is None:
            continue
        done = True
        stamp, requirements = layer
        say(f"preparing {_shown(venv)} ({why}) ...")
        if layer is layers[0]:
            stamps = [name for name, _ in layers]
            venvs.make(venv, base, requirements, lock, stamps, options=options)
        else:
            (venv / stamp).unlink(missing_ok=True)
            venvs.add(venv, requirements, lock, options)
        _write_stamp(venv / stamp, _stamp_text(venv, requirements))
    return done


def _shown(venv: Path) -> str:
    return os.path.relpath(venv, ROOT) if venv.is_relative_to(ROOT) else str(venv)


def _write_stamp(path: Path, text: str) -> None:
    """Puts the stamp there in one step, after everything it vouches for."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":  # for CI and editors: python3 -m imagebuild.bootstrap
    try:
        ensure_tests()
    except BuildError as failure:
        sys.exit(report(failure))
