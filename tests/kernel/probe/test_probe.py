"""The experiments give what FINDINGS.md says of them; on a CPU, in the smoke environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUMS = [1, 2, 3, 5, 8, 13, 5, 2, 7, 9, 0, 9, 9, 2]


def call(python: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-m", "kernel.probe", *words], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip


def test_no_torch_is_a_sentence() -> None:
    done = call(sys.executable)
    assert done.returncode == 5
    assert done.stderr.startswith("torch: expected it") and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def found(python: Path) -> dict[str, list[dict[str, Any]]]:
    done = call(python, "--format", "json")
    assert done.returncode == 0, done.stderr
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return result


@pytest.mark.network
class TestExperiments:
    def test_far_off_scales_make_the_experts_vanish(self, found: dict[str, Any]) -> None:
        size = {row["scale is off by"]: row["size of the output"] for row in found["scale"]}
        assert size["2^0"] == pytest.approx(1, abs=0.1)
        assert size["2^10"] == pytest.approx(size["2^0"], abs=0.01)
        assert all(size[f"2^{power}"] < 1e-4 for power in (-60, -30, -20, -14, -10, 20, 30, 60))
        errors = [row["error"] for row in found["scale"]]
        assert min(errors) < 0.2 and max(errors) <= 1.0, "they vanish, they do not turn to noise"

    def test_no_constant_is_right(self, found: dict[str, Any]) -> None:
        rows = {row["largest of the block"]: row for row in found["one constant"]}
        small, advised = "error at smallest (0.000558)", "error at advised 1.0 (1)"
        assert rows[100.0][small] > 0.9 and rows[0.003][small] < 0.11
        assert rows[100.0][advised] < 0.11 and rows[0.003][advised] == 1.0

    def test_what_memory_held_decides(self, found: dict[str, Any]) -> None:
        held = {row["memory held"]: row for row in found["memory"]}
        assert held["packed 4-bit weights"]["vanished (< 1 %)"] > 8
        assert held["zeros"]["experts right to 20 %"] == 0

    def test_swapping_attention_says_nothing(self, found: dict[str, Any]) -> None:
        rows = found["hypothesis 1: swapping attention backends"]
        told = {(row["experts"], row["attention"]): row["continues 0 1 with"] for row in rows}
        assert told["right scale", "dense"] == told["right scale", "sparse"] == SUMS
        assert told["right scale", "sparse, faulty"] != SUMS
        gone = [told["uninitialised scale", name] for name in ("dense", "sparse", "sparse, faulty")]
        assert gone[0] == gone[1] == gone[2] == [1] * len(SUMS)

    def test_the_checkpoint_is_the_trigger(self, found: dict[str, Any]) -> None:
        rows = found["hypothesis 2: one MoE backend is broken"]
        right = {(row["scale in the checkpoint"], row["experts compute with"]): row["right"]
                 for row in rows}  # fmt: skip
        four, sixteen = "4-bit activations", "16-bit (as Marlin)"
        assert right["calibrated", four] and not right["uninitialised", four]
        assert all(right[state, sixteen] for state in ("calibrated", "uninitialised", "none"))
