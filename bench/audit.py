#!/usr/bin/env python3
"""Measures a grid of releases by ranges against downloading, unzipping and checking whole wheels.

The whole-wheel way is measured on two of the releases in the same run, and compared by release. It
prints medians and ratios and judges nothing, except that both ways must give equal verdicts. Start
it with the Python of `.venv`; it uses the package index that pip is configured with.
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
from imagebuild.lock import Lock, read_lock  # noqa: E402

PIP_PLATFORMS = {"sm_120": "manylinux_2_28_x86_64", "sm_121": "manylinux_2_28_aarch64"}
# The twelve newest finals of 2026-11-29: what `--latest 12` names then.
GRID = ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0",
        "0.31.0", "0.32.0", "0.33.0")  # fmt: skip
# Runs a command as its only child, so that the child's peak memory can be told, in KiB.
_MEASURED = (
    "import resource, subprocess, sys; "
    "code = subprocess.run(sys.argv[1:], check=False).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
)
# Verdicts by release and patch.
Verdicts = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One run: seconds, bytes, requests (0 where nobody counts them), peak memory and verdicts."""

    seconds: float
    size: int
    requests: int
    peak: int
    verdicts: Verdicts


def audit(arguments: list[str], cache: Path, arch: str) -> Sample:
    """Runs `build.py audit` in a process of its own."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, sys.executable, "-m", "imagebuild", "audit", "--arch",
         arch, "--format", "json", *arguments],
        cwd=ROOT, env={**os.environ, "IMAGEBUILD_CACHE": str(cache)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - start
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if not document.get("releases") or document["failures"]:
        raise SystemExit(f"the audit failed:\n{done.stderr}")
    verdicts = {
        release["version"]: {patch["name"]: patch["verdict"] for patch in release["patches"]}
        for release in document["releases"]
    }
    peak = int(done.stderr.rstrip().rpartition("\n")[2]) * 1024
    return Sample(seconds, document["bytes_fetched"], document["requests"], peak, verdicts)


def whole(version: str, lock: Lock, arch: str, python: str, folder: Path) -> Sample:
    """The baseline: pip downloads the wheels, zipfile unpacks them, the folder is audited."""
    recipe = load_recipe(recipes(ROOT)[0], ROOT)
    base = lock.base(version)
    wanted = [f"{project}=={base.versions[project]}" for project in recipe.site]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-cache-dir",
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
    return Sample(time.monotonic() - start, size, 0, judged.peak, judged.verdicts)


def repeated(runs: int, what: str, call: Callable[[Path], Sample]) -> list[Sample]:
    """Each run in a folder of its own."""
    samples = []
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="bench-audit-") as folder:
            samples.append(call(Path(folder)))
        print(f"{what}, run {number + 1} of {runs}: {samples[-1].seconds:.1f} s", file=sys.stderr)
    return samples


def table(rows: dict[str, list[Sample]]) -> list[str]:
    """Medians of each row; time and bytes a release as parts of the first row's."""
    head = f"{'':<30}{'seconds':>9}{'a release':>11}{'MB':>9}{'requests':>10}{'peak MB':>9}"
    lines = [f"{head}{'time':>9}{'bytes':>9}"]
    reference = next(iter(rows.values()))
    base_seconds, base_size = (_each(reference, name) for name in ("seconds", "size"))
    for name, samples in rows.items():
        seconds, size = _each(samples, "seconds"), _each(samples, "size")
        requests = f"{_median(samples, 'requests'):.0f}" if samples is not reference else "-"
        lines.append(
            f"{name:<30}{_median(samples, 'seconds'):>9.1f}{seconds:>11.2f}"
            f"{_median(samples, 'size') / 1e6:>9.2f}{requests:>10}"
            f"{_median(samples, 'peak') / 1e6:>9.0f}{seconds / base_seconds:>9.3f}"
            f"{size / base_size:>9.4f}"
        )
    return lines


def _median(samples: list[Sample], name: str) -> float:
    return statistics.median(float(getattr(sample, name)) for sample in samples)


def _each(samples: list[Sample], name: str) -> float:
    """The median for one release."""
    return _median(samples, name) / len(samples[0].verdicts)


def disagreements(rows: dict[str, list[Sample]]) -> list[str]:
    """Patches and releases on which two runs do not agree."""
    seen: dict[tuple[str, str], set[str]] = {}
    for sample in (one for samples in rows.values() for one in samples):
        for version, verdicts in sample.verdicts.items():
            for name, verdict in verdicts.items():
                seen.setdefault((version, name), set()).add(verdict)
    return sorted(f"{name} on {version}" for (version, name), words in seen.items()
                  if len(words) > 1)  # fmt: skip


def main() -> int:
    """Measures and prints."""
    recipe = load_recipe(recipes(ROOT)[0], ROOT)
    lock = read_lock(recipe.lock_file)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--whole", nargs=2, default=list(lock.bases)[-2:], choices=list(lock.bases),
                        metavar=("V", "V"), help="releases for the whole-wheel way; default: the "
                        "two newest locked ones")  # fmt: skip
    parser.add_argument("--grid", nargs="+", default=list(GRID), metavar="V",
                        help=f"releases; default: {' '.join(GRID)}")  # fmt: skip
    parser.add_argument("--runs", type=int, default=3, help="of each; default: 3")
    parser.add_argument("--arch", default="sm_120", choices=list(PIP_PLATFORMS))
    options = parser.parse_args()
    wanted = [word for version in options.grid for word in ("--against", version)]
    cached: list[Sample] = []
    single: list[Sample] = []

    def cold_then_cached(folder: Path) -> Sample:
        cold = audit(wanted, folder, options.arch)
        cached.append(audit(wanted, folder, options.arch))
        return cold

    def both(folder: Path) -> Sample:
        parts = [
            whole(version, lock, options.arch, recipe.python, folder / version)
            for version in options.whole
        ]
        verdicts = {version: words for part in parts for version, words in part.verdicts.items()}
        return Sample(sum(p.seconds for p in parts), sum(p.size for p in parts), 0,
                      max(p.peak for p in parts), verdicts)  # fmt: skip

    def alone(folder: Path) -> Sample:
        return audit(["--against", options.whole[-1]], folder, options.arch)

    cold = repeated(options.runs, "grid", cold_then_cached)
    single += repeated(options.runs, "one release", alone)
    base = repeated(options.runs, "whole wheels", both)
    print(f"command: {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}")  # fmt: skip
    print(f"{len(options.grid)} releases, {options.grid[0]} to {options.grid[-1]}, for "
          f"{options.arch}; whole wheels of {' and '.join(options.whole)}; medians of "
          f"{options.runs}; time and bytes a release, as parts of the first row's")  # fmt: skip
    rows = {
        "whole wheels, two releases": base,
        "one release, cold cache": single,
        "grid, cold cache": cold,
        "grid, cached": cached,
    }
    print("\n".join(table(rows)))
    if odd := disagreements(rows):
        print(f"the ways do not agree on {', '.join(odd)}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
