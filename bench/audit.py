#!/usr/bin/env python3
"""Measures an audit by ranges against downloading the whole wheels, unzipping and checking them.

It prints medians and ratios and judges nothing, except that both ways must give equal verdicts.
Start it with the Python of `.venv`; it uses the package index that pip is configured with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from imagebuild.config import load_recipe, recipes  # noqa: E402
from imagebuild.lock import read_lock  # noqa: E402

PIP_PLATFORMS = {"sm_120": "manylinux_2_28_x86_64", "sm_121": "manylinux_2_28_aarch64"}


@dataclass(frozen=True)
class Sample:
    """One run: seconds, bytes and requests (0 where nobody counts them), and the verdicts."""

    seconds: float
    size: int
    requests: int
    verdicts: dict[str, str]


def audit(arguments: list[str], cache: Path, arch: str) -> Sample:
    """Runs `build.py audit` in a process of its own."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "imagebuild", "audit", "--arch", arch, "--format", "json",
         *arguments],
        cwd=ROOT, env={**os.environ, "IMAGEBUILD_CACHE": str(cache)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - start
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if "releases" not in document:
        raise SystemExit(f"the audit failed:\n{done.stderr}")
    (release,) = document["releases"]
    verdicts = {patch["name"]: patch["verdict"] for patch in release["patches"]}
    return Sample(seconds, release["bytes_fetched"], release["requests"], verdicts)


def whole(version: str, arch: str, python: str, folder: Path) -> Sample:
    """The baseline: pip downloads the wheels, zipfile unpacks them, the folder is audited."""
    recipe = load_recipe(recipes(ROOT)[0], ROOT)
    base = read_lock(recipe.lock_file).base(version)
    wanted = [f"{project}=={base.versions[project]}" for project in recipe.site]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir",
         "--only-binary=:all:", "--python-version", python, "--platform", PIP_PLATFORMS[arch],
         "--dest", str(folder / "wheels"), *wanted],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    wheels = sorted((folder / "wheels").iterdir())
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    judged = audit(["--tree", str(folder / "site")], folder / "cache", arch)
    size = sum(wheel.stat().st_size for wheel in wheels)
    return Sample(time.monotonic() - start, size, 0, judged.verdicts)


def ranges(version: str, arch: str, folder: Path) -> Sample:
    """An audit with an empty cache, or with what an earlier one left in `folder`."""
    return audit(["--against", version], folder, arch)


def repeated(runs: int, call: Callable[[Path], Sample]) -> list[Sample]:
    """Each run in a folder of its own."""
    samples = []
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="bench-audit-") as folder:
            samples.append(call(Path(folder)))
        print(f"run {number + 1} of {runs}: {samples[-1].seconds:.1f} s", file=sys.stderr)
    return samples


def table(rows: dict[str, list[Sample]]) -> list[str]:
    """Medians of each row, and what the first row takes as a multiple of it."""
    lines = [f"{'':<34}{'seconds':>9}{'MB':>10}{'requests':>10}{'time':>9}{'bytes':>9}"]
    reference = next(iter(rows.values()))
    base_seconds = statistics.median(s.seconds for s in reference)
    base_size = statistics.median(s.size for s in reference)
    for name, samples in rows.items():
        seconds = statistics.median(s.seconds for s in samples)
        size = statistics.median(s.size for s in samples)
        requests = statistics.median(s.requests for s in samples)
        told = f"{requests:.0f}" if samples is not reference else "-"
        less = f"{base_size / size:.0f}x" if size else "-"
        lines.append(
            f"{name:<34}{seconds:>9.2f}{size / 1e6:>10.2f}{told:>10}"
            f"{base_seconds / seconds:>8.1f}x{less:>9}"
        )
    return lines


def main() -> int:
    """Measures and prints."""
    recipe = load_recipe(recipes(ROOT)[0], ROOT)
    lock = read_lock(recipe.lock_file)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--version", default=list(lock.bases)[-1], choices=list(lock.bases),
                        help="a locked vLLM release; default: the newest")  # fmt: skip
    parser.add_argument("--runs", type=int, default=3, help="of each; default: 3")
    parser.add_argument("--arch", default="sm_120", choices=list(PIP_PLATFORMS))
    options = parser.parse_args()

    def cold_then_warm(folder: Path) -> Sample:
        cold = ranges(options.version, options.arch, folder)
        warm.append(ranges(options.version, options.arch, folder))
        return cold

    warm: list[Sample] = []
    cold = repeated(options.runs, cold_then_warm)
    base = repeated(
        options.runs,
        lambda folder: whole(options.version, options.arch, recipe.python, folder),
    )
    print(f"command: {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}")  # fmt: skip
    print(f"vLLM {options.version} for {options.arch}, medians of {options.runs}; the last two "
          "columns say how much less than the first row")  # fmt: skip
    rows = {
        "whole wheels, unzipped, checked": base,
        "audit by ranges, cold cache": cold,
        "audit by ranges, warm cache": warm,
    }
    print("\n".join(table(rows)))
    seen = [sample.verdicts for samples in rows.values() for sample in samples]
    odd = sorted({name for one in seen for name in one if one.get(name) != seen[0].get(name)})
    if odd:
        print(f"the ways do not agree on {', '.join(odd)}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
