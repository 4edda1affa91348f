"""What an image build needs from the lock, and what it says when that is unresolved."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.commands import image
from imagebuild.errors import EngineError
from tests.support.product import Product
from tests.support.registry_server import RegistryServer
from tests.support.remotes import Remote

BUILD = ("build", "--engine", "docker", "--arch", "sm_120")
PLAN = ("plan", *BUILD[1:], "--format", "json")
SOURCES = {"csrc/flashkda_registration.cpp": b"one", "csrc/core/registration.h": b"two"}


@pytest.fixture
def remote(product: Product) -> Iterator[Remote]:
    with RegistryServer() as served:
        made = Remote(product, served)
        assert product.run("lock", "update", "flashkda").code == 0
        yield made


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Contexts of each build that got as far as the engine, with the files of vllm-src."""
    seen: list[dict[str, Any]] = []

    def build(request: image.ImageRequest, *_arguments: object, **_options: object) -> None:
        contexts: dict[str, Any] = dict(request.contexts)
        folder = Path(contexts.get("vllm-src", "none"))
        if folder.is_dir():
            contexts["vllm-src"] = {path.relative_to(folder).as_posix(): path.read_bytes()
                                    for path in folder.rglob("*.*")}  # fmt: skip
        seen.append(contexts)
        raise EngineError("far enough")

    monkeypatch.setattr(image.engine, "build", build)
    return seen


def with_sdist(remote: Remote, files: dict[str, bytes]) -> Path:
    path = remote.product.wheels / "vllm-0.31.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"vllm-0.31.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    assert remote.product.run("lock", "update", "wheels").code == 0
    return path


def test_a_base_that_is_unresolved(remote: Remote, built: list[dict[str, Any]]) -> None:
    ran = remote.product.run(*BUILD, "--base-version", "0.32.0")
    assert ran.code == 4
    assert "lock: no image of vLLM 0.32.0: its digest is unresolved" in ran.err
    assert "hint: build.py lock update --base-version 0.32.0, or --base REF@sha256:..." in ran.err
    assert built == []
    assert remote.product.run("lock", "update", "image").code == 0
    assert remote.product.run(*BUILD, "--base-version", "0.32.0").code == 5
    assert built == [{}]


def test_a_cited_base_can_be_built_on(remote: Remote, built: list[dict[str, Any]]) -> None:
    assert remote.product.run(*BUILD).code == 5
    assert built == [{}]


def test_mentat_comes_from_its_image_once_that_is_resolved(
    remote: Remote, built: list[dict[str, Any]]
) -> None:
    ran = remote.product.run(*BUILD, "--cluster", "mentat")
    assert ran.code == 4
    assert "team/mentat:0.17.1, with mentatd and mentatd-probe-machine, is unresolved" in ran.err
    assert "hint: build.py lock update" in ran.err
    assert "--build-context mentat=DIR" in ran.err
    assert built == []
    assert remote.product.run("lock", "update", "mentat").code == 0
    assert remote.product.run(*BUILD, "--cluster", "mentat").code == 5
    place = f"docker-image://team/mentat:0.17.1@{remote.digests['mentat']}"
    assert built == [{"mentat": place}]
    # Another version than the locked one is another image.
    ran = remote.product.run(*BUILD, "--cluster", "mentat", "--mentat-version", "0.18.0")
    assert ran.code == 4
    assert "team/mentat:0.18.0, with mentatd" in ran.err
    # What was given by hand comes first, and what is not asked for needs nothing.
    given = ("--cluster", "mentat", "--build-context", "mentat=here")
    assert remote.product.run(*BUILD, *given, "--mentat-version", "0.18.0").code == 5
    assert remote.product.run(*BUILD, "--cluster", "ray").code == 5
    assert built[1:] == [{"mentat": "here"}, {}]


