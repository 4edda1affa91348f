"""Copies what the other steps read into one folder, so that their cache depends on that alone.

BuildKit keys a bind mount by its content. A mount of the whole repository would run the series
again after any edit; a copy of just the files that the series can read does not.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from imagebuild import plugin
from imagebuild.config import Recipe, load_recipe, recipes
from imagebuild.errors import UsageError
from imagebuild.steps.run import finish, say

_ROOTS = ("imagebuild.steps.series", "imagebuild.verify.script")
_FLASHKDA = ("imagebuild.steps.flashkda",)
_PLUGIN = ("imagebuild.steps.plugin",)
_HEADERS = "image/runtime/link_cuda_headers.py"
_RUNTIME = Path("image/runtime")
_ENTRYPOINT = _RUNTIME / "entrypoint.py"
# What the entry point imports is here in the image.
_SHARE = Path("opt/glm53")
_BESIDE = ("glm_mla_route.py", "glm_chat_template.py", "glm47_failclosed.py")


def main(arguments: Sequence[str]) -> int:
    """`inputs OUT`: writes OUT/series for apply and verify, and others beside it."""
    return finish("inputs", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise UsageError(f"inputs: expected one folder, found {list(arguments)!r}")
    root, out = Path.cwd(), Path(arguments[0])
    series = [path for name in recipes(root) for path in series_files(load_recipe(name, root))]
    copy(root, series, out / "series")
    headers = [Path(_HEADERS)] if (root / _HEADERS).is_file() else []
    copy(root, headers, out / "headers")
    copy(root, [_ENTRYPOINT], out / "runtime")
    copy(root / _RUNTIME, serving_files(root), out / "runtime" / _SHARE)
    copy(root, template_files(root), out / "runtime" / _SHARE)
    copy(root, flashkda_files(root), out / "flashkda")
    copy(root, plugin_files(root), out / "plugin")
    say(f"inputs: {len(set(series))} files for series and verify")


def copy(root: Path, paths: Iterable[Path], out: Path) -> None:
    """Copies `paths`, relative to `root`, below `out`, which is made even where there are none."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(set(paths)):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, out / path)


def series_files(recipe: Recipe) -> Iterator[Path]:
    """Every file, relative to the repository, that applying or verifying a recipe can read."""
    root = recipe.root
    starts = {_module_file(root, name) for name in _ROOTS}
    starts |= set(recipe.patches_dir.glob("*.py"))
    yield Path("verify-base.py")
    for path in _imported(root, starts):
        yield path.relative_to(root)
    for path in recipe.folder.iterdir():
        if path.is_file():
            yield path.relative_to(root)
    # Diffs, forks and their records.
    for path in recipe.patches_dir.rglob("*"):
        is_module = path.parent == recipe.patches_dir and path.suffix == ".py"
        if path.is_file() and not is_module and "__pycache__" not in path.parts:
            yield path.relative_to(root)
    for patch in recipe.series().patches:
        for variant in patch.variants:
            sources = [Path(file.source) for file in variant.files]
            yield from (Path("image/runtime") / one for one in sources if not one.is_absolute())


def flashkda_files(root: Path) -> Iterator[Path]:
    """What the FlashKDA steps read: their modules and the recipes, no patch and no lock."""
    yield from (path.relative_to(root) for path in _imported(root, [
        path for path in (_module_file(root, name) for name in _FLASHKDA) if path
    ]))  # fmt: skip
    yield from (Path("image") / name / "recipe.toml" for name in recipes(root))


def serving_files(root: Path) -> Iterator[Path]:
    """What the entry point imports beside itself, relative to image/runtime."""
    for path in (root / _RUNTIME / "serving").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(root / _RUNTIME)
    yield from map(Path, _BESIDE)


def template_files(root: Path) -> Iterator[Path]:
    """Our own modules that edit the chat template at each start."""
    start = root / _RUNTIME / "glm_chat_template.py"
    yield from (path.relative_to(root) for path in _imported(root, [start]) - {start})


def plugin_files(root: Path) -> Iterator[Path]:
    """What the plug-in's step reads: its modules, and the package with its metadata."""
    yield from (path.relative_to(root) for path in _imported(root, [
        path for path in (_module_file(root, name) for name in _PLUGIN) if path
    ]))  # fmt: skip
    folder = root / plugin.FOLDER
    if (folder / "pyproject.toml").is_file():
        yield Path(plugin.FOLDER) / "pyproject.toml"
        yield from (p.relative_to(root) for p in sorted((folder / plugin.PACKAGE).rglob("*.py")))


def _imported(root: Path, starts: Iterable[Path | None]) -> set[Path]:
    """Our own modules that these files import, at any depth, and their packages."""
    todo, seen = [path for path in starts if path], set[Path]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        names = _names(ast.parse(path.read_bytes()))
        found = {_module_file(root, part) for name in names for part in _prefixes(name)}
        todo += [one for one in found if one]
        package = path.parent / "__init__.py"
        if package.is_file():
            todo.append(package)
    return seen


def _names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] in ("imagebuild", "patches"):
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _module_file(root: Path, name: str) -> Path | None:
    place = root.joinpath(*name.split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
