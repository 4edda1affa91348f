"""What the compiled library holds, read without a GPU: instructions, symbols, shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from imagebuild import nvcc
from imagebuild.errors import BrokenError
from tests.kernel.build.conftest import SOURCE

TOOLS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
ARCHES = ("sm_120a", "sm_121a")
_FUNCTION = re.compile(r"Function : (\S+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def run(tool: str, *words: str) -> str:
    """Output of one of the tools that requirements-test.txt installs."""
    call = [str(TOOLS / tool), *words]
    done = subprocess.run(call, capture_output=True, text=True, check=True,
                          env={"PATH": str(TOOLS)})  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module", params=ARCHES)
def cubin(
    request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The machine code for one target, taken out of the library."""
    folder = tmp_path_factory.mktemp("cubin")
    subprocess.run([TOOLS / "cuobjdump", "-xelf", request.param, library], cwd=folder, check=True,
                   capture_output=True)  # fmt: skip
    (found,) = folder.glob("*.cubin")
    return found


def instructions(cubin: Path) -> dict[str, Counter[str]]:
    """How often each instruction stands in each kernel."""
    counts: dict[str, Counter[str]] = {}
    for line in run("cuobjdump", "-sass", str(cubin)).splitlines():
        function, found = _FUNCTION.search(line), _INSTRUCTION.search(line)
        if function:
            counts[function[1]] = Counter()
        elif found:
            counts[list(counts)[-1]][found[1]] += 1
    return counts


def having(counts: Counter[str], *prefixes: str) -> int:
    return sum(number for name, number in counts.items() if name.startswith(prefixes))


def test_instructions(cubin: Path) -> None:
    kernels = instructions(cubin)
    forward = {name: counts for name, counts in kernels.items() if "forward" in name}
    assert len(forward) == 6  # three numbers of heads, two kinds of rows
    for name, counts in forward.items():
        assert having(counts, "HMMA.16816") >= 32, name
        assert having(counts, "LDSM") >= 16, name
        assert having(counts, "LDGSTS") >= 10, name
        # e4m3 is widened to fp16, whose products are exact.
        kind = "HMMA.16816.F32.BF16" if "ILb0E" in name else "HMMA.16816.F32"
        assert counts[kind] == having(counts, "HMMA"), name
    for name, counts in kernels.items():
        assert sum(counts.values()) > 100, name
        # Hopper's and data-centre Blackwell's own: sm_120 has none of them.
        assert not having(counts, "HGMMA", "WGMMA", "UTMA", "UBLKCP", "UTC"), name
        assert not having(counts, "LDL", "STL"), name


def test_resources(cubin: Path) -> None:
    report = run("cuobjdump", "-res-usage", str(cubin))
    found = re.findall(r"Function (\S+):\s*\n?\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
                       report)  # fmt: skip
    assert len(found) == 8
    for name, registers, stack, _shared, local in found:
        assert (int(stack), int(local)) == (0, 0), name
        assert int(registers) <= 255


def test_one_of_a_kind_for_every_target(library: Path) -> None:
    assert nvcc.check(library, "linux/amd64") == ("sm_90a", "sm_120a", "sm_121a", "compute_120")


def test_symbols(library: Path) -> None:
    with library.open("rb") as file:
        elf = ELFFile(file)
        table, dynamic = (elf.get_section_by_name(name) for name in (".dynsym", ".dynamic"))
        assert isinstance(table, SymbolTableSection)
        assert isinstance(dynamic, DynamicSection)
        symbols = list(table.iter_symbols())
        needed = [vars(tag)["needed"] for tag in dynamic.iter_tags("DT_NEEDED")]
    exported = {one.name for one in symbols if one["st_shndx"] != "SHN_UNDEF"}
    wanted = {one.name for one in symbols if one["st_shndx"] == "SHN_UNDEF"} - {""}
    header = (SOURCE / "glm53_sparse_mla.h").read_text()
    assert exported == set(re.findall(r"GLM53_API [^(]*?(glm53_\w+)\(", header))
    foreign = re.compile(r"torch|c10|^_?Py|aoti|tvm|pybind", re.IGNORECASE)
    assert not [name for name in exported | wanted if foreign.search(name)]
    # Of CUDA the runtime alone, and of C++ only what the runtime of the compiler always has.
    allowed = re.compile(
        r"^(cuda|__cuda|__cxa_|_ITM_|__gmon_start__|__stack_chk_fail|_Unwind_Resume|__gxx_|snprintf)"
    )
    assert not [name for name in wanted if not allowed.match(name)]
    assert {name for name in needed if "cuda" in name} == {"libcudart.so.13"}
    assert not [
        name for name in needed if not re.match(r"lib(cudart|stdc\+\+|m|c|gcc_s)\.so", name)
    ]


def test_same_bytes_from_another_folder(library: Path, cuda: Path, tmp_path: Path) -> None:
    copy = tmp_path / "deeper" / "csrc"
    shutil.copytree(SOURCE, copy)
    again = nvcc.build(copy, tmp_path / "again.so", "linux/amd64", cuda=cuda)
    assert again.path.read_bytes() == library.read_bytes()


def broken_copy(folder: Path, before: str, after: str) -> Path:
    """The sources with one change to their shapes."""
    copy = folder / "csrc"
    shutil.copytree(SOURCE, copy)
    config = copy / "config.cuh"
    text = config.read_text()
    assert text.count(before) == 1
    config.write_text(text.replace(before, after))
    return copy


ONE = nvcc.Options(cubins=("sm_120a",), ptx=None, arches=("sm_120",))


def test_gate_on_shared_memory(cuda: Path, tmp_path: Path) -> None:
    source = broken_copy(tmp_path, "Config<false, 1, 2, 32, 3>", "Config<false, 1, 2, 32, 4>")
    with pytest.raises(BrokenError, match=r"config\.cuh(.|\n)*SharedMemory") as caught:
        nvcc.build(source, tmp_path / "x.so", "linux/amd64", cuda=cuda, options=ONE)
    assert caught.value.exit_code == 3
    assert "134144" in str(caught.value)  # bytes found
    assert not (tmp_path / "x.so").exists()


def test_gate_on_spills(cuda: Path, tmp_path: Path) -> None:
    # Twice the threads get half the registers each.
    source = broken_copy(tmp_path, "kThreads = kWarps * 32;", "kThreads = kWarps * 32;  //")
    forward = source / "forward.cuh"
    bounds = "__launch_bounds__(kThreads, 1) forward"
    text = forward.read_text()
    assert text.count(bounds) == 1
    forward.write_text(text.replace(bounds, "__launch_bounds__(kThreads, 2) forward"))
    with pytest.raises(BrokenError, match="bytes of spilled registers, found") as caught:
        nvcc.build(source, tmp_path / "x.so", "linux/amd64", cuda=cuda, options=ONE)
    said = str(caught.value)
    assert "glm53_sparse_mla.cu: _ZN5glm537forward" in said
    assert "for sm_120a: expected at most 0" in said
    assert not (tmp_path / "x.so").exists()
