from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.errors import EngineError, IntegrityError, ReviewError, UsageError
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile, PackageIndex, machine_of, wheel_tags
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer

X86 = "cp38-abi3-manylinux_2_28_x86_64"
ARM = "cp38-abi3-manylinux_2_28_aarch64"
NAMES = [
    f"vllm-0.30.0-{X86}.whl",
    f"vllm-0.31.0-{X86}.whl",
    f"vllm-0.31.0-{ARM}.whl",
    "vllm-0.31.0.tar.gz",
    f"vllm-0.32.0rc1-{X86}.whl",
    f"vllm-0.33.0-{X86}.whl",
    "vllm-odd-name.whl",
    f"vllm-1.0-extra-1-{X86}.whl",
]


@pytest.fixture
def served(folder: Path) -> Path:
    for name in NAMES:
        (folder / name).write_bytes(name.encode())
    (folder / "Flashinfer_Python-0.7.0.post1-py3-none-any.whl").write_bytes(b"fi")
    return folder


@pytest.fixture
def index(served: Path, settings: PipSettings, http: Http, cache: Cache) -> PackageIndex:
    return PackageIndex(settings, http, cache)


@pytest.fixture
def fresh(settings: PipSettings, cache: Cache) -> Iterator[Callable[..., PackageIndex]]:
    opened: list[Http] = []

    def make(*, offline: bool = False, **changes: object) -> PackageIndex:
        changed = replace(settings, **changes)  # type: ignore[arg-type]
        opened.append(Http(changed, offline=offline, backoff=0))
        return PackageIndex(changed, opened[-1], cache)

    yield make
    for http in opened:
        http.close()


Fresh = Callable[..., PackageIndex]


