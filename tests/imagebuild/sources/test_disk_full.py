"""Full and read-only disks, real ones: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.index_server import IndexServer
from tests.support.wheels import build_wheel, noise

NAMESPACE = ["unshare", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=1m,mode=0755 tmpfs "$1" || exit 99; shift; exec "$@"'

PRELUDE = """
import subprocess, sys
from pathlib import Path
from imagebuild.errors import EngineError
from imagebuild.sources import download
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile
from imagebuild.sources.pipconf import PipSettings
from imagebuild.sources.wheel import WheelTree

mount, url, sha256, size, wheel = sys.argv[1:]
mount = Path(mount)
cache = Cache(mount / "cache")
file = IndexFile("vllm", "x.whl", "1", url, sha256, int(size) or None)

def report(action):
    try:
        action()
    except EngineError as error:
        print(error)
        print(error.hint)
    else:
        print("no error")
    left = [path for path in mount.rglob("*") if path.is_file() and path.suffix != ".keep"]
    print([path.relative_to(mount).as_posix() for path in left])

def fetch():
    with Http(PipSettings(url)) as http:
        download.fetch(file, sha256, cache, http)
"""


def run(tmp_path: Path, code: str, *arguments: object) -> list[str]:
    mount = tmp_path / "mount"
    mount.mkdir()
    command = [*NAMESPACE, "sh", "-c", MOUNT, "sh", str(mount), sys.executable, "-c"]
    command += [PRELUDE + code, str(mount), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"not run, no mount namespace here: {' '.join(NAMESPACE)} ... {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def served(server: IndexServer) -> tuple[str, str, int]:
    content = noise(3_000_000)
    (server.folder / "x.whl").write_bytes(content)
    return server.file_url("x.whl"), hashlib.sha256(content).hexdigest(), len(content)


def test_too_little_room_is_known_before(tmp_path: Path, served: tuple[str, str, int]) -> None:
    message, hint, left = run(tmp_path, "report(fetch)", *served, "-")
    folder = tmp_path / "mount" / "cache"
    assert message.startswith(f"{folder}: expected room for 3000000 bytes, found ")
    assert message.endswith("bytes free") and "IMAGEBUILD_CACHE" in hint
    assert left == "[]"


def test_it_fills_while_downloading(
    tmp_path: Path, server: IndexServer, served: tuple[str, str, int]
) -> None:
    server.faults.length = False  # so that nobody knows the size before
    message, _, left = run(tmp_path, "report(fetch)", *served[:2], 0, "-")
    assert message == (
        f"{tmp_path / 'mount' / 'cache'}: expected to write, found no space left there"
    )
    assert left == "[]"


def test_it_fills_though_there_seemed_to_be_room(
    tmp_path: Path, served: tuple[str, str, int]
) -> None:
    code = "download.free_bytes = lambda folder: 1 << 40\nreport(fetch)"
    message, _, left = run(tmp_path, code, *served, "-")
    assert message == (
        f"{tmp_path / 'mount' / 'cache'}: expected room for 3000000 bytes, "
        "found no space left there"
    )
    assert left == "[]"


def test_small_entries(tmp_path: Path, served: tuple[str, str, int]) -> None:
    code = "report(lambda: cache.put('index', 'x', bytes(2 << 20)))"
    message, _, left = run(tmp_path, code, *served, "-")
    assert "expected room for 2097" in message and message.endswith("no space left there")
    assert left == "[]"


def test_extraction(tmp_path: Path, served: tuple[str, str, int]) -> None:
    wheel = build_wheel(tmp_path, files={"vllm/big.bin": noise(2_000_000)})
    code = "report(lambda: WheelTree(Path(wheel)).extract(mount / 'site', 1))"
    message, _, _ = run(tmp_path, code, *served, wheel)
    assert message == (
        f"{tmp_path / 'mount' / 'site'}: expected room for 2000000 bytes, found no space left there"
    )


def test_read_only(tmp_path: Path, served: tuple[str, str, int]) -> None:
    code = """
cache.put('index', 'known', b'content')
subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
assert cache.get('index', 'known') == b'content'
report(fetch)
report(lambda: cache.put('index', 'x', b'y'))
report(lambda: cache.prune(0))
"""
    lines = run(tmp_path, code, *served, "-")
    assert lines[0].endswith("expected room for 3000000 bytes, found Read-only file system")
    assert "IMAGEBUILD_CACHE=DIR" in lines[1]
    assert "found Read-only file system" in lines[3] and "found Read-only file" in lines[6]
