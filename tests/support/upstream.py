"""Runs whole upstream modules without torch: named ones are real, all others are stand-ins."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from imagebuild.patching.tree import Tree

_ROOTS = ("vllm", "torch", "regex", "numpy", "typing_extensions", "transformers", "flashinfer")


class _Meta(type):
    """Attributes of a stand-in class are stand-ins."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand


class Stand(metaclass=_Meta):
    """A class, a base, a value and a decorator that stands for anything and does nothing."""

    def __init__(self, *args: Any, **words: Any) -> None: ...

    def __call__(self, *args: Any, **words: Any) -> Any:
        return Stand()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand()

    def __class_getitem__(cls, _item: object) -> type[Stand]:
        return cls


class _StandModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(
        self, tree: Tree, real: frozenset[str], stubs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.tree, self.real, self.stubs = tree, real, stubs

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        file = fullname.replace(".", "/")
        top = fullname.partition(".")[0]
        if fullname not in self.real and top not in _ROOTS:
            return None
        there = any(self.tree.exists(f"{file}{end}") for end in (".py", "/__init__.py"))
        if (top == "vllm" or fullname in self.real) and not there:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname not in self.real)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in self.real else _StandModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module).update(self.stubs.get(name, {}))
        if name in self.real:
            path = name.replace(".", "/") + ".py"
            exec(compile(self.tree.read(path), path, "exec", dont_inherit=True), vars(module))


@contextlib.contextmanager
def upstream(
    tree: Tree, real: set[str], stubs: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[None]:
    """Makes the tree importable while the block runs, and forgets it afterwards.

    Args:
        tree: where the modules are.
        real: dotted names whose source runs; a name that the tree lacks cannot be imported.
        stubs: attributes of stand-ins, by module.
    """
    finder = _Finder(tree, frozenset(real), stubs or {})

    def is_ours(name: str) -> bool:
        return name in real or name.partition(".")[0] in _ROOTS

    kept = {name: module for name, module in sys.modules.items() if is_ours(name)}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