@pytest.mark.parametrize("html_only", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_both_forms(
    index: PackageIndex, server: IndexServer, html_only: bool, relative: bool
) -> None:
    server.faults.html_only, server.faults.relative = html_only, relative
    name = f"vllm-0.31.0-{X86}.whl"
    server.faults.yanked = {name: "breaks <all> & more"}
    files = {file.filename: file for file in index.files("VLLM")}
    assert sorted(files) == sorted(NAMES[:6])
    found = files[name]
    assert (found.project, found.version, found.url) == ("vllm", "0.31.0", server.file_url(name))
    assert found.sha256 is not None and len(found.sha256) == 64
    assert found.yanked == "breaks <all> & more" and files[NAMES[0]].yanked is False
    if not html_only:
        assert found.size == len(name) and found.requires_python == ">=3.10"
        assert found.upload_time == "2026-10-05T07:40:41.009965+00:00"
    assert index.http.get(found.url, what="it").body == name.encode()


def test_versions(index: PackageIndex) -> None:
    assert index.versions("vllm") == ["0.30.0", "0.31.0", "0.32.0rc1", "0.33.0"]
    assert index.versions("flashinfer.python") == ["0.7.0.post1"]
    assert index.http.requests == 2


def test_the_page_is_asked_for_once_a_run(index: PackageIndex) -> None:
    for _ in range(3):
        index.files("vllm")
    assert index.http.requests == 1


@pytest.mark.parametrize(("platform", "tag"), [("linux/amd64", X86), ("linux/arm64", ARM)])
def test_wheels_by_platform(index: PackageIndex, platform: str, tag: str) -> None:
    assert index.wheel("vllm", "0.31.0", platform).filename == f"vllm-0.31.0-{tag}.whl"
    assert index.wheel("vllm", "0.31", platform).version == "0.31.0"
    assert index.wheel("flashinfer-python", "0.7.0.post1", platform).filename.endswith("any.whl")


def test_pre_releases_when_named(index: PackageIndex) -> None:
    assert index.wheel("vllm", "0.32.0RC1", "linux/amd64").version == "0.32.0rc1"


def test_no_wheel_for_the_platform(index: PackageIndex) -> None:
    with pytest.raises(UsageError) as caught:
        index.wheel("vllm", "0.33.0", "linux/arm64")
    assert str(caught.value) == (
        f"vllm 0.33.0: expected a wheel for linux/arm64, found vllm-0.33.0-{X86}.whl"
    )
    with pytest.raises(UsageError, match="platform: expected linux/amd64 or linux/arm64, found"):
        index.wheel("vllm", "0.31.0", "linux/riscv64")


def test_an_unknown_version_names_the_nearest(index: PackageIndex, served: Path) -> None:
    for minor in range(40, 60):
        (served / f"vllm-0.{minor}.0-{X86}.whl").touch()
    with pytest.raises(UsageError) as caught:
        index.wheel("vllm", "0.45.1", "linux/amd64")
    assert str(caught.value) == (
        "vllm: expected version 0.45.1, found none; "
        "nearest are 0.44.0, 0.45.0, 0.46.0, 0.47.0, 0.48.0"
    )
    with pytest.raises(UsageError, match=r"nearest are 0\.55\.0, .*0\.59\.0$"):
        index.wheel("vllm", "99", "linux/amd64")
    with pytest.raises(UsageError, match=r"nearest are 0\.30\.0, 0\.31\.0"):
        index.wheel("vllm", "0.1", "linux/amd64")
    with pytest.raises(UsageError, match="expected a version, found 'newest'"):
        index.wheel("vllm", "newest", "linux/amd64")


def test_yanked_releases(index: PackageIndex, server: IndexServer) -> None:
    name = f"vllm-0.31.0-{X86}.whl"
    server.faults.yanked = {name: "computes wrong values"}
    with pytest.raises(ReviewError) as caught:
        index.wheel("vllm", "0.31.0", "linux/amd64")
    assert str(caught.value) == (
        "vllm 0.31.0: expected a release, found that upstream withdrew it: computes wrong values"
    )
    assert caught.value.exit_code == 1
    assert index.wheel("vllm", "0.31.0", "linux/amd64", allow_yanked=True).filename == name


def test_yanked_without_a_reason(index: PackageIndex, server: IndexServer) -> None:
    server.faults.html_only = True
    server.faults.yanked = {f"vllm-0.31.0-{X86}.whl": ""}
    with pytest.raises(ReviewError, match="withdrew it: no reason given"):
        index.wheel("vllm", "0.31.0", "linux/amd64")


def test_the_best_tag_and_build_win(index: PackageIndex, served: Path) -> None:
    for tag in (
        "py3-none-any",
        "cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64",
        "1-cp312-cp312-manylinux_2_28_x86_64",
        "2-cp312-cp312-manylinux_2_28_x86_64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp313-cp313-manylinux_2_28_x86_64",
        "cp312-cp312-macosx_11_0_arm64",
        "cp312-cp312-linux_x86_64",
    ):
        (served / f"kernel-1.0-{tag}.whl").touch()
    assert index.wheel("kernel", "1.0", "linux/amd64").filename == (
        "kernel-1.0-2-cp312-cp312-manylinux_2_28_x86_64.whl"
    )
    assert index.wheel("kernel", "1.0", "linux/arm64").filename == "kernel-1.0-py3-none-any.whl"
    assert machine_of("linux/arm64") == "aarch64"
    assert len(set(wheel_tags("linux/amd64"))) == len(wheel_tags("linux/amd64"))


def test_a_project_that_no_index_has(fresh: Fresh, server: IndexServer, tmp_path: Path) -> None:
    secret = server.url.replace("//", "//me:s3cret@")
    (tmp_path / "links").mkdir()
    index = fresh(
        index_url=secret,
        extra_index_urls=(f"{secret}/more",),
        find_links=(str(tmp_path / "links"),),
    )
    with pytest.raises(EngineError) as caught:
        index.files("no-such")
    assert str(caught.value) == (
        f"index-url {server.url}, extra-index-url {server.url}/more, "
        f"find-links {tmp_path / 'links'}: expected the project no-such, found no file of it"
    )
    assert "index-url" in str(caught.value.hint) and caught.value.exit_code == 5
    with pytest.raises(EngineError, match="pip configuration: expected the project"):
        fresh(no_index=True).files("no-such")


def test_all_places_are_merged(
    fresh: Fresh, served: Path, server: IndexServer, tmp_path: Path
) -> None:
    page = tmp_path / "simple" / "vllm"
    page.mkdir(parents=True)
    links = (
        f'<a href="../../files/vllm-0.35.0-{X86}.whl#sha256={"a" * 64}">vllm-0.35.0-{X86}.whl</a>'
    )
    (page / "index.html").write_text(links + f'<a href="{NAMES[0]}">{NAMES[0]}</a>')
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "vllm-0.36.0-py3-none-any.whl").write_bytes(b"mine")
    (folder / "torch-2.0-py3-none-any.whl").touch()
    listing = tmp_path / "links.html"
    listing.write_text(
        '<a href="wheels/vllm-0.37.0-py3-none-any.whl">take this</a><a href="x">x</a>'
    )
    index = fresh(
        extra_index_urls=((tmp_path / "simple").as_uri(), f"{server.url}/none"),
        find_links=(str(folder), folder.as_uri(), listing.as_uri(), f"{server.url}/gone.html"),
    )
    files = {(file.version, file.url.partition(":")[0]): file for file in index.files("vllm")}
    assert index.versions("vllm")[-4:] == ["0.33.0", "0.35.0", "0.36.0", "0.37.0"]
    assert files["0.35.0", "file"].url == (tmp_path / f"files/vllm-0.35.0-{X86}.whl").as_uri()
    assert files["0.36.0", "file"] == IndexFile(
        "vllm",
        "vllm-0.36.0-py3-none-any.whl",
        "0.36.0",
        (folder / "vllm-0.36.0-py3-none-any.whl").as_uri(),
        size=4,
    )
    assert files["0.37.0", "file"].filename == "vllm-0.37.0-py3-none-any.whl"
    # The configured index comes first where two places offer one name.
    assert index.wheel("vllm", "0.30.0", "linux/amd64").url == server.file_url(NAMES[0])


