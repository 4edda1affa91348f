"""What the tests on a real engine share: engine, registry, stand-in base and CUDA toolkit.

Nothing of the system is installed or changed here: `.ci/engine` does that on a CI machine. Without
an engine these tests are reported as not run; with REQUIRE_ENGINE=1 they fail instead.

IMAGEBUILD_TEST_STANDIN=TAG takes a stand-in that is loaded already, which saves a minute, and
IMAGEBUILD_TEST_STANDIN_ARM64=TAG the one of the other side, which saves two more.

The arm64 side needs an engine that runs linux/arm64 by emulation: ENGINE_ARM64=1 .ci/engine. Its
stand-in is made while the tests of the other side run.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.config import load_recipe
from tests.support import standin
from tests.support.images import RECIPE, First, Repository, docker

HERE = Path(__file__).resolve().parent
HOW = "as root on Debian: .ci/engine; then: ./build.py test tests/engine"
HOW_ARM64 = f"as root on Debian: ENGINE_ARM64=1 {HOW.partition(': ')[2]}"
CROSS = "g++-aarch64-linux-gnu"
Submit = Callable[..., Future[str]]
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


@functools.cache
def is_emulated() -> bool:
    """Whether the engine can run linux/arm64."""
    return "linux/arm64" in docker("buildx", "inspect").stdout


def _wants_index(request: pytest.FixtureRequest) -> bool:
    """Whether some test of this run needs both platforms, and can have them."""
    names = (getattr(item, "fixturenames", ()) for item in request.session.items)
    return is_emulated() and any({"index", "widest"} & set(one) for one in names)


@pytest.fixture(scope="session")
def emulation(engine: None) -> None:
    """An engine that runs both platforms."""
    if is_emulated():
        return
    if os.environ.get("REQUIRE_ENGINE") == "1" and os.environ.get("ENGINE_ARM64") == "1":
        pytest.fail(f"the engine cannot run linux/arm64; {HOW_ARM64}")
    pytest.skip(f"not run: the engine cannot run linux/arm64; to run it, {HOW_ARM64}")


@pytest.fixture(scope="session")
def beside() -> Iterator[Submit]:
    """Makes images beside the tests, one after the other; each call gives what will be its tag."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


@pytest.fixture(scope="session")
def arm64(
    emulation: None, beside: Submit, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[str]]:
    """The tag of a loaded stand-in base for linux/arm64, once it is made."""
    ready = os.environ.get("IMAGEBUILD_TEST_STANDIN_ARM64")
    if ready:
        yield beside(str, ready)
        return
    tag = "imagebuild-test/standin:arm64"
    folder = tmp_path_factory.mktemp("arm64")
    yield beside(standin.make, folder, tag, "linux/arm64", load_recipe(RECIPE))
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def base(
    request: pytest.FixtureRequest, engine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The tag of a loaded stand-in base for linux/amd64."""
    if _wants_index(request):
        request.getfixturevalue("arm64")  # is made meanwhile
    ready = os.environ.get("IMAGEBUILD_TEST_STANDIN")
    if ready:
        yield ready
        return
    tag = "imagebuild-test/standin:vllm"
    yield standin.make(tmp_path_factory.mktemp("amd64"), tag, "linux/amd64", load_recipe(RECIPE))
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def source(
    request: pytest.FixtureRequest, base: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A repository whose lock has the packages for the stand-in, as its own apt resolves them."""
    if _wants_index(request):
        request.getfixturevalue("toolchain")  # is made meanwhile
    made = Repository(tmp_path_factory.mktemp("source") / "clone", base, Path("none"))
    assert main(["lock", "update", "debs", "--base", base], root=made.folder) == 0
    made.commit()
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
    yield First(made, outcome, tag, arch="sm_120")
    shutil.rmtree(made.folder)
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def toolchain(base: str, beside: Submit) -> Iterator[Future[str]]:
    """The tag of an image with a cross compiler, once it is made."""
    tag = "imagebuild-test/toolchain:cross"
    yield beside(standin.derive, tag, f"FROM {base}\nRUN apt-get update && "
                 f"apt-get install --yes --no-install-recommends {CROSS}\n")  # fmt: skip
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def both(base: str, arm64: Future[str], registry: str) -> Iterator[str]:
    """A stand-in base for both platforms: an index in the registry, by digest."""
    name = f"{registry}/imagebuild-test/standin"
    yield standin.join(name, {"amd64": base, "arm64": arm64.result()})
    docker("image", "rm", "--force", f"{name}:amd64", f"{name}:arm64")


@pytest.fixture(scope="session")
def index(
    both: str,
    toolchain: Future[str],
    registry: str,
    cuda: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[First]:
    """An index over both platforms, loaded and pushed."""
    locked = Repository(tmp_path_factory.mktemp("locked") / "clone", both, cuda)
    assert main(["lock", "update", "debs", "--base", both], root=locked.folder) == 0
    # A clone of it is one commit, as is any other.
    made = Repository(tmp_path_factory.mktemp("index") / "clone", both, cuda, locked.folder)
    tag = f"{registry}/imagebuild-test/image:all"
    options = ("--toolchain", toolchain.result())
    outcome = made.build(tag, "--push", *options, arch="all")
    assert outcome.code == 0, outcome.err[-3000:]
    yield First(made, outcome, tag, arch="all", options=options)
    shutil.rmtree(made.folder)
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="session")
def widest(request: pytest.FixtureRequest, engine: None) -> First:
    """A finished build for all platforms that the engine can run."""
    made: First = request.getfixturevalue("index" if is_emulated() else "first")
    return made


@pytest.fixture
def repository(tmp_path: Path, base: str, source: Path, cuda: Path) -> Iterator[Repository]:
    """A fresh clone of what a build reads, on the stand-in base."""
    made = Repository(tmp_path / "clone", base, cuda, source)
    yield made
    shutil.rmtree(tmp_path / "clone")
    for tag in made.tags:
        docker("image", "rm", "--force", tag, f"{tag}-previous")
