"""Compiles FlashInfer's MLA attention ahead of time, from the sources in its own wheel.

FlashInfer's Python package would do it on the GPU machine and needs a dozen large packages there;
what comes out here is the same template, filled in the same way, as libraries of 0.3 MB that
tvm_ffi loads. It changes no source: the variant `sm120cfg` differs by one answer, that of the query
for shared memory, so that the code takes the branch that it takes on an sm_12x card.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import BrokenError
from imagebuild.nvcc import Compiler, echo_and_run, host_compiler

SM12X_SHARED_BYTES = 102_400  # of a multiprocessor; source: CUDA C++ programming guide, 12.x
PLATFORM = "linux/amd64"


@dataclass(frozen=True)
class Variant:
    """One library: FlashInfer's backend, the type of KV rows and what the card is said to have.

    Attributes:
        name: of the library, without ".so".
        family: prefix of upstream's source files.
        kv: C++ type of the KV rows.
        shared_bytes: shared memory a multiprocessor that the code is told of; None for the card's.
    """

    name: str
    family: str
    kv: str
    shared_bytes: int | None = None


VARIANTS = (
    Variant("fa2", "batch_mla", "nv_bfloat16"),
    Variant("sm120cfg", "batch_mla", "nv_bfloat16", SM12X_SHARED_BYTES),
    Variant("fa3", "batch_mla_sm90", "nv_bfloat16"),
    Variant("fa3_fp8", "batch_mla_sm90", "__nv_fp8_e4m3"),
)
_DEFINES = ("FLASHINFER_ENABLE_F16", "FLASHINFER_ENABLE_BF16", "FLASHINFER_ENABLE_FP8_E4M3",
            "FLASHINFER_ENABLE_FP8_E5M2", "FLASHINFER_ENABLE_FP8_E8M0",
            "FLASHINFER_ENABLE_FP4_E2M1", "NDEBUG")  # fmt: skip
# The flags that FlashInfer's own build passes, read in flashinfer/jit/core.py of 0.7.0; -w, which
# changes no code, keeps its warnings, a thousand lines, off the screen.
_FLAGS = ("-w", "-O3", "-std=c++17", "-use_fast_math", "-static-global-template-stub=false",
          "--expt-relaxed-constexpr", "--compiler-options=-fPIC")  # fmt: skip
_QUERY = "cudaDevAttrMaxSharedMemoryPerMultiprocessor"
_SHIM = """\
#pragma once
#include <cuda_runtime_api.h>
// Answers the one query that chooses the tile sizes; all others go to the card.
inline cudaError_t glm53_attribute(int* value, cudaDeviceAttr attribute, int device) {{
  if (attribute == {query}) {{ *value = {shared}; return cudaSuccess; }}
  return cudaDeviceGetAttribute(value, attribute, device);
}}
#define cudaDeviceGetAttribute glm53_attribute
"""


def build(compiler: Compiler, flashinfer: Path, tvm_ffi: Path, variant: Variant, out: Path) -> Path:
    """Compiles one variant for sm_90a into `out`, a folder; returns the library.

    Args:
        compiler: the nvcc.
        flashinfer: the unpacked flashinfer-python wheel.
        tvm_ffi: the unpacked apache-tvm-ffi wheel, for x86-64.
        variant: what to compile.
        out: gets `<name>.so`.

    Raises:
        EngineError: the compiler failed.
        BrokenError: the wheel does not have the sources that are expected.
    """
    data = flashinfer / "flashinfer" / "data"
    sources = [f"{variant.family}_{part}.cu" for part in ("plan", "run", "binding")]
    template = data / "csrc" / "batch_mla_config.jinja"
    missing = [path for path in (template, *(data / "csrc" / name for name in sources))
               if not path.is_file()]  # fmt: skip
    if missing:
        raise BrokenError(f"{flashinfer}: expected FlashInfer's MLA sources, found no "
                          + ", ".join(path.name for path in missing))  # fmt: skip
    library = out / f"{variant.name}.so"
    with tempfile.TemporaryDirectory(prefix="flashinfer-") as work:
        folder = Path(work)
        (folder / f"{variant.family}_config.inc").write_text(_config(template, variant))
        call = _call(compiler, data, tvm_ffi, variant, folder)
        objects = []
        for name in sources:
            (folder / name).write_bytes((data / "csrc" / name).read_bytes())
            objects.append(folder / f"{name}.o")
            echo_and_run([*call, "-c", name, "-o", str(objects[-1])], folder)
        echo_and_run([host_compiler(PLATFORM), "-shared", "-o", str(library), *map(str, objects),
                      f"-L{tvm_ffi / 'tvm_ffi' / 'lib'}", "-ltvm_ffi",
                      *_libraries(compiler), "-lcudart"], folder)  # fmt: skip
    return library


def _config(template: Path, variant: Variant) -> str:
    """Upstream's template with this model's types: 512 values a row, no rotary part."""
    import jinja2

    text: str = jinja2.Template(template.read_text()).render(
        dtype_q="nv_bfloat16", dtype_kv=variant.kv, dtype_o="nv_bfloat16", dtype_idx="int32_t",
        head_dim_ckv=512, head_dim_kpe=0,
    )  # fmt: skip
    return text


def _call(
    compiler: Compiler, data: Path, tvm_ffi: Path, variant: Variant, folder: Path
) -> list[str]:
    """The compiler's call, but for source and result."""
    flags: list[str] = []
    if variant.shared_bytes is not None:
        shim = folder / "shim.h"
        shim.write_text(_SHIM.format(query=_QUERY, shared=variant.shared_bytes))
        flags = ["-include", str(shim)]
    package = tvm_ffi / "tvm_ffi"
    includes = [folder, *(data / part for part in _INCLUDES), package / "include",
                package / "3rdparty" / "dlpack" / "include"]  # fmt: skip
    return [str(compiler.path), *_FLAGS, *(f"-D{one}" for one in _DEFINES), *flags,
            *(f"-I{path}" for path in includes), "-ccbin", host_compiler(PLATFORM),
            "-gencode=arch=compute_90a,code=sm_90a"]  # fmt: skip


_INCLUDES: Sequence[str] = ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include",
                            "csrc", "cutlass/include", "cutlass/tools/util/include",
                            "spdlog/include")  # fmt: skip


def _libraries(compiler: Compiler) -> list[str]:
    """Where the CUDA runtime is: beside the headers, under one of two names."""
    home = compiler.include.parent
    places = [home / "lib64", home / "lib", home.parent / "lib64"]
    return [f"-L{place}" for place in places if place.is_dir()]
