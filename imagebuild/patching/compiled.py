"""Byte code of patched sources: what is there, whose it is, and made anew. Standard library only.

A clamped mtime and an edit of the same length make CPython run old byte code, so a patched source
never keeps the base's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from imagebuild.errors import EngineError

ByteCode = Literal["rebuild", "remove"]
_COMPILED = re.compile(r"(?P<stem>.+?)\.[a-z]+-?\d+[a-z]*(\.opt-\w+)?\.pyc")
# Runs in a child: marshal's back references depend on what else a process holds.
_COMPILE = """
import json, py_compile, sys
for source, name, out in json.load(sys.stdin):
    py_compile.compile(source, out, dfile=name, doraise=True, optimize=0,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


def is_own(root: Path, path: str) -> bool:
    """Whether a removed pyc came back because an interpreter compiled the patched source."""
    source = root / source_of(path)
    try:
        head = (root / path).read_bytes()[:16]
        known = source.stat()
    except OSError:
        return False
    flags, mtime, size = (int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12))
    fits = mtime == int(known.st_mtime) & 0xFFFFFFFF and size == known.st_size & 0xFFFFFFFF
    # A timestamp pyc newer than the source it names was made after we wrote that source.
    return flags == 0 and fits and (root / path).stat().st_mtime_ns >= known.st_mtime_ns


def source_of(path: str) -> str:
    """The source that a byte code file belongs to; "" for any other file."""
    folder, found, name = path.rpartition("__pycache__/")
    match = _COMPILED.fullmatch(name) if found else None
    return f"{folder}{match['stem']}.py" if match else ""


def on_disk(root: Path, path: str) -> list[str]:
    """Byte code files of a source, whatever interpreter made them."""
    cache = (root / path).parent / "__pycache__"
    found = (item.relative_to(root).as_posix() for item in cache.glob("*.pyc"))
    return sorted(one for one in found if source_of(one) == path)


def compile_all(root: Path, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Unchecked-hash byte code of each source, as this interpreter's `__pycache__` names it."""
    tag = sys.implementation.cache_tag
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, (path, data) in enumerate(sorted(sources.items())):
            source = Path(folder) / f"{index}.py"
            source.write_bytes(data)
            jobs.append((str(source), str(root.resolve() / path), f"{folder}/{index}.pyc"))
        run = subprocess.run(
            [sys.executable, "-I", "-c", _COMPILE],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise EngineError(f"{sys.executable} could not compile the patched files: "
                              f"{run.stderr.strip()[-500:]}")  # fmt: skip
        return {
            # Not cache_from_source: PYTHONPYCACHEPREFIX leads it out of the tree.
            str(
                PurePosixPath(path).with_name("__pycache__") / f"{Path(path).stem}.{tag}.pyc"
            ): Path(compiled).read_bytes()
            for path, (_source, _name, compiled) in zip(sorted(sources), jobs, strict=True)
        }
