"""The memory module with a stand-in for torch: cap, statistics, snapshot, and bad settings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "spark_mem_trace.py"
GIB = 1 << 30


@pytest.fixture
def trace():
    spec = importlib.util.spec_from_file_location("spark_mem_trace", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TORCH_MEM_")]:
        monkeypatch.delenv(name)


class FakeTorch:
    """Records what is asked of torch; sizes are those of a 4 GiB device."""

    def __init__(self):
        self.asked = []
        self.observers = []
        self.cuda = SimpleNamespace(
            set_per_process_memory_fraction=lambda *args: self.asked.append(("cap", *args)),
            mem_get_info=lambda device: (GIB, 4 * GIB),
            memory_allocated=lambda device: 100,
            memory_reserved=lambda device: 200,
            max_memory_reserved=lambda device: 300,
            memory=SimpleNamespace(
                _record_memory_history=lambda max_entries: self.asked.append(
                    ("record", max_entries)
                ),
                _dump_snapshot=self.dump,
            ),
        )
        self._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=self.observers.append)

    def dump(self, path):
        self.asked.append(("dump", Path(path).name))
        Path(path).write_bytes(b"snapshot")


@pytest.fixture
def torch(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.parametrize("value", [None, "", "  "])
def test_unset_does_nothing_and_imports_nothing(trace, monkeypatch, value):
    # An import of None raises, so this also shows that torch is left alone.
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("TORCH_MEM_FRACTION", "TORCH_MEM_STATS_DIR", "TORCH_MEM_TRACE_DIR"):
        if value is not None:
            monkeypatch.setenv(name, value)
    before = threading.active_count()
    assert trace.arm("cuda:0") is None
    assert threading.active_count() == before


def test_it_is_standard_library_only():
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import spark_mem_trace"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.parametrize(("text", "share"), [("0.9", 0.9), ("1", 1.0), (" 0.5 ", 0.5)])
def test_cap(trace, torch, monkeypatch, text, share):
    monkeypatch.setenv("TORCH_MEM_FRACTION", text)
    trace.arm("cuda:1")
    assert torch.asked == [("cap", share, "cuda:1")]
    assert torch.observers == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TORCH_MEM_FRACTION", "90%", "a share over 0 and up to 1"),
        ("TORCH_MEM_FRACTION", "0", "a share over 0 and up to 1"),
        ("TORCH_MEM_FRACTION", "1.01", "a share over 0 and up to 1"),
        ("TORCH_MEM_FRACTION", "-0.5", "a share over 0 and up to 1"),
        ("TORCH_MEM_FRACTION", "nan", "a share over 0 and up to 1"),
        ("TORCH_MEM_STATS_INTERVAL", "0", "a positive number of seconds"),
        ("TORCH_MEM_STATS_INTERVAL", "soon", "a positive number of seconds"),
        ("TORCH_MEM_STATS_INTERVAL", "inf", "a positive number of seconds"),
        ("TORCH_MEM_TRACE_ENTRIES", "1.5", "a positive whole number of entries"),
        ("TORCH_MEM_TRACE_ENTRIES", "many", "a positive whole number of entries"),
    ],
)
def test_bad_values_stop_with_a_sentence(trace, torch, monkeypatch, *, name, text, expected):
    # A malformed variable stops the start even where its own part is off.
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name}=.*: expected {expected}") as error:
        trace.arm("cuda:0")
    assert "\n" not in str(error.value)
    assert torch.asked == []


def test_a_folder_that_cannot_be_made_stops(trace, torch, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_MEM_STATS_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"^TORCH_MEM_STATS_DIR=.*: expected a folder"):
        trace.arm("cuda:0")


def test_defaults_and_given_numbers(trace, tmp_path):
    plain = trace.settings({})
    assert (plain.interval, plain.entries) == (15.0, 100_000)
    given = trace.settings({"TORCH_MEM_STATS_INTERVAL": "2.5", "TORCH_MEM_TRACE_ENTRIES": "5e3"})
    assert (given.interval, given.entries) == (2.5, 5000)


def test_statistics_have_the_agreed_fields(trace, torch, tmp_path):
    path = trace.write_stats(torch.cuda, "cuda:0", tmp_path)
    assert path.name == f"mem-stats-pid{os.getpid()}.json"
    content = json.loads(path.read_text())
    assert content.pop("ts") > 1_700_000_000
    assert content == {
        "pid": os.getpid(), "allocated": 100, "reserved": 200, "max_reserved": 300,
        "device_free": GIB, "device_total": 4 * GIB,
    }  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_file(trace, torch, tmp_path):
    path = trace.write_stats(torch.cuda, "cuda:0", tmp_path)
    before = path.read_bytes()
    torch.cuda.mem_get_info = lambda device: (GIB, object())
    with pytest.raises(TypeError):
        trace.write_stats(torch.cuda, "cuda:0", tmp_path)
    assert path.read_bytes() == before


def test_the_writer_is_a_daemon_that_keeps_the_interval(trace, torch, monkeypatch, tmp_path):
    slept = threading.Event()
    seconds = []

    def sleep(interval):
        seconds.append(interval)
        slept.set()
        threading.Event().wait()  # for good: a daemon ends with the process

    monkeypatch.setattr(trace.time, "sleep", sleep)
    monkeypatch.setenv("TORCH_MEM_STATS_DIR", str(tmp_path / "new" / "folder"))
    monkeypatch.setenv("TORCH_MEM_STATS_INTERVAL", "3")
    trace.arm("cuda:0")
    assert slept.wait(10)
    assert seconds == [3.0]
    assert list((tmp_path / "new" / "folder").glob("mem-stats-pid*.json"))


def test_the_thread_is_a_daemon(trace, torch, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        trace.threading,
        "Thread",
        lambda **words: made.append(words) or SimpleNamespace(start=lambda: made.append("start")),
    )
    monkeypatch.setenv("TORCH_MEM_STATS_DIR", str(tmp_path))
    trace.arm("cuda:0")
    assert made[0]["daemon"] is True
    assert made[1:] == ["start"]


def test_a_full_disk_is_said_once_and_survived(trace, torch, monkeypatch, tmp_path, caplog):
    rounds = iter([None, None, None])

    def write(cuda, device, folder):
        raise OSError(28, "No space left on device")

    def sleep(interval):
        if next(rounds, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(trace, "write_stats", write)
    with pytest.raises(KeyboardInterrupt):
        trace._write_for_ever(torch.cuda, "cuda:0", tmp_path, 1.0, sleep)
    said = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(said) == 1


def test_first_failed_allocation_is_dumped_once(trace, torch, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_MEM_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_MEM_TRACE_ENTRIES", "77")
    trace.arm("cuda:0")
    assert torch.asked == [("record", 77)]
    (observe,) = torch.observers
    observe(0, 3 * GIB, 4 * GIB, GIB // 2)
    observe(0, 2 * GIB, 4 * GIB, GIB // 4)
    snapshot = tmp_path / f"mem-snapshot-pid{os.getpid()}.pickle"
    assert snapshot.read_bytes() == b"snapshot"
    assert [what for what, *_ in torch.asked] == ["record", "dump"]
    said = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert "asked for 3.00 GiB, 0.50 of 4.00 GiB free" in said[0]
    assert "asked for 2.00 GiB, 0.25 of 4.00 GiB free" in said[1]
    assert "test_first_failed_allocation_is_dumped_once" in said[0]


def test_a_failed_dump_does_not_raise_into_torch(trace, torch, monkeypatch, tmp_path):
    def dump(path):
        raise OSError("disk")

    torch.cuda.memory._dump_snapshot = dump
    monkeypatch.setenv("TORCH_MEM_TRACE_DIR", str(tmp_path))
    trace.arm("cuda:0")
    torch.observers[0](0, 1, 1, 1)
    assert list(tmp_path.iterdir()) == []
