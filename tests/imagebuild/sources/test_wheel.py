from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.patching.tree import UnionTree
from imagebuild.sources import wheel as wheel_module
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile
from imagebuild.sources.wheel import RemoteWheel, WheelTree, open_wheel
from tests.support.index_server import IndexServer
from tests.support.wheels import build_wheel, member, noise, sha256, vllm_files

REQUIRES = [
    "torch==2.13.0",
    "Flashinfer_Python == 0.7.0.post1 ; platform_machine == 'x86_64'",
    "flashinfer-python==0.6.0; platform_machine == 'aarch64'",
    "transformers>=5.10.4,<5.18.0",
    "nvidia-cutlass-dsl[cu13]==4.7.1",
    "wild==1.*",
    "video==9; extra == 'video'",
    "old==1; python_version < '3.12'",
    "windows==1; sys_platform == 'win32'",
]
# Far enough apart that the parts are several ranges.
FILES = vllm_files() | {f"vllm/big_{n}.bin": noise(200_000, n) for n in range(8)}


@pytest.fixture
def path(folder: Path) -> Path:
    return build_wheel(folder, files=FILES, requires=REQUIRES)


@pytest.fixture
def file(path: Path, server: IndexServer) -> IndexFile:
    return IndexFile(
        "vllm", path.name, "0.31.0", server.file_url(path.name), sha256(path), path.stat().st_size
    )


Remote = tuple[IndexServer, Http, Cache]


@pytest.fixture
def remote(server: IndexServer, http: Http, cache: Cache) -> Remote:
    return server, http, cache


@pytest.fixture
def small_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_module, "TAIL", 400)


def opened(
    kind: str, path: Path, file: IndexFile, http: Http, cache: Cache
) -> WheelTree | RemoteWheel:
    return WheelTree(path) if kind == "whole" else RemoteWheel(file, http, cache)


@pytest.fixture(params=["whole", "remote"])
def wheel(
    request: pytest.FixtureRequest, path: Path, file: IndexFile, http: Http, cache: Cache
) -> Iterator[WheelTree | RemoteWheel]:
    with opened(request.param, path, file, http, cache) as tree:
        yield tree


def test_it_is_a_tree(wheel: WheelTree | RemoteWheel) -> None:
    assert wheel.identity.version == "0.31.0" and wheel.identity.commit == "abc123def"
    assert wheel.identity.source.endswith(".whl")
    assert wheel.read("vllm/envs.py") == FILES["vllm/envs.py"]
    assert wheel.exists("vllm/envs.py") and not wheel.exists("vllm") and not wheel.exists("x")
    assert list(wheel.iter("vllm/")) == sorted(FILES)
    wheel.prefetch(["vllm/part_3.py", "not/there"])
    for name, data in FILES.items():
        assert wheel.read(name) == data
    for name in ("vllm", "vllm/nothing.py", ""):
        with pytest.raises(FileNotFoundError):
            wheel.read(name)


def test_metadata(wheel: WheelTree | RemoteWheel) -> None:
    assert wheel.metadata()["Name"] == "vllm" and wheel.metadata()["Version"] == "0.31.0"
    assert wheel.requirement("torch") == "2.13.0"
    assert wheel.requirement("flashinfer.python") == "0.7.0.post1"
    assert wheel.requirement("nvidia_cutlass_dsl") == "4.7.1"
    assert wheel.specifier("transformers") == "<5.18.0,>=5.10.4"
    for name in ("transformers", "wild", "video", "old", "windows", "absent"):
        assert wheel.requirement(name) is None
    assert wheel.specifier("absent") is None


def test_markers_are_judged_for_the_platform(path: Path) -> None:
    with WheelTree(path, platform="linux/arm64") as wheel:
        assert wheel.requirement("flashinfer-python") == "0.6.0"
    with pytest.raises(
        UsageError, match="platform: expected linux/amd64 or linux/arm64, found 'x'"
    ):
        WheelTree(path, platform="x")


