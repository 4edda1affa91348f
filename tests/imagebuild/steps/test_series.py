"""What the patched stage says of the base's files: whether they were the locked wheel's."""

from __future__ import annotations

from pathlib import Path

from imagebuild.lock import BaseLock, Lock
from imagebuild.patching.manifest import FOLDER, MANIFEST, FileEntry, Manifest
from imagebuild.steps.series import provenance

MINE, OTHER = "ab" * 32, "cd" * 32
BASE = BaseLock("0.31.0", "", 0, {}, {}, {}, targets={"vllm/a.py": OTHER})
LOCK = Lock(Path("lock.toml"), {"0.31.0": BASE})


def patched(root: Path, before: str, version: str = "0.31.0") -> Path:
    files = {"vllm/a.py": FileEntry(before, MINE, 0o644, ("vllm_a_b",)),
             "vllm/new.py": FileEntry(None, MINE, 0o644, ("vllm_a_b",))}  # fmt: skip
    manifest = Manifest(version, "", "tiny", "sm_120", "", (), files)
    (root / FOLDER).mkdir(parents=True)
    (root / MANIFEST).write_bytes(manifest.to_bytes())
    return root


def test_files_of_the_locked_wheel_are_counted(tmp_path: Path) -> None:
    assert list(provenance(patched(tmp_path / "site", OTHER, "0.31.0+cu130"), LOCK)) == [
        "1 of 1 were as in the wheel of vLLM 0.31.0"
    ]


def test_a_file_that_the_base_changed_is_named(tmp_path: Path) -> None:
    assert list(provenance(patched(tmp_path / "site", "ef" * 32), LOCK)) == [
        "0 of 1 were as in the wheel of vLLM 0.31.0",
        "! vllm/a.py was not: the base changed it before",
    ]


def test_a_tree_that_the_lock_does_not_know_has_nothing_to_say(tmp_path: Path) -> None:
    assert list(provenance(tmp_path, LOCK)) == []
    root = patched(tmp_path / "site", OTHER)
    assert list(provenance(root, Lock(LOCK.path, {}))) == []
