"""A builder beside the engine, which buildx reaches by its driver `remote` over TCP.

It is the engine's own BuildKit behind a forwarder: Debian has no BuildKit of its own, and the
driver docker-container needs an image from a registry. To the client it is as any remote one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.engines.docker import Call, Docker
from imagebuild.engines.ocitar import read_archive
from imagebuild.errors import EngineError
from tests.support.images import docker, inspect

NAME = "imagebuild-test-remote"
TAG = "imagebuild-test/beside:1"
EPOCH = 1791186062
UPGRADE = b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


class Forwarder(socketserver.ThreadingTCPServer):
    """Hands each connection to the BuildKit inside of dockerd, which listens on a Unix socket."""

    daemon_threads = True
    target = ""


class _Connection(socketserver.BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as engine, contextlib.suppress(OSError):
            engine.connect(self.server.target)
            engine.sendall(UPGRADE)
            head = b""
            while b"\r\n\r\n" not in head:
                head += engine.recv(1)
            assert b" 101 " in head.partition(b"\r\n")[0], head
            back = threading.Thread(target=_copy, args=(engine, self.request), daemon=True)
            back.start()
            _copy(self.request, engine)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def remote(engine: None) -> Iterator[str]:
    """The name of a builder that is reached by TCP."""
    host = docker("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.strip()
    if not host.startswith("unix://"):
        reason = f"the engine is at {host}, expected a Unix socket to forward to"
        if os.environ.get("REQUIRE_ENGINE") == "1":
            pytest.fail(reason)
        pytest.skip(f"not run: {reason}")
    with Forwarder(("127.0.0.1", 0), _Connection) as server:
        server.target = host.removeprefix("unix://")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            docker("buildx", "rm", "--force", NAME)
            address = f"tcp://127.0.0.1:{server.server_address[1]}"
            made = docker("buildx", "create", "--name", NAME, "--driver", "remote", address)
            assert made.returncode == 0, made.stderr
            yield NAME
        finally:
            docker("buildx", "rm", "--force", NAME)
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def small(engine: None, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small image in the registry, by digest; the engine has it as well."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "file").write_text("of the base\n")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
    tag = f"{registry}/imagebuild-test/small:1"
    built = docker("buildx", "build", "--quiet", "--provenance=false", "--tag", tag, str(folder))
    assert built.returncode == 0, built.stderr
    assert docker("push", "--quiet", tag).returncode == 0
    image = inspect(tag)
    assert image is not None
    yield f"{tag.rpartition(':')[0]}@{image['Id']}"
    docker("image", "rm", "--force", tag)


def client(builder: str | None = None) -> Docker:
    return Docker(lambda _words: None, builder)


def build(by: Docker, base: str, folder: Path) -> Path:
    context = folder / "context"
    context.mkdir(parents=True)
    (context / "ours").write_text("ours\n")
    (context / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY ours /opt/ours\n")
    output = folder / "image.tar"
    call = Call(context=context, output=output, name=TAG, platforms=("linux/amd64",), epoch=EPOCH,
                arguments={"BASE": base}, labels={"imagebuild.recipe": "test"}, contexts={},
                use_cache=False)  # fmt: skip
    by.build(call, lambda _line: None)
    return output


def test_an_image_is_built_there_and_loaded_here(remote: str, small: str, tmp_path: Path) -> None:
    beside = client(remote)
    builder = beside.builder()
    assert (builder.name, builder.driver, builder.is_beside) == (remote, "remote", True)
    assert client().builder().is_beside is False
    beside.require_platforms(builder, ["linux/amd64"])
    found = beside.base(small, ["linux/amd64"], builder)
    assert (found.is_local, found.digest) == (False, small.partition("@")[2])

    archive = build(beside, small, tmp_path / "beside")

    beside.load(archive)
    try:
        image = inspect(TAG)
        assert image is not None
        assert image["Id"] == read_archive(archive).digest
        # The same bytes as from the engine's own builder.
        assert read_archive(build(client(), small, tmp_path / "own")) == read_archive(archive)
    finally:
        docker("image", "rm", "--force", TAG)


def test_a_base_that_only_the_engine_has_is_refused_before_the_build(
    remote: str, small: str
) -> None:
    tag = "imagebuild-test/only-here:1"
    assert docker("image", "tag", small, tag).returncode == 0
    try:
        assert client().base(tag, ()).is_local
        beside = client(remote)
        with pytest.raises(EngineError) as caught:
            beside.base(tag, (), beside.builder())
        assert f"base {tag}: expected it in the engine or its registry" in str(caught.value)
        assert "--base MIRROR/NAME@sha256:" in (caught.value.hint or "")
    finally:
        docker("image", "rm", "--force", tag)


def test_another_engine_is_no_builder(engine: None) -> None:
    """buildx lists the engine of each context as a builder, and refuses to build with it."""
    name = "imagebuild-test-context"
    host = docker("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.strip()
    docker("context", "rm", "--force", name)
    assert docker("context", "create", name, "--docker", f"host={host}").returncode == 0
    try:
        with pytest.raises(EngineError, match=f"--builder {name}: expected a builder") as caught:
            client(name).builder()
        assert caught.value.hint == f"DOCKER_CONTEXT={name} build.py ..., without --builder"
    finally:
        docker("context", "rm", "--force", name)


def test_a_builder_that_nobody_made(engine: None) -> None:
    with pytest.raises(EngineError, match="--builder nobody-made-it: expected a builder"):
        client("nobody-made-it").builder()
