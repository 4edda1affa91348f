from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources import cache as cache_module
from imagebuild.sources.cache import Cache, default_limit, default_root, parse_size
from imagebuild.sources.disk import DiskError, disk_errors, free_bytes
from tests.support.wheels import noise

CONTENT = noise(100_000)
SHA = hashlib.sha256(CONTENT).hexdigest()


def store(cache: Cache, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    with cache.partial(sha256) as part:
        part.write(content)
        cache.commit(sha256, part)
    return sha256


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.fixture
def offline_cache(cache: Cache) -> Iterator[Cache]:
    with Cache(cache.root, offline=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        ("1.5 MiB", 3 << 19),
        ("7", 7),
        ("3kb", 3000),
        ("2 TB", 2 * 10**12),
        (" 1 B ", 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, where="x") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "1e3", "1 GiB more"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="IT: expected a size such as 20GiB, found"):
        parse_size(text, where="IT")


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("IMAGEBUILD_CACHE", "XDG_CACHE_HOME", "IMAGEBUILD_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    assert default_root() == tmp_path / ".cache" / "glm53-imagebuild"
    assert default_limit() == 20 << 30
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == tmp_path / ".cache" / "glm53-imagebuild"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_root() == Path("/xdg/glm53-imagebuild")
    monkeypatch.setenv("IMAGEBUILD_CACHE", "~/mine")
    monkeypatch.setenv("IMAGEBUILD_CACHE_LIMIT", "1GiB")
    cache = Cache()
    assert (cache.root, cache.limit_bytes) == (tmp_path / "mine", 1 << 30)


def test_nothing_is_made_by_reading(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "none")
    assert cache.get("index", "x") is None and cache.blob(SHA) is None
    assert cache.stats().files == 0 and cache.prune(0).files == 0
    assert not (tmp_path / "none").exists()


def test_entries(cache: Cache) -> None:
    cache.put("index", "a", b"first")
    cache.put("index", "a", b"second\nline")
    cache.put("other", "a", b"")
    assert cache.get("index", "a") == b"second\nline"
    assert cache.get("other", "a") == b""
    assert cache.get("index", "b") is None
    assert len(files_of(cache.root)) == 2


def test_whole_files(cache: Cache) -> None:
    assert cache.blob(SHA) is None
    assert store(cache, CONTENT) == SHA
    path = cache.blob(SHA)
    assert path == cache.root / "sha256" / SHA[:2] / SHA
    assert path.read_bytes() == CONTENT
    assert cache.blob(SHA) == path
    assert files_of(cache.root) == [path]


@pytest.mark.parametrize("sha256", ["", "../../x", "A" * 64, "0" * 63])
def test_a_hash_is_no_path(cache: Cache, sha256: str) -> None:
    with pytest.raises(UsageError, match="expected 64 lower-case hex digits"):
        cache.blob(sha256)


@pytest.mark.parametrize("damage", [b"", b"x", b"imagebuild-entry-1 00\ncontent"])
def test_a_corrupt_entry_is_dropped_with_a_notice(
    cache: Cache, notices: list[str], damage: bytes
) -> None:
    cache.put("index", "a", b"content")
    (path,) = files_of(cache.root)
    path.write_bytes(damage)
    assert cache.get("index", "a") is None
    assert len(notices) == 1 and str(path) in notices[0] and "fetched again" in notices[0]
    assert not path.exists()


def test_a_corrupt_whole_file_is_dropped_with_a_notice(cache: Cache, notices: list[str]) -> None:
    path = cache.blob_path(store(cache, CONTENT))
    path.write_bytes(CONTENT[:-1])
    assert cache.blob(SHA) is None
    assert not path.exists() and f"expected sha256 {SHA}" in notices[0]


def test_offline_corruption_is_an_error_and_stays(cache: Cache, offline_cache: Cache) -> None:
    cache.put("index", "a", b"content")
    store(cache, CONTENT)
    for path in files_of(cache.root):
        path.write_bytes(b"bad")
    with pytest.raises(IntegrityError, match="that differ") as caught:
        offline_cache.get("index", "a")
    assert "--offline" in str(caught.value.hint)
    with pytest.raises(IntegrityError, match="expected sha256"):
        offline_cache.blob(SHA)
    assert len(files_of(cache.root)) == 2


def test_a_failed_write_leaves_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("index", "a", b"old")

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError) as caught:
        cache.put("index", "a", b"new")
    assert str(caught.value).startswith(f"{cache.root}: expected room for ")
    assert str(caught.value).endswith("bytes, found no space left there")
    assert caught.value.exit_code == 5 and "cache prune" in str(caught.value.hint)
    assert len(files_of(cache.root)) == 1
    assert cache.get("index", "a") == b"old"


def test_disk_errors_name_folder_and_cause(tmp_path: Path) -> None:
    read_only = OSError(30, "Read-only file system")
    found = pytest.raises(EngineError, match="expected to write, found Read-only file system")
    with found, disk_errors(tmp_path):
        raise read_only
    assert free_bytes(tmp_path / "not" / "there") > 0


def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    cache = Cache(tmp_path / "cache")
    assert cache.get("index", "a") is None and cache.blob(SHA) is None
    with pytest.raises(EngineError, match=r"cache: expected room for \d+ bytes, found "):
        cache.put("index", "a", b"x")
    with pytest.raises(EngineError, match="expected"), cache.partial(SHA):
        pass


def test_entries_survive_many_writers(cache: Cache) -> None:
    def write() -> None:
        for number in range(20):
            cache.put("index", f"{number % 3}", b"%d" % (number % 3) * 1000)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.get("index", f"{n}") for n in range(3)] == [b"%d" % n * 1000 for n in range(3)]
    assert len(files_of(cache.root)) == 3


