"""Patched vLLM trees of Python files, stand-ins for the library, and the smoke environment."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagebuild.config import load_recipe
from imagebuild.deep.run import _environment
from imagebuild.patching.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.31.0", "0.32.0", "0.33.0")


@pytest.fixture(scope="session")
def python() -> Iterator[Path]:
    """An interpreter that imports vLLM's Python code; made once, and kept in the user's cache."""
    from imagebuild.console import Console
    from imagebuild.lock import read_lock
    from imagebuild.smoke import environment
    from imagebuild.upstream import Upstream

    recipe = load_recipe("glm53-flash")
    lock = read_lock(recipe.lock_file)
    with Upstream(recipe, lock) as upstream:
        made = environment.provide(recipe.folder / "smoke.txt", lock.base("0.31.0").pins["torch"],
                                   ["2.13.0", "2.14.0"], upstream, Console())  # fmt: skip
    with made.held():
        yield made.python


@pytest.fixture(scope="session")
def vllm_tree(
    real_tree: Callable[[str], Tree], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Writes the Python files of a release, with the patches of the routes, once a session."""
    from tests.patches.harness import patched

    made: dict[str, Path] = {}

    def make(version: str) -> Path:
        if version not in made:
            base = real_tree(version)
            paths = [path for path in base.iter("vllm/") if path.endswith(".py")]
            prefetch = getattr(base, "prefetch", None)
            if prefetch:
                prefetch(paths)
            tree = patched("vllm_mla_route_switch", base)
            folder = tmp_path_factory.mktemp(f"vllm-{version}")
            # The series adds one file outside of the package: the table of routes.
            for path in [*paths, "glm_mla_route.py"]:
                place = folder / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(tree.read(path))
            made[version] = folder
        return made[version]

    yield make
    for folder in made.values():
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a library with the functions of glm53_sparse_mla.h that do nothing."""
    folder = tmp_path_factory.mktemp("stand-in")
    source = ROOT / "tests" / "kernel" / "stand_in.c"

    def build(name: str, *options: str) -> Path:
        library = folder / f"{name}.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True
        )
        return library

    return build


@pytest.fixture(scope="session")
def run_python(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a script in the smoke environment, with no variable of the caller's that matters."""
    cache = tmp_path_factory.getbasetemp() / "pycache"

    def run(*words: str | Path) -> str:
        home = tmp_path_factory.mktemp("home")
        done = subprocess.run(
            [python, "-I", "-W", "ignore", "-X", f"pycache_prefix={cache}", *words],
            cwd=home, env=_environment(home), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run
