"""The reports' scripts show what the reports say, on the real packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.patching.tree import Tree

ROOT = Path(__file__).resolve().parents[3]
REPORTS = ROOT / "docs" / "upstream"
SUM = "flashinfer/mla/_batch_mla/_backends/_fa_common.py"


def call(script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, REPORTS / script, *words], capture_output=True,
                          text=True, check=False)  # fmt: skip


class TestFlashInfer:
    def run(self, base: Tree, folder: Path) -> subprocess.CompletedProcess[str]:
        path = folder / SUM
        path.parent.mkdir(parents=True)
        path.write_bytes(base.read(SUM))
        return call("flashinfer_fp8_mla_tile.py", folder)

    def test_output_is_the_reports(self, real_base: Callable[[str], Tree], tmp_path: Path) -> None:
        done = self.run(real_base("0.33.0"), tmp_path)
        assert done.returncode == 1, done.stderr
        report = (REPORTS / "flashinfer-fp8-mla-tile.md").read_text()
        assert done.stdout in report
        assert "sm_121       84512      117312 (!) 91680" in done.stdout

    def test_before_0_7_2(self, real_base: Callable[[str], Tree], tmp_path: Path) -> None:
        done = self.run(real_base("0.31.0"), tmp_path)
        assert done.returncode == 2
        assert "it came with 0.7.2" in done.stderr


class TestVllm:
    RUN = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.path.append(sys.argv[2])
from imagebuild.smoke import stubs
stubs.install()
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

    @pytest.mark.parametrize("version", ["0.33.0"])
    def test_output_is_the_reports(
        self, version: str, vllm_tree: Callable[[str], Path], python: Path
    ) -> None:
        script = REPORTS / "vllm_nvfp4_moe_missing_scales.py"
        words = [python, "-W", "ignore", "-c", self.RUN, vllm_tree(version), ROOT, script]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr[-2000:]
        assert done.stdout.splitlines()
        report = (REPORTS / "vllm-nvfp4-moe-missing-scales.md").read_text()
        shown = [line for line in done.stdout.splitlines() if "scale" in line]
        assert len(shown) == 2 and all(line in report for line in shown)


@pytest.mark.parametrize(
    "script", ["flashkda_state_at_calls.py", "vllm_nvfp4_moe_missing_scales.py"]
)
def test_what_is_missing_is_a_sentence(script: str, tmp_path: Path) -> None:
    library = tmp_path / "_flashkda_C.abi3.so"
    library.write_bytes(b"")
    done = call(script, *([library] if "flashkda" in script else []))
    assert done.returncode == 2
    assert "expected" in done.stderr and "Traceback" not in done.stderr


def test_index_names_every_report() -> None:
    index = (REPORTS / "README.md").read_text()
    reports = {path.name for path in REPORTS.glob("*.md")} - {"README.md"}
    assert reports and all(f"({name})" in index for name in reports)
    for name in reports:
        text = (REPORTS / name).read_text()
        assert (REPORTS / f"{name.removesuffix('.md').replace('-', '_')}.py").is_file()
        assert all(word in text for word in ("**Version.**", "**Reproduce.**", "**Suggested"))
