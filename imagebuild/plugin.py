"""The vLLM plug-in of kernel/ as an installed project: its files and metadata, by our own hand.

vLLM finds plug-ins by the entry points of installed projects. What pip would make of a pure-Python
project is these few files, so the image needs no build tool and the tree engine no interpreter of
the target. Standard library only; nothing of the package is imported.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import UsageError

FOLDER = "kernel"
PACKAGE = "glm53_sparse_mla"
PROJECT = "glm53-sparse-mla"
LIBRARY = f"{PACKAGE}/libglm53_kernel.so"
GROUP = "vllm.general_plugins"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', flags=re.MULTILINE)


@dataclass(frozen=True)
class Plugin:
    """What an installation consists of.

    Attributes:
        version: of the package.
        info: name of its dist-info folder.
        entry_points: of vLLM's plug-ins, by name.
        files: contents by path, relative to site-packages.
    """

    version: str
    info: str
    entry_points: Mapping[str, str]
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Of every file; RECORD has the digests of the others."""
        return hashlib.sha256(self.files[f"{self.info}/RECORD"]).hexdigest()

    def is_in(self, site: Path) -> bool:
        """Whether every file lies there as it is here."""
        try:
            return all((site / path).read_bytes() == data for path, data in self.files.items())
        except OSError:
            return False


def read(folder: Path, library: bytes | None = None) -> Plugin:
    """The installation that a kernel/ folder gives, the same bytes for the same input.

    Args:
        folder: holds pyproject.toml and the package.
        library: the kernel library, to lie beside the modules; None where it lies elsewhere.

    Raises:
        UsageError: the folder has no such project, or its version cannot be read.
    """
    try:
        about = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        text = (folder / PACKAGE / "__init__.py").read_text("utf-8")
        entry_points = dict(about["entry-points"][GROUP])
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise UsageError(f"{folder}: expected the project {PROJECT}, found: {error}") from error
    version = _VERSION.search(text)
    if version is None:
        raise UsageError(f"{folder / PACKAGE}: expected __version__ in __init__.py, found none")
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted((folder / PACKAGE).rglob("*.py"))
        if "__pycache__" not in path.parts
    }
    if library is not None:
        files[LIBRARY] = library
    info = f"{PACKAGE}-{version[1]}.dist-info"
    files |= {
        f"{info}/METADATA": _metadata(about, version[1]).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: glm53-imagebuild\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/INSTALLER": b"glm53-imagebuild\n",
        f"{info}/entry_points.txt": _entry_points(entry_points).encode(),
    }
    record = f"{info}/RECORD"
    rows = [f"{path},{_digest(content)},{len(content)}" for path, content in sorted(files.items())]
    files[record] = "".join(f"{row}\n" for row in [*rows, f"{record},,"]).encode()
    return Plugin(version[1], info, entry_points, files)


def _metadata(about: Mapping[str, str], version: str) -> str:
    return (f"Metadata-Version: 2.4\nName: {about['name']}\nVersion: {version}\n"
            f"Summary: {about['description']}\nLicense-Expression: {about['license']}\n"
            f"Requires-Python: {about['requires-python']}\n")  # fmt: skip


def _entry_points(entry_points: Mapping[str, str]) -> str:
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    return "".join(f"{line}\n" for line in [f"[{GROUP}]", *lines])


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def write(plugin: Plugin, site: Path) -> list[str]:
    """Writes it into site-packages, in place of another version of it; the paths, sorted.

    Raises:
        OSError: a file cannot be written.
    """
    for old in site.glob(f"{PACKAGE}-*.dist-info"):
        _remove_recorded(old, site)
    for path, content in sorted(plugin.files.items()):
        place = site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.new")
        temporary.write_bytes(content)
        temporary.chmod(0o644)
        temporary.replace(place)
    return sorted(plugin.files)


def _remove_recorded(info: Path, site: Path) -> None:
    """Removes what an installation of ours wrote: a module that is gone must not stay."""
    try:
        lines = (info / "RECORD").read_text("utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    inside = (line.partition(",")[0] for line in lines)
    for path in inside:
        if path.startswith((f"{PACKAGE}/", f"{info.name}/")) and ".." not in Path(path).parts:
            (site / path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's file is in it
        info.rmdir()
