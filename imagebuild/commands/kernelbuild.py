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
    out = Path(asked.out) if asked.out else context.dist / "kernel" / platform.split("/")[1] / NAME
    with context.upstream() as upstream:
        named = folder(upstream) if asked.pinned else Path(asked.cuda) if asked.cuda else None
        cuda = compiler(upstream, named)
    context.console.step(f"nvcc {cuda.version} ({cuda.path}) for {platform}")
    chosen = options(asked.arch or nvcc.GPU_ARCHES, debug=asked.debug)
    built = nvcc.build(context.root / "kernel" / "csrc", out, platform,
                       cuda=cuda.path.parent.parent, options=chosen)  # fmt: skip
    for one in built.kernels:
        context.console.step(f"{one.target} {one.kernel}: {one.registers} registers, "
                             f"{one.stack} bytes of stack, {one.spill_stores} spilled")  # fmt: skip
    context.console.result(f"{built.path}: {', '.join(built.targets)}")
    context.console.document({"library": str(built.path), "platform": platform,
                              "nvcc": cuda.version, "targets": list(built.targets)})  # fmt: skip
    return 0


def options(arches: Sequence[str], *, debug: bool = False) -> nvcc.Options:
    """What a library for these GPUs carries; with all of them, just what the image gets.

    A debug build traps on rows out of range. It may spill: nobody serves with it.
    """
    chosen = tuple(arch for arch in nvcc.GPU_ARCHES if arch in arches)
    cubins = (_HOPPER, *(f"{arch}a" for arch in chosen))
    usual = nvcc.Options()
    return nvcc.Options(cubins=cubins, arches=chosen, flags=("-DGLM53_DEBUG",) if debug else (),
                        limits=None if debug else usual.limits)  # fmt: skip
