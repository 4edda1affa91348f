"""`python -m glm53_sparse_mla.check`: the checks on the card that is there.

Exit codes are build.py's: 0 all well, 1 something could not be run, 2 usage, 3 a miss, 5 no torch,
no GPU or no library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm53_sparse_mla.check import attention, cases, flashkda, native, report
from glm53_sparse_mla.library import LibraryError

WELL, LOOK, USAGE, MISS, UNABLE = 0, 1, 2, 3, 5


class Unable(Exception):  # noqa: N818 - it ends the run with a sentence
    """What is needed for a check is not there."""


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; returns the exit code."""
    asked = _parse(arguments)
    try:
        machine, rows, outcomes = _run(asked)
    except (Unable, LibraryError) as error:
        sys.stderr.write(f"check: error: {error}\n")
        if asked.format == "json":
            _print({"schema": 1, "error": str(error), "exit_code": UNABLE})
        return UNABLE
    code = exit_code(rows, outcomes)
    if asked.format == "json":
        _print(report.document(machine, rows, outcomes, code))
        return code
    lines = [*report.attention_lines(rows), *report.flashkda_lines(outcomes)]
    sys.stdout.write("\n".join([*lines, _verdict(code, machine)]) + "\n")
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="check", description="Checks the kernel and FlashKDA on this GPU against fp64."
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--only", choices=["kernel", "flashkda"], help="default: both")
    parser.add_argument("--library", type=Path, metavar="FILE",
                        help="the kernel; default: the installed one")  # fmt: skip
    parser.add_argument("--flashkda", type=Path, metavar="FILE",
                        help="default: the one in the installed vLLM, if any")  # fmt: skip
    parser.add_argument("--format", choices=["text", "json"], default="text",
                        help="json goes to stdout alone")  # fmt: skip
    return parser.parse_args(list(arguments))


def _run(
    asked: argparse.Namespace,
) -> tuple[dict[str, Any], list[attention.Row], list[flashkda.Outcome]]:
    started = time.monotonic()
    machine = _machine()
    rows: list[attention.Row] = []
    outcomes: list[flashkda.Outcome] = []
    if asked.only != "flashkda":
        kernel = native.Native(asked.library)
        chosen = cases.quick() if asked.quick else cases.full()
        machine |= {"library": str(kernel.library.path), "code": kernel.device.code}
        rows = attention.check(chosen, kernel, tell=_tell)
    if asked.only != "kernel":
        outcomes = _flashkda(asked)
    return {**machine, "seconds": round(time.monotonic() - started, 1)}, rows, outcomes


def _machine() -> dict[str, Any]:
    """The GPU and torch. Raises Unable where one is missing."""
    try:
        import torch
    except ImportError as error:
        raise Unable(
            f"torch: expected it for the fp64 reference, found none ({error}); run this "
            "inside the image, or by a Python that has torch with CUDA (build.py: --python FILE)"
        ) from error
    if not torch.cuda.is_available():
        raise Unable(f"GPU: expected one that torch {torch.__version__} can use, found none; run "
                     "this on the machine that serves, with --gpus all in a container")  # fmt: skip
    major, minor = torch.cuda.get_device_capability()
    return {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}",
            "torch": torch.__version__}  # fmt: skip


def _flashkda(asked: argparse.Namespace) -> list[flashkda.Outcome]:
    library = asked.flashkda or flashkda.installed()
    if library is None:
        if asked.only == "flashkda":
            raise Unable(f"{flashkda.LIBRARY}: expected it in an installed vLLM, found none; name "
                         "one: --flashkda FILE")  # fmt: skip
        _tell("FlashKDA: no vLLM is installed here, so it is not checked")
        return []
    if not library.is_file():
        raise Unable(f"{library}: expected a FlashKDA library, found no file")
    _tell("FlashKDA")
    try:
        return flashkda.check(library, is_quick=asked.quick)
    except (RuntimeError, OSError, AttributeError) as error:  # torch's, for a library or a call
        said = (str(error).strip() or repr(error)).splitlines()[0]
        return [flashkda.Outcome(f"{library}: {said}", float("inf"), "a call that works", False)]


def exit_code(rows: Sequence[attention.Row], outcomes: Sequence[flashkda.Outcome]) -> int:
    """3 for a miss, 1 for a case that could not be run, else 0."""
    if not all(row.is_well for row in rows) or not all(one.is_well for one in outcomes):
        return MISS
    return LOOK if any(row.not_run for row in rows) else WELL


def _verdict(code: int, machine: dict[str, Any]) -> str:
    words = {WELL: "all well", LOOK: "well, as far as it could be run", MISS: "MISS"}[code]
    return f"{words}: {machine['gpu']}, torch {machine['torch']}, {machine['seconds']} s"


def _tell(text: str) -> None:
    sys.stderr.write(f"- {text}\n")
    sys.stderr.flush()


def _print(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
