"""`kernel build`, `check` and `bench`."""

from __future__ import annotations

from imagebuild.config import PLATFORMS
from imagebuild.options.common import Verbs, group, verb
from imagebuild.patching.patch import GPU_ARCHES


def kernel(verbs: Verbs) -> None:
    """`kernel`."""
    kernel = group(verbs, "kernel", "the attention kernel")
    build = verb(kernel, "build", "commands.kernelbuild:build",
                  "compile the library, with this machine's nvcc or the pinned one")  # fmt: skip
    build.add_argument("--arch", choices=GPU_ARCHES, action="append",
                       help="may be given twice; default: all")  # fmt: skip
    build.add_argument("--platform", choices=PLATFORMS, help="default: this machine's")
    build.add_argument("--cuda", metavar="DIR", help="a CUDA toolkit to take nvcc from")
    build.add_argument("--pinned", action="store_true",
                       help="take the pinned compiler even where there is one")  # fmt: skip
    build.add_argument("--debug", action="store_true", help="trap on rows that are out of range")
    build.add_argument("--out", metavar="FILE", help="default: below dist/kernel")
    build.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    check = verb(kernel, "check", "commands.kernelruns:check",
                  "check the kernel and FlashKDA on this machine's GPU against fp64")  # fmt: skip
    check.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    check.add_argument("--only", choices=["kernel", "flashkda"], help="default: both")
    check.add_argument("--flashkda", metavar="FILE",
                       help="default: the one in the installed vLLM, if any")  # fmt: skip
    bench = verb(kernel, "bench", "commands.kernelruns:bench",
                  "time the kernel beside every other one that a user could pick")  # fmt: skip
    bench.add_argument("--prepare", action="store_true",
                       help="make the baselines and stop: needs nvcc and no GPU")  # fmt: skip
    bench.add_argument("--parts", metavar="DIR", help="the baselines; default: dist/kernel-bench")
    bench.add_argument("--tilelang", action="store_true", help="prepare TileLang too, 90 MB")
    bench.add_argument("--out", metavar="FILE", help="default: kernel/bench/results.json")
    bench.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    for one in (check, bench):
        one.add_argument("--python", metavar="FILE",
                         help="one that has torch; default: the first python3 on PATH")  # fmt: skip
        one.add_argument(
            "--library",
            metavar="FILE",
            help="default: what kernel build made, or the installed one",
        )
