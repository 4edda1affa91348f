"""The kernel's library, compiled once a session for all who read it."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import pytest

from imagebuild import nvcc
from imagebuild.config import ROOT, load_recipe
from imagebuild.lock import read_lock
from imagebuild.toolchain import compiler
from imagebuild.upstream import Upstream

SOURCE = ROOT / "kernel" / "csrc"


@pytest.fixture(scope="session")
def cuda() -> Path:
    """A CUDA toolkit's folder: this machine's, else the pinned wheels."""
    recipe = load_recipe("glm53-flash")
    with Upstream(recipe, read_lock(recipe.lock_file)) as upstream:
        return compiler(upstream).path.parent.parent


@pytest.fixture(scope="session")
def library(cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole library for linux/amd64, shared by all workers of a run."""
    files = [Path(nvcc.__file__), *sorted(SOURCE.iterdir())]
    content = b"".join(path.read_bytes() for path in files)
    folder = tmp_path_factory.getbasetemp().parent / "kernel-library"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            nvcc.build(SOURCE, path, "linux/amd64", cuda=cuda)
    return path
