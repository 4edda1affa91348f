"""The plug-in as an installed project: what pip would see, written by hand, and replaced whole."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from imagebuild import plugin
from imagebuild.config import ROOT
from imagebuild.errors import UsageError
from imagebuild.steps import plugin as step

KERNEL = ROOT / "kernel"


def test_importlib_metadata_finds_it_whole(tmp_path: Path) -> None:
    written = plugin.write(plugin.read(KERNEL, b"library"), tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert found.metadata["Name"] == plugin.PROJECT
    assert found.version == plugin.read(KERNEL).version
    entries = {one.name: one.value for one in found.entry_points if one.group == plugin.GROUP}
    assert entries == {
        "glm53_sparse_mla": "glm53_sparse_mla.register:register",
        "glm53_moe_scale": "glm53_sparse_mla.moe_scale:register",
    }
    assert sorted(str(path) for path in found.files or []) == written
    assert (tmp_path / plugin.LIBRARY).read_bytes() == b"library"
    # What an installer compares.
    for path in found.files or []:
        content = (tmp_path / str(path)).read_bytes()
        assert path.size in (None, len(content))
        if path.hash is not None:
            assert path.hash.value in plugin._digest(content)


def test_same_input_same_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "kernel"
    shutil.copytree(KERNEL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / plugin.PACKAGE / "__pycache__").mkdir()
    (copy / plugin.PACKAGE / "__pycache__" / "stale.py").write_text("raise SystemExit\n")
    names = {path for path in plugin.read(copy).files if "__pycache__" in path}
    assert names == set()
    assert plugin.read(copy).files == plugin.read(KERNEL).files


def test_another_version_replaces_every_file(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(KERNEL, old, ignore=shutil.ignore_patterns("__pycache__"))
    init = old / plugin.PACKAGE / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "0.0.'))
    (old / plugin.PACKAGE / "gone.py").write_text("")
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "kept.py").write_text("")
    plugin.write(plugin.read(old), site)
    assert (site / plugin.PACKAGE / "gone.py").exists()
    plugin.write(plugin.read(KERNEL), site)
    assert not (site / plugin.PACKAGE / "gone.py").exists()
    assert (site / "vllm" / "kept.py").exists()
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert found.version == plugin.read(KERNEL).version


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("pyproject.toml", "[project]", "[project"),
        ("pyproject.toml", "vllm.general_plugins", "vllm.other"),
        ("glm53_sparse_mla/__init__.py", "__version__ = ", "__version = "),
    ],
)
def test_a_project_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, name: str, before: str, after: str
) -> None:
    copy = tmp_path / "kernel"
    shutil.copytree(KERNEL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / name).read_text()
    assert before in text
    (copy / name).write_text(text.replace(before, after))
    with pytest.raises(UsageError, match="expected"):
        plugin.read(copy)


def test_step_installs_beside_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--source", str(KERNEL), "--root", str(tmp_path)]) == 0
    assert f"{plugin.PROJECT} {plugin.read(KERNEL).version}, " in capsys.readouterr().out
    assert step.main(["--source", str(tmp_path / "no"), "--root", str(tmp_path)]) == 2
    assert "plugin: error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["register", "moe_scale", "releases", "library", "__init__"])
def test_what_the_loader_imports_is_the_standard_library_alone(name: str) -> None:
    """An error in such an import would be logged by vLLM, and the server would start."""
    import ast

    module = ast.parse((KERNEL / plugin.PACKAGE / f"{name}.py").read_text())
    for node in module.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for one in names:
            assert one.partition(".")[0] in sys.stdlib_module_names, one
