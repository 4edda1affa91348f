"""Runs FlashInfer's own shared-memory sum for MLA for several cards: python3 THIS [FOLDER].

FOLDER holds the flashinfer package; by default the installed one is read. Neither FlashInfer nor
torch is imported. Exits 1 where fp8 rows do not fit an sm_12x card although smaller tiles would.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

NAME = "_generated_fa_shared_bytes"
FILE = "mla/_batch_mla/_backends/_fa_common.py"
# Bytes of shared memory of a multiprocessor, and that one block may ask for.
CARDS = {"sm_90": (233472, 232448), "sm_100": (233472, 232448), "sm_89": (102400, 101376),
         "sm_120": (102400, 101376), "sm_121": (102400, 101376)}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Prints the table."""
    if arguments:
        package = Path(arguments[0]) / "flashinfer"
    else:
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or not spec.submodule_search_locations:
            sys.stderr.write("flashinfer: expected it installed, or a folder that holds it\n")
            return 2
        package = Path(spec.submodule_search_locations[0])
    text = (package / FILE).read_text()
    functions = [one for one in ast.parse(text).body
                 if isinstance(one, ast.FunctionDef) and one.name == NAME]  # fmt: skip
    if not functions:
        sys.stderr.write(f"{package / FILE}: has no {NAME}; it came with 0.7.2\n")
        return 2
    source = ast.unparse(functions[0])
    stock = _function(source)
    small = _function(source.replace("tile_kv = 32\n", "tile_kv = min(tile_kv, 32)\n"))
    sys.stdout.write("card      bf16 rows   fp8 rows      fp8 rows, 16 a tile   available\n")
    is_refused = False
    for card, (per_sm, per_block) in CARDS.items():
        bf16, fp8 = (stock("fa2", 512, 0, is_fp8, per_sm) for is_fp8 in (False, True))
        less = small("fa2", 512, 0, True, per_sm)
        mark = "(!)" if fp8 > per_block else ""
        shown = str(less) if less != fp8 else ""
        sys.stdout.write(f"{card:8}{bf16:10}{fp8:12} {mark:4}{shown:12}{per_block:22}\n")
        is_refused |= fp8 > per_block >= less
    return 1 if is_refused else 0


def _function(source: str):  # noqa: ANN202 - FlashInfer's
    names: dict[str, object] = {"_BackendPlanUnsupportedError": ValueError}
    exec(source, names)  # noqa: S102 - the function of the package, nothing else of it
    return names[NAME]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