def test_a_folder_as_index(fresh: Fresh, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "vllm"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="{NAMES[0]}">{NAMES[0]}</a>')
    assert fresh(index_url=str(tmp_path / "simple"), offline=True).versions("vllm") == ["0.30.0"]


def test_the_lock_chooses_between_files_of_one_name(
    fresh: Fresh, served: Path, tmp_path: Path
) -> None:
    page = tmp_path / "simple" / "vllm"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="{NAMES[0]}#sha256={"a" * 64}">{NAMES[0]}</a>')
    index = fresh(extra_index_urls=((tmp_path / "simple").as_uri(),))
    assert index.wheel("vllm", "0.30.0", "linux/amd64").url.startswith("http")
    chosen = index.wheel("vllm", "0.30.0", "linux/amd64", sha256="a" * 64)
    assert chosen.url.startswith("file:")
    with pytest.raises(IntegrityError, match=f"with sha256 {'b' * 64}, found none"):
        index.wheel("vllm", "0.30.0", "linux/amd64", sha256="b" * 64)


def test_a_locked_wheel_may_come_from_where_no_hash_is_given(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).touch()
    index = fresh(no_index=True, find_links=(str(tmp_path),))
    chosen = index.wheel("vllm", "0.30.0", "linux/amd64", sha256="b" * 64)
    assert (chosen.filename, chosen.sha256) == (NAMES[0], None)


def test_credentials_are_used_and_never_recorded(
    fresh: Fresh, served: Path, server: IndexServer
) -> None:
    server.faults.auth, server.faults.relative = ("me", "s3cret"), True
    index = fresh(index_url=server.url.replace("//", "//me:s3cret@"))
    found = index.wheel("vllm", "0.31.0", "linux/amd64")
    assert found.url == server.file_url(found.filename)
    assert index.http.get(found.url, what="it").status == 200
    for path in index.cache.root.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes()
    with pytest.raises(EngineError, match="found status 401"):
        fresh().files("vllm")


@pytest.mark.parametrize("html_only", [False, True])
def test_online_asks_again_and_offline_uses_the_cache(
    fresh: Fresh, served: Path, server: IndexServer, html_only: bool
) -> None:
    server.faults.html_only = html_only
    files = fresh().files("vllm")
    assert fresh().files("vllm") == files
    assert [one.status for one in server.asked] == [200, 304]
    assert fresh(offline=True).files("vllm") == files
    (served / f"vllm-0.34.0-{X86}.whl").touch()
    assert "0.34.0" in fresh().versions("vllm")
    assert "0.34.0" in fresh(offline=True).versions("vllm")
    assert len(server.asked) == 3


def test_without_etag_the_whole_page_is_read_again(
    fresh: Fresh, served: Path, server: IndexServer
) -> None:
    server.faults.etag = False
    assert fresh().files("vllm") == fresh().files("vllm") == fresh(offline=True).files("vllm")
    assert [one.status for one in server.asked] == [200, 200]


def test_offline_and_never_asked(fresh: Fresh, served: Path, server: IndexServer) -> None:
    with pytest.raises(EngineError) as caught:
        fresh(offline=True).files("vllm")
    assert str(caught.value).startswith(f"{server.url}/vllm/: expected the index page of vllm in")
    assert "without --offline" in str(caught.value.hint)
    with pytest.raises(EngineError, match="found no file of it"):
        fresh().files("absent")
    with pytest.raises(EngineError, match="found no file of it"):
        fresh(offline=True).files("absent")


def test_a_damaged_cached_page(
    fresh: Fresh, served: Path, cache: Cache, notices: list[str], server: IndexServer
) -> None:
    files = fresh().files("vllm")
    for path in cache.root.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert fresh().files("vllm") == files
    assert len(notices) == 1 and [one.status for one in server.asked] == [200, 200]


@pytest.mark.parametrize("content", [b"no json\nx", b'{"status": 200, "more": 1}\nx', b"[]\n"])
def test_a_page_that_another_version_cached(
    fresh: Fresh, served: Path, cache: Cache, server: IndexServer, content: bytes
) -> None:
    cache.put("index", f"{server.url}/vllm/", content)
    with pytest.raises(EngineError, match="expected the index page of vllm in the cache"):
        fresh(offline=True).files("vllm")
    assert fresh().files("vllm")


@pytest.mark.parametrize("html_only", [False, True])
@pytest.mark.parametrize(
    "page",
    [
        b'{"meta": {"api-version": "1.0"}',
        b"[1, 2]",
        json.dumps({"meta": {"api-version": "9.0"}, "name": "vllm", "files": []}).encode(),
        b'<meta name="pypi:repository-version" content="9.0">',
    ],
)
def test_pages_that_are_none(
    index: PackageIndex, server: IndexServer, page: bytes, html_only: bool
) -> None:
    server.faults.page, server.faults.html_only = page, html_only
    with pytest.raises(EngineError) as caught:
        index.files("vllm")
    assert "\n" not in str(caught.value)
    if html_only == page.startswith(b"<"):
        assert f"{server.url}/vllm/: expected a simple index page of vllm" in str(caught.value)


def test_a_newer_minor_version_is_no_news(index: PackageIndex, server: IndexServer) -> None:
    name = f"vllm-0.31.0-{X86}.whl"
    entry = {"filename": name, "url": name, "hashes": {}, "yanked": True}
    page = {"meta": {"api-version": "1.99"}, "name": "vllm", "files": [entry], "versions": []}
    server.faults.page = json.dumps(page).encode()
    (file,) = index.files("vllm")
    assert (file.url, file.sha256, file.yanked) == (
        f"{server.url}/vllm/{name}",
        None,
        "no reason given",
    )
