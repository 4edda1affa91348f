"""Stand-ins for what named contexts carry: FlashKDA's sources, mentat, and a .deb package."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from imagebuild.verify.flashkda import SCHEMAS

MENTAT = "0.17.1"


def flashkda(folder: Path, schemas: tuple[str, ...] = SCHEMAS) -> tuple[Path, Path]:
    """A small CUDA source with FlashKDA's operators by name; gives its folder and vLLM's."""
    ours, vllm = folder / "flashkda-src", folder / "vllm-src"
    files = {
        ours / "LICENSE": "stand-in for the MIT licence text\n",
        ours / "cutlass" / "LICENSE.txt": "stand-in for the BSD licence text\n",
        ours / "csrc" / "flash_kda.h": "int flash_kda(float* state, int n);\n",
        ours
        / "csrc"
        / "flash_kda.cpp": '#include "flash_kda.h"\nint unused_here() { return 1; }\n',
        ours / "csrc" / "smxx" / "fwd_launch.cu": (
            '#include "flash_kda.h"\n'
            "__global__ void decay(float* s) { s[threadIdx.x] *= 0.5f; }\n"
            "int flash_kda(float* s, int n) {\n"
            "  decay<<<1, n>>>(s);\n  return (int)cudaGetLastError();\n}\n"
        ),
        vllm / "csrc" / "flashkda_registration.cpp": (
            '#include "flash_kda.h"\n'
            "static const char* const kSchemas[] = {"
            + ", ".join(f'"{schema}"' for schema in schemas)
            + "};\n"
            'extern "C" __attribute__((visibility("default"))) const char* '
            "flashkda_schema(int i) { return kSchemas[i]; }\n"
            'extern "C" __attribute__((visibility("default"))) int PyInit__flashkda_C() '
            "{ return flash_kda(nullptr, 0); }\n"
        ),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ours, vllm


def mentat(folder: Path) -> Path:
    """A mentatd that answers to both of its names."""
    folder.mkdir(parents=True)
    (folder / "mentatd").write_text(
        '#!/bin/sh\ncase "$0" in\n'
        f'*ray) echo "stand-in mentat as ray {MENTAT}" ;;\n*) echo "mentatd {MENTAT}" ;;\nesac\n'
    )
    (folder / "mentatd-probe-machine").write_text("#!/bin/sh\necho no GPU\n")
    return folder


def deb(folder: Path) -> Path:
    """One package with its sum."""
    root = folder / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: imagebuild-test\nVersion: 1\nArchitecture: all\n"
        "Maintainer: Test <test@example.invalid>\nDescription: stand-in\n"
    )
    (root / "usr" / "share" / "imagebuild-test").mkdir(parents=True)
    (root / "usr" / "share" / "imagebuild-test" / "file").write_text("content\n")
    out = folder / "debs"
    out.mkdir()
    package = out / "imagebuild-test_1_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(root), str(package)]
    subprocess.run(command, check=True, capture_output=True)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    (out / "SHA256SUMS").write_text(f"{digest}  {package.name}\n")
    return out
