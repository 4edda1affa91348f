"""The command line of verify-base.py: verify inside the base, with the base's own Python."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from imagebuild.config import ROOT, load_recipe, recipes
from imagebuild.deep.run import Where
from imagebuild.errors import BuildError, EngineError, UsageError
from imagebuild.lock import read_lock
from imagebuild.patching.apply import is_own_site
from imagebuild.patching.patch import GPU_ARCHES
from imagebuild.verify import deep
from imagebuild.verify.core import verify
from imagebuild.verify.shadows import search_path

_NAME = "verify-base.py"


def main(argv: Sequence[str]) -> int:
    """Verifies a tree, prints the report and returns the exit code; never raises."""
    try:
        return _run(argv)
    except BuildError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a fault of ours: a sentence and no traceback
        return _fail(EngineError(f"internal error: {type(error).__name__}: {error}",
                                 hint="report it with this line"))  # fmt: skip


def _run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    recipe = load_recipe(options.recipe or _only_recipe())
    root = Path(options.root).absolute() if options.root else own_root()
    lock = read_lock(recipe.lock_file)
    is_own = is_own_site(root)
    report = verify(root, recipe, lock, gpu_arch=options.gpu_arch, in_base=is_own)
    if options.deep:
        if not is_own:
            raise UsageError(f"--deep: {root} is not where {sys.executable} imports from",
                             hint="start it with the base's own Python, or use build.py verify "
                             "--deep")  # fmt: skip
        # Native modules are real here, and the byte code is what will serve.
        where = Where(Path(sys.executable), stubs=False, cached_code=False)
        outcomes = deep.check_now(report, recipe, lock, where)
        rows = (f"  {name}: {result}: {said}" for name, result, said in deep.rows(outcomes))
        _write(sys.stdout, ["deep probes", *rows])
    _write(sys.stdout, report.lines())
    return report.exit_code


def own_root() -> Path:
    """The folder of this interpreter's packages that holds vLLM, without importing it.

    Raises:
        UsageError: there is none.
    """
    places = search_path([ROOT, Path(sys.argv[0]).resolve().parent])
    holding = [
        Path(place).absolute()
        for place in places
        if importlib.machinery.PathFinder.find_spec("vllm", [place]) is not None
    ]
    if not holding:
        raise UsageError(
            f"this interpreter ({sys.executable}) has no vLLM",
            hint="start it with the base's own Python, or name --root DIR",
        )
    # A bare folder called vllm earlier on the path must be found as a fault, not verified.
    whole = [place for place in holding if any(place.glob("vllm-*.dist-info"))]
    return (whole or holding)[0]


def _only_recipe() -> str:
    names = recipes()
    if len(names) == 1:
        return names[0]
    known = ", ".join(names) or "none"
    raise UsageError(f"expected --recipe NAME, since there is not just one (recipes: {known})")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every verb does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"python3 {_NAME} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_NAME,
        description="Checks that a patched base is what the recipe and its lock say. Exit codes: "
        "0 all well, 2 usage, 3 problems found, 4 lock or manifest cannot be trusted.",
    )
    parser.add_argument("--recipe", metavar="NAME", help="default: the only one")
    own = "site-packages; default: this interpreter's with vLLM in it"
    parser.add_argument("--root", metavar="DIR", help=own)
    parser.add_argument("--deep", action="store_true", help="also run the tree's own code")
    built = "default: what the tree was built for"
    parser.add_argument("--gpu-arch", choices=GPU_ARCHES, help=built)
    return parser


def _fail(error: BuildError) -> int:
    lines = [f"{_NAME}: error: {error}", *([f"hint: {error.hint}"] if error.hint else [])]
    _write(sys.stderr, lines)
    return error.exit_code


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    """Writes lines in any locale; a reader that went away is no fault of the tree."""
    encoding = stream.encoding or "utf-8"
    text = "".join(f"{line}\n" for line in lines)
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
