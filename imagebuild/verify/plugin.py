"""Whether the vLLM plug-in is whole: its project, its entry points, its modules and its library.

All of it on paper: nothing is imported, since the loader in vLLM would only log what fails.
"""

from __future__ import annotations

import ast
import base64
import configparser
import hashlib
import sys
from pathlib import Path

from imagebuild.plugin import GROUP, LIBRARY, PACKAGE, PROJECT
from imagebuild.steps.elf import defined_symbols, undefined_symbols
from imagebuild.verify import fatbin
from imagebuild.verify.installed import Distribution, distributions
from imagebuild.verify.report import Group

# What the entry points must be: by other names vLLM would load nothing, and say nothing.
ENTRY_POINTS = {
    "glm53_sparse_mla": "glm53_sparse_mla.register:register",
    "glm53_moe_scale": "glm53_sparse_mla.moe_scale:register",
}
# The image's place for the library; a tree has it beside the modules.
INSTALLED = Path("/usr/local/lib/glm53/libglm53_kernel.so")
FUNCTIONS = (
    "glm53_sparse_mla_abi",
    "glm53_sparse_mla_forward",
    "glm53_sparse_mla_query",
    "glm53_sparse_mla_workspace",
)
# Names that a library of plain C cannot need: torch's C++ classes, its C interface, Python's.
_FOREIGN = ("3c10", "2at", "5torch", "aoti_", "Py_", "PyObject", "_Py")
_INSTALL = "build the image or the tree again: build.py build"


class _Entries(configparser.ConfigParser):
    """Names keep their case, as importlib.metadata reads them."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def check(
    found: Group, root: Path, gpu_arch: str | None, *, in_base: bool, installed: Path = INSTALLED
) -> None:
    """Checks the plug-in of a tree; one that has neither package nor library has none.

    Args:
        found: takes the findings.
        root: site-packages.
        gpu_arch: what the library must run on; None: nobody said.
        in_base: `root` is in the image, where the library is `installed`.
        installed: that place.
    """
    library = next((path for path in (root / LIBRARY, *([installed] if in_base else []))
                    if path.is_file()), None)  # fmt: skip
    projects = distributions([root]).get(PROJECT, [])
    if not projects and not (root / PACKAGE).exists():
        if library is None:
            found.skip("the tree has no plug-in, so that only the routes of vLLM itself are served")
        else:
            found.error("plugin-missing", f"{library} is there, and {PROJECT} is not installed: "
                        "nothing would load it", fix=_INSTALL)  # fmt: skip
        return
    if len(projects) != 1:
        found.error("plugin-metadata", f"{PROJECT}: expected its dist-info once, found it "
                    f"{len(projects)} times", fix=_INSTALL)  # fmt: skip
        return
    _check_files(found, root, projects[0])
    _check_entry_points(found, root, projects[0])
    if library is None:
        level = found.error if in_base else found.info
        places = [str(root / LIBRARY), *([str(installed)] if in_base else [])]
        level("plugin-library", f"expected the kernel library in {' or '.join(places)}, found "
              "none: route cuda would not start")  # fmt: skip
    else:
        _check_library(found, library, gpu_arch)
    found.summary = f"{PROJECT} {projects[0].version}" + (f", {library}" if library else "")


def _check_files(found: Group, root: Path, project: Distribution) -> None:
    try:
        rows = [row for row in project.rows() if row.digest]
    except (OSError, ValueError) as error:
        found.error("plugin-metadata", f"its RECORD cannot be read: {error}", fix=_INSTALL)
        return
    problems = []
    for row in rows:
        try:
            content = (root / row.path).read_bytes()
        except OSError as error:
            problems.append((row.path, f"RECORD lists it, and it cannot be read: {error.strerror}"))
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if row.digest != f"sha256={digest}":
            problems.append((row.path, f"expected {row.digest} as RECORD says, found {digest}"))
    listed = {row.path for row in rows}
    problems += [
        (path, "is no file of the plug-in, and can be imported as one")
        for path in (p.relative_to(root).as_posix() for p in sorted((root / PACKAGE).rglob("*.py")))
        if path not in listed
    ]
    found.files("error", "plugin-file", problems, fix=_INSTALL)


def _check_entry_points(found: Group, root: Path, project: Distribution) -> None:
    """Each must name a function of a module that imports the standard library alone."""
    parser = _Entries()
    try:
        parser.read_string((project.folder / "entry_points.txt").read_text("utf-8"))
        entries = dict(parser[GROUP])
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError) as error:
        found.error("plugin-entry-points", f"expected the group {GROUP}, found: {error}",
                    fix=_INSTALL)  # fmt: skip
        return
    if entries != ENTRY_POINTS:
        found.error("plugin-entry-points", f"expected {ENTRY_POINTS}, found {entries}",
                    fix=_INSTALL)  # fmt: skip
        return
    for value in entries.values():
        name, _, function = value.partition(":")
        path = f"{name.replace('.', '/')}.py"
        try:
            module = ast.parse((root / path).read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            found.error("plugin-entry-points", f"{value} cannot be loaded: {error}", file=path,
                        fix=_INSTALL)  # fmt: skip
            continue
        if not any(isinstance(n, ast.FunctionDef) and n.name == function for n in module.body):
            found.error("plugin-entry-points", f"expected a function {function}, found none",
                        file=path, fix=_INSTALL)  # fmt: skip
        foreign = sorted(_imported(module) - sys.stdlib_module_names)
        if foreign:
            found.error("plugin-entry-points", f"imports {', '.join(foreign)} as it is loaded, "
                        "where an error would be swallowed", file=path, fix=_INSTALL)  # fmt: skip


def _imported(module: ast.Module) -> set[str]:
    """Top-level packages that a module imports at once, not inside of functions."""
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or PACKAGE).partition(".")[0])
    return names


def _check_library(found: Group, library: Path, gpu_arch: str | None) -> None:
    try:
        data = library.read_bytes()
        codes = fatbin.device_code(data)
        missing = sorted(set(FUNCTIONS) - set(defined_symbols(data)))
        needed = undefined_symbols(data)
    except (OSError, fatbin.NotElfError, fatbin.FatbinError) as error:
        found.error("plugin-library", f"{library}: expected a library with GPU code, found: "
                    f"{error}", fix=_INSTALL)  # fmt: skip
        return
    if missing:
        found.error("plugin-library", f"{library}: expected the functions of glm53_sparse_mla.h, "
                    f"found no {', '.join(missing)}", fix=_INSTALL)  # fmt: skip
    foreign = [name for name in needed if any(part in name for part in _FOREIGN)]
    if foreign:
        found.error("plugin-library", f"{library}: expected no symbol of torch or Python, found "
                    f"{', '.join(foreign[:3])}", fix=_INSTALL)  # fmt: skip
    if gpu_arch and not fatbin.runs_on(codes, gpu_arch):
        targets = ", ".join(dict.fromkeys(code.target for code in codes)) or "none"
        found.error("plugin-library", f"{library}: expected code that runs on {gpu_arch}, found "
                    f"{targets}", fix=_INSTALL)  # fmt: skip