def test_record(wheel: WheelTree | RemoteWheel) -> None:
    record = wheel.record()
    data = FILES["vllm/envs.py"]
    assert record["vllm/envs.py"] == (hashlib.sha256(data).hexdigest(), len(data))
    assert set(record) == set(FILES) | {
        f"vllm-0.31.0.dist-info/{name}" for name in ("METADATA", "WHEEL")
    }


def test_a_wheel_says_of_which_project_it_is(tmp_path: Path, path: Path) -> None:
    other = build_wheel(tmp_path, name="flashinfer_python", files={"flashinfer/a.py": b"1"})
    with WheelTree(other) as flashinfer, WheelTree(path) as vllm:
        union = UnionTree([vllm, flashinfer])
        assert union.identity.version == "0.31.0"
        assert union.read("flashinfer/a.py") == b"1"
        assert (vllm.project, flashinfer.project) == ("vllm", "flashinfer-python")
        assert (flashinfer.identity.version, flashinfer.identity.title) == (
            "0.31.0", "flashinfer-python",
        )  # fmt: skip


def test_a_wheel_of_vllm_without_its_version_file(tmp_path: Path) -> None:
    with (
        WheelTree(build_wheel(tmp_path, files={"vllm/a.py": b"1"})) as wheel,
        pytest.raises(UsageError, match=r"found no usable vllm/_version.py"),
    ):
        _ = wheel.identity


def test_bad_metadata(tmp_path: Path) -> None:
    with (
        WheelTree(build_wheel(tmp_path, requires=["torch =!= 1"])) as wheel,
        pytest.raises(IntegrityError, match="METADATA: expected valid Requires-Dist lines"),
    ):
        wheel.requirement("torch")


def test_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x.whl: expected a wheel, found no file"):
        WheelTree(tmp_path / "x.whl").members()


def without(path: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if not line.startswith(f"{path},")]


