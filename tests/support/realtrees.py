"""Real releases for tests: vLLM and the FlashInfer that it pins, by the product's own sources."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from imagebuild.patching.tree import DirTree, Tree, UnionTree
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import PackageIndex
from imagebuild.sources.pipconf import read_settings
from imagebuild.sources.wheel import open_wheel
from imagebuild.sources.wheelbase import Wheel

PLATFORM = "linux/amd64"
FLASHINFER = "flashinfer-python"
PATCHES = Path(__file__).resolve().parents[2] / "patches" / "glm53_flash"


def wanted_paths() -> Iterator[str]:
    """Every file that a patch or an upstream fix reads, so that a wheel is asked once for all."""
    for file in sorted(PATCHES.glob("*.py")):
        module = importlib.import_module(f"patches.glm53_flash.{file.stem}")
        for fix in getattr(module, "FIXES", ()):
            yield from fix.probe.paths
        patch = getattr(module, "PATCH", None)
        for variant in patch.variants if patch else ():
            yield from (edit.path for edit in variant.edits)
            yield from (symbol.path for symbol in variant.relies_on)
        for note in patch.notes if patch else ():
            yield from note.paths


class RealTrees:
    """Opens each wheel once, by ranges, with the user's configured index and cache."""

    def __init__(self) -> None:
        self._cache = Cache()
        self._http = Http(read_settings())
        self._index = PackageIndex(self._http.settings, self._http, self._cache)
        self._open: dict[tuple[str, str], Wheel] = {}
        # One object a release, so that what tests derive from it can be kept.
        self.base = functools.cache(self._base)

    def __enter__(self) -> RealTrees:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()
        self._cache.close()

    def _wheel(self, project: str, version: str) -> Wheel:
        if (project, version) not in self._open:
            # Yanked releases stay readable: a test must not turn red because upstream withdrew one.
            file = self._index.wheel(project, version, PLATFORM, allow_yanked=True)
            wheel = open_wheel(file, self._http, self._cache, platform=PLATFORM)
            wheel.prefetch([path for path in wanted_paths() if wheel.exists(path)])
            self._open[project, version] = wheel
        return self._open[project, version]

    def open(self, version: str) -> Tree:
        """The vLLM wheel of a release."""
        return self._wheel("vllm", version)

    def _base(self, version: str) -> Tree:
        """The vLLM wheel beside the FlashInfer wheel that it pins."""
        vllm = self._wheel("vllm", version)
        pinned = vllm.requirement(FLASHINFER)
        assert pinned is not None, f"vllm {version} pins no {FLASHINFER}"
        return UnionTree([vllm, self._wheel(FLASHINFER, pinned)])


class FolderTrees:
    """The same from a folder with unzipped wheels: v0.31.0/, fi0.7.0.post1/ and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = functools.cache(self._tree)
        self.base = functools.cache(self._base)

    def _tree(self, version: str) -> Tree:
        return DirTree(self.folder / f"v{version}")

    def _base(self, version: str) -> Tree:
        (metadata,) = (self.folder / f"v{version}").glob("vllm-*.dist-info/METADATA")
        found = re.search(rf"^Requires-Dist: {FLASHINFER}==(\S+)", metadata.read_text(), re.M)
        assert found, f"vllm {version} pins no {FLASHINFER}"
        return UnionTree([self.open(version), DirTree(self.folder / f"fi{found[1]}")])
