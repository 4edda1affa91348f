"""`kernel build`: what is compiled for which GPUs, and the pinned compiler."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagebuild import nvcc, toolchain
from imagebuild.cli import main
from imagebuild.commands import build, kernelbuild
from imagebuild.commands.kernelbuild import options
from imagebuild.errors import EngineError


def test_options_of_the_image() -> None:
    usual = nvcc.Options()
    assert options(nvcc.GPU_ARCHES) == usual
    assert usual.limits is not None


def test_options_of_one_gpu() -> None:
    one = options(["sm_121"])
    assert (one.cubins, one.arches) == (("sm_90a", "sm_121a"), ("sm_121",))
    assert options(["sm_121", "sm_120"]).cubins == nvcc.CUBINS  # in the order of the image


def test_a_debug_build_is_marked_and_has_no_limits() -> None:
    debug = options(nvcc.GPU_ARCHES, debug=True)
    assert debug.flags == ("-DGLM53_DEBUG",)
    assert debug.limits is None


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_pins_of_a_whole_compiler(platform: str) -> None:
    wheels = {one.project: one for one in toolchain.wheels() if one.platform == platform}
    assert set(wheels) == {"nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc",
                           "nvidia-cuda-runtime", "nvidia-nvvm"}  # fmt: skip
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[platform]
    for one in wheels.values():
        assert re.fullmatch(r"[0-9a-f]{64}", one.pin.sha256)
        assert one.pin.filename.endswith(f"_{machine}.whl")
        assert f"-{one.version}-" in one.pin.filename
        assert one.version.startswith("13.0.")  # the CUDA of the images
    assert len({one.pin.sha256 for one in toolchain.wheels()}) == 10


def test_no_compiler_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(EngineError, match="x86_64 or aarch64 machine, found riscv64"):
        toolchain.own_platform()


def test_a_folder_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bin" / "nvcc"
    bad.parent.mkdir()
    bad.write_text("#!/bin/sh\necho release 11.0\n")
    bad.chmod(0o755)
    out = tmp_path / "x.so"
    assert main(["kernel", "build", "--cuda", str(tmp_path), "--out", str(out)]) == 5
    assert "expected release 12.9 or newer" in capsys.readouterr().err
    assert not out.exists()


def test_the_tree_engine_compiles_for_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path, nvcc.Options]] = []

    def compiled(_context: object, platform: str, out: Path, chosen: nvcc.Options) -> None:
        calls.append((platform, out, chosen))

    monkeypatch.setattr(kernelbuild, "compiled", compiled)
    said: list[str] = []
    context = SimpleNamespace(console=SimpleNamespace(result=said.append))
    request = SimpleNamespace(dist=tmp_path, platform="linux/arm64")
    build._compile(context, request)  # type: ignore[arg-type]
    out = tmp_path / "kernel" / "arm64" / "libglm53_kernel.so"
    assert calls == [("linux/arm64", out, nvcc.Options())]
    assert said == [f"{out}: goes to /usr/local/lib/glm53/ on the machine that serves"]