def altered(path: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        text = "A" * 42
        return [
            f"{path},sha256={text}A,1" if line.startswith(f"{path},") else line for line in lines
        ]

    return change


@pytest.mark.parametrize("kind", ["whole", "remote"])
@pytest.mark.parametrize(
    ("record", "found"),
    [
        (without("vllm/envs.py"), "expected a line with a hash in RECORD, found none"),
        (altered("vllm/envs.py"), "expected 1 bytes of sha256 0+ by RECORD, found 14 bytes of"),
    ],
)
def test_record_is_believed_over_the_crc(
    remote: Remote, kind: str, record: Callable[[list[str]], list[str]], found: str
) -> None:
    server, http, cache = remote
    path = build_wheel(server.folder, record=record)
    file = IndexFile("vllm", path.name, "0.31.0", server.file_url(path.name), sha256(path))
    with opened(kind, path, file, http, cache) as wheel:
        assert wheel.read("vllm/_version.py")
        with pytest.raises(IntegrityError, match=found):
            wheel.read("vllm/envs.py")


# Remote only


def test_few_requests(server: IndexServer, file: IndexFile, http: Http, cache: Cache) -> None:
    with RemoteWheel(file, http, cache) as wheel:
        assert http.requests == 0
        assert wheel.requirement("torch") == "2.13.0"
        assert http.requests == 1
        wheel.prefetch(["vllm/envs.py"])
        assert http.requests == 2
        names = [f"vllm/part_{n}.py" for n in range(12)]
        wheel.prefetch([*names, *names])
        assert http.requests == 3
        for name in names:
            assert wheel.read(name) == FILES[name]
        assert http.requests == 3


def test_only_what_is_needed(
    server: IndexServer, file: IndexFile, http: Http, cache: Cache, small_tail: None
) -> None:
    with RemoteWheel(file, http, cache) as wheel:
        wheel.prefetch(["vllm/part_0.py", "vllm/big_1.bin", "vllm/big_5.bin"])
        assert wheel.read("vllm/big_5.bin") == FILES["vllm/big_5.bin"]
    asked = server.files_asked()
    # End, directory, RECORD and METADATA, three parts.
    assert [one.status for one in asked] == [206] * 6
    assert asked[0].range == f"bytes={file.size - 400}-{file.size - 1}"  # type: ignore[operator]
    assert http.bytes_fetched < 420_000


def test_a_second_reader_asks_for_nothing(
    file: IndexFile, http: Http, offline: Http, cache: Cache
) -> None:
    with RemoteWheel(file, http, cache) as wheel:
        wheel.prefetch(["vllm/envs.py", "vllm/big_3.bin"])
        names = list(wheel.iter())
    with RemoteWheel(file, offline, cache) as again:
        assert list(again.iter()) == names
        assert again.requirement("torch") == "2.13.0" and len(again.record()) == len(FILES) + 2
        assert again.read("vllm/big_3.bin") == FILES["vllm/big_3.bin"]
        with pytest.raises(EngineError, match=r"expected vllm-0.31.0-.*whl in the cache") as caught:
            again.read("vllm/big_0.bin")
        assert "--offline" in str(caught.value)
    assert offline.requests == 0


@pytest.mark.parametrize("content", [b"no number\nx", b"3\nfour", b""])
def test_a_directory_that_another_version_cached(
    file: IndexFile, http: Http, cache: Cache, content: bytes
) -> None:
    cache.put("wheel-directory", str(file.sha256), content)
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.identity.version == "0.31.0"


def test_offline_and_never_read(file: IndexFile, offline: Http, cache: Cache) -> None:
    with RemoteWheel(file, offline, cache) as wheel, pytest.raises(EngineError, match="--offline"):
        wheel.exists("vllm/envs.py")


def test_without_a_hash_nothing_is_kept_on_disk(file: IndexFile, http: Http, cache: Cache) -> None:
    bare = replace(file, sha256=None, size=None)
    with RemoteWheel(bare, http, cache) as wheel:
        assert wheel.read("vllm/envs.py") == wheel.read("vllm/envs.py") == FILES["vllm/envs.py"]
        assert http.requests == 2
    assert cache.stats().files == 0


def test_cached_parts_are_not_trusted_blindly(
    file: IndexFile, http: Http, cache: Cache, notices: list[str]
) -> None:
    with RemoteWheel(file, http, cache) as wheel:
        wheel.read("vllm/envs.py")
    for path in (cache.root / "wheel-member").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"rot")
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.read("vllm/envs.py") == FILES["vllm/envs.py"]
    assert len(notices) == 2  # RECORD and the file
    cache.put("wheel-member", f"{file.sha256} vllm/envs.py", b"another file's content")
    with (
        RemoteWheel(file, http, cache) as wheel,
        pytest.raises(IntegrityError, match=r"vllm/envs.py: expected 14 bytes of sha256"),
    ):
        wheel.read("vllm/envs.py")


@pytest.mark.parametrize("fault", ["ranges", "suffix_ranges"])
def test_without_ranges_the_whole_is_fetched_and_checked(
    server: IndexServer, file: IndexFile, http: Http, cache: Cache, fault: str
) -> None:
    setattr(server.faults, fault, False)
    file = replace(file, size=None)
    with RemoteWheel(file, http, cache) as wheel:
        wheel.prefetch(["vllm/envs.py"])
        assert wheel.read("vllm/envs.py") == FILES["vllm/envs.py"]
        assert wheel.requirement("torch") == "2.13.0"
    assert cache.blob(str(file.sha256)) is not None
    assert [one.range for one in server.asked][1:] == [""]


def test_without_ranges_and_without_a_hash(
    server: IndexServer, file: IndexFile, http: Http, cache: Cache
) -> None:
    server.faults.ranges = False
    with (
        RemoteWheel(replace(file, sha256=None), http, cache) as wheel,
        pytest.raises(
            IntegrityError, match="expected a sha256 from the index or the lock, found none"
        ),
    ):
        wheel.exists("vllm/envs.py")


def test_without_ranges_and_with_wrong_bytes(
    server: IndexServer, file: IndexFile, http: Http, cache: Cache
) -> None:
    server.faults.ranges, server.faults.flip = False, 77
    with (
        RemoteWheel(file, http, cache) as wheel,
        pytest.raises(IntegrityError, match="found other bytes"),
    ):
        wheel.exists("vllm/envs.py")


