"""The check calls the right kernel right and each wrong one wrong; its words and exit codes.

The comparison itself runs in the smoke environment, which has torch: made in the session's cache
where there is none yet, 90 s and 1.3 GB.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kernel"
# A word of what the check must say about each wrong kernel.
FAULTS = {
    "noise": "norm-relative",
    "one_token_off": "token 9 of 10",
    "base_two": "lse",
    "nan_for_masked": "NaN or infinite values in token 7 of 10",
    "zero_lse_for_masked": "expected an lse of -inf where every key is masked",
    "reads_row_0": "NaN or infinite values",
    "not_repeatable": "a second launch wrote other bits",
    "depends_on_batch": "has other bits when it is alone in the batch",
    "leaves_a_head": "NaN or infinite values",
    "cut": "norm-relative",
    "no_kv_scale": "fp8",
    "only_minus_one": "expected an lse of -inf",
    "stops_at_hole": "expected finite lse where there are keys",
    "once_each": "token 8 of 10",
    "fp32_overflow": "q x40",
}


@pytest.fixture(scope="module")
def found(python: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("doubles.py")
    done = subprocess.run([python, script, PACKAGE], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class TestDoubles:
    pytestmark = pytest.mark.network

    def test_right_is_right(self, found: dict[str, Any]) -> None:
        right = found["kernels"]["right"]
        assert right["problems"] == [] and right["ok"]
        assert right["runs"] == 9
        assert 1e-3 < right["norm_rel"] < 2e-3, "rounding to bf16 is 1.65e-3"

    @pytest.mark.parametrize("name", FAULTS)
    def test_wrong_is_wrong(self, found: dict[str, Any], name: str) -> None:
        wrong = found["kernels"][name]
        assert not wrong["ok"]
        assert any(FAULTS[name] in problem for problem in wrong["problems"]), wrong["problems"]
        assert any("MISS" in line for line in wrong["lines"])

    def test_every_fault_is_tried(self, found: dict[str, Any]) -> None:
        assert set(found["kernels"]) == {*FAULTS, "right", "broken"}

    def test_lost_device_ends_it(self, found: dict[str, Any]) -> None:
        broken = found["kernels"]["broken"]
        assert broken["runs"] == 0
        assert len(broken["problems"]) == 1, "what runs on a lost device means nothing"
        assert broken["problems"][0].endswith("an illegal memory access was encountered")

    def test_reference_is_what_the_formula_says(self, found: dict[str, Any]) -> None:
        assert found["naive"]["distance"] < 1e-6

    def test_unselected_rows_are_nan(self, found: dict[str, Any]) -> None:
        assert found["poisoned"] is True

    def test_matrix(self, found: dict[str, Any]) -> None:
        matrix = found["matrix"]
        assert matrix["heads"] == [8, 16, 24, 32, 64]
        assert set(matrix["widths"]) >= {1, 31, 32, 33, 64, 2048, 2051}
        assert set(matrix["tokens"]) >= {1, 2, 7, 64, 129, 4096}
        assert matrix["splits"] == [0, 1, 2, 3, 8, 64]
        assert set(matrix["amplitudes"]) >= {1.0, 2.0, 40.0}
        assert matrix["how"] == ["graph", "plain", "stream"]
        assert set(matrix["masks"]) >= {"none", "tail", "head", "holes", "tile", "last", "all",
                                        "duplicates"}  # fmt: skip
        assert matrix["largest_pool"] > 2**31
        six = ["h8 bf16", "h8 fp8", "h16 bf16", "h16 fp8", "h32 bf16", "h32 fp8"]
        assert matrix["named"] == matrix["quick"] == six

    def test_closed_form_of_small_increments(self, found: dict[str, Any]) -> None:
        for logit, exact in zip((-9.0, -11.0, -13.0), found["exact_increments"], strict=True):
            state, step = 0.5, 1 / (1 + math.exp(-logit))
            for _ in range(4096):
                state += step * (1.0 - state)
            assert exact == pytest.approx(state, abs=1e-9)


def call(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, PACKAGE / "check.py", *arguments], capture_output=True,
                          text=True, check=False)  # fmt: skip


class TestCommand:
    def test_no_torch_is_a_sentence(self) -> None:
        done = call("--quick")
        assert done.returncode == 5
        assert done.stderr.startswith("check: error: torch: expected it for the fp64 reference")
        assert "Traceback" not in done.stderr and done.stdout == ""

    def test_no_torch_as_json(self) -> None:
        done = call("--quick", "--format", "json")
        assert done.returncode == 5
        assert json.loads(done.stdout)["exit_code"] == 5

    def test_wrong_use(self) -> None:
        assert call("--only", "everything").returncode == 2

    def test_build_py_runs_it(self) -> None:
        build = [sys.executable, "-m", "imagebuild", "kernel", "check", "--quick", "--python",
                 sys.executable]  # fmt: skip
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 5
        assert "kernel/check.py --format text --quick" in done.stderr
        assert "torch: expected it" in done.stderr

    @pytest.mark.network
    def test_no_gpu_is_a_sentence(self, python: Path) -> None:
        done = call("--quick", python=str(python))
        assert done.returncode == 5
        assert "GPU: expected one that torch" in done.stderr and "Traceback" not in done.stderr
