#!/usr/bin/env python3
"""Times applying the whole series to an unpacked tree against copying the same files.

Baseline: reading every file that the series changes and writing it to another folder, with the
same fsync per file. Run it with the project's interpreter after a build:

    .venv/bin/python bench/apply.py dist/glm53-flash-sm_120/site
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from imagebuild.patching.apply import apply, revert
from imagebuild.patching.manifest import Manifest, read_manifest


def main() -> int:
    """Prints one row a step: median seconds and the ratio to the copy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("site", type=Path, help="a patched site, such as `build.py build` writes")
    parser.add_argument("--recipe", default="glm53-flash")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.site)
    if manifest is None:
        parser.error(f"{arguments.site}: expected a patched tree, found no manifest")
    recipe = load_recipe(arguments.recipe)
    series, lock = recipe.series(), read_lock(recipe.lock_file)
    rows: dict[str, list[float]] = {"copy": [], "apply": [], "apply again": [], "revert": []}

    def run_apply() -> None:
        apply(arguments.site, series, manifest.gpu_arch, lock.fingerprints_for,
              recipe=recipe.name, known_as=lock.identify)  # fmt: skip

    revert(arguments.site)
    for _ in range(arguments.runs):
        rows["copy"].append(_timed(lambda: _copy(arguments.site, manifest)))
        rows["apply"].append(_timed(run_apply))
        rows["apply again"].append(_timed(run_apply))
        rows["revert"].append(_timed(lambda: revert(arguments.site)))
    run_apply()
    _print(arguments, manifest, rows)
    return 0


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _copy(site: Path, manifest: Manifest) -> None:
    with tempfile.TemporaryDirectory(dir=site.parent) as folder:
        for number, path in enumerate(manifest.files):
            if (site / path).exists():
                target = Path(folder) / str(number)
                shutil.copyfile(site / path, target)
                handle = os.open(target, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)


def _print(arguments: argparse.Namespace, manifest: Manifest, rows: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(times) for name, times in rows.items()}
    python = platform.python_version()
    content = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {python}",
        "command": " ".join(["bench/apply.py", *sys.argv[1:]]),
        "base": manifest.version,
        "patches": len(manifest.patches),
        "files": len(manifest.files),
        "runs": arguments.runs,
        "rows": [
            {"step": name, "seconds": round(value, 4), "ratio": round(value / medians["copy"], 1)}
            for name, value in medians.items()
        ],
    }
    if arguments.json:
        print(json.dumps({"schema": 1, **content}, indent=2))
        return
    print(f"{content['machine']}; {content['command']}")
    print(f"vLLM {content['base']}, {content['patches']} patches, {content['files']} files, "
          f"median of {arguments.runs}")  # fmt: skip
    for row in content["rows"]:
        print(f"{row['step']:<12}{row['seconds']:>9.4f} s{row['ratio']:>8.1f} x copy")


if __name__ == "__main__":
    sys.exit(main())
