"""The plug-in on paper: whole, or a sentence on what is not, with no import of any of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild import plugin as project
from imagebuild.config import ROOT
from imagebuild.verify import Group, plugin
from tests.support import verify_site as site

INFO = "glm53_sparse_mla-*.dist-info"
_SYMBOL = struct.Struct("<IBBHQQ")


def library(*, lacks: str = "", needs: str = "", arches: tuple[int, ...] = (120, 121)) -> bytes:
    """A library with device code and a dynamic symbol table."""
    names = b"\0"
    symbols = [_SYMBOL.pack(0, 0, 0, 0, 0, 0)]
    wanted = [(name, 1) for name in plugin.FUNCTIONS if name != lacks]
    for name, section in [*wanted, *([(needs, 0)] if needs else [])]:
        symbols.append(_SYMBOL.pack(len(names), 0x12, 0, section, 0, 0))
        names += name.encode() + b"\0"
    code = site.container([site.entry(arch, "a", b"payload") for arch in arches])
    return site.elf({".dynsym": b"".join(symbols), ".dynstr": names, ".nv_fatbin": code})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    project.write(project.read(ROOT / "kernel", library()), tmp_path)
    return tmp_path


def said(root: Path, arch: str | None = "sm_121", *, in_base: bool = False,
         installed: Path = Path("/nowhere/libglm53_kernel.so")) -> Group:  # fmt: skip
    found = Group("plug-in")
    plugin.check(found, root, arch, in_base=in_base, installed=installed)
    return found


def test_a_whole_one_is_said_with_version_and_library(root: Path) -> None:
    found = said(root)
    assert found.findings == []
    version = project.read(ROOT / "kernel").version
    assert found.summary == f"glm53-sparse-mla {version}, {root / project.LIBRARY}"


def test_a_tree_without_one_is_not_checked(tmp_path: Path) -> None:
    assert said(tmp_path).is_skipped
    assert said(tmp_path, in_base=True).is_skipped


def test_in_the_image_the_library_lies_elsewhere(tmp_path: Path) -> None:
    project.write(project.read(ROOT / "kernel"), tmp_path)
    elsewhere = tmp_path / "lib" / "libglm53_kernel.so"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(library())
    assert said(tmp_path, in_base=True, installed=elsewhere).findings == []
    # A tree may be used with a library that is built later; an image may not.
    assert [f.level for f in said(tmp_path).findings] == ["info"]
    assert [f.level for f in said(tmp_path, in_base=True).findings] == ["error"]


def test_a_library_that_nothing_loads_is_an_error(tmp_path: Path) -> None:
    elsewhere = tmp_path / "libglm53_kernel.so"
    elsewhere.write_bytes(library())
    (found,) = said(tmp_path, in_base=True, installed=elsewhere).findings
    assert (found.level, found.code) == ("error", "plugin-missing")


def entry_points(root: Path) -> Path:
    (info,) = root.glob(INFO)
    return info / "entry_points.txt"


def renamed(root: Path) -> None:
    place = entry_points(root)
    place.write_text(place.read_text().replace("vllm.general_plugins", "vllm.general_plugin"))


def other_function(root: Path) -> None:
    place = entry_points(root)
    place.write_text(place.read_text().replace("register:register", "register:main"))


def heavy_import(root: Path) -> None:
    place = root / "glm53_sparse_mla" / "register.py"
    place.write_text(place.read_text().replace("import os\n", "import os\nimport torch\n", 1))


def no_function(root: Path) -> None:
    place = root / "glm53_sparse_mla" / "moe_scale.py"
    place.write_text(place.read_text().replace("def register(", "def registered("))


def broken_module(root: Path) -> None:
    (root / "glm53_sparse_mla" / "register.py").write_text("def register(:\n")


def gone_module(root: Path) -> None:
    (root / "glm53_sparse_mla" / "ops.py").unlink()


def shadow(root: Path) -> None:
    (root / "glm53_sparse_mla" / "ops2.py").write_text("")


def second(root: Path) -> None:
    (root / "glm53_sparse_mla-9.9.dist-info").mkdir()


def given(data: bytes) -> Callable[[Path], None]:
    return lambda root: (root / project.LIBRARY).write_bytes(data) and None


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (renamed, "plugin-entry-points", "expected the group vllm.general_plugins"),
        (other_function, "plugin-entry-points", "register:main"),
        (heavy_import, "plugin-entry-points", "imports torch as it is loaded"),
        (no_function, "plugin-entry-points", "expected a function register, found none"),
        (broken_module, "plugin-entry-points", "cannot be loaded"),
        (gone_module, "plugin-file", "cannot be read"),
        (shadow, "plugin-file", "is no file of the plug-in"),
        (second, "plugin-metadata", "found it 2 times"),
        (given(b"text"), "plugin-library", "expected a library with GPU code"),
        (given(library(lacks="glm53_sparse_mla_forward")), "plugin-library",
         "found no glm53_sparse_mla_forward"),
        (given(library(needs="_ZN3c106Device")), "plugin-library", "no symbol of torch or Python"),
        (given(library(needs="PyObject_Call")), "plugin-library", "no symbol of torch or Python"),
        (given(library(arches=(120,))), "plugin-library", "expected code that runs on sm_121"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_an_error(
    root: Path, damage: Callable[[Path], None], code: str, words: str
) -> None:
    damage(root)
    errors = [f for f in said(root).findings if f.level == "error"]
    assert any(f.code == code and words in f.message for f in errors), errors
