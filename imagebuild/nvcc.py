"""The one caller of the CUDA compiler: sources in, one checked shared library out.

Standard library only: it runs in a Dockerfile stage, in the tree engine and in `kernel build`. It
must not fetch anything, and it leaves nothing but the library behind.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.errors import BrokenError, BuildError, EngineError, UsageError, raise_collected
from imagebuild.verify import fatbin, ptxas

# What every library carries: both cards, Hopper for tests on hardware that we have, and PTX for
# cards to come. An sm_120a cubin does not run on sm_121, so neither can stand for the other.
CUBINS = ("sm_90a", "sm_120a", "sm_121a")
PTX = "compute_120"
GPU_ARCHES = ("sm_120", "sm_121")
# Docker's word -> ELF machine, prefix of the cross compiler.
_MACHINES: Mapping[str, tuple[str, str]] = {
    "linux/amd64": ("x86_64", "x86_64-linux-gnu-"),
    "linux/arm64": ("aarch64", "aarch64-linux-gnu-"),
}
_OLDEST = (12, 9)  # the first nvcc that knows sm_121


@dataclass(frozen=True)
class Compiler:
    """An nvcc. `version` is the release, such as "13.0"; `include` holds the CUDA headers."""

    path: Path
    version: str
    include: Path


@dataclass(frozen=True)
class Options:
    """What differs between libraries.

    Attributes:
        cubins: targets of machine code.
        ptx: target of PTX; None for none.
        flags: for the compiler, such as macros and include folders.
        needed: sonames that the library asks for beside the CUDA runtime's.
        arches: GPUs that the library must run on.
        limits: what its kernels may use; None for code that is not ours.
    """

    cubins: tuple[str, ...] = CUBINS
    ptx: str | None = PTX
    flags: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    arches: tuple[str, ...] = GPU_ARCHES
    limits: ptxas.Limits | None = field(default_factory=ptxas.Limits)


@dataclass(frozen=True)
class Built:
    """A finished library.

    Attributes:
        path: the file.
        targets: of its GPU code, such as "sm_120a" and "compute_120".
        kernels: what each of them uses, where that is limited.
    """

    path: Path
    targets: tuple[str, ...]
    kernels: tuple[ptxas.Usage, ...] = ()


def find(cuda: Path | None = None) -> Compiler:
    """The compiler below `cuda`, else CUDA_HOME's, that on PATH, or /usr/local/cuda's.

    Raises:
        EngineError: there is none, it does not run, or it is too old for sm_121.
    """
    places = _places(cuda)
    path = next((place.resolve() for place in places if place.is_file()), None)
    if path is None:
        raise EngineError("nvcc: expected the CUDA compiler, found none in "
                          + ", ".join(str(place) for place in places),
                          hint="install CUDA 13.0's nvcc, set CUDA_HOME, or give the image build "
                          "one: --build-context cuda=DIR")  # fmt: skip
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{path}: cannot be started: {error.strerror}") from error
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if not match:
        raise EngineError(f"{path} --version: expected a release, found {done.stdout[-200:]!r}")
    if (int(match[1]), int(match[2])) < _OLDEST:
        raise EngineError(f"{path}: expected release 12.9 or newer, which knows sm_121, found "
                          f"{match[1]}.{match[2]}")  # fmt: skip
    return Compiler(path, f"{match[1]}.{match[2]}", _include(path))


def is_installed() -> bool:
    """Whether `find` finds a compiler where none is named."""
    return any(place.is_file() for place in _places(None))


def _places(cuda: Path | None) -> list[Path]:
    """Where a compiler may be, best first."""
    on_path = shutil.which("nvcc")
    named = [cuda, Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else [cuda]
    places = [place / "bin" / "nvcc" for place in named if place]
    places += [Path(on_path)] if on_path else []
    return [*places, Path("/usr/local/cuda/bin/nvcc")]


def _include(nvcc: Path) -> Path:
    """Where cuda_runtime.h is; it is the same for every processor.

    nvcc itself says so, since what is on PATH may be a script that starts another one.
    """
    dry = [str(nvcc), "--dryrun", "-x", "cu", "/dev/null", "-o", "/dev/null"]
    done = subprocess.run(dry, capture_output=True, text=True, check=False)
    told = re.findall(r'"-I([^"]+)"', done.stderr)
    places = [Path(place) for place in told] + [nvcc.parent.parent / "include"]
    for place in places:
        if (place / "cuda_runtime.h").is_file():
            return place.resolve()
    raise EngineError(f"{nvcc}: expected cuda_runtime.h in {' or '.join(map(str, places))}, "
                      "found none", hint="install the CUDA runtime's headers")  # fmt: skip


def host_compiler(platform: str) -> str:
    """The C++ compiler whose code runs on a platform. Raises UsageError or EngineError."""
    if platform not in _MACHINES:
        raise UsageError(f"platform: expected one of {', '.join(_MACHINES)}, found {platform!r}")
    machine, prefix = _MACHINES[platform]
    is_native = os.uname().machine == machine
    for name in [f"{prefix}g++", *(["g++", "c++"] if is_native else [])]:
        if shutil.which(name):
            return name
    package = "g++" if is_native else f"g++-{prefix}".rstrip("-").replace("_", "-")
    raise EngineError(f"{prefix}g++: expected a C++ compiler for {platform}, found none",
                      hint=f"install {package}; for the image, --build-arg TOOLCHAIN=IMAGE names "
                      "one that has it")  # fmt: skip


def command(
    compiler: Compiler,
    sources: Sequence[Path],
    out: Path,
    platform: str,
    *,
    stubs: Sequence[Path],
    options: Options,
) -> list[str]:
    """The call. `stubs` are empty libraries with the sonames of what is linked at run time."""
    targets = [(cubin.replace("sm_", "compute_"), cubin) for cubin in options.cubins]
    targets += [(options.ptx, options.ptx)] if options.ptx else []
    code = [f"-gencode=arch={virtual},code={real}" for virtual, real in targets]
    linked = [word for stub in stubs for word in ("-Xlinker", str(stub))]
    return [
        str(compiler.path), "-O3", "-std=c++17", "-shared",
        "-Xcompiler", "-fPIC,-fvisibility=hidden", *code, *options.flags,
        # Targets are compiled side by side; the bytes are the same.
        f"--threads={os.cpu_count() or 1}", *(["-Xptxas=-v"] if options.limits else []),
        "-ccbin", host_compiler(platform), f"-I{compiler.include}",
        # What is linked at run time is the image's own. Stubs stand in for it here, so that linking
        # for another processor needs nothing of that processor but its compiler.
        "-cudart", "none", "-Xlinker", "--no-as-needed", *linked,
        "-Xlinker", "--unresolved-symbols=ignore-in-object-files",
        # The symbol table names nvcc's temporary files, which carry its process id.
        "-Xlinker", "-s", "-Xlinker", "--build-id=none",
        *map(str, sources), "-o", str(out),
    ]  # fmt: skip


def build(
    source: Path,
    out: Path,
    platform: str,
    *,
    cuda: Path | None = None,
    sources: Sequence[Path] | None = None,
    options: Options | None = None,
) -> Built:
    """Compiles sources below `source` into `out`, and checks what came of it.

    Two runs give the same bytes when `source` has the same absolute path: the names of internal
    device symbols carry a checksum of it.

    Args:
        source: folder; the compiler runs in it.
        out: the library; its folder is made.
        platform: docker's word for the processor that it must run on.
        cuda: where to look for the compiler first.
        sources: what to compile; by default every .cu file of the folder.
        options: what differs from our own kernels.

    Raises:
        UsageError: no source, or an unknown platform.
        EngineError: no compiler, or it failed.
        BrokenError: the library has no code for a card, or is for another processor; a kernel
            needs more than its limits.
    """
    source, out = source.resolve(), out.absolute()
    found = [source / path for path in sources or ()] or sorted(source.rglob("*.cu"))
    if not found:
        raise UsageError(f"{source}: expected .cu files, found none")
    compiler, options = find(cuda), options or Options()
    sonames = [f"libcudart.so.{compiler.version.partition('.')[0]}", *options.needed]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nvcc-") as work:
        stubs = [_stub(Path(work), soname, platform) for soname in sonames]
        library = Path(work) / out.name
        call = command(compiler, found, library, platform, stubs=stubs, options=options)
        report = _compile(call, source)
        kernels = _gate(report, options, found) if options.limits else ()
        built = Built(out, check(library, platform, options.arches), kernels)
        shutil.copyfile(library, out)
    out.chmod(0o644)
    return built


def _stub(folder: Path, soname: str, platform: str) -> Path:
    """An empty library that makes what links to it ask for `soname`."""
    path = folder / soname
    echo_and_run([host_compiler(platform), "-shared", "-fPIC", "-nostdlib", "-x", "c++",
                  "/dev/null", f"-Wl,-soname,{soname}", "-o", str(path)], folder)  # fmt: skip
    return path


def _compile(call: Sequence[str], folder: Path) -> str:
    """Runs the compiler; what it reports. A static assertion that fails is a limit of ours."""
    try:
        return echo_and_run(call, folder, quiet="ptxas info")
    except EngineError as error:
        if "static assertion failed" in str(error):
            raise BrokenError(str(error)) from error
        raise


def _gate(report: str, options: Options, sources: Sequence[Path]) -> tuple[ptxas.Usage, ...]:
    """What the kernels use, once it is sure to be no more than allowed."""
    where = ", ".join(path.name for path in sources)
    try:
        found = ptxas.usages(report)
    except ptxas.ReportError as error:
        raise EngineError(f"{where}: ptxas -v: {error}") from error
    targets = {one.target for one in found}
    if targets != set(options.cubins):
        raise EngineError(f"{where}: ptxas -v: expected a report of {', '.join(options.cubins)}, "
                          f"found {', '.join(sorted(targets)) or 'none'}")  # fmt: skip
    problems = ptxas.broken(found, options.limits or ptxas.Limits(), where=where)
    raise_collected(BrokenError, "kernels need more than is allowed", problems,
                    hint="registers and shared memory: kernel/csrc/config.cuh")  # fmt: skip
    return tuple(found)


def check(library: Path, platform: str, arches: Sequence[str] = GPU_ARCHES) -> tuple[str, ...]:
    """The targets of a library's GPU code, once it is sure to run on every card we serve.

    Raises:
        BrokenError: it is not, or it is for another processor.
    """
    data = library.read_bytes()
    try:
        machine, codes = fatbin.machine(data), fatbin.device_code(data)
    except (fatbin.NotElfError, fatbin.FatbinError) as error:
        raise BrokenError(f"{library.name}: expected a library with GPU code, found: "
                          f"{error}") from error  # fmt: skip
    if machine != _MACHINES[platform][0]:
        raise BrokenError(f"{library.name}: expected code for {platform}, found {machine}")
    targets = tuple(dict.fromkeys(code.target for code in codes))
    missing = [arch for arch in arches if not fatbin.runs_on(codes, arch)]
    if missing:
        raise BrokenError(f"{library.name}: expected code that runs on {' and '.join(missing)}, "
                          f"found {', '.join(targets) or 'none'}")  # fmt: skip
    return targets


def echo_and_run(call: Sequence[str], folder: Path, *, quiet: str | None = None) -> str:
    """Shows a command and runs it there; what it said on standard error.

    Args:
        call: the words.
        folder: where it runs.
        quiet: lines with this, and lines that are indented, are not shown.

    Raises:
        EngineError: it failed; with the end of what it said.
    """
    sys.stderr.write(f"+ {shlex.join(call)}\n")
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise EngineError(f"{Path(call[0]).name}: expected exit code 0, found {done.returncode}:\n"
                          f"{said}")  # fmt: skip
    for line in done.stderr.splitlines():
        if not quiet or not (quiet in line or line.startswith(" ") or not line):
            sys.stderr.write(f"{line}\n")
    return done.stderr


def main(arguments: Sequence[str]) -> int:
    """`nvcc --source DIR --out FILE --platform P [--cuda DIR]`; the exit codes are build.py's."""
    parser = argparse.ArgumentParser(prog="nvcc")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--cuda", type=Path)
    asked = parser.parse_args(arguments)
    try:
        built = build(asked.source, asked.out, asked.platform, cuda=asked.cuda)
    except BuildError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"nvcc: error: {error}{hint}\n")
        return error.exit_code
    sys.stdout.write(f"{built.path}: {', '.join(built.targets)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
