"""Reading a lock, and choosing the base that a tree is compared with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.errors import IntegrityError
from imagebuild.lock import BaseLock, Lock, WheelPin, read_lock
from imagebuild.patching.tree import Identity

DIGEST = "ab" * 32
TEXT = f"""\
schema = 1
[requires."torch==2.13.0"]
triton = "3.7.1"
[base."0.31.0"]
commit = "aaaaaaa31"
epoch = 7
[base."0.31.0".pins]
torch = "2.13.0"
[base."0.31.0".wheels.vllm]
version = "0.31.0"
[base."0.31.0".wheels.vllm.files."linux/amd64"]
filename = "a.whl"
sha256 = "{DIGEST}"
size = 3
[base."0.31.0".fingerprints.vllm_a_b]
"vllm/a.py::f" = "t1:00"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lock.toml"
    path.write_text(text)
    return path


def lock_of(*versions: str, commits: dict[str, str] | None = None) -> Lock:
    bases = {
        version: BaseLock(
            version=version, commit=(commits or {}).get(version, ""), epoch=0, wheels={},
            versions={}, pins={}, fingerprints={"vllm_a_b": {"vllm/a.py": version}},
        )
        for version in versions
    }  # fmt: skip
    return Lock(Path("lock.toml"), bases)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lock = read_lock(write(tmp_path, TEXT))
    base = lock.base("0.31.0")
    assert base.wheel("vllm", "linux/amd64") == WheelPin("a.whl", DIGEST, 3)
    assert base.fingerprints == {"vllm_a_b": {"vllm/a.py::f": "t1:00"}}
    assert lock.requires == {"torch==2.13.0": {"triton": "3.7.1"}}


def test_an_absent_lock_is_empty(tmp_path: Path) -> None:
    lock = read_lock(tmp_path / "lock.toml")
    with pytest.raises(IntegrityError) as caught:
        lock.base("0.31.0")
    assert "vLLM 0.31.0 is not locked (locked: none)" in str(caught.value)
    assert caught.value.hint == "build.py lock update --base-version 0.31.0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "schema 2, expected 1"),
        ("schema = 1", "schema", "expected a lock in TOML"),
        ('commit = "aaaaaaa31"\n', "", "no 'commit'"),
        ("epoch = 7", 'epoch = "noon"', "invalid literal"),
        ('"0.31.0".pins]', '"newest".pins]', "'newest' is not a version"),
        (DIGEST, "ab" * 31, "expected 64 lower-case hex digits"),
        (DIGEST, "zz" * 32, "expected 64 lower-case hex digits"),
        (DIGEST, "AB" * 32, "expected 64 lower-case hex digits"),
        ("size = 3\n", "", "no 'size'"),
        ('[base."0.31.0".wheels.vllm]\nversion = "0.31.0"\n', "", "no 'version'"),
        ('"vllm/a.py::f" = "t1:00"', "", ""),
    ],
)
def test_a_malformed_lock_is_an_integrity_error(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in TEXT
    path = write(tmp_path, TEXT.replace(old, new))
    if not said:  # a patch without symbols is no fault
        assert read_lock(path).base("0.31.0").fingerprints == {"vllm_a_b": {}}
        return
    with pytest.raises(IntegrityError, match=re.escape(said)) as caught:
        read_lock(path)
    # `lock update` reads the lock before it writes one, so it is no remedy on its own.
    assert "git" in (caught.value.hint or "")


def test_a_wheel_that_is_not_locked_for_the_platform(tmp_path: Path) -> None:
    base = read_lock(write(tmp_path, TEXT)).base("0.31.0")
    for project, platform in (("vllm", "linux/arm64"), ("torch", "linux/amd64")):
        with pytest.raises(IntegrityError, match=f"no wheel of {project} for {platform}"):
            base.wheel(project, platform)


def test_a_wheel_for_any_platform_serves_each() -> None:
    pin = WheelPin("any.whl", DIGEST, 1)
    base = BaseLock("0.31.0", "", 0, {"flashinfer-python": {"any": pin}}, {}, {})
    assert base.wheel("flashinfer-python", "linux/arm64") is pin


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("0.32.0", "0.32.0"), ("0.32", "0.32.0"), ("0.32.0.0", "0.32.0"), ("0.32.1", None),
        ("0.32.0rc1", None), ("0.32.0+cu130", None), ("0.3", None), ("newest", None), ("", None),
    ],
)  # fmt: skip
def test_one_release_has_one_table(asked: str, found: str | None) -> None:
    base = lock_of("0.31.0", "0.32.0").find(asked)
    assert (base and base.version) == found


@pytest.mark.parametrize(
    ("version", "versions", "nearest"),
    [
        ("0.32.0", ">=0.31,<0.34", "0.32.0"),  # itself
        ("0.32.1", ">=0.31,<0.34", "0.32.0"),  # the last one not after it
        ("0.33.0rc1.dev3+g12ab", ">=0.31,<0.34", "0.33.0"),  # counts as what it leads to
        ("0.34.0", ">=0.31,<0.34", "0.33.0"),  # past the range: its last base
        ("0.34.0", ">=0.31,<0.33", "0.32.0"),
        ("0.32.0", ">=0.33,<0.34", "0.33.0"),  # before the range: its first base
        ("0.32.0", ">=0.34,<0.35", None),  # nothing of the range is locked
        ("0.1.dev20051+g487ecf187", ">=0.31,<0.33", "0.32.0"),  # names no release: the newest
    ],
)
def test_the_nearest_base(version: str, versions: str, nearest: str | None) -> None:
    lock = lock_of("0.31.0", "0.32.0", "0.33.0")
    assert lock.nearest(Identity(version), versions) == nearest
    found = lock.fingerprints_for(Identity(version))("vllm_a_b", versions)
    assert found == ({"vllm/a.py": nearest} if nearest else None)
    assert lock.fingerprints_for(Identity(version))("vllm_not_locked", versions) is None


@pytest.mark.parametrize(
    ("commit", "version"),
    [
        ("bbbbbbb32", "0.32.0"),
        ("bbbbbbb32ffffffffffffffffffffffffffffffff", "0.32.0"),
        ("bbbbbbb", "0.32.0"),
        ("bbbbbb", "0.1.dev20051+gbbbbbbb32"),  # six digits prove nothing
        ("", "0.1.dev20051+gbbbbbbb32"),
        ("ddddddd99", "0.1.dev20051+gbbbbbbb32"),
    ],
)
def test_a_known_commit_says_which_release_it_is(commit: str, version: str) -> None:
    lock = lock_of("0.31.0", "0.32.0", commits={"0.32.0": "bbbbbbb32", "0.31.0": ""})
    found = lock.identify(Identity("0.1.dev20051+gbbbbbbb32", commit, "tree"))
    assert (found.version, found.commit, found.source) == (version, commit, "tree")
