"""Several releases in one call: what is named, side by side, one that fails, and the search."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imagebuild.audit.targets import Asked, targets_of
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import PackageIndex
from imagebuild.sources.pipconf import PipSettings
from imagebuild.upstream import Upstream
from tests.support.index_server import IndexServer
from tests.support.product import COUNTER, GREETER, TAGS, Product, release_files
from tests.support.wheels import build_wheel

RECORDED = Path(__file__).with_name("vllm-index.txt")
NEWEST = "0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0"
GREET = b'        return "hello"'


def newer(
    folder: Path,
    version: str,
    changes: Mapping[str, bytes] | None = None,
    *,
    commit: str = "",
    platform: str = "linux/amd64",
) -> Path:
    """A wheel like that of 0.33.0 under another version, with some files changed."""
    stamp = f"__version__ = '{version}'\n__commit_id__ = 'g{commit or 'ddddddd'}'\n"
    files = {**release_files("0.33.0", platform), "vllm/_version.py": stamp.encode(),
             **(changes or {})}  # fmt: skip
    return build_wheel(folder, version=version, tag=TAGS[platform], files=files,
                       requires=["torch==2.13.0", "flashinfer-python==0.7.2"])  # fmt: skip


def drifted() -> dict[str, bytes]:
    text = release_files("0.33.0", "linux/amd64")["vllm/greeter.py"]
    return {"vllm/greeter.py": text.replace(GREET, b'        return "hullo"')}


def versions(document: dict[str, Any]) -> list[str]:
    return [release["version"] for release in document["releases"]]


class TestRecordedIndex:
    """The names that a real index had, so that --latest is not judged by a made-up one."""

    def named(self, tmp_path: Path, **asked: Any) -> list[str]:
        rows = [line.partition("\t") for line in RECORDED.read_text().split("\n")[1:] if line]
        files = [
            {"filename": name, "url": name, "hashes": {}, "yanked": why or False}
            for name, _, why in rows
        ]
        page = {"meta": {"api-version": "1.0"}, "name": "vllm", "files": files}
        with IndexServer(tmp_path) as server:
            server.faults.page = json.dumps(page).encode()
            settings = PipSettings(server.url, timeout=20, retries=0)
            with Http(settings) as http:
                index = PackageIndex(settings, http, Cache(tmp_path / "cache"))
                recipe = SimpleNamespace(project="vllm")
                lock = SimpleNamespace(bases={}, find=lambda _version: None)
                upstream = cast(Upstream, SimpleNamespace(index=index, lock=lock, recipe=recipe))
                return [target.name for target in targets_of(Asked(**asked), upstream)]

    def test_latest_are_the_twelve_newest(self, tmp_path: Path) -> None:
        assert self.named(tmp_path, latest=12) == NEWEST.split()

    def test_more_than_there_are_is_all_that_were_not_withdrawn(self, tmp_path: Path) -> None:
        found = self.named(tmp_path, latest=64)
        assert len(found) == 64
        assert "0.2.1" not in self.named(tmp_path, since="0.0.1")
        assert {"0.2.1.post1", "0.5.3.post1"} <= set(self.named(tmp_path, since="0.0.1"))

    def test_since_and_ranges(self, tmp_path: Path) -> None:
        assert self.named(tmp_path, since="0.30.0") == ["0.30.0", "0.31.0", "0.32.0", "0.33.0"]
        assert self.named(tmp_path, against=["0.33.0", ">=0.27,<0.28", "0.27.1"]) == [
            "0.27.0", "0.27.1", "0.33.0",
        ]  # fmt: skip
        assert self.named(tmp_path, against=["0.31"], since="0.32", latest=1) == [
            "0.31", "0.32.0", "0.33.0",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--since", "soon"], 2, "--since: expected a version such as 0.30.0, found 'soon'"),
        (["--since", "9"], 2, "--since: the index has no vLLM release from 9 on"),
        (["--latest", "0"], 2, "expected a number from 1 to 64, found '0'"),
        (["--nightly", "here"], 2, "--nightly: expected the address of an index, found 'here'"),
        (["--first-bad", "nobody"], 2, "nobody"),
        (["--first-bad", GREETER, "--tree", "."], 2, "leave --wheel, --tree and --nightly out"),
    ],
)
def test_a_call_that_cannot_be_meant(
    product: Product, arguments: list[str], code: int, said: str
) -> None:
    ran = product.run("audit", *arguments)
    assert ran.code == code
    assert said in ran.err


def test_everything_named_is_one_grid(product: Product, tmp_path: Path) -> None:
    wheel = newer(tmp_path, "0.35.0")
    ran = product.run("audit", "--latest", "2", "--since", "0.33", "--against", "0.31.0",
                      "--wheel", str(wheel), "--format", "json")  # fmt: skip
    assert versions(ran.json) == ["0.31.0", "0.32.0", "0.33.0", "0.35.0"]
    assert [release["origin"] for release in ran.json["releases"]] == ["index"] * 3 + ["wheel"]
    assert ran.code == ran.json["exit_code"] == 1  # 0.35 is past every range
    for release in ran.json["releases"]:
        assert [patch["name"] for patch in release["patches"]][:2] == [GREETER, COUNTER]


def test_progress_is_told_as_it_comes(product: Product) -> None:
    newer(product.wheels, "0.30.0")
    ran = product.run("audit", "--since", "0.30")
    assert ran.code == 0
    told = [line for line in ran.err.split("\n") if line.startswith("- audited vLLM ")]
    # Whichever comes first: they are counted as they come.
    assert [line.split("(")[1].split(")")[0] for line in told] == [
        f"{count} of 4" for count in range(1, 5)
    ]
    assert {line.split()[3]: line.rpartition(": ")[2] for line in told} == {
        "0.30.0": "no patch is for it", "0.31.0": "every patch fits", "0.32.0": "every patch fits",
        "0.33.0": "every patch fits",
    }  # fmt: skip
    assert "  - 2 patches are not for 0.30.0: before their first range, >=0.31,<0.32\n" in ran.out
    assert ran.out.endswith("every patch fits; no patch is for 0.30.0; 0.33.0 requires other "
                            "versions than the recipe's base (see pin)\n")  # fmt: skip


def test_bytes_are_of_who_asked_and_add_up(product: Product) -> None:
    ran = product.run("audit", "--since", "0.31", "--format", "json")
    releases = ran.json["releases"]
    assert all(release["requests"] > 0 for release in releases)
    own = sum(release["bytes_fetched"] for release in releases)
    # The list of releases was asked for before any of them was opened.
    assert 0 < own < ran.json["bytes_fetched"]
    assert ran.json["requests"] == len(product.server.asked)


def test_one_of_several_that_fails_leaves_the_others(product: Product) -> None:
    (product.wheels / f"vllm-0.32.0-{TAGS['linux/amd64']}.whl").write_bytes(b"no zip" * 99)
    ran = product.run("audit", "--since", "0.31", "--format", "json")
    assert versions(ran.json) == ["0.31.0", "0.33.0"]
    (failure,) = ran.json["failures"]
    assert (failure["name"], failure["exit_code"]) == ("0.32.0", 4)
    assert ran.code == ran.json["exit_code"] == 4
    text = product.run("audit", "--since", "0.31")
    assert "vLLM 0.32.0 could not be read: " in text.out
    assert text.out.endswith("every patch fits; 1 release could not be read\n")
    alone = product.run("audit", "--against", "0.32.0")
    assert (alone.code, alone.out) == (4, "")
    assert alone.err.count("error:") == 1


def test_an_interrupted_call_waits_for_no_server(product: Product) -> None:
    product.extra["PIP_DEFAULT_TIMEOUT"] = "3600"
    product.server.faults.hold = threading.Event()
    process = product.start("audit", "--against", "0.31.0", "--against", "0.32.0")
    assert product.server.held.wait(120)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "error: interrupted" in err
    assert "Traceback" not in err


class TestFirstBad:
    def test_it_searches_by_halves_and_shows_each_step(self, product: Product) -> None:
        for minor in range(1, 9):
            newer(product.wheels, f"0.33.{minor}", drifted() if minor >= 6 else None)
        ran = product.run("audit", "--first-bad", GREETER, "--format", "json")
        found = ran.json["bisection"]
        assert (found["first_bad"], found["last_good"]) == ("0.33.6", "0.33.5")
        steps = [(step["version"], step["verdict"]) for step in found["steps"]]
        assert steps[:2] == [("0.33.8", "drifted"), ("0.31.0", "ok")]
        assert ("0.33.6", "drifted") in steps
        assert ("0.33.5", "ok") in steps
        assert len(steps) <= 6  # of 11 releases
        assert found["untested"] == 11 - len(steps)
        assert sorted(versions(ran.json)) == sorted(version for version, _ in steps)
        assert {p["name"] for r in ran.json["releases"] for p in r["patches"]} == {GREETER}
        assert ran.code == 3
        for version, verdict in steps:
            assert f"- vLLM {version}: {GREETER} is {verdict}: " in ran.err
        text = product.run("audit", "--first-bad", GREETER)
        assert f"0.33.6 is the first on which {GREETER} is not green; 0.33.5 before it is" \
            in text.out  # fmt: skip

    def test_what_is_green_to_the_end_needs_one_look(self, product: Product) -> None:
        ran = product.run("audit", "--first-bad", COUNTER, "--format", "json")
        assert ran.code == 0
        assert [step["version"] for step in ran.json["bisection"]["steps"]] == ["0.33.0"]
        assert (ran.json["bisection"]["first_bad"], ran.json["bisection"]["untested"]) == ("", 2)

    def test_what_was_never_green(self, product: Product) -> None:
        newer(product.wheels, "0.33.1", drifted())
        newer(product.wheels, "0.33.2", drifted())
        ran = product.run("audit", "--first-bad", GREETER, "--since", "0.33.1", "--format", "json")
        found = ran.json["bisection"]
        assert (found["first_bad"], found["last_good"]) == ("0.33.1", "")
        one = product.run("audit", "--first-bad", GREETER, "--against", "0.33.1")
        assert f"{GREETER} is not green on 0.33.1, the first release looked at; 0 not" in one.out


class TestNightly:
    """An index of one commit: HTML, relative links, no hashes, a version that no tag has."""

    VERSION = "0.34.0rc1.dev7+gabc1234"

    @pytest.fixture
    def nightly(self, tmp_path: Path) -> IndexServer:
        folder = tmp_path / "nightly"
        folder.mkdir()
        newer(folder, self.VERSION, commit="abc1234")
        server = IndexServer(folder)
        server.faults.html_only = server.faults.relative = True
        server.faults.hashes = False
        return server

    @pytest.mark.parametrize("page", ["", "/", "/vllm/"])
    def test_the_index_or_its_page(self, product: Product, nightly: IndexServer, page: str) -> None:
        with nightly:
            ran = product.run("audit", "--nightly", nightly.url + page, "--format", "json")
        (release,) = ran.json["releases"]
        assert (release["version"], release["commit"]) == (self.VERSION, "abc1234")
        assert (release["origin"], release["name"]) == ("nightly", nightly.url + page)
        assert ran.code == 1  # past every range: a person must look
        # What it pins comes from the usual index.
        assert release["pins"]["flashinfer-python"] == "0.7.2"
        assert {p["name"]: p["verdict"] for p in release["patches"]}[COUNTER] == "absorbed"

    def test_a_login_in_the_address_is_used_and_never_shown(
        self, product: Product, nightly: IndexServer
    ) -> None:
        nightly.faults.auth = ("me", "s3cret")
        with nightly:
            url = nightly.url.replace("://", "://me:s3cret@")
            ran = product.run("audit", "--nightly", url, "--format", "json")
            bare = product.run("audit", "--nightly", nightly.url)
        assert ran.code == 1
        assert versions(ran.json) == [self.VERSION]
        assert "s3cret" not in ran.out + ran.err
        assert bare.code == 5
        assert "found status 401" in bare.err

    def test_an_index_without_vllm(self, product: Product, nightly: IndexServer) -> None:
        for wheel in nightly.folder.iterdir():
            wheel.unlink()
        with nightly:
            ran = product.run("audit", "--nightly", nightly.url)
        assert ran.code == 2
        assert "expected an index with vllm wheels, found none" in ran.err
