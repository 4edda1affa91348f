"""A small synthetic site-packages, and pictures of a whole tree to compare."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import py_compile
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Pyc = Literal["timestamp", "checked", "unchecked"]
MODES = {
    "timestamp": py_compile.PycInvalidationMode.TIMESTAMP,
    "checked": py_compile.PycInvalidationMode.CHECKED_HASH,
    "unchecked": py_compile.PycInvalidationMode.UNCHECKED_HASH,
}
RECORD = "vllm-0.31.0.dist-info/RECORD"
ENGINE = """\
class Engine:
    def limit(self, tokens):
        ceiling = 12
        return min(tokens, ceiling)

    def name(self):
        return "engine"


def helper(x):
    return x + 1
"""
CONFIG = """\
DEFAULTS = {"spin", "wait", "poll", "park", "yield"}


def default(kind):
    if kind in {"spin", "wait", "poll", "park", "yield"}:
        return 7
    return 0
"""
KERNEL = """\
namespace vllm {
template <typename T>
__global__ void __launch_bounds__(128) scale(T* out, int n) {
  if (n > 12) { out[n] = T(1); }
}
}  // namespace vllm
"""
MODULES: dict[str, str] = {
    "vllm/__init__.py": "",
    "vllm/core/__init__.py": "",
    "vllm/core/engine.py": ENGINE,
    "vllm/core/config.py": CONFIG,
    "vllm/data/kernel.cuh": KERNEL,
}


def version_file(version: str, commit: str = "gabc123def") -> str:
    """What setuptools-scm writes to `_version.py`."""
    return (
        f"__version__ = version = {version!r}\n__commit_id__ = commit_id = {commit!r}\n"
        "__all__ = ['__version__']\n"
    )


def record_hash(data: bytes) -> str:
    """A file's hash as a wheel's RECORD spells it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def make_site(
    root: Path,
    files: Mapping[str, str | bytes] | None = None,
    *,
    version: str = "0.31.0",
    pycs: Pyc | None = None,
    newline: str = "\n",
) -> Path:
    """Writes a tree with vLLM's version file, the modules, `files` and a RECORD of them all."""
    content: dict[str, str | bytes] = {"vllm/_version.py": version_file(version), **MODULES}
    content |= files or {}
    for path, data in content.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)
    write_record(root, newline=newline)
    if pycs:
        for source in sorted((root / "vllm").rglob("*.py")):
            name = source.relative_to(root).as_posix()  # so that no byte tells where the tree is
            py_compile.compile(str(source), dfile=name, doraise=True, invalidation_mode=MODES[pycs])
    return root


def write_record(root: Path, record: str = RECORD, *, newline: str = "\n") -> None:
    """Writes a RECORD that lists every file of the tree; its own row is last, without a hash."""
    (root / record).parent.mkdir(exist_ok=True)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=newline)
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != root / record):
        data = path.read_bytes()
        writer.writerow([path.relative_to(root).as_posix(), record_hash(data), len(data)])
    writer.writerow([record, "", ""])
    (root / record).write_bytes(out.getvalue().encode())


def picture(root: Path) -> dict[str, tuple[str, int, bytes]]:
    """Kind, permission bits and content of everything below `root`."""
    seen = {}
    for path in sorted(root.rglob("*")):
        known = path.lstat()
        name, mode = path.relative_to(root).as_posix(), stat.S_IMODE(known.st_mode)
        if path.is_symlink():
            seen[name] = ("link", 0, os.fsencode(path.readlink()))
        elif path.is_dir():
            seen[name] = ("folder", mode, b"")
        else:
            seen[name] = ("file", mode, path.read_bytes())
    return seen


def upstream(root: Path) -> dict[str, tuple[str, int, bytes]]:
    """The picture without `.imagebuild/`."""
    everything = picture(root)
    return {path: one for path, one in everything.items() if path.split("/")[0] != ".imagebuild"}
