"""Both platforms in one index; the arm64 side's own steps run under emulation.

Compiling is done on the build platform, by an image with a cross compiler. It takes some six
minutes, so it runs where the engine can run linux/arm64: ENGINE_ARM64=1 .ci/engine
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from tests.support import standin
from tests.support.images import RECIPE, Repository, docker

CROSS = "g++-aarch64-linux-gnu"
HOW = "as root on Debian: ENGINE_ARM64=1 .ci/engine; then: ./build.py test tests/engine"


@dataclass(frozen=True)
class Bases:
    """`index` names a base by digest; `toolchain` is an image with a cross compiler."""

    index: str
    toolchain: str


@pytest.fixture
def bases(base: str, registry: str, tmp_path: Path) -> Iterator[Bases]:
    if "linux/arm64" not in docker("buildx", "inspect").stdout:
        if os.environ.get("REQUIRE_ENGINE") == "1" and os.environ.get("ENGINE_ARM64") == "1":
            pytest.fail(f"the engine cannot run linux/arm64; {HOW}")
        pytest.skip(f"not run: the engine cannot run linux/arm64; to run it, {HOW}")
    recipe = load_recipe(RECIPE)
    lock = read_lock(recipe.lock_file)
    locked = lock.base(recipe.base_version)
    name = f"{registry}/imagebuild-test/standin"
    folder = tmp_path / "arm64"
    folder.mkdir()
    standin.rootfs(folder / "rootfs.tar", "linux/arm64", locked.epoch)
    standin.site(folder / "site", recipe, lock, locked, "linux/arm64")
    standin.build(folder, f"{name}:arm64", locked.epoch, "linux/arm64")
    shutil.rmtree(folder)
    done(docker("image", "tag", base, f"{name}:amd64"))
    for arch in ("amd64", "arm64"):
        done(docker("push", "--quiet", f"{name}:{arch}"))
    done(docker("buildx", "imagetools", "create", "--tag", f"{name}:both",
                f"{name}:amd64", f"{name}:arm64"))  # fmt: skip
    told = docker("buildx", "imagetools", "inspect", f"{name}:both").stdout
    digest = next(line.split()[1] for line in told.splitlines() if line.startswith("Digest:"))

    toolchain = "imagebuild-test/toolchain:cross"
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nRUN apt-get update && "
        f"apt-get install --yes --no-install-recommends {CROSS}\n"
    )
    done(docker("buildx", "build", "--quiet", "--provenance=false", "--tag", toolchain,
                str(tmp_path)))  # fmt: skip
    yield Bases(f"{name}@{digest}", toolchain)
    docker("image", "rm", "--force", toolchain, f"{name}:amd64", f"{name}:arm64")


def done(result: object) -> None:
    assert getattr(result, "returncode", 1) == 0, getattr(result, "stderr", "")


def test_one_index_holds_both_platforms(
    repository: Repository, bases: Bases, registry: str
) -> None:
    tag = f"{registry}/imagebuild-test/image:all"
    outcome = repository.build(tag, "--push", "--toolchain", bases.toolchain, base=bases.index,
                               arch="all")  # fmt: skip
    assert outcome.code == 0, outcome.err[-3000:]
    record = outcome.document
    assert record["pushed"] == record["digest"]
    assert set(record["platforms"]) == {"linux/amd64", "linux/arm64"}
    library = "/usr/local/lib/glm53/libglm53_kernel.so"
    code = f"import os; print(os.uname().machine, open('{library}', 'rb').read()[18])"
    machines = {}
    for platform in record["platforms"]:
        said = docker("run", "--rm", "--platform", platform, "--network=none",
                      "--entrypoint", "python3", tag, "-c", code)  # fmt: skip
        machines[platform] = said.stdout.split()
    # 62 and 183 are the ELF numbers of the two processors.
    assert machines == {"linux/amd64": ["x86_64", "62"], "linux/arm64": ["aarch64", "183"]}
    kept = docker("buildx", "imagetools", "inspect", "--raw", tag).stdout
    for image in record["platforms"].values():
        assert image["digest"] in kept
