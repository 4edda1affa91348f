"""A clone of the repository to build images from, and what the engine says about them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "glm53-flash"
CONTEXT = (".dockerignore", "Dockerfile", "image", "imagebuild", "kernel", "patches",
           "verify-base.py")  # fmt: skip
_RUN = """\
import sys
from pathlib import Path
from imagebuild.cli import main
sys.exit(main(sys.argv[2:], root=Path(sys.argv[1])))
"""
# What the kernel stage compiles in most tests: one kernel behind a plain C function.
_KERNEL = """\
#include <cuda_runtime.h>
__global__ void scale(float* x, float by) { x[blockIdx.x * blockDim.x + threadIdx.x] *= by; }
extern "C" __attribute__((visibility("default"))) int stand_in_scale(float* x, float by, int n) {
  scale<<<n, 128>>>(x, by);
  return static_cast<int>(cudaGetLastError());
}
// The names that the plug-in binds; verify looks for them.
#define NAME extern "C" __attribute__((visibility("default"))) int
NAME glm53_sparse_mla_abi() { return 1; }
NAME glm53_sparse_mla_forward(const void*) { return 1; }
NAME glm53_sparse_mla_query(int, void*) { return 1; }
NAME glm53_sparse_mla_workspace(long, int, int, int, void*) { return 1; }
"""
# Two clones of the same content are the same commit.
_GIT = {
    "GIT_AUTHOR_NAME": "Test", "GIT_AUTHOR_EMAIL": "test@example.invalid",
    "GIT_COMMITTER_NAME": "Test", "GIT_COMMITTER_EMAIL": "test@example.invalid",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}  # fmt: skip


def docker(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Asks the engine; the caller judges the exit code."""
    return subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True,
                          check=False)  # fmt: skip


def inspect(reference: str) -> dict[str, Any] | None:
    """The engine's record of an image."""
    done = docker("image", "inspect", reference)
    return dict(json.loads(done.stdout)[0]) if done.returncode == 0 else None


@dataclass(frozen=True)
class Outcome:
    """What a call of build.py gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON."""
        return dict(json.loads(self.out))

    def steps(self) -> dict[str, str]:
        """What became of each step that runs or copies, such as {"patched 3/4": "cached"}."""
        found = re.findall(
            r"^- \[(\S+ +\d+/\d+)\] (?!FROM ).*: (cached|[\d.]+ s)$", self.err, re.MULTILINE
        )
        return {" ".join(name.split()): what for name, what in found}


@dataclass(frozen=True)
class First:
    """A finished build.

    Attributes:
        tag: loaded, and pushed to the registry that it names.
        arch, options: with which it was built.
    """

    repository: Repository
    outcome: Outcome
    tag: str
    arch: str
    options: tuple[str, ...] = ()


@dataclass
class Repository:
    """A clone of a repository.

    Attributes:
        folder: where it is.
        base: what its builds start from.
        cuda: a CUDA toolkit.
        source: of what it is a clone.
        has_kernel: with our own CUDA sources, which compile for a minute, not a small one.
        tags: those that a build may have made.
    """

    folder: Path
    base: str
    cuda: Path
    source: Path = ROOT
    has_kernel: bool = False
    tags: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        for name in CONTEXT:
            source = self.source / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(source, self.folder / name, ignore=ignored)
            else:
                shutil.copyfile(source, self.folder / name)
        if not self.has_kernel:
            shutil.rmtree(self.folder / "kernel" / "csrc")
            (self.folder / "kernel" / "csrc").mkdir()
            (self.folder / "kernel" / "csrc" / "small.cu").write_text(_KERNEL)
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def git(self, *arguments: str) -> str:
        """Runs git in the clone."""
        command = ["git", "-C", str(self.folder), *arguments]
        done = subprocess.run(command, env={**os.environ, **_GIT}, capture_output=True, text=True,
                              check=True)  # fmt: skip
        return done.stdout.strip()

    def commit(self) -> str:
        """Commits everything; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=test")
        return self.git("rev-parse", "HEAD")

    def command(
        self, tag: str, *options: str, base: str | None = None, arch: str = "sm_120"
    ) -> list[str]:
        """A call of `build.py build --engine docker`."""
        self.tags.add(tag)
        return [
            sys.executable, "-c", _RUN, str(self.folder), "build", "--engine", "docker",
            "--arch", arch, "--base", base or self.base, "--tag", tag,
            "--build-context", f"cuda={self.cuda}", "--format", "json", *options,
        ]  # fmt: skip

    def build(
        self, tag: str, *options: str, base: str | None = None, arch: str = "sm_120"
    ) -> Outcome:
        """Builds and waits."""
        command = self.command(tag, *options, base=base, arch=arch)
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        return Outcome(done.returncode, done.stdout, done.stderr)
