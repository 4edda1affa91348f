"""verify-base.py as a user starts it: by path, from elsewhere, with the base's own Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import verify_site as site
from tests.support.verify_site import damaged

REPOSITORY = Path(__file__).resolve().parents[3]


# verify-base.py, started as a user starts it.


def pythons() -> list[str]:
    """An interpreter for each supported version that is here."""
    found = []
    for minor in range(11, 15):
        path = shutil.which(f"python3.{minor}")
        run = path and subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if path and run and run.returncode == 0:
            found.append(path)
    return found or [sys.executable]


@dataclass(frozen=True)
class Base:
    """A stand-in for a base image: an interpreter with its own packages, and our files in it."""

    python: Path
    root: Path
    script: Path
    elsewhere: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [str(self.python), str(self.script), *arguments],
            cwd=self.elsewhere,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


def make_base(tmp_path: Path, python: str) -> Base:
    venv = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True)
    (root,) = venv.glob("lib/python3*/site-packages")
    repository = tmp_path / "repository"
    recipe = site.write_repository(repository)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "imagebuild", repository / "imagebuild", ignore=ignored)
    shutil.copy(REPOSITORY / "verify-base.py", repository)
    site.write_site(root)
    site.install(root, "torch", "2.13.0+cu130", {})
    site.install(root, "nvidia_nccl_cu13", site.IMAGE_NCCL, {})
    site.install(root, "transformers", "5.17.0", {})
    lock = site.write_lock(recipe, root)
    site.patch_site(root, recipe, lock)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    return Base(venv / "bin" / "python", root, repository / "verify-base.py", elsewhere)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return make_base(tmp_path, sys.executable)


@pytest.mark.parametrize("python", pythons())
def test_verify_base_finds_its_own_tree_and_leaves_it_alone(tmp_path: Path, python: str) -> None:
    base = make_base(tmp_path, python)
    before = site.snapshot(base.root)
    ours = site.snapshot(base.script.parent)
    run = base.run()
    # The stand-in's FlashKDA is one that nobody knows.
    assert "warning: vllm/_flashkda_C.abi3.so: neither the file" in run.stdout
    assert run.stdout.splitlines()[0] == f"{base.root}: vLLM 0.31.0, recipe tiny, sm_120"
    assert "versions: 5 compared ok" in run.stdout
    assert run.stdout.endswith("verify ok\n")
    assert (run.returncode, run.stderr) == (0, "")
    assert site.snapshot(base.root) == before
    assert site.snapshot(base.script.parent) == ours


@pytest.mark.parametrize("setting", ["PYTHONSAFEPATH", "PYTHONOPTIMIZE"])
def test_verify_base_runs_whatever_python_leaves_out(base: Base, setting: str) -> None:
    run = base.run(**{setting: "2"})
    assert (run.returncode, run.stderr) == (0, ""), run.stdout


def test_verify_base_reports_every_problem_and_exits_3(base: Base) -> None:
    shutil.rmtree(base.root / "nvidia_nccl_cu13-2.30.7.dist-info")
    site.install(base.root, "nvidia_nccl_cu13", "2.29.7", {})
    shutil.rmtree(base.root / "torch-2.13.0+cu130.dist-info")
    damaged("vllm/overlay.py")(base.root)
    run = base.run()
    assert ("nvidia-nccl-cu13: expected 2.30.7 (recipe, image_pins of 0.31.0), found 2.29.7 "
            "(installed, nvidia_nccl_cu13-2.29.7.dist-info)") in run.stdout  # fmt: skip
    assert "torch: expected 2.13.0 (lock, pins), found none installed" in run.stdout
    assert "[foreign-code]" in run.stdout
    assert run.stdout.endswith("verify failed: 3 errors\n")
    assert (run.returncode, run.stderr) == (3, "")


def test_verify_base_exits_4_on_a_manifest_that_cannot_be_trusted(base: Base) -> None:
    site.break_manifest(base.root)
    run = base.run()
    assert "[manifest-unreadable]" in run.stdout
    assert (run.returncode, run.stderr) == (4, "")


def test_another_vllm_on_the_path_is_found_and_not_verified(base: Base) -> None:
    other = base.elsewhere / "checkout"
    damaged("vllm/__init__.py")(other)
    run = base.run(PYTHONPATH=str(other))
    assert run.stdout.splitlines()[0].startswith(f"{base.root}: ")
    assert f"PYTHONPATH names {other}, which holds another vllm" in run.stdout
    assert f"import vllm: expected {base.root / 'vllm'}, found {other / 'vllm'}" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
    assert run.returncode == 3


def test_a_path_file_that_puts_another_vllm_first_is_found(base: Base) -> None:
    other = base.elsewhere / "checkout"
    damaged("vllm/__init__.py")(other)
    damaged("zz.pth", f"import sys; sys.path.insert(0, {str(other)!r})\n".encode())(base.root)
    run = base.run()
    assert "[startup-path]" in run.stdout
    assert "[shadow-import]" in run.stdout
    assert run.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (["--recipe", "huge"], "huge/recipe.toml: expected a recipe, found no such file", 2),
        (["--gpu-arch", "sm_90"], "argument --gpu-arch: invalid choice: 'sm_90'", 2),
        (["--gpu"], "argument --gpu-arch: expected one argument", 2),
        (["--root", "nowhere"], "nowhere: expected a site-packages folder, found none", 2),
        (["more"], "unrecognized arguments: more", 2),
    ],
)
def test_bad_usage_is_one_sentence(
    arguments: list[str], sentence: str, code: int, base: Base
) -> None:
    run = base.run(*arguments)
    assert run.stderr.startswith("verify-base.py: error: ")
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
    assert (run.returncode, run.stdout) == (code, "")


def test_a_malformed_lock_or_series_is_one_sentence(base: Base) -> None:
    lock = base.script.parent / "image/tiny/lock.toml"
    whole = lock.read_text("utf-8")
    lock.write_text("schema = [", "utf-8")
    run = base.run()
    assert (run.returncode, "expected a lock in TOML" in run.stderr) == (4, True)
    lock.write_text(whole, "utf-8")
    (base.script.parent / "image/tiny/series.toml").write_text('patches = ["x"]\n', "utf-8")
    run = base.run()
    assert (run.returncode, "the series is malformed" in run.stderr) == (2, True)
    assert "Traceback" not in run.stderr


def test_an_interpreter_without_vllm(base: Base) -> None:
    shutil.rmtree(base.root / "vllm")
    run = base.run()
    assert "has no vLLM" in run.stderr
    assert "hint: start it with the base's own Python, or name --root DIR" in run.stderr
    assert run.returncode == 2


def test_the_tree_of_another_interpreter(base: Base, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(base.script), "--root", str(base.root), "--gpu-arch", "sm_120"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Not inside its base: the image's own NCCL is not asked for, the lock's is.
    assert "nvidia-nccl-cu13: expected 2.29.7 (lock, pins), found 2.30.7" in run.stdout
    assert run.returncode == 3


def test_our_own_fault_is_a_sentence_too(base: Base) -> None:
    broken = base.script.parent / "imagebuild/verify/flashkda.py"
    broken.write_text(broken.read_text("utf-8").replace("def check(", "def _check("), "utf-8")
    run = base.run()
    assert run.stderr.startswith("verify-base.py: error: internal error: AttributeError: ")
    assert len(run.stderr.splitlines()) == 2
    assert run.returncode == 5


def test_output_in_an_ascii_locale(base: Base) -> None:
    damaged("vllm/überlagert.py")(base.root)
    run = base.run(PYTHONIOENCODING="ascii")
    assert "vllm/\\xfcberlagert.py" in run.stdout
    assert run.returncode == 3


def test_an_old_python_gets_a_sentence() -> None:
    source = (REPOSITORY / "verify-base.py").read_text("utf-8")
    assert len(source.splitlines()) <= 20
    code = source.replace("import sys\n", "import sys\nsys.version_info = (3, 9)\n", 1)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 5
    assert run.stderr.startswith("verify-base.py: error: expected Python 3.11 or newer, found 3.")
