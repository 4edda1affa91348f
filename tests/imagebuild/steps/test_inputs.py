"""The inputs step copies all that the series can read, and nothing that others edit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.config import ROOT, load_recipe
from imagebuild.errors import UsageError
from imagebuild.steps import inputs
from imagebuild.steps.series import arch_of
from tests.support.product import Product

RECIPE = load_recipe("glm53-flash")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    assert inputs.main([str(tmp_path)]) == 0
    return tmp_path


def test_steps_run_from_the_copy_alone(copied: Path) -> None:
    for module in ("imagebuild.steps.series", "imagebuild.verify.script"):
        command = [sys.executable, "-I", "-B", "-c",
                   f"import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p];"
                   f"sys.path.insert(0, '.'); import {module}"]  # fmt: skip
        done = subprocess.run(command, cwd=copied / "series", capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
    series = load_recipe("glm53-flash", copied / "series").series()
    assert series.digest == RECIPE.series().digest


def test_plugin_is_installed_from_the_copy_alone(copied: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    command = [sys.executable, "-I", "-B", "-c",
               "import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p];"
               "sys.path.insert(0, '.'); from imagebuild.steps import plugin;"
               f"sys.exit(plugin.main(['--source', 'kernel', '--root', {str(site)!r}]))"
               ]  # fmt: skip
    done = subprocess.run(command, cwd=copied / "plugin", capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (site / "glm53_sparse_mla" / "register.py").is_file()
    assert not (copied / "plugin" / "kernel" / "csrc").exists()


def test_copy_leaves_out_what_others_edit(copied: Path) -> None:
    names = {path.relative_to(copied / "series").as_posix()
             for path in (copied / "series").rglob("*") if path.is_file()}  # fmt: skip
    assert "verify-base.py" in names
    assert "image/glm53-flash/lock.toml" in names
    assert "image/runtime/entrypoint.py" not in names
    assert "imagebuild/cli.py" not in names
    assert not [name for name in names if name.startswith(("imagebuild/engines", "kernel"))]
    assert not [name for name in names if name.endswith(".pyc")]


def test_other_folders_hold_one_concern_each(copied: Path) -> None:
    headers = [path.name for path in (copied / "headers").rglob("*") if path.is_file()]
    assert headers == ["link_cuda_headers.py"]


def test_entry_point_runs_from_the_copy_alone(copied: Path) -> None:
    """As it lies in the image, with the standard library and no package of ours elsewhere."""
    share = copied / "runtime" / "opt" / "glm53"
    names = {path.relative_to(share).as_posix() for path in share.rglob("*") if path.is_file()}
    assert {"serving/main.py", "glm_mla_route.py", "glm47_failclosed.py"} <= names
    assert not [
        name for name in names if "pycache" in name or name.startswith("imagebuild/engines")
    ]
    code = (f"import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p];"
            f"sys.path.insert(0, {str(share)!r});"
            "import serving.main, serving.cli, glm_chat_template")  # fmt: skip
    done = subprocess.run([sys.executable, "-I", "-B", "-c", code], cwd=copied, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (copied / "runtime" / "image" / "runtime" / "entrypoint.py").is_file()


def test_folder_is_made_even_for_nothing(tmp_path: Path) -> None:
    inputs.copy(tmp_path, [], tmp_path / "deep" / "empty")
    assert (tmp_path / "deep" / "empty").is_dir()


def test_imports_are_followed_through_packages(tmp_path: Path) -> None:
    (tmp_path / "imagebuild" / "a").mkdir(parents=True)
    for name, text in (("__init__", ""), ("a/__init__", "from imagebuild.b import x\n"),
                       ("a/one", "def f():\n    import imagebuild.c\n"), ("b", "x = 1\n"),
                       ("c", "import json\n"), ("unused", "")):  # fmt: skip
        (tmp_path / "imagebuild" / f"{name}.py").write_text(text)
    found = inputs._imported(tmp_path, [tmp_path / "imagebuild" / "a" / "one.py"])
    names = {path.relative_to(tmp_path / "imagebuild").as_posix() for path in found}
    assert names == {"__init__.py", "a/__init__.py", "a/one.py", "b.py", "c.py"}


def test_wrong_call_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert inputs.main([]) == 2
    assert "expected one folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "arch"),
    [("linux/amd64", "sm_120"), ("linux/arm64", "sm_121"), ("linux/arm64/v8", "sm_121")],
)
def test_arch_of_a_platform(platform: str, arch: str) -> None:
    assert arch_of(RECIPE, platform) == arch


def test_platform_that_nobody_serves() -> None:
    with pytest.raises(UsageError, match="linux/riscv64"):
        arch_of(RECIPE, "linux/riscv64")


class TestSeriesStep:
    """The step as the Dockerfile calls it, on a tree of a few lines."""

    def run(self, product: Product, site: Path, platform: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from imagebuild.steps.series import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-B", "-c", code, "--recipe", "tiny", "--platform", platform,
                   "--root", str(site)]  # fmt: skip
        folder = product.root
        if not (folder / "imagebuild").exists():
            shutil.copytree(ROOT / "imagebuild", folder / "imagebuild")
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    def test_it_applies_once_and_says_what(self, product: Product) -> None:
        built = product.run("build", "--arch", "sm_120")
        assert built.code == 0
        site = product.root / "dist" / "tiny-sm_120" / "site"
        assert product.run("patches", "revert", "--tree", str(site)).code == 0
        done = self.run(product, site, "linux/amd64")
        assert done.returncode == 0, done.stderr
        assert "vllm_greeter_polite_words: ok" in done.stdout
        assert "files written" in done.stdout
        again = self.run(product, site, "linux/amd64")
        assert "0 files written" in again.stdout

    def test_damage_ends_with_the_place_and_a_hint(self, product: Product) -> None:
        assert product.run("build", "--arch", "sm_120").code == 0
        site = product.root / "dist" / "tiny-sm_120" / "site"
        assert product.run("patches", "revert", "--tree", str(site)).code == 0
        for path in site.glob("vllm/*.py"):
            path.write_text("# nothing is left\n" + path.read_text().replace("return", "yield"))
        done = self.run(product, site, "linux/amd64")
        assert done.returncode == 3
        last = done.stderr.splitlines()[-10:]
        assert last[-1].startswith("hint: ")
        assert any("vllm_greeter_polite_words: " in line for line in last)
