"""Children end whole, their output arrives, and the log of the run before is kept."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import process
from serving.errors import EnvironmentFault
from serving.process import Child, Signals, Stopped


def child(code, **named):
    return Child("it", [sys.executable, "-c", code], os.environ, out=io.BytesIO(), **named)


def wait(one):
    end = time.monotonic() + 30
    while one.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    one.finish()
    return one.poll()


def test_output_goes_to_us_to_the_log_and_to_who_asks(tmp_path):
    lines, out, log = [], io.BytesIO(), tmp_path / "logs" / "it.log"
    for text in ("one", "two"):
        one = Child("it", [sys.executable, "-c", f"print('{text}\\xff')"], os.environ, log=log,
                    on_line=lines.append, out=out)  # fmt: skip
        assert wait(one) == 0
    assert out.getvalue().decode() == "one\xff\ntwo\xff\n"
    assert (log.read_text(), (tmp_path / "logs" / "it.log.prev").read_text()) == (
        "two\xff\n",
        "one\xff\n",
    )
    assert lines == ["one\xff", "two\xff"]


def test_output_that_nobody_can_take_stops_nothing(tmp_path):
    out = io.BytesIO()
    out.close()
    one = Child("it", [sys.executable, "-c", "print('x' * 300000)"], os.environ, out=out)
    assert wait(one) == 0


def test_what_cannot_be_started_or_logged(tmp_path):
    with pytest.raises(EnvironmentFault, match="/no/such cannot be started: No such file"):
        Child("it", ["/no/such"], {})
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="the log cannot be written"):
        child("", log=tmp_path / "file" / "it.log")


def test_stop_lets_it_drain(tmp_path):
    mark = tmp_path / "mark"
    code = ("import signal, sys, time\n"
            f"end = lambda *_: (time.sleep(0.2), open({str(mark)!r}, 'w'), sys.exit(4))\n"
            "signal.signal(15, end)\n"
            f"open({str(tmp_path / 'ready')!r}, 'w')\n"
            "time.sleep(60)")  # fmt: skip
    one = child(code)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    one.stop(30)
    assert (one.poll(), mark.exists()) == (4, True)


def test_stop_ends_what_does_not_listen():
    lines = []
    one = child("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
                "time.sleep(60)", on_line=lines.append)  # fmt: skip
    while not lines:
        time.sleep(0.01)
    one.stop(0.1)
    assert one.poll() == -signal.SIGKILL


def test_hurry_ends_the_wait():
    one = child("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
    before = time.monotonic()
    one.stop(60, lambda: time.monotonic() > before + 0.2)
    assert one.poll() is not None


def test_orphans_of_a_child_end_with_it():
    """In a process of its own, since it adopts and ends whatever it has."""
    code = """
import subprocess, sys, time
from serving.process import Child, adopt_orphans
adopt_orphans()
lines = []
grand = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
one = Child("it", [sys.executable, "-c", grand], {}, on_line=lines.append)
while one.poll() is None:
    time.sleep(0.01)
one.finish()
import os
try:
    os.kill(int(lines[0]), 0)
    print("alive")
except ProcessLookupError:
    print("gone")
"""
    path = str(Path(process.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "gone", done.stderr


class TestSignals:
    def test_first_one_interrupts_what_blocks_and_is_counted(self):
        signals = Signals()
        with pytest.raises(Stopped), signals.raising():
            signals._take(15, None)
        assert signals.asked == 1
        signals._take(15, None)
        assert signals.asked == 2
        with pytest.raises(Stopped), signals.raising():
            raise AssertionError("a later stage must not begin")


def test_a_log_that_grows_large_becomes_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_LARGEST_LOG", 3000)
    log = tmp_path / "it.log"
    code = "for number in range(1000): print(f'line {number:04}')"
    assert wait(child(code, log=log)) == 0
    kept = (tmp_path / "it.log.prev").read_text() + log.read_text()
    assert kept.splitlines() == [f"line {n:04}" for n in range(1000)][-len(kept.splitlines()) :]
    assert 300 <= len(kept.splitlines()) <= 620
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.log", "it.log.prev"]


def test_a_log_that_cannot_be_replaced_grows_on(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_LARGEST_LOG", 3000)
    (tmp_path / "it.log.prev" / "in the way").mkdir(parents=True)
    code = "print('x' * 2000); print('y' * 2000)"
    assert wait(child(code, log=tmp_path / "it.log")) == 0
    assert len((tmp_path / "it.log").read_text()) == 4002


def test_a_full_disk_stops_nothing_and_says_nothing():
    code = """
import os, sys
from pathlib import Path
from serving import process
def full(path):
    return Path("/dev/full").open("wb")
process._rotated = full
lines = []
one = process.Child("it", [sys.executable, "-c", "print('x' * 300000); print('end')"], os.environ,
                    log=Path("/x"), on_line=lines.append)
while one.poll() is None:
    pass
one.finish()
sys.exit(0 if lines[-1] == "end" else 1)
"""
    path = str(Path(process.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, check=False, timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_is_left_of_a_start_that_a_signal_cut_short():
    code = """
import os, signal, sys, threading
from serving import process
process.adopt_orphans()
def cut(self):
    raise process.Stopped
threading.Thread.start = cut  # where the signal comes in
pids = []
popen = process.subprocess.Popen
process.subprocess.Popen = lambda *a, **k: pids.append(popen(*a, **k)) or pids[0]
try:
    process.Child("it", ["sleep", "600"], os.environ)
except process.Stopped:
    process.end_all()
try:
    os.kill(pids[0].pid, 0)
    print("alive")
    os.kill(pids[0].pid, 9)
except ProcessLookupError:
    print("gone")
"""
    path = str(Path(process.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.stdout == "gone\n", done.stderr
