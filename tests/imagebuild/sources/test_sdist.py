"""Single files of an sdist: what is taken, and archives that would lead elsewhere."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from imagebuild.errors import IntegrityError
from imagebuild.sources import sdist as module
from imagebuild.sources.sdist import extract

WANTED = ("csrc/a.h", "csrc/core/b.h")


def write(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """Members by name: bytes are a file, a string is a link to there."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return path


def test_only_what_is_wanted_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar.gz", ("x-1/setup.py", b"no"), ("x-1/csrc/a.h", b"a"),
                 ("x-1/../../evil", b"no"), ("x-1/csrc/core/b.h", b"b"))  # fmt: skip
    out = tmp_path / "out"
    extract(path, WANTED, out)
    found = {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*.*")}
    assert found == {"csrc/a.h": b"a", "csrc/core/b.h": b"b"}
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("odd", [b"x" * 11, "/etc/passwd"], ids=["large", "link"])
def test_what_is_no_plain_small_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes | str
) -> None:
    monkeypatch.setattr(module, "MEMBER_LIMIT", 10)
    path = write(tmp_path / "x.tar.gz", ("x-1/csrc/a.h", odd), ("x-1/csrc/core/b.h", b"b"))
    with pytest.raises(IntegrityError, match=r"csrc/a\.h: expected a file, found none"):
        extract(path, WANTED, tmp_path / "out")


@pytest.mark.parametrize("data", [b"", b"odd", b"cut"], ids=["empty", "odd", "cut"])
def test_what_is_no_archive(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "x.tar.gz", ("x-1/filler", bytes(range(256)) * 400))
    path.write_bytes(path.read_bytes()[:200] if data == b"cut" else data)
    with pytest.raises(IntegrityError):
        extract(path, WANTED, tmp_path / "out")
