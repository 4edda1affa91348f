"""`kernel build`: compiles kernel/csrc into the library that the image and the plug-in load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from imagebuild import nvcc
from imagebuild.commands.context import Context
from imagebuild.toolchain import compiler, folder, own_platform

NAME = "libglm53_kernel.so"
_HOPPER = "sm_90a"  # for tests on hardware that we have


def build(context: Context) -> int:
    """Builds, checks what came of it, and says what each kernel uses."""
    asked = context.arguments
    platform = asked.platform or own_platform()
    out = Path(asked.out) if asked.out else place(context.dist, platform)
    chosen = options(asked.arch or nvcc.GPU_ARCHES, debug=asked.debug)
    cuda = Path(asked.cuda) if asked.cuda else None
    built = compiled(context, platform, out, chosen, cuda=cuda, pinned=asked.pinned)
    context.console.result(f"{built.path}: {', '.join(built.targets)}")
    context.console.document({"library": str(built.path), "platform": platform,
                              "targets": list(built.targets)})  # fmt: skip
    return 0


def place(dist: Path, platform: str) -> Path:
    """Where the library of a platform goes by default."""
    return dist / "kernel" / platform.split("/")[1] / NAME


def compiled(
    context: Context,
    platform: str,
    out: Path,
    chosen: nvcc.Options,
    *,
    cuda: Path | None = None,
    pinned: bool = False,
) -> nvcc.Built:
    """The library, made by `cuda`'s compiler, this machine's, or the pinned one. Raises as nvcc."""
    with context.upstream() as upstream:
        found = compiler(upstream, folder(upstream) if pinned else cuda)
    context.console.step(f"nvcc {found.version} ({found.path}) for {platform}")
    built = nvcc.build(context.root / "kernel" / "csrc", out, platform,
                       cuda=found.path.parent.parent, options=chosen)  # fmt: skip
    for one in built.kernels:
        context.console.step(f"{one.target} {one.kernel}: {one.registers} registers, "
                             f"{one.stack} bytes of stack, {one.spill_stores} spilled")  # fmt: skip
    return built


def options(arches: Sequence[str], *, debug: bool = False) -> nvcc.Options:
    """What a library for these GPUs carries; with all of them, just what the image gets.

    A debug build traps on rows out of range. It may spill: nobody serves with it.
    """
    chosen = tuple(arch for arch in nvcc.GPU_ARCHES if arch in arches)
    cubins = (_HOPPER, *(f"{arch}a" for arch in chosen))
    usual = nvcc.Options()
    return nvcc.Options(cubins=cubins, arches=chosen, flags=("-DGLM53_DEBUG",) if debug else (),
                        limits=None if debug else usual.limits)  # fmt: skip
