"""`kernel check` and `kernel bench`: what needs a GPU, run by a Python that has torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.commands.kernelbuild import NAME
from imagebuild.errors import EngineError
from imagebuild.toolchain import own_platform


def check(context: Context) -> int:
    """Runs kernel/check.py; returns its exit code, which is one of ours."""
    asked = context.arguments
    words = [str(context.root / "kernel" / "check.py"), "--format", asked.format]
    words += ["--quick"] if asked.quick else []
    for name in ("only", "flashkda"):
        value = getattr(asked, name)
        words += [f"--{name}", value] if value else []
    return _run(context, [*words, *_library(context)])


def bench(context: Context) -> int:
    """Prepares the baselines, then times them beside ours where there is a GPU.

    With `--prepare` it stops after the first half, which needs no GPU. Without, a machine that
    cannot time them is told so before minutes of compiling.
    """
    asked = context.arguments
    parts = Path(asked.parts) if asked.parts else context.dist / "kernel-bench"
    if not asked.prepare and not parts.is_dir():
        _require_gpu(context)
    if asked.prepare or not parts.is_dir():
        _prepare(context, parts)
    if asked.prepare:
        context.console.result(f"{parts}: ready; on the GPU machine, in this repository: "
                               f"python3 -m kernel.bench --parts {parts}")  # fmt: skip
        context.console.document({"parts": str(parts), "files": sorted(
            path.name for path in parts.iterdir())})  # fmt: skip
        return 0
    words = ["-m", "kernel.bench", "--parts", str(parts), *_library(context)]
    words += ["--out", asked.out] if asked.out else []
    return _run(context, words)


def _require_gpu(context: Context) -> None:
    """Raises EngineError where the Python that would time has no torch with a GPU."""
    python = _python(context.arguments.python)
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 4)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        found = "no GPU that it can use" if done.returncode == 4 else "none"
        raise EngineError(f"{python}: expected torch with a GPU to time on, found {found}",
                          hint="name a Python that has it with --python; --prepare makes the "
                          "baselines without")  # fmt: skip


def _prepare(context: Context, parts: Path) -> None:
    from kernel.bench.prepare import prepare

    with context.upstream() as upstream:
        prepare(upstream, context.console, parts, with_tilelang=context.arguments.tilelang)


def _library(context: Context) -> list[str]:
    """`--library`, else what `kernel build` made for this machine; none of both: the installed."""
    asked = context.arguments.library
    if not asked:
        made = context.root / "dist" / "kernel" / own_platform().partition("/")[2] / NAME
        asked = str(made) if made.is_file() else None
    return ["--library", asked] if asked else []


def _run(context: Context, words: Sequence[str]) -> int:
    """Runs a script of the kernel's there, with its output as ours."""
    call = [str(_python(context.arguments.python)), *words]
    context.console.command(call)
    done = subprocess.run(call, cwd=context.root, check=False)
    if done.returncode < 0:
        raise EngineError(f"{words[0]}: ended by signal {-done.returncode}")
    return done.returncode


def _python(asked: str | None) -> Path:
    """`--python`, else the first python3 on PATH that is not that of build.py's environment.

    Raises:
        EngineError: there is none.
    """
    if asked:
        found = shutil.which(asked)
        if found is None:
            raise EngineError(f"--python {asked}: expected an interpreter, found none")
        return Path(found)
    ours = Path(sys.prefix).resolve()
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        place = Path(folder or ".") / "python3"
        if place.is_file() and place.parent.parent.resolve() != ours:
            return place
    return Path(sys.executable)
