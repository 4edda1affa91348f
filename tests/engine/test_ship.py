"""An image shipped between two real engines: this machine's, and one that the tests start."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.cli import main
from tests.support.images import docker, inspect

TAG = "imagebuild-test/ship:one"
# Namespaces of its own: an engine without a bridge would take this machine's docker0 away, and what
# it mounts and starts ends with it.
APART = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
NOISE = 3_000_000


class Engine:
    """A second engine; `address` is what DOCKER_HOST takes."""

    def __init__(self, folder: Path, *, has_containerd_store: bool) -> None:
        self.folder = folder
        self.is_same_kind = has_containerd_store
        self.address = f"unix://{folder / 'docker.sock'}"
        settings: dict[str, object] = {
            "data-root": f"{folder / 'data'}", "exec-root": f"{folder / 'run'}",
            "pidfile": f"{folder / 'pid'}", "hosts": [self.address], "bridge": "none",
            "iptables": False, "ip6tables": False,
            "features": {"containerd-snapshotter": has_containerd_store},
        }  # fmt: skip
        if not has_containerd_store:
            settings["storage-driver"] = "vfs"
        (folder / "daemon.json").write_text(json.dumps(settings))
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*APART, "dockerd", "--config-file", str(folder / "daemon.json")],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while docker("--host", self.address, "version").returncode:
            said = (self.folder / "log").read_text()[-1500:]
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def has(self) -> str | None:
        """Id of the image there."""
        done = docker("--host", self.address, "image", "inspect", "--format", "{{.Id}}", TAG)
        return done.stdout.strip() if done.returncode == 0 else None

    def remove(self) -> None:
        docker("--host", self.address, "image", "rm", "--force", TAG)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def image(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Id of a small image of this machine's engine."""
    folder = tmp_path_factory.mktemp("ship")
    (folder / "noise").write_bytes(random.Random(1).randbytes(NOISE))
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY noise /\nCOPY Dockerfile /\n")
    done = docker("build", "--quiet", "--tag", TAG, str(folder))
    assert done.returncode == 0, done.stderr
    found = inspect(TAG)
    assert found is not None
    yield str(found["Id"])
    docker("image", "rm", "--force", TAG)


@pytest.fixture(scope="module", params=[True, False], ids=["containerd", "classic"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
          engine: None) -> Iterator[Engine]:  # fmt: skip
    """An engine with a store of either kind."""
    made = Engine(tmp_path_factory.mktemp("engine"), has_containerd_store=request.param)
    try:
        made.until_ready()
        yield made
    finally:
        made.stop()


def ship(capfd: pytest.CaptureFixture[str], host: str, *words: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = main(["ship", host, "--image", TAG, "--format", "json", *words])
    [found] = json.loads(capfd.readouterr().out)["hosts"]
    return code, found


def test_it_arrives_once(image: str, other: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    other.remove()
    code, found = ship(capfd, other.address)
    assert (code, found["was_there"]) == (0, False)
    # Ids are those of the manifest or of the configuration, by the kind of store.
    assert found["id"] == other.has() and (not other.is_same_kind or found["id"] == image)
    assert found["sent"] > NOISE
    code, again = ship(capfd, other.address)
    assert (code, again["was_there"], again["sent"]) == (0, True, 0)
    assert again["id"] == found["id"]


def test_compressed(image: str, other: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """An engine unpacks zstd by itself."""
    other.remove()
    code, found = ship(capfd, other.address, "--compress")
    assert (code, found["was_there"]) == (0, False)
    assert found["id"] == other.has() is not None


def test_a_newer_one_of_that_name_replaces_it(
    image: str, other: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ship(capfd, other.address)[0] == 0
    before = other.has()
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /newer\n")
    docker("tag", TAG, f"{TAG}-kept")
    try:
        assert docker("build", "--quiet", "--tag", TAG, str(tmp_path)).returncode == 0
        code, found = ship(capfd, other.address)
    finally:
        newer = inspect(TAG) or {}
        docker("tag", f"{TAG}-kept", TAG)
        docker("image", "rm", f"{TAG}-kept", str(newer.get("Id", "")))
    assert (code, found["was_there"]) == (0, False)
    assert found["id"] == other.has() != before


def test_an_engine_that_is_not_there(image: str, tmp_path: Path,
                                     capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    code, found = ship(capfd, f"unix://{tmp_path / 'none.sock'}")
    assert code == 5
    assert "expected an engine" in found["error"]
