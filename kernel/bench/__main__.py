"""`python3 -m kernel.bench`, in the repository: what runs on the GPU machine, and the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from imagebuild.errors import BuildError
from kernel.bench import results, tables
from kernel.bench.run import run

MISS, FAILED = 3, 5


def main(arguments: Sequence[str]) -> int:
    """Runs the bench, or makes tables and picture from results. Returns build.py's exit codes."""
    parser = argparse.ArgumentParser(prog="kernel.bench", description=__doc__)
    parser.add_argument("--parts", type=Path, metavar="DIR", help="what --prepare made")
    parser.add_argument("--library", type=Path, metavar="FILE", help="default: the installed one")
    parser.add_argument("--out", type=Path, metavar="FILE", default=results.FILE)
    parser.add_argument("--only", action="append", default=[], metavar="KERNEL")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the roofline there")
    parser.add_argument("--tables", action="store_true", help="write the README's from --out")
    asked = parser.parse_args(list(arguments))
    try:
        return _do(asked, ["python3", "-m", "kernel.bench", *arguments])
    except BuildError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {error}{hint}\n")
        return error.exit_code


def _do(asked: argparse.Namespace, command: Sequence[str]) -> int:
    problems: list[str] = []
    if asked.parts:
        sys.path.insert(0, str((asked.parts / "site").resolve()))
        problems = run(asked.parts, asked.library, asked.out, command, asked.only)
    sys.stderr.write("".join(f"not timed: {one}\n" for one in problems))
    found = results.read(asked.out)
    if asked.picture:
        from kernel.bench.roofline import draw

        draw(found, asked.picture)
    if asked.tables:
        tables.README.write_text(tables.update(found))
    sys.stdout.write(tables.markdown(found) + "\n")
    missed = tables.missed(found)
    sys.stderr.write("".join(f"target missed: {one}\n" for one in missed))
    return MISS if missed else FAILED if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
