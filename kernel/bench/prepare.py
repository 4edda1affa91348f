"""Makes the folder that a GPU machine needs for the bench: baselines, fetched by hash and compiled.

It needs nvcc and the package index, and no GPU.
"""

from __future__ import annotations

import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from imagebuild import nvcc
from imagebuild.console import Console
from imagebuild.errors import IntegrityError
from imagebuild.files import replaced_folder
from imagebuild.pins import WheelPin
from imagebuild.sources.wheel import WheelTree
from imagebuild.upstream import Upstream
from kernel.bench import flashinfer_build
from kernel.bench.flashinfer_build import PLATFORM

VERSION = "0.31.0"  # of vLLM, whose kernels are timed; what it pins of FlashInfer comes with it
SITE = "site"
_FROM_VLLM = ("vllm/_flashmla_C.abi3.so", "vllm/v1/attention/ops/triton_decode_attention.py",
              "vllm/v1/attention/ops/xpu_mla_sparse.py")  # fmt: skip
_HERE = Path(__file__).parent
_MTIME = 0


@dataclass(frozen=True)
class BenchWheel:
    """A pinned wheel that is no part of the image."""

    project: str
    version: str
    pin: WheelPin
    tilelang: bool


def wheels(path: Path = _HERE / "wheels.toml") -> list[BenchWheel]:
    """The pins of the bench."""
    return [
        BenchWheel(one["project"], one["version"],
                   WheelPin(one["filename"], one["sha256"], one["size"]),
                   bool(one.get("tilelang", False)))
        for one in tomllib.loads(path.read_text())["wheel"]
    ]  # fmt: skip


def prepare(upstream: Upstream, console: Console, out: Path, *, with_tilelang: bool) -> None:
    """Fills `out` anew: `*.so`, vLLM's Triton sources, and Python packages under `site`.

    Raises:
        EngineError: no nvcc, it fails, or the network does.
        IntegrityError: the release is not locked, or a wheel has other bytes than its pin.
    """
    base = upstream.lock.base(VERSION)
    compiler = nvcc.find()
    with replaced_folder(out) as folder, tempfile.TemporaryDirectory(prefix="bench-") as work:
        tree = upstream.open(VERSION, PLATFORM).tree
        tree.prefetch(_FROM_VLLM)
        for path in _FROM_VLLM:
            console.step(f"vLLM {VERSION}: {path}")
            (folder / Path(path).name).write_bytes(tree.read(path))
        (folder / SITE).mkdir()
        for wheel in wheels():
            if wheel.tilelang <= with_tilelang:
                _unpack(upstream, wheel.project, wheel.version, wheel.pin, folder / SITE)
        flashinfer = Path(work) / "flashinfer"
        flashinfer.mkdir()
        pin = base.wheel("flashinfer-python", PLATFORM)
        version = base.pins.get("flashinfer-python", "")
        if pin is None or not version:
            raise IntegrityError(f"lock: expected FlashInfer's wheel with vLLM {VERSION}, found "
                                 "none", hint="build.py lock update")  # fmt: skip
        _unpack(upstream, "flashinfer-python", version, pin, flashinfer)
        for variant in flashinfer_build.VARIANTS:
            console.step(f"FlashInfer {version}: {variant.name}")
            flashinfer_build.build(compiler, flashinfer, folder / SITE, variant, folder)
        console.step("gather-only kernel")
        _gather(compiler, folder)


def _unpack(upstream: Upstream, project: str, version: str, pin: WheelPin, into: Path) -> None:
    path = upstream.fetch(project, version, PLATFORM, pin)
    with WheelTree(path, platform=PLATFORM, source=pin.filename) as wheel:
        wheel.extract(into, _MTIME)


def _gather(compiler: nvcc.Compiler, folder: Path) -> None:
    source = _HERE / "gather.cu"
    targets = ("compute_90,code=sm_90", "compute_120,code=[sm_120,compute_120]")
    nvcc.echo_and_run([str(compiler.path), "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC",
                       "-ccbin", nvcc.host_compiler(PLATFORM),
                       *(f"-gencode=arch={one}" for one in targets),
                       str(source), "-o", str(folder / "gather.so")], folder)  # fmt: skip
