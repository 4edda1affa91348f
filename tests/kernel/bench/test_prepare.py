"""What is made for the GPU machine, and the sentences where a part is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.errors import BrokenError
from imagebuild.nvcc import Compiler
from kernel.bench import flashinfer_build, prepare
from kernel.bench.flashinfer_build import VARIANTS

ROOT = Path(__file__).resolve().parents[3]
COMPILER = Compiler(Path("/cuda/bin/nvcc"), "13.0", Path("/cuda/include"))


def test_wheels_are_pinned() -> None:
    wheels = prepare.wheels()
    assert {wheel.project for wheel in wheels if not wheel.tilelang} == {"apache-tvm-ffi"}
    assert "tilelang" in {wheel.project for wheel in wheels}
    for wheel in wheels:
        assert re.fullmatch(r"[0-9a-f]{64}", wheel.pin.sha256)
        assert wheel.version in wheel.pin.filename and wheel.pin.size > 0


def test_a_wheel_without_the_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match=r"found no batch_mla_config.jinja, batch_mla_plan.cu"):
        flashinfer_build.build(COMPILER, tmp_path, tmp_path, VARIANTS[0], tmp_path)


def test_template_is_filled_in(tmp_path: Path) -> None:
    template = tmp_path / "config.jinja"
    template.write_text("{{ dtype_q }} {{ dtype_kv }} {{ head_dim_ckv }} {{ head_dim_kpe }}")
    texts = {one.name: flashinfer_build._config(template, one) for one in VARIANTS}
    assert texts["fa2"] == texts["sm120cfg"] == texts["fa3"] == "nv_bfloat16 nv_bfloat16 512 0"
    assert texts["fa3_fp8"] == "nv_bfloat16 __nv_fp8_e4m3 512 0"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_only_sm120cfg_is_told_another_card(
    variant: flashinfer_build.Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_build, "host_compiler", lambda _platform: "g++")
    call = flashinfer_build._call(COMPILER, tmp_path, tmp_path, variant, tmp_path)
    shim = tmp_path / "shim.h"
    assert ("-include" in call) == shim.is_file() == (variant.name == "sm120cfg")
    if shim.is_file():
        text = shim.read_text()
        assert "*value = 102400" in text and "{{" not in text
        assert "cudaDevAttrMaxSharedMemoryPerMultiprocessor" in text


class TestCommand:
    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "imagebuild", "kernel", "bench", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def test_without_torch(self, tmp_path: Path) -> None:
        done = self.call("--parts", str(tmp_path), "--python", sys.executable, "--out",
                         str(tmp_path / "results.json"))  # fmt: skip
        assert done.returncode == 5
        assert "torch: expected it for timing and comparing" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "results.json").exists()

    def test_no_such_python(self, tmp_path: Path) -> None:
        done = self.call("--parts", str(tmp_path), "--python", "python-that-is-not")
        assert done.returncode == 5
        assert "--python python-that-is-not: expected an interpreter, found none" in done.stderr
