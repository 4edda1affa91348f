"""The pinned CUDA compiler of the package index, for a machine that has none.

kernel/toolchain.toml has the wheels. They are fetched by hash into the cache like every other wheel
and unpacked beside it, once; nothing is installed.
"""

from __future__ import annotations

import hashlib
import platform
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild import nvcc
from imagebuild.config import ROOT
from imagebuild.errors import EngineError
from imagebuild.files import only_one, replaced_folder
from imagebuild.pins import WheelPin
from imagebuild.sources.cache import default_root
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Upstream

PINS = ROOT / "kernel" / "toolchain.toml"
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
# Where the wheels put what a toolkit has in its root.
_ROOT = Path("nvidia") / "cu13"
_MTIME = 0


@dataclass(frozen=True)
class ToolWheel:
    """One wheel of the compiler. `platform` is that of the machine it runs on."""

    platform: str
    project: str
    version: str
    pin: WheelPin


def wheels(path: Path = PINS) -> list[ToolWheel]:
    """Every pin, of every platform."""
    return [
        ToolWheel(one["platform"], one["project"], one["version"],
                  WheelPin(one["filename"], one["sha256"], one["size"]))
        for one in tomllib.loads(path.read_text("utf-8"))["wheel"]
    ]  # fmt: skip


def own_platform() -> str:
    """Docker's word for this machine. Raises EngineError: no compiler is made for it."""
    machine = platform.machine()
    if machine not in _PLATFORMS:
        raise EngineError(
            f"CUDA's compiler: expected an x86_64 or aarch64 machine, found {machine}"
        )
    return _PLATFORMS[machine]


def folder(upstream: Upstream, root: Path | None = None) -> Path:
    """The unpacked compiler, as a CUDA toolkit's folder; made on the first call.

    Args:
        upstream: fetches the wheels.
        root: where it is kept; by default in the cache's folder.

    Raises:
        IntegrityError: a wheel has other bytes than its pin.
        EngineError: the network or the disk.
    """
    wanted = [wheel for wheel in wheels() if wheel.platform == own_platform()]
    digest = hashlib.sha256("".join(wheel.pin.sha256 for wheel in wanted).encode()).hexdigest()
    place = (root or default_root() / "toolchain") / digest[:16]
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with only_one(place.with_name(f".{place.name}.lock"), f"an unpacking of {place}"):
            _fill(upstream, wanted, place)
    return place / _ROOT


def _fill(upstream: Upstream, wanted: Sequence[ToolWheel], place: Path) -> None:
    if place.is_dir():
        return  # by another process, meanwhile
    with replaced_folder(place) as partial:
        for wheel in wanted:
            _unpack(upstream, wheel, partial)


def _unpack(upstream: Upstream, wheel: ToolWheel, into: Path) -> None:
    path = upstream.fetch(wheel.project, wheel.version, wheel.platform, wheel.pin)
    with WheelTree(path, platform=wheel.platform, source=wheel.pin.filename) as tree:
        tree.extract(into, _MTIME)


def compiler(upstream: Upstream, cuda: Path | None = None) -> nvcc.Compiler:
    """This machine's nvcc, else the pinned one.

    Args:
        upstream: fetches the pinned one.
        cuda: a toolkit's folder to look in first.

    Raises:
        EngineError: there is none in `cuda`, or the one found does not run.
    """
    if cuda is not None or nvcc.is_installed():
        return nvcc.find(cuda)
    return nvcc.find(folder(upstream))
