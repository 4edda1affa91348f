"""The manifest: what it writes it reads, and a damaged one is exit code 4 with a sentence."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any

import pytest

from imagebuild.errors import IntegrityError
from imagebuild.patching.manifest import (
    FileEntry,
    Manifest,
    PatchEntry,
    original_path,
    read_manifest,
    read_original,
    sha256,
)

A, B = sha256(b"a"), sha256(b"b")
MANIFEST = Manifest(
    version="0.31.0",
    commit="abc123",
    recipe="toy",
    gpu_arch="sm_120",
    series="5e" * 32,
    patches=(
        PatchEntry("vllm_a_b", "ok", ">=0.31,<0.32", ("vllm/a.py", "vllm/new.py")),
        PatchEntry("vllm_c_d", "absorbed", "", ()),
    ),
    files={
        "vllm/new.py": FileEntry(None, B, 0o644, ("vllm_a_b",)),
        "vllm/a.py": FileEntry(A, B, 0o600, ("vllm_a_b",)),
        "vllm/__pycache__/a.cpython-312.pyc": FileEntry(A, None, 0o644),
    },
    folders=("vllm/x/y", "vllm/x"),
)


def test_reads_what_it_wrote() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes(), "m") == MANIFEST


def test_bytes_are_pinned() -> None:
    data = MANIFEST.to_bytes()
    assert data.endswith(b"}\n")
    assert list(json.loads(data)) == sorted(json.loads(data))
    assert sha256(data) == PIN


PIN = "518c210517504cf6badf55e4e1b6bc402a500012a2834b6d71948ab4a4e7dcb6"


def damaged(**change: Any) -> bytes:
    return json.dumps(json.loads(MANIFEST.to_bytes()) | change).encode()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"[]", "list indices must be integers or slices, not str"),
        (b"{}", "no 'schema'"),
        (MANIFEST.to_bytes()[:-5], None),
        (b"\xff" + MANIFEST.to_bytes(), None),
        (damaged(schema=2), "schema 2, expected 1"),
        (damaged(base={"version": "1"}), "no 'commit'"),
        (damaged(files=[]), "'list' object has no attribute 'items'"),
        (damaged(files={"a": {"before": "ab", "after": None, "mode": 1, "patches": []}}),
         "'ab' where a SHA-256 is expected"),
        (damaged(files={"a": {"before": 1, "after": None, "mode": 1, "patches": []}}),
         "1 where a SHA-256 is expected"),
        (damaged(patches=[{"name": "x"}]), "no 'verdict'"),
        (damaged(folders=["vllm/../.."]), "the path 'vllm/../..' that leaves the tree"),
        (damaged(files={"/etc/x": {"before": None, "after": A, "mode": 1, "patches": []}}),
         "the path '/etc/x' that leaves the tree"),
        (damaged(files={"a": {"before": "/" * 64, "after": A, "mode": 1, "patches": []}}),
         f"{'/' * 64!r} where a SHA-256 is expected"),
        (damaged(files={".imagebuild/x": {"before": None, "after": A, "mode": 1, "patches": []}}),
         "the path '.imagebuild/x', which no patch can have written"),
        (damaged(folders=["vllm/./x"]), "the path 'vllm/./x', which no patch can have written"),
        (damaged(folders=[""]), "the path '', which no patch can have written"),
    ],
)  # fmt: skip
def test_a_damaged_manifest(data: bytes, found: str | None) -> None:
    with pytest.raises(IntegrityError) as caught:
        Manifest.from_bytes(data, "tree/manifest.json")
    assert caught.value.exit_code == 4
    assert caught.value.hint == "start from a pristine tree"
    prefix = "tree/manifest.json: expected a manifest of this tool, found "
    assert str(caught.value).startswith(prefix)
    if found is not None:
        assert str(caught.value) == prefix + found


def test_a_patch_that_names_a_file_which_is_not_listed() -> None:
    files = json.loads(MANIFEST.to_bytes())["files"]
    del files["vllm/new.py"]
    with pytest.raises(IntegrityError) as caught:
        Manifest.from_bytes(damaged(files=files), "m")
    assert str(caught.value) == "m: a patch names vllm/new.py, which its list of files lacks"


def test_read_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / ".imagebuild").mkdir()
    (tmp_path / ".imagebuild/manifest.json").write_bytes(MANIFEST.to_bytes())
    assert read_manifest(tmp_path) == MANIFEST


class TestOriginals:
    def keep(self, root: Path, data: bytes) -> None:
        path = original_path(root, A)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def test_is_read(self, tmp_path: Path) -> None:
        self.keep(tmp_path, bz2.compress(b"a"))
        assert read_original(tmp_path, A) == b"a"

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", f"expected content with that SHA-256, found {sha256(b'')}"),
            (bz2.compress(b"a")[:-3], "the original cannot be read: "),
            (b"no bz2", "the original cannot be read: Invalid data stream"),
            (bz2.compress(b"b"), f"expected content with that SHA-256, found {B}"),
        ],
    )
    def test_is_damaged(self, tmp_path: Path, data: bytes, why: str) -> None:
        self.keep(tmp_path, data)
        with pytest.raises(IntegrityError) as caught:
            read_original(tmp_path, A)
        assert str(caught.value).startswith(f"{original_path(tmp_path, A)}: {why}")

    def test_is_absent(self, tmp_path: Path) -> None:
        with pytest.raises(IntegrityError, match=r"the original cannot be read: .*No such file"):
            read_original(tmp_path, A)
