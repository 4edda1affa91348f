"""A stand-in for the base image: a Debian rootfs, the real wheels, and names of the other projects.

It is called standin everywhere, so that nobody takes a green run for a run on the real base.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.lock import BaseLock, Lock, read_lock
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Upstream

SUITE = "trixie"
# What the real base has as well: pip, and a C++ compiler for its JIT compilers.
PACKAGES = {"linux/amd64": ("python3", "python3-pip", "g++"), "linux/arm64": ("python3",)}
SITE = "usr/local/lib/python3.13/dist-packages"
_UNNEEDED = ("doc", "man", "locale", "info", "lintian")


def rootfs(out: Path, platform: str, epoch: int) -> None:
    """Makes a minimal Debian with Python as a tar; the mirror is the machine's own."""
    arch = platform.partition("/")[2]
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNNEEDED]
    command = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--architectures={arch}",
        f"--include={','.join(PACKAGES[platform])}", *excluded, "--dpkgopt=force-unsafe-io",
        SUITE, str(out), f"deb {mirror()} {SUITE} main",
    ]  # fmt: skip
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


def mirror() -> str:
    """The Debian mirror that this machine's apt uses."""
    places = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for place in places:
        found = re.search(
            r"https?://\S+/debian/?(?=\s)", place.read_text() if place.is_file() else ""
        )
        if found:
            return found[0]
    raise AssertionError("apt's sources name no Debian mirror")


def site(root: Path, recipe: Recipe, lock: Lock, base: BaseLock, platform: str) -> None:
    """Unpacks the locked wheels, and states the locked versions of all other watched projects."""
    root.mkdir(parents=True)
    with Upstream(recipe, lock) as upstream:
        for project in recipe.site:
            pin = base.wheel(project, platform)
            wheel = upstream.fetch(project, base.versions[project], platform, pin)
            with WheelTree(wheel, platform=platform, source=pin.filename) as tree:
                tree.extract(root, base.epoch)
    image = recipe.image_pins.get(base.version, {})
    for project in recipe.pins:
        if project not in recipe.site:
            _installed(root, project, image.get(project) or _lowest(base.pins[project]))


def _lowest(pin: str) -> str:
    """A version that fits a pin: the pin itself, or the lower end of its range."""
    found = re.search(r">=([0-9.]+)", pin)
    return found[1] if found else pin


def _installed(root: Path, project: str, version: str) -> None:
    info = root / f"{project.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


# A CUDA that is trimmed as in the real base: an empty toolkit folder, and NVRTC among the packages.
_CUDA = f"""\
WORKDIR /{SITE}/nvidia/cu13
RUN mkdir -p include lib /usr/local/cuda/include /usr/local/cuda/lib64 && \\
    echo 'int nvrtcVersion(int *major, int *minor);' > include/nvrtc.h && \\
    echo 'int nvrtcVersion(int *a, int *b) {{ *a = 13; *b = 0; return 0; }}' > /tmp/stub.c && \\
    if command -v gcc; then gcc -shared -fPIC -o lib/libnvrtc.so.13 /tmp/stub.c; \\
    else cp /tmp/stub.c lib/libnvrtc.so.13; fi && rm /tmp/stub.c
WORKDIR /
"""


def context(folder: Path, rootfs_tar: Path) -> None:
    """The Dockerfile of the stand-in beside `site`, which the caller fills."""
    if not (folder / "rootfs.tar").exists():
        try:
            os.link(rootfs_tar, folder / "rootfs.tar")
        except OSError:
            shutil.copyfile(rootfs_tar, folder / "rootfs.tar")
    (folder / "Dockerfile").write_text(
        f'FROM scratch\nADD rootfs.tar /\n{_CUDA}COPY site /{SITE}\nCMD ["python3"]\n'
    )


def make(folder: Path, tag: str, platform: str, recipe: Recipe) -> str:
    """Makes and loads the stand-in of a recipe's base for one platform; gives its tag."""
    lock = read_lock(recipe.lock_file)
    locked = lock.base(recipe.base_version)
    rootfs(folder / "rootfs.tar", platform, locked.epoch)
    site(folder / "site", recipe, lock, locked, platform)
    build(folder, tag, locked.epoch, platform)
    shutil.rmtree(folder)
    return tag


def derive(tag: str, dockerfile: str) -> str:
    """Makes and loads another image by a Dockerfile without a context; gives its tag."""
    command = ["docker", "buildx", "build", "--quiet", "--provenance=false", "--tag", tag, "-"]
    subprocess.run(command, input=dockerfile, text=True, check=True, capture_output=True)
    return tag


def join(name: str, tags: Mapping[str, str]) -> str:
    """Pushes images as one index, NAME:both; gives its reference by digest."""
    for word, tag in tags.items():
        subprocess.run(["docker", "image", "tag", tag, f"{name}:{word}"], check=True)
        subprocess.run(["docker", "push", "--quiet", f"{name}:{word}"], check=True)
    both = ["docker", "buildx", "imagetools"]
    parts = [f"{name}:{word}" for word in tags]
    subprocess.run([*both, "create", "--tag", f"{name}:both", *parts], check=True)
    told = subprocess.run([*both, "inspect", f"{name}:both"], check=True, capture_output=True,
                          text=True).stdout  # fmt: skip
    digest = next(line.split()[1] for line in told.splitlines() if line.startswith("Digest:"))
    return f"{name}@{digest}"


def build(folder: Path, tag: str, epoch: int, platform: str = "linux/amd64") -> None:
    """Builds and loads the stand-in from a folder with rootfs.tar and site/."""
    context(folder, folder / "rootfs.tar")
    archive = folder.with_suffix(".oci.tar")
    output = f"type=oci,dest={archive},name={tag},compression=zstd,force-compression=true"
    command = ["docker", "buildx", "build", "--quiet", "--provenance=false", "--no-cache",
               "--platform", platform, "--output", output, str(folder)]  # fmt: skip
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    subprocess.run(["docker", "load", "--quiet", "--input", str(archive)], check=True)
    archive.unlink()
