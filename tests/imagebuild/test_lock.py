"""Reading a lock, and choosing the base that a tree is compared with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.errors import IntegrityError
from imagebuild.lock import BaseLock, Lock, read_lock
from imagebuild.patching.tree import Identity
from imagebuild.pins import DebPin, DebsPin, ImagePin, SourcePin, WheelPin

DIGEST, OTHER, COMMIT = "ab" * 32, "cd" * 32, "12" * 20
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
[base."0.31.0".targets]
"vllm/a.py" = "{OTHER}"
[base."0.31.0".sdist]
filename = "a.tar.gz"
sha256 = "{OTHER}"
size = 4
[base."0.31.0".debs]
packages = ["ripgrep"]
state = "unresolved"
[base."0.31.0".image]
repository = "team/vllm"
tag = "v0.31.0"
digest = "sha256:{OTHER}"
state = "cited"
source = "a document"
platforms = {{"linux/amd64" = "sha256:{OTHER}"}}
[images.mentat]
repository = "team/mentat"
tag = "0.17.1"
state = "unresolved"
[sources.flashkda]
url = "https://git.example/a.git"
commit = "{COMMIT}"
state = "resolved"
seen = "2026-11-29"
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


@pytest.mark.parametrize("version", ["0.31.0", "0.31.0.post1"])
def test_of_two_releases_of_one_commit_the_tree_names_its_own(version: str) -> None:
    commits = dict.fromkeys(("0.31.0", "0.31.0.post1"), "aaaaaaa31")
    lock = lock_of(*commits, commits=commits)
    assert lock.identify(Identity(version, "aaaaaaa31", "tree")).version == version
    assert lock.identify(Identity("0.1.dev7", "aaaaaaa31", "tree")).version == "0.31.0"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lock = read_lock(write(tmp_path, TEXT))
    base = lock.base("0.31.0")
    assert base.wheel("vllm", "linux/amd64") == WheelPin("a.whl", DIGEST, 3)
    assert base.fingerprints == {"vllm_a_b": {"vllm/a.py::f": "t1:00"}}
    assert lock.requires == {"torch==2.13.0": {"triton": "3.7.1"}}
    assert base.targets == {"vllm/a.py": OTHER}
    assert base.sdist == WheelPin("a.tar.gz", OTHER, 4)
    assert base.debs == DebsPin(("ripgrep",))
    assert base.image is not None
    assert base.image.reference == f"team/vllm:v0.31.0@sha256:{OTHER}"
    assert base.image.platforms == {"linux/amd64": f"sha256:{OTHER}"}
    assert lock.images == {"mentat": ImagePin("team/mentat", "0.17.1")}
    assert lock.images["mentat"].reference == "team/mentat:0.17.1"
    assert lock.sources == {
        "flashkda": SourcePin("https://git.example/a.git", COMMIT, "resolved", seen="2026-11-29")
    }


def test_packages_may_be_resolved(tmp_path: Path) -> None:
    file = f'{{filename = "a.deb", url = "http://a.example/a.deb", sha256 = "{DIGEST}", size = 5}}'
    files = (f'state = "resolved"\nbase = "sha256:{OTHER}"\nseen = "2026-11-29"\n'
             f'files = {{"linux/amd64" = [{file}]}}')  # fmt: skip
    text = TEXT.replace('packages = ["ripgrep"]\nstate = "unresolved"',
                        f'packages = ["ripgrep"]\n{files}')  # fmt: skip
    debs = read_lock(write(tmp_path, text)).base("0.31.0").debs
    pin = DebPin("a.deb", "http://a.example/a.deb", DIGEST, 5)
    assert debs == DebsPin(("ripgrep",), "resolved", f"sha256:{OTHER}", "2026-11-29",
                           {"linux/amd64": (pin,)})  # fmt: skip
    for old, new, said in [
        (f'sha256 = "{DIGEST}", size = 5', 'sha256 = "00", size = 5', "64 lower-case hex digits"),
        ("size = 5", "size = -5", "size: expected a number above 0, found -5"),
        ('"a.deb"', '"../a.deb"', "expected the name of a .deb file"),
        ('"a.deb"', '"-a.deb"', "expected the name of a .deb file"),
        ("http://a.example", "file:///etc", r"expected url = http(s)://"),
        (f'base = "sha256:{OTHER}"\n', "", "the base that they are for"),
        ('state = "resolved"\nbase', 'state = "unresolved"\nbase', "expected no files"),
    ]:
        assert old in text
        with pytest.raises(IntegrityError, match=re.escape(said)):
            read_lock(write(tmp_path, text.replace(old, new)))


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
        ("epoch = 7", 'epoch = "noon"', "epoch: expected seconds since 1970, found 'noon'"),
        ("epoch = 7", "epoch = -7", "epoch: expected seconds since 1970, found -7"),
        ("epoch = 7", "epoch = true", "epoch: expected seconds since 1970, found True"),
        (f'vllm/a.py" = "{OTHER}"', 'vllm/a.py" = 7', "expected 64 lower-case hex digits, found 7"),
        ("size = 3", "size = -3", "size: expected a number above 0, found -3"),
        ("size = 3", "size = 0", "size: expected a number above 0, found 0"),
        ('"0.31.0".pins]', '"newest".pins]', "'newest' is not a version"),
        (DIGEST, "ab" * 31, "expected 64 lower-case hex digits"),
        (DIGEST, "zz" * 32, "expected 64 lower-case hex digits"),
        (DIGEST, "AB" * 32, "expected 64 lower-case hex digits"),
        ("size = 3\n", "", "no 'size'"),
        ('[base."0.31.0".wheels.vllm]\nversion = "0.31.0"\n', "", "no 'version'"),
        ('"vllm/a.py::f" = "t1:00"', "", ""),
        ('state = "cited"', 'state = "guessed"', "image.state: expected resolved or cited or"),
        ('state = "cited"\n', "", "no 'state'"),
        ('state = "cited"', 'state = "unresolved"', "expected no digest, since its state is unre"),
        (f'digest = "sha256:{OTHER}"\n', "", "expected a digest, since its state is cited"),
        (f'digest = "sha256:{OTHER}"', 'digest = "sha256:00"', "expected sha256:<64 hex digits>"),
        (f'amd64" = "sha256:{OTHER}"', 'amd64" = "x"', "expected sha256:<64 hex digits>"),
        ('tag = "0.17.1"\n', "", "no 'tag'"),
        (COMMIT, COMMIT[:7], "commit: expected 40 hex digits"),
        ('url = "https://git.example/a.git"\n', "", "no 'url'"),
        (OTHER + '"\nsize = 4', OTHER + '"\nsize = "x"', "size: expected a number"),
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
