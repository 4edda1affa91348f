"""The worker arms the memory cap between setting its device and everything that allocates."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.tree import OverlayTree
from tests.patches.harness import RUNTIME, VERSIONS, PatchContract, extract, patched, run

PATH = "vllm/v1/worker/gpu_worker.py"
NAME = "vllm_worker_memory_cap"


class TestMemoryCap(PatchContract):
    name = NAME
    upstream_fix = (
        (
            PATH,
            r"^( +)torch\.accelerator\.set_device_index\(self\.device\)$",
            r"\g<0>\n\1torch.cuda.set_per_process_memory_fraction(0.9, self.device)",
        ),
    )


class SnapshotError(Exception):
    """Ends the run once the first snapshot is taken."""


class Mocks(dict):
    """Globals in which every unknown name is a mock."""

    def __missing__(self, name):
        if name.startswith("__"):
            raise KeyError(name)
        return MagicMock(name=name)


def events(tree, monkeypatch):
    """What init_device does on a CUDA worker, in order, up to its first memory snapshot."""
    seen = []
    torch = MagicMock()
    torch.device.side_effect = lambda text: text
    torch.accelerator.device_count.return_value = 1
    torch.accelerator.set_device_index.side_effect = lambda device: seen.append(("set", device))
    platform = MagicMock()
    platform.logical_device_id_to_visible_device_id.return_value = 0

    def snapshot(device):
        seen.append(("snapshot", device))
        raise SnapshotError

    names = {
        "torch": torch,
        "current_platform": platform,
        "init_worker_distributed_environment": lambda *args: seen.append(("nccl", None)),
        "MemorySnapshot": snapshot,
    }
    arm = SimpleNamespace(arm=lambda device: seen.append(("arm", device)))
    monkeypatch.setitem(sys.modules, "spark_mem_trace", arm)
    worker = MagicMock(local_rank=0)
    worker.device_config.device_type = "cuda"
    worker.parallel_config.assigned_physical_gpu_ids = None
    worker.parallel_config.get_local_gpu_index.return_value = 0
    owner = extract(tree, PATH, "Worker.init_device", {})
    method = owner.init_device
    run_in = type(method)(method.__code__, Mocks(names, __builtins__=method.__builtins__))
    with pytest.raises(SnapshotError):
        run_in(worker)
    return seen


@pytest.mark.parametrize("version", VERSIONS)
def test_armed_before_anything_allocates(real_tree, version, monkeypatch):
    assert events(patched(NAME, real_tree(version)), monkeypatch) == [
        ("set", "cuda:0"),
        ("arm", "cuda:0"),
        ("nccl", None),
        ("snapshot", "cuda:0"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_arms_nothing(real_tree, version, monkeypatch):
    assert [what for what, _ in events(real_tree(version), monkeypatch)] == [
        "set",
        "nccl",
        "snapshot",
    ]


def test_the_module_enters_the_tree(real_tree):
    files = run(NAME, real_tree("0.31.0")).files
    assert files["spark_mem_trace.py"] == (RUNTIME / "spark_mem_trace.py").read_bytes()


def test_a_foreign_module_of_that_name_is_refused(real_tree):
    tree = OverlayTree(real_tree("0.31.0"), {"spark_mem_trace.py": b"def arm(device): pass\n"})
    (report,) = run(NAME, tree).reports
    assert report.verdict is Verdict.DRIFTED
    assert "spark_mem_trace.py" in {finding.file for finding in report.findings}


def test_effect_needs_a_module_that_caps(real_tree):
    after = patched(NAME, real_tree("0.31.0"))
    hollow = OverlayTree(after, {"spark_mem_trace.py": b"def arm(device): pass\n"})
    missing = OverlayTree(after, {"spark_mem_trace.py": None})
    effect = TestMemoryCap().patch.effect
    assert ask(effect, hollow).outcome is Outcome.FAILS
    assert ask(effect, missing).outcome is Outcome.FAILS
