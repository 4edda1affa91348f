"""Which names of `ray` a release's executor asks for, against those that a shim is known to give.

With `--cluster mentat` the package `ray` is a shim that gives what vLLM's executor needed when it
was written. The list and where it was read stand in the recipe's `ray-names.toml`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.errors import UsageError
from imagebuild.patching.evaluate import Finding
from imagebuild.patching.structure import NotThere, parse
from imagebuild.patching.tree import Tree

FILE = "ray-names.toml"
FOLDERS = ("vllm/v1/executor/ray_", "vllm/ray/")


@dataclass(frozen=True)
class Shim:
    """What a shim gives, and where that was read.

    Attributes:
        name: of the shim, which is the cluster that a build chooses it by.
        names: dotted names; "()" stands for a call, after which its result is asked.
        skipped: files that are not looked at, with the reason.
        tolerated: names that it lacks and that are not needed, with the reason.
    """

    name: str
    names: frozenset[str]
    skipped: Mapping[str, str] = field(default_factory=dict)
    tolerated: Mapping[str, str] = field(default_factory=dict)

    def gives(self, used: str) -> bool:
        """Whether a used chain is in the list, or goes on from a value or call that is."""
        plain = used.removesuffix("()")
        known = self.names | self.tolerated.keys()

        def leads_on(start: str) -> bool:
            """A module, or a call of whose result more is listed: `import ray`, `ray.util`."""
            return any(name.startswith((f"{start}.", f"{start}().")) for name in known)

        if plain in known or leads_on(plain):
            return True
        return any(start in known and not leads_on(start) for start in _starts(plain))


def read_shim(path: Path) -> Shim | None:
    """Reads the list; None where the recipe has none.

    Raises:
        UsageError: it is malformed.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        return Shim(
            str(content["shim"]),
            frozenset(map(str, content["names"])),
            dict(content.get("skipped", {})),
            dict(content.get("tolerated", {})),
        )
    except FileNotFoundError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: expected a list of names that a shim gives, found: {error}",
                         hint="restore it with git") from error  # fmt: skip


def ray_findings(recipe: Recipe, tree: Tree) -> tuple[Finding, ...]:
    """A finding for every name that the executor asks for and the shim is not known to give.

    It is a warning where the recipe builds with that shim, else for information.
    """
    shim = read_shim(recipe.series_file.parent / FILE)
    if shim is None:
        return ()
    level = "warning" if recipe.image.cluster == shim.name else "info"
    fix = f"read python/ray of the {shim.name} in the lock; add the name to {FILE}, or take a newer"
    found = []
    for name, path, line in _asked(shim, tree):
        message = (
            f"vLLM asks for {name}, which {shim.name} is not known to give "
            f"(matters with --cluster {shim.name})"
        )
        found.append(Finding(level, "ray-name", message, path, line, fix))
    return tuple(found)


def _asked(shim: Shim, tree: Tree) -> list[tuple[str, str, int]]:
    """Names that are not given, each at the first place that asks for it."""
    paths = [path for folder in FOLDERS for path in tree.iter(folder) if path.endswith(".py")]
    paths = [path for path in paths if path not in shim.skipped]
    tree.prefetch(paths)
    found: dict[str, tuple[str, int]] = {}
    for path in paths:
        try:
            module = parse(tree, path)
        except NotThere:
            continue  # what cannot be parsed asks for nothing that could be listed
        for name, line in sorted(used_names(module), key=lambda one: one[1]):
            if not shim.gives(name):
                found.setdefault(name, (path, line))
    # `ray.dag` says all that `ray.dag.Node` does.
    return [
        (name, *place)
        for name, place in found.items()
        if not any(name != other and name.startswith(f"{other}.") for other in found)
    ]


def used_names(module: ast.Module) -> set[tuple[str, int]]:
    """Every dotted name of `ray` that a module uses, with its line; calls as "()"."""
    bound: dict[str, str] = {}
    found: set[tuple[str, int]] = set()
    for node in ast.walk(module):
        for local, name in _imported(node):
            bound[local] = name
            found.add((name, getattr(node, "lineno", 0)))
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            head, dot, rest = _chain(node).partition(".")
            plain = head.removesuffix("()")
            if plain in bound:
                found.add((f"{bound[plain]}{head[len(plain) :]}{dot}{rest}", node.lineno))
    return found


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names that an import binds to something of `ray`, each with its dotted name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "ray":
                yield (alias.asname, alias.name) if alias.asname else ("ray", "ray")
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if node.level == 0 and (node.module or "").partition(".")[0] == "ray":
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
            elif alias.name == "ray" and (node.module or "").startswith("vllm."):
                yield alias.asname or "ray", "ray"  # vLLM hands its own import on


def _chain(node: ast.AST) -> str:
    """The text of a name, attribute and call chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _chain(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Call):
        base = _chain(node.func)
        return f"{base}()" if base else ""
    return ""


def _starts(name: str) -> Iterator[str]:
    """The name itself and everything that it goes on from, calls with and without "()"."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        start = ".".join(parts[:count])
        while True:
            yield start
            if not start.endswith("()"):
                break
            start = start.removesuffix("()")