def test_ranges_that_stop_midway(
    server: IndexServer, file: IndexFile, http: Http, cache: Cache, small_tail: None
) -> None:
    server.faults.etag = False
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.exists("vllm/envs.py")
        server.faults.ranges = False
        assert wheel.read("vllm/big_2.bin") == FILES["vllm/big_2.bin"]


@pytest.mark.parametrize(("etag", "grow"), [(True, 0), (False, 3)])
def test_changes_while_reading(remote: Remote, file: IndexFile, etag: bool, grow: int) -> None:
    server, http, cache = remote
    server.faults.etag, server.faults.grow, server.faults.change_after = etag, grow, 1
    with (
        RemoteWheel(replace(file, size=None), http, cache) as wheel,
        pytest.raises(IntegrityError, match="changed while reading"),
    ):
        wheel.prefetch(FILES)


@pytest.mark.parametrize("name", ["vllm/big_1.bin", "vllm/_version.py"])
def test_wrong_bytes_in_a_part(remote: Remote, path: Path, file: IndexFile, name: str) -> None:
    server, http, cache = remote
    with WheelTree(path) as whole:
        server.faults.flip = whole.members()[name].header_offset + 50 + len(name)
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.read("vllm/envs.py") == FILES["vllm/envs.py"]
        with pytest.raises(IntegrityError, match=f"{name}: expected an intact wheel, found"):
            wheel.read(name)
    with RemoteWheel(file, http, cache) as wheel, pytest.raises(IntegrityError):
        wheel.read(name)  # it was not kept either


def test_damage_anywhere_is_an_error_or_harmless(
    server: IndexServer, file: IndexFile, http: Http, tmp_path: Path
) -> None:
    rng = random.Random(3)
    for number in range(60):
        server.faults.flip = rng.randrange(file.size or 0)
        with (
            Cache(tmp_path / f"cache{number}") as cache,
            RemoteWheel(replace(file, size=None), http, cache) as wheel,
        ):
            try:
                wheel.prefetch(FILES)
                assert {n: wheel.read(n) for n in FILES if wheel.exists(n)} == {
                    n: FILES[n] for n in FILES if wheel.exists(n)
                }
            except (IntegrityError, EngineError) as error:
                assert "\n" not in str(error)


def test_a_wrong_directory_does_not_outlive_its_run(
    remote: Remote, file: IndexFile, folder: Path, path: Path
) -> None:
    server, http, cache = remote
    good, file = path.read_bytes(), replace(file, size=None)
    build_wheel(folder, files={name: data[::-1] for name, data in FILES.items()}, requires=REQUIRES)
    server.faults.etag = False
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.exists("vllm/envs.py")
    path.write_bytes(good)
    with RemoteWheel(file, http, cache) as wheel, pytest.raises(IntegrityError):
        wheel.read("vllm/big_1.bin")
    with RemoteWheel(file, http, cache) as wheel:
        assert wheel.read("vllm/big_1.bin") == FILES["vllm/big_1.bin"]


def test_refusals_hold_for_remote_wheels_too(server: IndexServer, http: Http, cache: Cache) -> None:
    def spoil(archive: object) -> None:
        member(archive, "vllm/envs.py").filename = "../envs.py"  # type: ignore[arg-type]

    path = build_wheel(server.folder, spoil=spoil)
    file = IndexFile("vllm", path.name, "0.31.0", server.file_url(path.name), sha256(path))
    with RemoteWheel(file, http, cache) as wheel, pytest.raises(IntegrityError, match="inside"):
        wheel.members()
    assert cache.stats().files == 0


def test_zip64_by_range(server: IndexServer, http: Http, cache: Cache, small_tail: None) -> None:
    path = build_wheel(server.folder, zip64=True)
    file = IndexFile("vllm", path.name, "0.31.0", server.file_url(path.name), sha256(path))
    with RemoteWheel(file, http, cache) as wheel:
        wheel.prefetch(["vllm/part_1.py", "vllm/part_9.py"])
        assert wheel.read("vllm/part_9.py") == vllm_files()["vllm/part_9.py"]


# open_wheel


