"""The image on a real engine: it loads, is verified inside, and a damaged base stops the build.

The base is a stand-in (tests/support/standin.py): what runs is the product's, the CUDA base is not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.lock import read_lock
from imagebuild.verify import fatbin
from tests.support.images import RECIPE, First, Repository, docker, inspect

TAG = "imagebuild-test/image:sm_120"
LIBRARY = "/usr/local/lib/glm53/libglm53_kernel.so"


def test_build_loads_and_says_what_it_is(first: First) -> None:
    repository, record = first.repository, first.outcome.document
    image, base = inspect(first.tag), inspect(repository.base)
    assert image is not None
    assert base is not None
    assert image["Id"] == record["digest"] == record["pushed"]
    dist = repository.folder / "dist"
    written = json.loads((dist / "glm53-flash-image-sm_120" / "image.json").read_text())
    assert written["digest"] == record["digest"]
    assert not list(dist.glob("*.partial"))
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == repository.base
    assert labels["org.opencontainers.image.base.digest"] == base["Id"]
    assert labels["org.opencontainers.image.revision"] == repository.git("rev-parse", "HEAD")
    assert labels["org.opencontainers.image.created"] == "2026-10-05T07:41:02Z"
    assert labels["imagebuild.recipe"] == "glm53-flash"
    assert labels["imagebuild.series"] == record["series"]
    assert image["Created"].startswith("2026-10-05T07:41:02")
    assert set(image["Config"]["ExposedPorts"]) == {"8002/tcp", "8082/tcp"}
    # The base's layers are its own, unchanged: nothing was clamped or compressed again.
    layers, own = image["RootFS"]["Layers"], base["RootFS"]["Layers"]
    assert layers[: len(own)] == own
    # Nothing is compiled that the base has already.
    assert not [name for name in first.outcome.steps() if name.startswith("flashkda")]


def test_images_lists_it(first: First, capsys: pytest.CaptureFixture[str]) -> None:
    folder = first.repository.folder
    assert main(["images", "--format", "json"], root=folder) == 0
    listed = json.loads(capsys.readouterr().out)["images"]
    mine = [one for one in listed if first.tag in one["tags"]]
    assert len(mine) == 1
    assert mine[0]["digest"] == first.outcome.document["digest"]
    assert mine[0]["base"] == first.repository.base


def test_image_verifies_inside(first: First) -> None:
    verified = docker("run", "--rm", "--network=none",
                      "--volume", f"{first.repository.folder}:/src:ro",
                      "--entrypoint", "python3", first.tag, "/src/verify-base.py")  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "verify ok" in verified.stdout
    assert re.search(r"effects: (\d+) hold ok", verified.stdout)


def test_entrypoint(first: First, tmp_path: Path) -> None:
    """The entrypoint becomes `vllm serve` with the container's arguments."""
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\necho "$$ $*"\n')
    vllm.chmod(0o755)
    said = docker(
        "run", "--rm", "--volume", f"{vllm}:/usr/local/bin/vllm:ro", first.tag, "a b", "--port=1"
    )
    assert said.stdout == "1 serve a b --port=1\n", said.stderr


def test_packages_are_those_that_the_base_s_own_apt_resolved(first: First) -> None:
    """Fetched by hash before the build; what they depend on is in as well."""
    repository, record = first.repository, first.outcome.document
    pin = read_lock(repository.folder / "image" / RECIPE / "lock.toml").base("0.31.0").debs
    assert pin is not None
    locked = {one.filename: one.sha256 for one in pin.files["linux/amd64"]}
    assert record["debs"] == {"linux/amd64": locked}
    assert len(locked) > len(pin.packages)
    assert ".deb packages are installed" not in first.outcome.out
    # A package may have another name than the one by which it was asked for.
    names = sorted(name.partition("_")[0] for name in locked)
    said = docker("run", "--rm", "--network=none", "--entrypoint", "dpkg-query", first.tag,
                  "--show", "--showformat", "${Package} ${db:Status-Status}\n", *names)  # fmt: skip
    assert said.stdout.splitlines() == [f"{name} installed" for name in names], said.stderr
    assert {"iproute2", "ibverbs-providers", "ripgrep"} <= set(names)


def test_kernel_runs_on_both_cards(first: First, tmp_path: Path) -> None:
    name = "imagebuild-test-copy"
    assert docker("create", "--name", name, first.tag).returncode == 0
    try:
        assert docker("cp", f"{name}:{LIBRARY}", str(tmp_path / "kernel.so")).returncode == 0
    finally:
        docker("rm", name)
    data = (tmp_path / "kernel.so").read_bytes()
    codes = fatbin.device_code(data)
    assert fatbin.machine(data) == "x86_64"
    assert fatbin.runs_on(codes, "sm_120")
    assert fatbin.runs_on(codes, "sm_121")
    assert b"stand_in_scale" in data
    assert b"torch" not in data


def test_our_own_kernel_compiles_in_its_stage(first: First, tmp_path: Path) -> None:
    """The other tests have a small one in its place."""
    made = Repository(tmp_path / "clone", first.repository.base, first.repository.cuda,
                      has_kernel=True)  # fmt: skip
    out = tmp_path / "out"
    built = docker("build", "--quiet", "--target", "kernel-only", "--build-arg",
                   f"BASE={made.base}", "--build-context", f"cuda={made.cuda}",
                   "--file", "-", "--output", f"type=local,dest={out}", str(made.folder),
                   stdin=(made.folder / "Dockerfile").read_text()
                   + "\nFROM scratch AS kernel-only\nCOPY --from=kernel /out/ /\n")  # fmt: skip
    assert built.returncode == 0, built.stderr
    data = (out / LIBRARY.lstrip("/")).read_bytes()
    codes = fatbin.device_code(data)
    assert fatbin.runs_on(codes, "sm_120")
    assert fatbin.runs_on(codes, "sm_121")
    assert b"stand_in_scale" not in data
    assert b"torch" not in data


def test_python_runs_the_patched_source(first: First) -> None:
    """Though every time in the image is clamped, no old byte code is left to run."""
    code = (
        "import importlib.util as u, json, pathlib, sys;"
        "s=u.find_spec('vllm').submodule_search_locations[0];"
        "m=json.loads(pathlib.Path(s,'../.imagebuild/manifest.json').read_text());"
        "f=[p for p in m['files'] if p.endswith('.py')];"
        "c=[pathlib.Path(u.cache_from_source(str(pathlib.Path(s,'..',p).resolve()))) for p in f];"
        "print(len(f), sum(p.exists() and p.read_bytes()[4] == 1 for p in c))"
    )
    said = docker("run", "--rm", "--network=none", "--entrypoint", "python3", first.tag, "-c", code)
    patched, compiled = map(int, said.stdout.split())
    assert patched > 5
    assert compiled == patched, said.stderr


def test_plain_docker_build_works(first: First) -> None:
    """Without build.py: what it would pass are the Dockerfile's own defaults, but for the base."""
    made = first.repository
    built = docker("build", "--quiet", "--build-arg", f"BASE={made.base}",
                   "--build-context", f"cuda={made.cuda}", "--output", "type=cacheonly",
                   str(made.folder))  # fmt: skip
    assert built.returncode == 0, built.stderr


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
