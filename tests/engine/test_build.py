"""The image on a real engine: it loads, is verified inside, and a damaged base stops the build.

The base is a stand-in (tests/support/standin.py): what runs is the product's, the CUDA base is not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from imagebuild.verify import fatbin
from tests.support.images import Repository, docker, inspect

TAG = "imagebuild-test/image:sm_120"
LIBRARY = "/usr/local/lib/glm53/libglm53_kernel.so"


def test_build_loads_verifies_and_says_what_it_is(repository: Repository, tmp_path: Path) -> None:
    outcome = repository.build(TAG)
    assert outcome.code == 0, outcome.err[-3000:]

    record = outcome.document
    image = inspect(TAG)
    assert image is not None
    assert image["Id"] == record["digest"]
    assert json.loads((repository.folder / "dist" / "glm53-flash-image-sm_120" / "image.json")
                      .read_text())["digest"] == record["digest"]  # fmt: skip
    assert not list((repository.folder / "dist").glob("*.partial"))
    labels = image["Config"]["Labels"]
    base = inspect(repository.base)
    assert base is not None
    assert labels["org.opencontainers.image.base.name"] == repository.base
    assert labels["org.opencontainers.image.base.digest"] == base["Id"]
    assert labels["org.opencontainers.image.revision"] == repository.git("rev-parse", "HEAD")
    assert labels["org.opencontainers.image.created"] == "2026-10-05T07:41:02Z"
    assert labels["imagebuild.recipe"] == "glm53-flash"
    assert labels["imagebuild.series"] == record["series"]
    assert image["Created"].startswith("2026-10-05T07:41:02")
    assert set(image["Config"]["ExposedPorts"]) == {"8002/tcp", "8082/tcp"}
    # The base's layers are its own, unchanged: nothing was clamped or compressed again.
    own = image["RootFS"]["Layers"]
    assert own[: len(base["RootFS"]["Layers"])] == base["RootFS"]["Layers"]

    verified = docker("run", "--rm", "--network=none", "--volume", f"{repository.folder}:/src:ro",
                      "--entrypoint", "python3", TAG, "/src/verify-base.py")  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "verify ok" in verified.stdout
    assert re.search(r"effects: (\d+) hold ok", verified.stdout)

    _check_entrypoint(tmp_path)
    _check_kernel(tmp_path)
    _check_old_bytecode_is_gone()


def _check_entrypoint(tmp_path: Path) -> None:
    """The entrypoint becomes `vllm serve` with the container's arguments."""
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\necho "$$ $*"\n')
    vllm.chmod(0o755)
    said = docker(
        "run", "--rm", "--volume", f"{vllm}:/usr/local/bin/vllm:ro", TAG, "a b", "--port=1"
    )
    assert said.stdout == "1 serve a b --port=1\n", said.stderr


def _check_kernel(tmp_path: Path) -> None:
    name = "imagebuild-test-copy"
    assert docker("create", "--name", name, TAG).returncode == 0
    try:
        assert docker("cp", f"{name}:{LIBRARY}", str(tmp_path / "kernel.so")).returncode == 0
    finally:
        docker("rm", name)
    data = (tmp_path / "kernel.so").read_bytes()
    codes = fatbin.device_code(data)
    assert fatbin.machine(data) == "x86_64"
    assert fatbin.runs_on(codes, "sm_120")
    assert fatbin.runs_on(codes, "sm_121")
    assert b"glm53_gather_rows" in data
    assert b"torch" not in data


def _check_old_bytecode_is_gone() -> None:
    """Python runs the patched source, though every time in the image is clamped."""
    code = (
        "import importlib.util as u, json, pathlib, sys;"
        "s=u.find_spec('vllm').submodule_search_locations[0];"
        "m=json.loads(pathlib.Path(s,'../.imagebuild/manifest.json').read_text());"
        "f=[p for p in m['files'] if p.endswith('.py')];"
        "c=[pathlib.Path(u.cache_from_source(str(pathlib.Path(s,'..',p).resolve()))) for p in f];"
        "print(len(f), sum(p.exists() and p.read_bytes()[4] == 1 for p in c))"
    )
    said = docker("run", "--rm", "--network=none", "--entrypoint", "python3", TAG, "-c", code)
    patched, compiled = map(int, said.stdout.split())
    assert patched > 5
    assert compiled == patched, said.stderr


@pytest.fixture
def damaged(repository: Repository, tmp_path: Path) -> str:
    """A base in which one anchor of vllm_spin_wait is not what it was."""
    tag = "imagebuild-test/standin:damaged"
    repository.tags.add(tag)
    folder = tmp_path / "damaged"
    folder.mkdir()
    target = "vllm/distributed/device_communicators/shm_broadcast.py"
    (folder / "Dockerfile").write_text(
        f"FROM {repository.base}\n"
        "RUN cd /usr/local/lib/python3*/dist-packages && "
        f"sed -i 's/busy_loop_s: float = 1,/busy_loop_s: float = 2,/' {target} && "
        f"grep 'busy_loop_s: float = 2,' {target}\n"
    )
    done = docker("buildx", "build", "--quiet", "--provenance=false", "--tag", tag, str(folder))
    assert done.returncode == 0, done.stderr
    return tag


def test_a_damaged_anchor_stops_the_build_at_the_patched_stage(
    repository: Repository, damaged: str
) -> None:
    outcome = repository.build(TAG, base=damaged)

    assert outcome.code == 3
    last = "\n".join(outcome.err.splitlines()[-10:])
    assert "stage patched" in last
    assert "vllm_spin_wait: drifted" in last, last
    assert re.search(r"shm_broadcast\.py:\d+", last), last
    assert "hint: " in last
    assert inspect(TAG) is None
    assert not (repository.folder / "dist" / "glm53-flash-image-sm_120").exists()
