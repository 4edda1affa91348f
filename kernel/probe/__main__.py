"""`python3 -m kernel.probe [--device cuda]`: every experiment of FINDINGS.md, as tables or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

MISSING = 5


def main(arguments: Sequence[str]) -> int:
    """Runs the experiments; returns build.py's exit codes."""
    parser = argparse.ArgumentParser(prog="kernel.probe", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    asked = parser.parse_args(list(arguments))
    try:
        import torch
    except ImportError as error:
        sys.stderr.write(f"torch: expected it, found none ({error}); any build will do\n")
        return MISSING
    if asked.device != "cpu" and not torch.cuda.is_available():
        sys.stderr.write(f"GPU: expected one that torch {torch.__version__} can use, found none; "
                         "leave --device out to run on the CPU\n")  # fmt: skip
        return MISSING
    from kernel.probe import experiments

    found = experiments.run(asked.device)
    if asked.format == "json":
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write("\n\n".join(_text(name, rows) for name, rows in found.items()) + "\n")
    return 0


def _text(name: str, rows: list[dict[str, Any]]) -> str:
    """One experiment as a markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([_cell(row[key]) for key in head] for row in rows)]
    return f"{name}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:  # noqa: ANN401 - what JSON can hold
    if isinstance(value, float):
        return f"{value:.3g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
