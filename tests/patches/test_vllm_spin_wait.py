"""A reader spins 2 ms unless the knob or its caller says otherwise."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import ask
from imagebuild.patching.patch import Outcome
from tests.patches.harness import VERSIONS, PatchContract, changed, extract, patched

PATH = "vllm/distributed/device_communicators/shm_broadcast.py"
KNOB = "VLLM_SHM_BROADCAST_BUSY_LOOP_S"
DEFAULT = r"busy_loop_s: float = 1,"


class TestSpinWait(PatchContract):
    name = "vllm_spin_wait"
    upstream_fix = ((PATH, DEFAULT, f"busy_loop_s: float = envs.{KNOB},"),)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(KNOB, raising=False)


def spin_seconds(tree, is_reader=True, **words):
    names = {name: MagicMock() for name in ("zmq", "SUB", "SUBSCRIBE", "PUB")}
    names |= {"get_open_zmq_inproc_path": str, "time": time, "os": os}
    condition = extract(tree, PATH, "SpinCondition.__init__", names)
    made = condition(is_reader, MagicMock(), "ipc://x", **words)
    return getattr(made, "busy_loop_s", None)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("setting", "seconds"),
    [(None, 0.002), ("", 0.002), (" ", 0.002), ("0", 0.0), ("1", 1.0), ("2.5e-3", 0.0025)],
)
def test_seconds_by_setting(real_tree, version, setting, seconds, monkeypatch):
    if setting is not None:
        monkeypatch.setenv(KNOB, setting)
    assert spin_seconds(patched(TestSpinWait.name, real_tree(version))) == seconds


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("setting", ["soon", "-0.1", "nan", "inf", "1s", "0,002"])
def test_bad_setting_is_one_sentence(real_tree, version, setting, monkeypatch):
    monkeypatch.setenv(KNOB, setting)
    tree = patched(TestSpinWait.name, real_tree(version))
    with pytest.raises(ValueError, match=f"^{KNOB}='{setting}': expected a number of seconds"):
        spin_seconds(tree)


def test_the_variable_is_read_when_a_reader_is_made(real_tree, monkeypatch):
    names = {name: MagicMock() for name in ("zmq", "SUB", "SUBSCRIBE", "PUB")}
    names |= {"get_open_zmq_inproc_path": str, "time": time, "os": os}
    tree = patched(TestSpinWait.name, real_tree("0.33.0"))
    condition = extract(tree, PATH, "SpinCondition.__init__", names)
    # The module is imported; then the executor hands over the environment.
    monkeypatch.setenv(KNOB, "0.5")
    assert condition(True, MagicMock(), "ipc://x").busy_loop_s == 0.5


@pytest.mark.parametrize("version", VERSIONS)
def test_an_explicit_argument_wins(real_tree, version, monkeypatch):
    monkeypatch.setenv(KNOB, "0.5")
    tree = patched(TestSpinWait.name, real_tree(version))
    assert spin_seconds(tree, busy_loop_s=0.125) == 0.125
    assert spin_seconds(tree, busy_loop_s=0) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_spins_a_second(real_tree, version, monkeypatch):
    monkeypatch.setenv(KNOB, "0.5")
    assert spin_seconds(real_tree(version)) == 1


def test_a_knob_read_elsewhere_is_seen(real_tree):
    # The caller passes it, or __init__ reads it by getenv: both are upstream having the knob.
    caller = (PATH, r"is_reader=True, context=context,",
              f"is_reader=True, busy_loop_s=envs.{KNOB}, context=context,")  # fmt: skip
    getenv = (PATH, r"self\.busy_loop_s = busy_loop_s",
              f'self.busy_loop_s = float(os.getenv("{KNOB}", "1"))')  # fmt: skip
    for change in (caller, getenv):
        tree = changed(real_tree("0.33.0"), [change])
        assert ask(TestSpinWait().patch.absorbed, tree).outcome is Outcome.HOLDS


def test_another_fixed_default_is_not_the_knob(real_tree):
    tree = changed(real_tree("0.33.0"), [(PATH, DEFAULT, "busy_loop_s: float = 0.002,")])
    patch = TestSpinWait().patch
    assert ask(patch.absorbed, tree).outcome is Outcome.FAILS
    assert ask(patch.effect, tree).outcome is Outcome.FAILS
    assert ask(patch.reason, tree).outcome is Outcome.FAILS


def test_wait_idles_once_the_time_is_over(real_tree):
    yields = []
    names = {
        "time": SimpleNamespace(monotonic=lambda: 10.0),
        "sched_yield": lambda: yields.append("yield"),
        "logger": MagicMock(),
    }
    wait = extract(real_tree("0.31.0"), PATH, "SpinCondition.wait", names).wait
    reader = MagicMock(is_reader=True, busy_loop_s=0.002, last_read=9.999)
    wait(reader)
    assert (yields, reader.poller.poll.called) == (["yield"], False)
    reader.last_read = 9.997
    reader.poller.poll.return_value = []
    wait(reader)
    assert (yields, reader.poller.poll.called) == (["yield"], True)
