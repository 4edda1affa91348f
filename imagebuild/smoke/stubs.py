"""Stand-ins for what no CPU can load, so that vLLM's Python imports; standard library only.

It runs inside the smoke environment, before anything of the tree. Only modules that are named here
are replaced: every other failing import is a finding and must stay one. A stub answers to every
attribute, so nothing that a probe claims may rest on a value that came out of one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder

# Extension modules of the vLLM wheel that link CUDA and that some module imports without asking.
NATIVE = (
    "vllm._C_stable_libtorch",
    "vllm._deepselect_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
)
# Whole projects, with the version that their metadata claims. The index's torchvision registers
# operators that a CPU build of torch lacks, and dies in that; transformers asks for its version.
PROJECTS: Mapping[str, str] = {"torchvision": "0.28.0"}


class _Answering(type):
    """Makes every class attribute another placeholder."""

    def __getattr__(cls, name: str) -> type[Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class Placeholder(metaclass=_Answering):
    """Stands for any class, function or constant of a stubbed module."""

    def __init__(self, *_arguments: object, **_named: object) -> None:
        pass

    def __call__(self, *_arguments: object, **_named: object) -> Placeholder:
        return Placeholder()

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type[Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class _Finder(MetaPathFinder, Loader):
    """Finds the named modules and, below a stubbed project, all of its submodules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        is_project = fullname.partition(".")[0] in PROJECTS
        if not is_project and fullname not in NATIVE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_project)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module answers by itself."""


class _Distribution(importlib.metadata.Distribution):
    """Metadata of a stubbed project: its name and version."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            version = PROJECTS[self._name]
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\n"
        return f"{self._name}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(path=path)


class _Metadata(MetaPathFinder):
    """Answers `importlib.metadata` for the stubbed projects; it finds no module."""

    def find_spec(self, *_arguments: object) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> list[_Distribution]:
        wanted = context.name if context is not None else None
        return [_Distribution(name) for name in PROJECTS if wanted in (None, name)]


def install() -> None:
    """Puts the stubs before every other way to import; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Finder(), _Metadata()]
