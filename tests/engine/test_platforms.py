"""Both platforms in one index; the arm64 side's own steps run under emulation.

Compiling is done on the build platform, by an image with a cross compiler.
"""

from __future__ import annotations

import re

from tests.support.images import First, docker


def test_one_index_holds_both_platforms(index: First) -> None:
    record = index.outcome.document
    assert record["pushed"] == record["digest"]
    assert set(record["platforms"]) == {"linux/amd64", "linux/arm64"}
    library = "/usr/local/lib/glm53/libglm53_kernel.so"
    code = f"import os; print(os.uname().machine, open('{library}', 'rb').read()[18])"
    machines = {}
    for platform in record["platforms"]:
        said = docker("run", "--rm", "--platform", platform, "--network=none",
                      "--entrypoint", "python3", index.tag, "-c", code)  # fmt: skip
        machines[platform] = said.stdout.split()
    # 62 and 183 are the ELF numbers of the two processors.
    assert machines == {"linux/amd64": ["x86_64", "62"], "linux/arm64": ["aarch64", "183"]}
    kept = docker("buildx", "imagetools", "inspect", "--raw", index.tag).stdout
    for image in record["platforms"].values():
        assert image["digest"] in kept


def test_each_platform_has_its_own_packages(index: First) -> None:
    """From the lock, where each base's own apt resolved them; nothing is fetched in the build."""
    locked = index.outcome.document["debs"]
    assert set(locked) == {"linux/amd64", "linux/arm64"}
    for platform, files in locked.items():
        arch = platform.partition("/")[2]
        others = [name for name in files if not re.search(rf"_({arch}|all)\.deb$", name)]
        assert files
        assert not others
    said = docker("run", "--rm", "--platform", "linux/arm64", "--network=none", "--entrypoint",
                  "dpkg-query", index.tag, "--show", "--showformat", "${Architecture} ${Status}",
                  "libibverbs1")  # fmt: skip
    assert said.stdout == "arm64 install ok installed", said.stderr


def test_arm64_image_verifies_inside(index: First) -> None:
    folder = index.repository.folder
    said = docker("run", "--rm", "--platform", "linux/arm64", "--network=none",
                  "--volume", f"{folder}:/src:ro", "--entrypoint", "python3", index.tag,
                  "/src/verify-base.py")  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    assert "verify ok" in said.stdout
    assert "sm_121" in said.stdout