def test_what_is_opened(
    file: IndexFile, path: Path, http: Http, offline: Http, cache: Cache
) -> None:
    from imagebuild.sources.download import fetch

    with open_wheel(file, http, cache, platform="linux/amd64") as wheel:
        assert isinstance(wheel, RemoteWheel)
    local = replace(file, url=path.as_uri())
    with open_wheel(local, offline, cache, sha256=sha256(path)) as wheel:
        assert isinstance(wheel, WheelTree) and wheel.path == path
    fetch(file, None, cache, http)
    with open_wheel(file, offline, cache) as wheel:
        assert isinstance(wheel, WheelTree) and wheel.path == cache.blob_path(sha256(path))
        assert wheel.identity.source == file.filename


def test_a_local_wheel_with_other_bytes(
    file: IndexFile, path: Path, http: Http, cache: Cache
) -> None:
    local = replace(file, url=path.as_uri(), sha256=None)
    with pytest.raises(IntegrityError, match=f"expected sha256 {'0' * 64}, found {sha256(path)}"):
        open_wheel(local, http, cache, sha256="0" * 64)
    with pytest.raises(IntegrityError, match=f"expected sha256 {'0' * 64}, found"):
        open_wheel(file, http, cache, sha256="0" * 64)
    path.unlink()
    with pytest.raises(EngineError, match="expected a wheel, found No such file"):
        open_wheel(local, http, cache, sha256="0" * 64)


# Extraction


def modes(dest: Path) -> dict[str, tuple[str, float]]:
    return {
        path.relative_to(dest).as_posix(): (oct(path.stat().st_mode & 0o7777), path.stat().st_mtime)
        for path in sorted(dest.rglob("*"))
    }


def test_extract(tmp_path: Path) -> None:
    files = vllm_files() | {"vllm/bin/tool": b"#!"}
    wheel_path = build_wheel(tmp_path, files=files, executable=["vllm/bin/tool"])
    old = os.umask(0o077)
    try:
        with WheelTree(wheel_path) as wheel:
            dest = tmp_path / "site"
            paths = wheel.extract(dest, 1_700_000_000)
            wheel.extract(tmp_path / "again", 1_700_000_000)
            assert paths == list(wheel.iter())
    finally:
        os.umask(old)
    assert {p: (dest / p).read_bytes() for p in files} == files
    assert modes(dest) == modes(tmp_path / "again")
    assert modes(dest)["vllm/bin/tool"] == ("0o755", 1_700_000_000)
    assert modes(dest)["vllm/envs.py"] == ("0o644", 1_700_000_000)
    assert modes(dest)["vllm"] == ("0o755", 1_700_000_000)


def test_extract_beside_another_wheel(tmp_path: Path) -> None:
    first = build_wheel(tmp_path)
    second = build_wheel(tmp_path, name="other", files={"other/a.py": b"1"})
    third = build_wheel(tmp_path, name="third", files={"vllm/envs.py": b"mine"})
    dest = tmp_path / "site"
    for path in (first, second):
        with WheelTree(path) as wheel:
            wheel.extract(dest, 1)
    with (
        WheelTree(third) as wheel,
        pytest.raises(UsageError, match=r"envs.py: expected nothing there, found a file that"),
    ):
        wheel.extract(dest, 1)
    assert (dest / "vllm/envs.py").read_bytes() == b"USE_IT = True\n"


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (without("vllm/envs.py"), "expected RECORD to list each file .* found vllm/envs.py"),
        (lambda lines: [*lines, "vllm/gone.py,sha256=AAAA,1"], "found vllm/gone.py"),
        (altered("vllm/envs.py"), "expected 1 bytes of sha256 0+ by RECORD"),
    ],
)
def test_extract_checks_record(
    tmp_path: Path, record: Callable[[list[str]], list[str]], found: str
) -> None:
    with (
        WheelTree(build_wheel(tmp_path, record=record)) as wheel,
        pytest.raises(IntegrityError, match=found),
    ):
        wheel.extract(tmp_path / "site", 1)


def test_extract_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "site").write_text("a file")
    with (
        WheelTree(build_wheel(tmp_path)) as wheel,
        pytest.raises(EngineError, match=r"site: expected room for \d+ bytes, found "),
    ):
        wheel.extract(tmp_path / "site", 1)
