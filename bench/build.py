#!/usr/bin/env python3
"""Times builds against a full build or against pip, and counts what each stage adds to the base.

It prints medians and ratios and judges nothing. Start it with the Python of `.venv`:

    .venv/bin/python bench/build.py tree
    .venv/bin/python bench/build.py docker --base TAG --cuda DIR

`tree` uses the package index that pip is configured with. `docker` builds in a copy of the
repository and leaves no image behind; `--base` is a loaded tag of a base, or of a stand-in such as
tests/support/standin.py makes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from imagebuild import dockerfile  # noqa: E402
from imagebuild.config import HOST_ARCHES, load_recipe, recipes  # noqa: E402
from imagebuild.engines.layers import Layout  # noqa: E402
from imagebuild.engines.reproduce import copy_of  # noqa: E402
from imagebuild.lock import read_lock  # noqa: E402

Rows = dict[str, list[float]]


def main() -> int:
    """Measures one engine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", choices=["tree", "docker"])
    parser.add_argument("--recipe", default=recipes(ROOT)[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--base", help="docker: a loaded tag; default: the locked image")
    parser.add_argument("--cuda", type=Path, help="docker: a CUDA toolkit, for a base without one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-build-") as folder:
        measure = _tree if arguments.engine == "tree" else _docker
        rows, baselines, sizes = measure(arguments, Path(folder))
    _print(arguments, rows, baselines, sizes)
    return 0


def _build(root: Path, *words: str, cache: Path | None = None) -> dict[str, Any]:
    """Calls `build` in a process of its own, as build.py does once .venv is there."""
    command = [sys.executable, "-m", "imagebuild", "build", "--format", "json", *words]
    environment = {**os.environ, **({"IMAGEBUILD_CACHE": str(cache)} if cache else {})}
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stderr[-3000:]}")
    written = re.findall(r"^- exporting .*: ([\d.]+) s$", done.stderr, re.MULTILINE)
    return {**json.loads(done.stdout), "archive_seconds": sum(map(float, written))}


def _timed(step: Callable[[], object]) -> float:
    start = time.monotonic()
    step()
    return time.monotonic() - start


def _tree(
    arguments: argparse.Namespace, folder: Path
) -> tuple[Rows, dict[str, str], dict[str, int]]:
    recipe = load_recipe(arguments.recipe)
    base = read_lock(recipe.lock_file).base(recipe.base_version)
    host = recipe.platform(HOST_ARCHES[platform.machine()])
    pinned = folder / "requirements.txt"
    pinned.write_text("".join(
        f"{project}=={base.versions[project]} --hash=sha256:{base.wheel(project, host).sha256}\n"
        for project in recipe.site
    ))  # fmt: skip

    def pip(run: int, name: str) -> Callable[[], object]:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
                   "--require-hashes", "--only-binary", ":all:", "--requirement", str(pinned),
                   "--cache-dir", str(folder / f"pip{run}"),
                   "--target", str(folder / f"{name}{run}")]  # fmt: skip
        return lambda: subprocess.run(command, check=True)

    rows: Rows = {name: [] for name in _TREE}
    for run in range(arguments.runs):
        cache = folder / f"cache{run}"

        def build(dist: str, cache: Path = cache) -> Callable[[], object]:
            words = ("--dist", str(folder / dist))
            return lambda: _build(ROOT, *words, cache=cache)

        steps = [pip(run, "cold"), pip(run, "warm"), build(f"one{run}"), build(f"two{run}"),
                 build(f"two{run}")]  # fmt: skip
        for name, step in zip(_TREE, steps, strict=True):
            rows[name].append(_timed(step))
    return rows, {name: baseline for name, baseline in _TREE.items() if baseline}, {}


_PIP, _PIP_WARM = "pip install, nothing cached", "pip install, wheels in its cache"
# Each row with the one that it is compared with.
_TREE = {
    _PIP: "",
    _PIP_WARM: "",
    "build, nothing cached": _PIP,
    "build, wheels in the cache": _PIP_WARM,
    "build, nothing changed": _PIP_WARM,
}


