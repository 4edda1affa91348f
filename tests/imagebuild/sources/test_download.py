from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.errors import BuildError, EngineError, IntegrityError
from imagebuild.sources import download
from imagebuild.sources.cache import Cache
from imagebuild.sources.download import fetch, parse_content_range
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer
from tests.support.wheels import noise

CONTENT = noise(3_000_000)
SHA = hashlib.sha256(CONTENT).hexdigest()
NAME = "vllm-1-py3-none-any.whl"


@pytest.fixture
def file(server: IndexServer, folder: Path) -> IndexFile:
    (folder / NAME).write_bytes(CONTENT)
    return IndexFile("vllm", NAME, "1", server.file_url(NAME), SHA, len(CONTENT))


def leftovers(cache: Cache) -> list[str]:
    return [path.name for path in (cache.root / "partial").glob("*.part")]


def test_a_whole_file(server: IndexServer, file: IndexFile, cache: Cache, http: Http) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(file, SHA, cache, http, lambda name, done, total: seen.append((name, done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[0] == (NAME, 0, len(CONTENT)) and seen[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert fetch(file, SHA, cache, http) == path
    assert http.requests == 1 and http.bytes_fetched == len(CONTENT)
    assert leftovers(cache) == []


def test_the_indexs_hash_serves_where_the_lock_has_none(
    file: IndexFile, cache: Cache, http: Http
) -> None:
    assert fetch(file, None, cache, http).name == SHA
    bare = replace(file, sha256=None, size=None)
    assert fetch(bare, SHA, cache, http).name == SHA
    with pytest.raises(IntegrityError, match="expected a sha256 from the index or the lock"):
        fetch(bare, None, cache, http)


def test_index_and_lock_must_agree(file: IndexFile, cache: Cache, http: Http) -> None:
    with pytest.raises(IntegrityError, match=f"expected sha256 {'0' * 64}, found {SHA} in the"):
        fetch(file, "0" * 64, cache, http)
    assert http.requests == 0


def test_breaks_are_resumed(server: IndexServer, file: IndexFile, cache: Cache, http: Http) -> None:
    server.faults.drop_after = [1_200_000, 0, 1_000]
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    asked = [one.range for one in server.asked]
    assert asked == ["", "bytes=1200000-", "bytes=1200000-", "bytes=1201000-"]
    assert http.bytes_fetched == len(CONTENT)


def test_without_ranges_a_break_starts_again(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.ranges = False
    server.faults.drop_after = [1_200_000, 1_000]
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert [one.status for one in server.asked] == [200, 200, 200]
    assert http.bytes_fetched == len(CONTENT) + 1_201_000


def test_a_server_that_always_breaks_off_is_given_up(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.drop_after = [100] * 99
    with pytest.raises(EngineError, match=f"{NAME}, found that the connection broke off"):
        fetch(file, SHA, cache, http)
    assert len(server.asked) == download.ATTEMPTS
    server.faults.drop_after = []
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert server.asked[-1].range == f"bytes={100 * download.ATTEMPTS}-"


def test_progress_renews_patience(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.drop_after = [download.PROGRESS_BYTES, 0, 0, 0, download.PROGRESS_BYTES, 0, 0, 0]
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT


def test_busy_servers_are_asked_again(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.busy = 2
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert http.requests == 3


@pytest.mark.parametrize("size", [len(CONTENT), None])
@pytest.mark.parametrize("length", [True, False])
def test_a_cut_body_is_never_a_file(
    server: IndexServer, file: IndexFile, settings: PipSettings, length: bool, size: int | None
) -> None:
    server.faults.cut = 10
    server.faults.length = length
    cache = Cache(server.folder.parent / "cache")
    refused = pytest.raises(BuildError, match=r"expected (3000000 bytes|sha256 .*), found ")
    with Http(settings, backoff=0) as http, refused:
        fetch(replace(file, size=size), SHA, cache, http)
    assert len(server.asked) <= download.ATTEMPTS + 1
    assert cache.blob(SHA) is None


def test_wrong_bytes_are_never_a_file(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.flip = 2_999_999
    with pytest.raises(IntegrityError, match=f"expected sha256 {SHA}, found other bytes"):
        fetch(file, SHA, cache, http)
    assert cache.blob(SHA) is None and leftovers(cache) == [] and len(server.asked) == 1


def test_a_longer_body_is_refused(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.length = False
    with pytest.raises(IntegrityError, match="expected 2999999 bytes, found more"):
        fetch(replace(file, size=2_999_999), SHA, cache, http)
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    "left", [b"wrong" * 1000, CONTENT[:1000] + b"x", CONTENT + b"too long", noise(3_000_000, 1)]
)
def test_a_bad_part_is_started_again(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http, left: bytes
) -> None:
    with cache.partial(SHA) as part:
        part.write(left)
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_a_complete_part_costs_no_request(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    with cache.partial(SHA) as part:
        part.write(CONTENT)
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert server.asked == []


def test_a_range_that_was_not_asked_for(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    server.faults.wrong_range = True
    with cache.partial(SHA) as part:
        part.write(CONTENT[:5])
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert [one.range for one in server.asked] == ["bytes=5-", ""]


def test_a_corrupt_cached_file_is_fetched_again(
    file: IndexFile, cache: Cache, http: Http, notices: list[str]
) -> None:
    fetch(file, SHA, cache, http).write_bytes(b"rot")
    with Cache(cache.root, notice=notices.append) as other:
        assert fetch(file, SHA, other, http).read_bytes() == CONTENT
    assert len(notices) == 1


def test_offline(file: IndexFile, cache: Cache, http: Http, offline: Http) -> None:
    with pytest.raises(EngineError, match=f"expected {NAME} in the cache, found nothing"):
        fetch(file, SHA, cache, offline)
    assert not cache.root.exists()
    path = fetch(file, SHA, cache, http)
    assert fetch(file, SHA, cache, offline) == path


def test_file_urls(file: IndexFile, folder: Path, cache: Cache, offline: Http) -> None:
    local = replace(file, url=(folder / NAME).as_uri())
    assert fetch(local, SHA, cache, offline).read_bytes() == CONTENT


def test_missing_on_the_server(file: IndexFile, cache: Cache, http: Http) -> None:
    with pytest.raises(EngineError, match="found status 404"):
        fetch(replace(file, url=file.url + "x"), SHA, cache, http)
    assert leftovers(cache) == []


def test_too_little_room_is_said_before_anything_is_written(
    file: IndexFile, cache: Cache, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "free_bytes", lambda _folder: 17)
    with pytest.raises(EngineError) as caught:
        fetch(file, SHA, cache, http)
    assert str(caught.value) == (
        f"{cache.root}: expected room for 3000000 bytes, found 17 bytes free"
    )
    assert leftovers(cache) == []


def test_content_ranges() -> None:
    assert parse_content_range("bytes 0-9/10") == (0, 10, 10)
    assert parse_content_range(" bytes 5-5/*") == (5, 6, None)
    for text in ("", "bytes */10", "items 0-9/10", "bytes 0-9"):
        assert parse_content_range(text) is None


def test_the_limit_is_kept_and_the_new_file_too(file: IndexFile, cache: Cache, http: Http) -> None:
    cache.put("index", "old", bytes(1000))
    cache.limit_bytes = 10
    path = fetch(file, SHA, cache, http)
    assert path.exists() and cache.get("index", "old") is None


def test_a_cache_that_keeps_nothing(
    file: IndexFile, cache: Cache, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "blob", lambda _sha256: None)
    with pytest.raises(EngineError, match=f"expected to keep {NAME}, found it gone each time"):
        fetch(file, SHA, cache, http)


# Reports each piece and waits for a line before it goes on, so the parent decides where it dies.
CHILD = """
import sys
from pathlib import Path
from imagebuild.sources.cache import Cache
from imagebuild.sources.download import fetch
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile
from imagebuild.sources.pipconf import PipSettings

def step(name, done, total):
    print(done, flush=True)
    sys.stdin.readline()

root, url, sha256, size = sys.argv[1:]
file = IndexFile("vllm", "x.whl", "1", url, sha256, int(size))
with Http(PipSettings(url, timeout=60)) as http:
    print(fetch(file, sha256, Cache(Path(root)), http, step), flush=True)
"""


def start(cache: Cache, file: IndexFile) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(cache.root),
        file.url,
        str(file.sha256),
        str(file.size),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go_on(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def finish(child: subprocess.Popen[str]) -> str:
    with child:
        out, _ = child.communicate("\n" * 10_000)
    assert child.returncode == 0
    return out.strip().splitlines()[-1]


def test_killed_twenty_times_and_completed(server: IndexServer, cache: Cache) -> None:
    rng = random.Random(20261129)
    content = rng.randbytes(24 << 20)  # more than twenty runs of at most four pieces receive
    (server.folder / NAME).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    file = IndexFile("vllm", NAME, "1", server.file_url(NAME), sha256, len(content))
    reached = [0]
    for _ in range(20):
        with start(cache, file) as child:
            assert child.stdout is not None
            done = int(child.stdout.readline())
            assert done >= reached[-1]  # what an earlier run received was not lost
            for _ in range(rng.randrange(1, 4)):
                done = int(go_on(child))
            child.kill()
        reached.append(done)
        assert cache.blob(sha256) is None
    assert 0 < reached[-1] < len(content)
    assert Path(finish(start(cache, file))).read_bytes() == content
    assert leftovers(cache) == []


@pytest.mark.parametrize("point", ["fsync", "rename", "after"])
def test_killed_while_it_is_committed(
    file: IndexFile, cache: Cache, http: Http, point: str
) -> None:
    fault = {
        "fsync": "os.fsync = lambda fd: os.kill(os.getpid(), 9)",
        "rename": "Path.replace = lambda *a: os.kill(os.getpid(), 9)",
        "after": "Cache.keep_within_limit = lambda self: os.kill(os.getpid(), 9)",
    }[point]
    script = (
        f"import os\nfrom pathlib import Path\nfrom imagebuild.sources.cache import Cache\n{fault}"
    )
    command = [sys.executable, "-c", script + CHILD, str(cache.root), file.url, SHA, str(file.size)]
    done = subprocess.run(
        command, input="\n" * 10_000, stdout=subprocess.DEVNULL, text=True, check=False
    )
    assert done.returncode == -9
    assert fetch(file, SHA, cache, http).read_bytes() == CONTENT
    assert leftovers(cache) == []
    assert http.requests == 0


def test_two_processes_fetch_once(server: IndexServer, file: IndexFile, cache: Cache) -> None:
    first = start(cache, file)
    assert first.stdout is not None
    first.stdout.readline()  # it holds the lock now
    second = start(cache, file)
    assert finish(first) == finish(second) == str(cache.blob_path(SHA))
    assert len(server.files_asked()) == 1
    assert leftovers(cache) == []


def test_who_waits_does_not_wait_for_the_end_of_the_first(
    server: IndexServer, file: IndexFile, cache: Cache, http: Http
) -> None:
    path = fetch(file, SHA, cache, http)  # and holds it until the end of the test
    with Cache(cache.root) as other, other.partial(SHA):
        assert path.exists()
    assert finish(start(cache, file)) == str(path)


def test_two_processes_one_is_killed(server: IndexServer, file: IndexFile, cache: Cache) -> None:
    with start(cache, file) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = start(cache, file)
        go_on(first)
        go_on(first)
        first.kill()
    assert Path(finish(second)).read_bytes() == CONTENT


def test_threads_fetch_once(
    server: IndexServer, file: IndexFile, cache: Cache, settings: PipSettings
) -> None:
    paths: list[Path] = []

    def work() -> None:
        with Http(settings) as http:
            paths.append(fetch(file, SHA, cache, http))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache.blob_path(SHA)] * 4
    assert len(server.asked) == 1
