"""The read side of registries on a real one, with images that a real engine pushed."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.errors import EngineError
from imagebuild.lock_remote import Remotes, resolve_image
from imagebuild.pins import ImagePin
from imagebuild.sources.cache import Cache
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.git import Git
from imagebuild.sources.http import Http
from imagebuild.sources.imageref import Reference, parse_reference
from imagebuild.sources.pipconf import PipSettings
from imagebuild.sources.registry import NotFoundError, Registry
from tests.support.images import docker

NAME = "imagebuild-test/reading"
PLATFORMS = ["linux/amd64", "linux/arm64"]
COMMIT = "db9527a46873454610df6dbedf79a36d6bf1a7f6"
# No step runs, so that both platforms can be built without emulation.
_DOCKERFILE = f"""\
FROM scratch
ARG TARGETPLATFORM
ENV VLLM_BUILD_COMMIT={COMMIT}
LABEL test.platform=$TARGETPLATFORM
COPY large /large
"""


@pytest.fixture(scope="module")
def pushed(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """An index over both platforms, made and pushed by the engine."""
    folder = tmp_path_factory.mktemp("reading")
    (folder / "Dockerfile").write_text(_DOCKERFILE)
    (folder / "large").write_bytes(bytes(range(256)) * 8192)
    tag = f"{registry}/{NAME}:v0.31.0"
    archive = folder / "out.tar"
    # With provenance, so that the index has attestations as upstream's own has.
    build = docker("buildx", "build", "--platform", ",".join(PLATFORMS), "--provenance=mode=max",
                   "--output", f"type=oci,dest={archive},name={tag}", str(folder))  # fmt: skip
    assert build.returncode == 0, build.stderr
    assert docker("load", "--input", str(archive)).returncode == 0
    push = docker("push", tag)
    assert push.returncode == 0, push.stderr
    yield parse_reference(tag)
    docker("image", "rm", "--force", tag)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Http(PipSettings("", retries=0, timeout=30), backoff=0) as http:
        yield Registry(http, Logins(lambda _command: None, tmp_path / "none.json"))


def raw(reference: str) -> dict[str, Any]:
    done = subprocess.run(["docker", "buildx", "imagetools", "inspect", "--raw", reference],
                          capture_output=True, check=True)  # fmt: skip
    return {**json.loads(done.stdout), "sha256": hashlib.sha256(done.stdout).hexdigest()}


def test_what_buildx_sees_is_what_we_see(pushed: Reference, reader: Registry) -> None:
    theirs = raw(str(pushed))
    top = reader.manifest(pushed)
    assert top.digest == f"sha256:{theirs['sha256']}"
    found = reader.platforms(top)
    assert list(found) == PLATFORMS
    listed = {one["digest"]: one["platform"]["architecture"] for one in theirs["manifests"]}
    assert len(listed) == 4  # two images, and what says how each was made
    assert {name: listed[one.digest] for name, one in found.items()} == {
        "linux/amd64": "amd64", "linux/arm64": "arm64",
    }  # fmt: skip


def test_config_and_layers_of_each_platform(
    pushed: Reference, reader: Registry, tmp_path: Path
) -> None:
    top = reader.manifest(pushed)
    with Cache(tmp_path / "cache", 1 << 30) as cache:
        for platform in PLATFORMS:
            image = reader.image(top, platform)
            config = reader.config(image)
            assert config["config"]["Labels"] == {"test.platform": platform}
            (layer,) = image.layers
            path = reader.fetch(image.where, layer, cache)
            assert f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" == layer.digest


def test_the_lock_s_entry_for_it(pushed: Reference, reader: Registry, tmp_path: Path) -> None:
    pin = ImagePin(f"{pushed.host}/{pushed.repository}", pushed.tag)
    remotes = Remotes(reader, Git(lambda _command: None, offline=True), "2026-11-29")
    found = resolve_image(pin, PLATFORMS, remotes)
    assert (found.state, found.revision, found.seen) == ("resolved", COMMIT, "2026-11-29")
    inspected = docker("buildx", "imagetools", "inspect", found.reference)
    assert inspected.returncode == 0, inspected.stderr
    assert found.digest in inspected.stdout
    # The engine takes the same reference, by digest, and a build takes it as a named context.
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "Dockerfile").write_text("FROM scratch AS part\nFROM scratch\nCOPY --from=part / /\n")
    taken = docker("buildx", "build", "--build-context", f"part=docker-image://{found.reference}",
                   "--output", f"type=local,dest={tmp_path / 'out'}", str(stage))  # fmt: skip
    assert taken.returncode == 0, taken.stderr
    assert (tmp_path / "out" / "large").stat().st_size == 256 * 8192
    assert docker("pull", "--quiet", "--platform", "linux/arm64", found.reference).returncode == 0


def test_tags_and_what_is_not_there(pushed: Reference, reader: Registry) -> None:
    assert reader.tags(pushed) == ["v0.31.0"]
    for name in (f"{pushed.host}/{NAME}:v0.32.0", f"{pushed.host}/{NAME}@sha256:{'0' * 64}"):
        with pytest.raises(NotFoundError):
            reader.manifest(parse_reference(name))
    with pytest.raises(EngineError):
        reader.tags(parse_reference(f"{pushed.host}/imagebuild-test/none"))