def _docker(
    arguments: argparse.Namespace, folder: Path
) -> tuple[Rows, dict[str, str], dict[str, int]]:
    copy = copy_of(ROOT, folder / "copy")
    recipe = load_recipe(arguments.recipe, copy)
    words = ["--engine", "docker", "--recipe", recipe.name, "--no-load", "--tag", "bench/build:x"]
    words += ["--base", arguments.base] if arguments.base else []
    words += ["--build-context", f"cuda={arguments.cuda.absolute()}"] if arguments.cuda else []
    rows: Rows = {}
    sizes: dict[str, int] = {}

    def edit(path: Path) -> None:
        with path.open("a") as file:
            file.write(f"\n# {time.time_ns()}\n")

    for _run in range(arguments.runs):
        start = time.monotonic()
        built = _build(copy, *words, "--no-cache")
        _add(rows, _FULL, time.monotonic() - start, built)
        sizes = _sizes(copy, built)
        for name, changed in zip(_DOCKER, _changes(copy, recipe.patches_dir), strict=True):
            for path in changed:
                edit(path)
            start = time.monotonic()
            built = _build(copy, *words)
            _add(rows, name, time.monotonic() - start, built)
    steps = {f"{name}{_STEPS}": f"{_FULL}{_STEPS}" for name in _DOCKER}
    return rows, {**dict.fromkeys(_DOCKER, _FULL), **steps}, sizes


def _add(rows: Rows, name: str, seconds: float, built: dict[str, Any]) -> None:
    """One build, and what is left of it without writing the archive, base layers and all."""
    rows.setdefault(name, []).append(seconds)
    rows.setdefault(f"{name}{_STEPS}", []).append(seconds - built["archive_seconds"])


_FULL = "full build, no cache"
_STEPS = ", less the archive"
_DOCKER = ("nothing changed", "one patch edited", "entrypoint edited")


def _changes(root: Path, patches: Path) -> list[list[Path]]:
    patch = min(path for path in patches.glob("*_*_*.py") if path.stem != "upstream_fixes")
    return [[], [patch], [root / "image" / "runtime" / "entrypoint.py"]]


def _sizes(root: Path, document: dict[str, Any]) -> dict[str, int]:
    """Bytes of the layers as stored, by the stage that they are from."""
    steps = dockerfile.parse((root / "Dockerfile").read_text()).steps()
    found: dict[str, int] = {}
    with Layout(Path(document["folder"]) / "image.tar") as layout:
        image = next(iter(layout.images.values()))
        layers = image.manifest["layers"]
        before = len(layers) - len(steps)
        for index, stored in enumerate(layers):
            step = steps[index - before] if index >= before else None
            name = f"{step.origin or step.stage}: {step.text[:60]}" if step else "base"
            found[name] = found.get(name, 0) + int(stored["size"])
    return found


def _print(
    arguments: argparse.Namespace, rows: Rows, baselines: dict[str, str], sizes: dict[str, int]
) -> None:
    medians = {name: statistics.median(times) for name, times in rows.items()}
    added = {name: size for name, size in sizes.items() if name != "base"}
    content = {
        "schema": 1,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
                   f"Python {platform.python_version()}",
        "engine": arguments.engine,
        "runs": arguments.runs,
        "rows": [
            {"step": name, "seconds": round(value, 2), "baseline": baselines.get(name),
             "ratio": round(value / medians[baselines[name]], 3) if name in baselines else None}
            for name, value in medians.items()
        ],
        "bytes": sizes,
        "bytes_added": sum(added.values()),
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(content, indent=2))
        return
    print(f"{content['machine']}; {arguments.engine} engine, median of {arguments.runs}\n")
    print("| step | seconds | part of |\n|---|---|---|")
    for name, value in medians.items():
        base = baselines.get(name)
        part = f"{value / medians[base]:.2f} of {base}" if base else "-"
        print(f"| {name} | {value:.1f} | {part} |")
    if sizes:
        print("\n| stage and step | bytes packed |\n|---|---|")
        for name, size in added.items():
            print(f"| {name} | {size:,} |")
        print(f"| all of it | {content['bytes_added']:,} |")
        print(f"| the base below | {sizes.get('base', 0):,} |")


if __name__ == "__main__":
    sys.exit(main())
