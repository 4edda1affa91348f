"""The caller of nvcc: finding it, judging its result, and real compilations where there is one."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from imagebuild import nvcc
from imagebuild.errors import BrokenError, EngineError, UsageError
from imagebuild.verify import fatbin
from tests.support.verify_site import flashkda_library

HAS_NVCC = Path("/usr/local/cuda/bin/nvcc").is_file() and shutil.which("g++") is not None
CROSS = shutil.which("aarch64-linux-gnu-g++") is not None
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="needs nvcc in /usr/local/cuda and g++")


def fake(folder: Path, release: str) -> Path:
    """A toolkit whose nvcc states a release."""
    program = folder / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n"
    )
    program.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    return folder


def test_given_toolkit_comes_first(tmp_path: Path) -> None:
    found = nvcc.find(fake(tmp_path / "cuda", "13.1"))
    assert found.version == "13.1"
    assert found.include == tmp_path / "cuda" / "include"


def test_old_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"12\.9 or newer.*12\.8"):
        nvcc.find(fake(tmp_path / "cuda", "12.8"))


def test_toolkit_without_headers_is_refused(tmp_path: Path) -> None:
    (fake(tmp_path / "cuda", "13.0") / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(EngineError, match=r"cuda_runtime\.h"):
        nvcc.find(tmp_path / "cuda")


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(nvcc.Path, "is_file", lambda _self: False)
    with pytest.raises(EngineError, match="none in") as caught:
        nvcc.find()
    assert "--build-context cuda=DIR" in str(caught.value.hint)


def test_foreign_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="linux/riscv64"):
        nvcc.host_compiler("linux/riscv64")
    monkeypatch.setenv("PATH", str(tmp_path))
    for platform in ("linux/amd64", "linux/arm64"):
        with pytest.raises(EngineError, match=platform) as caught:
            nvcc.host_compiler(platform)
        assert "install g++" in str(caught.value.hint)


def test_nothing_to_compile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.cu files"):
        nvcc.build(tmp_path, tmp_path / "x.so", "linux/amd64")


def library(folder: Path, *targets: str, machine: int = 62) -> Path:
    path = folder / "x.so"
    split = re.compile(r"sm_(\d+)([af]?)")
    parts = [match for match in map(split.fullmatch, targets) if match]
    codes = [(int(part[1]), part[2], b"code") for part in parts]
    path.write_bytes(flashkda_library(targets=codes, machine=machine))
    return path


def test_gate_on_architectures(tmp_path: Path) -> None:
    good = library(tmp_path, "sm_120a", "sm_121a")
    assert nvcc.check(good, "linux/amd64") == ("sm_120a", "sm_121a")
    assert nvcc.check(library(tmp_path, "sm_120f"), "linux/amd64") == ("sm_120f",)
    # A cubin for sm_120a alone does not run on sm_121.
    with pytest.raises(BrokenError, match=r"runs on sm_121, found sm_120a"):
        nvcc.check(library(tmp_path, "sm_120a"), "linux/amd64")
    with pytest.raises(BrokenError, match=r"sm_120 and sm_121"):
        nvcc.check(library(tmp_path, "sm_90a"), "linux/amd64")


def test_gate_on_the_processor(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match=r"linux/arm64, found x86_64"):
        nvcc.check(library(tmp_path, "sm_120a", "sm_121a"), "linux/arm64")
    (tmp_path / "x.so").write_bytes(b"text")
    with pytest.raises(BrokenError, match="GPU code"):
        nvcc.check(tmp_path / "x.so", "linux/amd64")


@needs_nvcc
@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_real_compilation_is_repeatable_and_plain(tmp_path: Path, platform: str) -> None:
    if platform == "linux/arm64" and not CROSS:
        pytest.skip("needs g++-aarch64-linux-gnu")
    # The whole kernel is compiled twice in tests/kernel/build.
    source = tmp_path / "source"
    source.mkdir()
    (source / "k.cu").write_text(
        "#include <cuda_runtime.h>\n"
        "static __global__ void fill(int* p) { p[threadIdx.x] = 1; }\n"
        'extern "C" __attribute__((visibility("default"))) void glm53_fill(int* p) {\n'
        "  fill<<<1, 32>>>(p);\n}\n"
    )
    digests = set()
    for name in ("one", "two"):
        built = nvcc.build(source, tmp_path / name / "k.so", platform)
        assert {one.target for one in built.kernels} == set(nvcc.CUBINS)
        data = built.path.read_bytes()
        digests.add(hashlib.sha256(data).hexdigest())
    assert len(digests) == 1
    assert built.targets == ("sm_90a", "sm_120a", "sm_121a", "compute_120")
    assert all(fatbin.runs_on(fatbin.device_code(data), arch) for arch in ("sm_120", "sm_121"))
    assert b"glm53_fill" in data
    assert not [word for word in (b"libtorch", b"libc10", b"Py_", str(tmp_path).encode())
                if word in data]  # fmt: skip
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".so"]
    assert left == [source / "k.cu"]


@needs_nvcc
def test_fault_in_the_source_is_shown(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("int f() { return missing; }\n")
    with pytest.raises(EngineError, match="missing"):
        nvcc.build(tmp_path, tmp_path / "out" / "x.so", "linux/amd64")
    assert not (tmp_path / "out" / "x.so").exists()


def test_main_turns_errors_into_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--source", str(tmp_path), "--out", str(tmp_path / "x.so"), "--platform", "linux/amd64"]
    assert nvcc.main(call) == 2
    assert capsys.readouterr().err.startswith("nvcc: error: ")
