"""What an image has when it is asked for: FlashKDA built here, mentat or Ray, packages by hash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.images import Repository, docker, inspect

HERE = Path(__file__).resolve().parent
TAG = "imagebuild-test/image:parts"
_LOOK = """\
set -e
cat /usr/local/share/glm53/flashkda.json
echo; echo ---
ls /usr/local/share/licenses/flashkda
echo ---
mentatd --version; ray --version; command -v mentatd-probe-machine
dpkg-query --show --showformat '${Package} ${Version}\\n' imagebuild-test
cat /usr/share/imagebuild-test/file
ls /usr/local/lib/python3*/dist-packages/vllm | grep _flashkda
"""


def options(folder: Path) -> list[str]:
    ours, vllm = parts.flashkda(folder)
    contexts = {"flashkda-src": ours, "vllm-src": vllm, "mentat": parts.mentat(folder / "mentat"),
                "debs": parts.deb(folder / "deb")}  # fmt: skip
    named = [word for name, place in contexts.items()
             for word in ("--build-context", f"{name}={place}")]  # fmt: skip
    return ["--flashkda", "build", "--cluster", "mentat", "--mentat-version", parts.MENTAT, *named]


def test_every_part_is_built_installed_and_checked(repository: Repository, tmp_path: Path) -> None:
    outcome = repository.build(TAG, *options(tmp_path / "parts"))
    assert outcome.code == 0, outcome.err[-3000:]
    said = docker("run", "--rm", "--network=none", "--entrypoint", "sh", TAG, "-c", _LOOK)
    assert said.returncode == 0, said.stderr
    marker, licences, rest = said.stdout.split("---\n")
    assert json.loads(marker)["built"] is True
    assert json.loads(marker)["code"] == ["sm_120f"]
    assert json.loads(marker)["commits"]["flashkda"].startswith("17a037d")
    assert licences.split() == ["CUTLASS.txt", "FlashKDA.txt"]
    assert rest.splitlines() == [
        "mentatd 0.17.1",
        "stand-in mentat as ray 0.17.1",
        "/usr/local/bin/mentatd-probe-machine",
        "imagebuild-test 1",
        "content",
        "_flashkda_C.abi3.so",
    ]
    verified = docker("run", "--rm", "--network=none", "--volume", f"{repository.folder}:/src:ro",
                      "--entrypoint", "python3", TAG, "/src/verify-base.py")  # fmt: skip
    assert verified.returncode == 0, verified.stdout
    assert "flashkda-unknown" in verified.stdout  # a library that nobody has measured


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of Ray and of all that it depends on, from the package index by hash."""
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
               "--only-binary=:all:", "--python-version=3.13", "--implementation=cp",
               "--abi=cp313", "--abi=abi3", "--abi=none", "--platform=manylinux_2_28_x86_64",
               "--platform=manylinux_2_17_x86_64", "--platform=manylinux2014_x86_64",
               "--dest", str(folder), "-r", str(HERE / "ray.txt")]  # fmt: skip
    subprocess.run(command, check=True)
    return folder


def test_ray_itself_starts_from_the_wheels_that_were_given(
    repository: Repository, ray: Path
) -> None:
    before = inspect(repository.base)
    assert before is not None
    assert docker("image", "tag", repository.base, TAG).returncode == 0
    outcome = repository.build(TAG, "--cluster", "ray", "--build-context", f"ray={ray}")
    assert outcome.code == 0, outcome.err[-3000:]
    image, previous = inspect(TAG), inspect(f"{TAG}-previous")
    assert image is not None
    # What had the name keeps one, and the record says which it was.
    assert previous is not None
    assert previous["Id"] == outcome.document["previous"] == before["Id"]
    assert image["Config"]["Labels"]["imagebuild.cluster"] == "ray"
    code = ("import ray; ray.init(num_cpus=1, include_dashboard=False); "
            "print(ray.__version__, ray.get(ray.remote(lambda: 6 * 7).remote()))")  # fmt: skip
    said = docker("run", "--rm", "--network=none", "--shm-size=1g", "--entrypoint", "python3", TAG,
                  "-c", code)  # fmt: skip
    assert said.stdout.splitlines()[-1:] == ["2.60.0 42"], said.stdout + said.stderr


def test_wheels_of_ray_alone_are_not_enough(
    repository: Repository, ray: Path, tmp_path: Path
) -> None:
    """What Ray depends on is not fetched: a build that lacks it must not end green."""
    shutil.copy2(next(ray.glob("ray-*.whl")), tmp_path)
    outcome = repository.build(TAG, "--no-load", "--cluster", "ray",
                               "--build-context", f"ray={tmp_path}")  # fmt: skip
    assert outcome.code == 5
    last = "\n".join(outcome.err.splitlines()[-10:])
    assert "stage cluster-ray" in last
    assert "No module named" in last


def test_a_flashkda_with_other_arguments_stops_the_build(
    repository: Repository, tmp_path: Path
) -> None:
    ours, vllm = parts.flashkda(tmp_path / "parts", ("fwd(Tensor q) -> ()",))
    outcome = repository.build(TAG, "--flashkda", "build", "--no-load",
                               "--build-context", f"flashkda-src={ours}",
                               "--build-context", f"vllm-src={vllm}")  # fmt: skip
    assert outcome.code == 3
    last = "\n".join(outcome.err.splitlines()[-10:])
    assert "stage patched" in last
    assert "operator fwd: expected" in last
    assert "hint: " in last


def test_missing_parts_are_named(repository: Repository) -> None:
    outcome = repository.build(TAG, "--no-load", "--cluster", "mentat", "--mentat-version", "1")
    assert outcome.code == 4
    assert "mentatd and mentatd-probe-machine" in outcome.err
    assert "--build-context mentat=DIR" in outcome.err