def test_stats(cache: Cache) -> None:
    cache.put("index", "a", b"x")
    store(cache, CONTENT)
    stats = cache.stats()
    assert stats.files == 2
    assert stats.bytes_by_kind["sha256"] == len(CONTENT)
    assert stats.bytes == sum(stats.bytes_by_kind.values())
    assert stats.limit_bytes == cache.limit_bytes


def test_prune_takes_the_least_recently_used(cache: Cache) -> None:
    for number in range(4):
        cache.put("index", f"{number}", bytes(1000))
        os.utime(cache._entry_path("index", f"{number}"), (number, number))
    cache.get("index", "0")  # is used now
    pruned = cache.prune(2500)
    assert (pruned.files, pruned.kept_in_use) == (2, 0)
    assert [cache.get("index", f"{n}") is not None for n in range(4)] == [True, False, False, True]
    assert cache.prune(2500).files == 0
    assert cache.prune(0).files == 2 and cache.stats().files == 0


def test_prune_takes_temporaries_of_killed_processes_only(cache: Cache) -> None:
    cache.put("index", "a", b"x")
    folder = cache._entry_path("index", "a").parent
    old, young = folder / ".tmp-old", folder / ".tmp-young"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    assert cache.prune().files == 1
    assert not old.exists() and young.exists() and cache.get("index", "a") == b"x"


def test_prune_spares_what_was_handed_out(cache: Cache) -> None:
    path = cache.blob(store(cache, CONTENT))
    assert path is not None
    with Cache(cache.root) as other:
        assert other.prune(0).kept_in_use == 1
        assert path.exists()
        cache.close()
        assert other.prune(0).files == 1


HOLDER = """
import sys
from pathlib import Path
from imagebuild.sources.cache import Cache
cache = Cache(Path(sys.argv[1]))
with cache.partial("0" * 64):
    print(cache.blob(sys.argv[2]), flush=True)
    sys.stdin.readline()
"""


def test_prune_spares_what_another_process_holds(cache: Cache) -> None:
    path = cache.blob_path(store(cache, CONTENT))
    command = [sys.executable, "-c", HOLDER, str(cache.root), SHA]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline().strip() == str(path)
        assert cache.prune(0).kept_in_use == 3  # the file, the part and its lock
        assert path.exists()
        holder.stdin.write("\n")
    assert holder.returncode == 0
    assert cache.prune(0).files == 2


def test_a_file_that_goes_while_it_is_opened(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.blob_path(store(cache, CONTENT))
    real = cache_module.fcntl.flock

    def flock_after_unlink(file: object, how: int) -> None:
        path.unlink()
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module.fcntl, "flock", flock_after_unlink)
    assert cache.blob(SHA) is None


def test_keeping_within_the_limit_never_fails(cache: Cache, notices: list[str]) -> None:
    cache.put("index", "a", bytes(100))
    cache.limit_bytes = 0

    def fail(_limit: int | None = None) -> None:
        raise EngineError("no")

    cache.prune = fail  # type: ignore[method-assign,assignment]
    cache.keep_within_limit()
    assert notices == ["the cache was not pruned: no"]
