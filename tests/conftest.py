"""Fixtures for the whole suite: real upstream trees, read through the product's own sources."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from imagebuild.patching.tree import Tree

if TYPE_CHECKING:
    from tests.support.browser import Browser
    from tests.support.realtrees import FolderTrees, RealTrees

# A folder with unzipped wheels (v0.31.0/vllm/...) to use instead of the package index.
TREES = "IMAGEBUILD_TEST_TREES"
# Folders whose tests share something that takes a minute to make: an image, a library, a venv.
SHARED = ("engine", "kernel", "deep")
FIXTURES = {"real_tree", "real_base"}


def pytest_configure() -> None:
    """Background jobs of a shell ignore SIGINT, and those of nohup SIGHUP; both are inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes `version` once for each release that its class names."""
    versions = getattr(metafunc.cls, "versions", None)
    if versions is not None and "version" in metafunc.fixturenames:
        metafunc.parametrize("version", versions)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Gives a process whole files, and of `SHARED` folders all: xdist's own groups need a mark a
    test, and no longer reach its scheduler under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name in SHARED if name in file.split("/")), file)

    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what reads a real wheel, and what needs a browser."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
        if FIXTURES & set(getattr(item, "fixturenames", ())) and not os.environ.get(TREES):
            item.add_marker(pytest.mark.network)


@pytest.fixture(scope="session")
def _trees() -> Iterator[RealTrees | FolderTrees]:
    # Imported here, since the engine's tests run where the sources' libraries are absent.
    from tests.support.realtrees import FolderTrees, RealTrees

    folder = os.environ.get(TREES)
    if folder:
        yield FolderTrees(Path(folder))
        return
    with RealTrees() as trees:
        yield trees


@pytest.fixture(scope="session")
def real_tree(_trees: RealTrees | FolderTrees) -> Callable[[str], Tree]:
    """Opens the vLLM wheel of a release; what it reads is kept in the user's cache."""
    return _trees.open


@pytest.fixture(scope="session")
def real_base(_trees: RealTrees | FolderTrees) -> Callable[[str], Tree]:
    """Opens the vLLM wheel of a release beside the FlashInfer that it pins."""
    return _trees.base


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium. For one module: its event loop would stop other tests' own."""
    from tests.support.browser import chromium

    with chromium() as found:
        yield found
