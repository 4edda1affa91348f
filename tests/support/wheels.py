"""Builds small synthetic wheels, good ones and ones that no honest builder makes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from unittest import mock

VERSION_PY = "__version__ = version = {version!r}\n__commit_id__ = commit_id = 'gabc123def'\n"


def vllm_files(version: str = "0.31.0") -> dict[str, bytes]:
    """A few files as a vllm wheel has them; contents differ so that mixing them up shows."""
    files = {f"vllm/part_{n}.py": (f"# part {n}\n" * (n + 1) * 40).encode() for n in range(12)}
    return files | {
        "vllm/__init__.py": b"",
        "vllm/_version.py": VERSION_PY.format(version=version).encode(),
        "vllm/envs.py": b"USE_IT = True\n",
    }


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    blocks = (hashlib.sha256(b"%d %d" % (seed, n)).digest() for n in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def record_line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"


def build_wheel(
    folder: Path,
    *,
    name: str = "vllm",
    version: str = "0.31.0",
    tag: str = "cp38-abi3-manylinux_2_28_x86_64",
    files: Mapping[str, bytes] | None = None,
    requires: Iterable[str] = (),
    executable: Iterable[str] = (),
    record: Callable[[list[str]], list[str]] = lambda lines: lines,
    spoil: Callable[[zipfile.ZipFile], None] = lambda _archive: None,
    zip64: bool = False,
    prefix: bytes = b"",
) -> Path:
    """Writes a wheel and returns its path.

    Args:
        folder: where to.
        name: project.
        version: of the project.
        tag: wheel tag in the file name.
        files: contents by path, without the dist-info folder.
        requires: Requires-Dist lines.
        executable: paths with an x bit.
        record: changes the lines of RECORD.
        spoil: changes the open archive before its directory is written.
        zip64: write 64-bit places and sizes though nothing needs them.
        prefix: bytes before the zip.
    """
    info = f"{name}-{version}.dist-info"
    contents = dict(vllm_files(version) if files is None else files)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    contents[f"{info}/METADATA"] = ("\n".join(lines) + "\n\nA wheel made for a test.\n").encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nTag: {tag}\n".encode()
    rows = record([record_line(path, data) for path, data in contents.items()])
    contents[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"{name}-{version}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(prefix)
    limits = [mock.patch.object(zipfile, "ZIP64_LIMIT", 16)] if zip64 else []
    with contextlib.ExitStack() as stack:
        for limit in limits:
            stack.enter_context(limit)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        archive = stack.enter_context(zipfile.ZipFile(path, "a" if prefix else "w"))
        for member, data in contents.items():
            entry = zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if member in set(executable) else 0o100664) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
        spoil(archive)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def member(archive: zipfile.ZipFile, path: str) -> zipfile.ZipInfo:
    """The entry that the directory will be written from; for `spoil`."""
    return next(entry for entry in archive.filelist if entry.filename == path)
