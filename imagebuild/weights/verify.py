"""Checks a folder of weights against weights.json and against its own safetensors index."""

from __future__ import annotations

import hashlib
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from imagebuild.sources.download import Progress
from imagebuild.weights import manifest

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one file."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


def check(folder: Path, *, quick: bool, jobs: int, progress: Progress) -> list[Problem]:
    """Every problem of a folder; an empty list for a sound one.

    Args:
        folder: what `weights fetch` wrote.
        quick: compare sizes and read headers alone, which takes seconds instead of minutes.
        jobs: files hashed at a time.
        progress: is told how far each file is.

    Raises:
        UsageError, IntegrityError: there is no readable weights.json.
    """
    record = manifest.read(folder)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        found = pool.map(
            lambda item: _file(folder, item[0], *item[1], quick=quick, progress=progress),
            sorted(record.files.items()),
        )
        problems = [problem for problem in found if problem]
    broken = {problem.path for problem in problems}
    whole = [path for path in record.files if path not in broken]
    for path in whole:
        if path.endswith(".safetensors"):
            problems += _shard(folder, path)
    if INDEX in whole:
        problems += _index(folder, set(record.files))
    return problems


def _file(
    folder: Path, path: str, size: int, sha256: str, *, quick: bool, progress: Progress
) -> Problem | None:
    file = folder / path
    if not file.is_file():
        return Problem(path, "a file", "none")
    if (now := file.stat().st_size) != size:
        return Problem(path, f"{size} bytes", f"{now}")
    if quick:
        return None
    digest, done = hashlib.sha256(), 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(path, done, size)
    if digest.hexdigest() != sha256:
        return Problem(path, f"sha256 {sha256}", digest.hexdigest())
    return None


def _shard(folder: Path, path: str) -> list[Problem]:
    """A safetensors file is as long as its header says, so a cut one is found without hashing."""
    size = (folder / path).stat().st_size
    with (folder / path).open("rb") as content:
        start = content.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _HEADER_LIMIT):
            return [Problem(path, "a safetensors header", f"a length of {length} bytes")]
        try:
            header = json.loads(content.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items()
                    if name != "__metadata__"]  # fmt: skip
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return [Problem(path, "a safetensors header", "one that cannot be read")]
    return [] if wanted == size else [Problem(path, f"{wanted} bytes by its header", f"{size}")]


def _index(folder: Path, files: set[str]) -> list[Problem]:
    try:
        named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [Problem(INDEX, "a weight_map", "none that can be read")]
    return [Problem(path, f"a shard that {INDEX} names", "none")
            for path in sorted(map(str, named - files))]  # fmt: skip