def test_the_version_of_mentat_is_the_recipes(remote: Remote) -> None:
    planned = remote.product.run(*PLAN, "--cluster", "mentat").json
    assert planned["arguments"]["MENTAT_VERSION"] == "0.17.1"
    assert planned["warnings"][0].startswith("cluster mentat: team/mentat:0.17.1, with mentatd")
    assert "MENTAT_VERSION" not in remote.product.run(*PLAN).json["arguments"]


def test_flashkda_needs_the_sdist_or_a_context(remote: Remote, built: list[dict[str, Any]]) -> None:
    remote.edit("[image.sources.flashkda]", COPY.format(remote=remote) + "[image.sources.flashkda]")
    flags = ("--flashkda", "build")
    ran = remote.product.run(*BUILD, *flags)
    assert ran.code == 4
    assert "the sources of cutlass are not locked" in ran.err
    assert "the sdist of vLLM 0.31.0 is unresolved" in ran.err
    assert "--build-context flashkda-src=DIR --build-context vllm-src=DIR" in ran.err
    given = ("--build-context", "flashkda-src=there", "--build-context", "vllm-src=here")
    assert remote.product.run(*BUILD, *flags, *given).code == 5
    assert built == [{"flashkda-src": "there", "vllm-src": "here"}]


COPY = """[image.sources.cutlass]
url = "{remote.repository.url}"
commit = "{remote.repository.second}"
"""


def test_vllms_part_of_flashkda_comes_from_the_sdist(
    remote: Remote, built: list[dict[str, Any]]
) -> None:
    remote.edit("[image.sources.flashkda]", COPY.format(remote=remote) + "[image.sources.flashkda]")
    path = with_sdist(remote, {**SOURCES, "setup.py": b"no"})
    assert remote.product.run("lock", "update", "cutlass").code == 0
    assert remote.product.run(*BUILD, "--flashkda", "build").code == 5
    assert built == [{"vllm-src": SOURCES}]
    # Once fetched it is in the cache.
    path.unlink()
    assert remote.product.run(*BUILD, "--flashkda", "build", "--offline").code == 5
    assert len(built) == 2


def test_an_sdist_that_changed_since(remote: Remote, built: list[dict[str, Any]]) -> None:
    remote.edit("[image.sources.flashkda]", COPY.format(remote=remote) + "[image.sources.flashkda]")
    path = with_sdist(remote, SOURCES)
    assert remote.product.run("lock", "update", "cutlass").code == 0
    path.write_bytes(b"other")
    ran = remote.product.run(*BUILD, "--flashkda", "build")
    assert (ran.code, built) == (4, [])
    assert "vllm-0.31.0.tar.gz: expected sha256" in ran.err
    path.unlink()
    ran = remote.product.run(*BUILD, "--flashkda", "build")
    assert (ran.code, built) == (4, [])
    assert "vllm-0.31.0.tar.gz: expected it in the index, found none" in ran.err


def test_an_sdist_without_those_files(remote: Remote, built: list[dict[str, Any]]) -> None:
    remote.edit("[image.sources.flashkda]", COPY.format(remote=remote) + "[image.sources.flashkda]")
    with_sdist(remote, {"csrc/core/registration.h": b"two"})
    assert remote.product.run("lock", "update", "cutlass").code == 0
    ran = remote.product.run(*BUILD, "--flashkda", "build")
    assert (ran.code, built) == (4, [])
    assert "csrc/flashkda_registration.cpp: expected a file, found none" in ran.err


def test_show_has_every_entry_with_its_state(remote: Remote) -> None:
    ran = remote.product.run("lock", "show")
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    told = {(row[0], row[1]): row[2] for row in rows if len(row) > 2}
    assert told["0.31.0", "image"] == "cited"
    assert told["0.32.0", "image"] == "unresolved"
    assert told["0.31.0", "debs"] == "unresolved"
    assert told["all", "mentat"] == "unresolved"
    assert told["all", "flashkda"] == "resolved"
    assert remote.product.server.asked == []
