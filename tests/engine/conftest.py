"""What the tests on a real engine share: engine, registry, stand-in base and CUDA toolkit.

Nothing of the system is installed or changed here: `.ci/engine` does that on a CI machine. Without
an engine these tests are reported as not run; with REQUIRE_ENGINE=1 they fail instead.

IMAGEBUILD_TEST_STANDIN=TAG takes a stand-in that is loaded already, which saves two minutes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from tests.support import standin
from tests.support.images import RECIPE, First, Repository, docker

HERE = Path(__file__).resolve().parent
HOW = "as root on Debian: .ci/engine; then: ./build.py test tests/engine"
TOOLS = ("docker", "mmdebstrap", "docker-registry")


def unavailable() -> str:
    """Why these tests cannot run here; "" when they can."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    if docker("version", "--format", "{{.Server.Version}}").returncode:
        return "no Docker engine answers"
    if docker("buildx", "version").returncode:
        return "the engine has no buildx"
    if "io.containerd.snapshotter" not in docker("info", "-f", "{{json .DriverStatus}}").stdout:
        return "the engine does not use the containerd image store"
    return "" if os.geteuid() == 0 else "a Debian rootfs can be made by root only"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def engine() -> None:
    """An engine that can build the image."""
    reason = unavailable()
    if reason and os.environ.get("REQUIRE_ENGINE") == "1":
        pytest.fail(f"REQUIRE_ENGINE=1: {reason}; {HOW}")
    if reason:
        pytest.skip(f"not run: {reason}; to run it, {HOW}")


@pytest.fixture(scope="session")
def cuda(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA toolkit: this machine's, else nvcc from the package index by hash."""
    for place in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"):
        if place and (Path(place) / "bin" / "nvcc").is_file():
            return Path(place).resolve()
    target = tmp_path_factory.mktemp("cuda")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes",
               "--target", str(target), "-r", str(HERE / "cuda.txt")]  # fmt: skip
    subprocess.run(command, check=True)
    return target / "nvidia" / "cu13"


@pytest.fixture(scope="session")
def base(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tag of a loaded stand-in base for linux/amd64."""
    ready = os.environ.get("IMAGEBUILD_TEST_STANDIN")
    if ready:
        yield ready
        return
    folder = tmp_path_factory.mktemp("standin")
    tag = "imagebuild-test/standin:vllm"
    recipe = load_recipe(RECIPE)
    lock = read_lock(recipe.lock_file)
    locked = lock.base(recipe.base_version)
    standin.rootfs(folder / "rootfs.tar", "linux/amd64", locked.epoch)
    standin.site(folder / "site", recipe, lock, locked, "linux/amd64")
    standin.build(folder, tag, locked.epoch)
    shutil.rmtree(folder)
    yield tag
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def source(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose lock has the packages for the stand-in, as its own apt resolves them."""
    made = Repository(tmp_path_factory.mktemp("source") / "clone", base, Path("none"))
    assert main(["lock", "update", "debs", "--base", base], root=made.folder) == 0
    return made.folder


@pytest.fixture(scope="session")
def registry(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a registry on the loopback interface."""
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "config.yml").write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while not _answers(address):
            assert time.monotonic() < deadline, "the registry did not answer within 20 s"
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def _answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def first(
    base: str, source: Path, cuda: Path, registry: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[First]:
    """One image, built from a fresh clone, loaded and pushed: what several tests look at."""
    made = Repository(tmp_path_factory.mktemp("first") / "one" / "clone", base, cuda, source)
    tag = f"{registry}/imagebuild-test/image:first"
    outcome = made.build(tag, "--push")
    assert outcome.code == 0, outcome.err[-3000:]
    yield First(made, outcome, tag)
    shutil.rmtree(made.folder)
    docker("image", "rm", "--force", tag)


@pytest.fixture
def repository(tmp_path: Path, base: str, source: Path, cuda: Path) -> Iterator[Repository]:
    """A fresh clone of what a build reads, on the stand-in base."""
    made = Repository(tmp_path / "clone", base, cuda, source)
    yield made
    shutil.rmtree(tmp_path / "clone")
    for tag in made.tags:
        docker("image", "rm", "--force", tag, f"{tag}-previous")
