"""The state file: what a reader sees at each step, and that it never sees half of one."""

from __future__ import annotations

import json
import threading

import pytest
from serving import cli, health, state
from serving.state import StateFile


@pytest.fixture
def clock():
    return iter(range(100, 200)).__next__


def entry(document, name):
    return next(one for one in document["stages"] if one["name"] == name)


def test_stages_follow_each_other(tmp_path, clock):
    made = StateFile(tmp_path / "deep", "gb10-2x", clock)
    assert state.read(tmp_path / "deep") == made.document()
    made.begin("preflight")
    made.note("looking")
    made.begin("discover")
    made.skip("self_test", "the head's")
    found = state.read(tmp_path / "deep")
    assert found["stage"] == "discover"
    assert entry(found, "preflight") == {"name": "preflight", "state": "done", "started": 100,
                                         "ended": 101, "message": "looking"}  # fmt: skip
    assert entry(found, "discover")["state"] == "running"
    skipped = entry(found, "self_test")
    assert (skipped["state"], skipped["started"], skipped["message"]) == (
        "done",
        None,
        "not run: the head's",
    )


def test_serving_is_true_in_that_stage_alone(tmp_path, clock):
    made = StateFile(tmp_path, "gb10-2x", clock)
    for stage in state.STAGES:
        made.begin(stage)
        assert state.read(tmp_path)["serving"] == (stage == "serving")
    made.stop()
    found = state.read(tmp_path)
    assert (found["stage"], found["serving"], found["error"]) == ("stopped", False, None)


def test_failure_stands_where_it_happened(tmp_path, clock):
    made = StateFile(tmp_path, "gb10-2x", clock)
    made.begin("join")
    made.fail("rank 1 is lost")
    found = state.read(tmp_path)
    assert (found["stage"], found["error"]) == ("failed", "rank 1 is lost")
    assert (entry(found, "join")["state"], entry(found, "join")["message"]) == (
        "failed",
        "rank 1 is lost",
    )


def test_unknown_field_is_a_fault(tmp_path):
    made = StateFile(tmp_path, "gb10-2x")
    for name in ("colour", "stage", "stages"):
        with pytest.raises(ValueError, match=name):
            made.update(**{name: 1})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 2}', b"\xff"])
def test_what_is_no_state(tmp_path, data):
    (tmp_path / "state.json").write_bytes(data)
    assert state.read(tmp_path) is None


def test_a_reader_sees_whole_states_only(tmp_path):
    made = StateFile(tmp_path, "gb10-2x")
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            made.update(error="x" * (number % 5000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            json.loads((tmp_path / "state.json").read_bytes())
    finally:
        stop.set()
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


class TestHealth:
    def check(self, tmp_path, capsys):
        code = cli.main(["health"], {"GLM_DEPLOYMENT": "gb10-2x", "GLM_STATE_DIR": str(tmp_path)})
        return code, capsys.readouterr().out.strip()

    def test_before_and_during_a_start(self, tmp_path, capsys):
        code, said = self.check(tmp_path, capsys)
        assert (code, said.partition(": ")[2]) == (1, "the start has not begun")
        made = StateFile(tmp_path, "gb10-2x")
        made.begin("load")
        assert self.check(tmp_path, capsys) == (1, "load")
        made.fail("vLLM ended with 1")
        assert self.check(tmp_path, capsys) == (1, "failed: vLLM ended with 1")

    def test_worker_is_well_by_its_state_and_the_head_by_its_api(
        self, tmp_path, capsys, monkeypatch
    ):
        made = StateFile(tmp_path, "gb10-2x")
        made.begin("serving")
        made.update(rank=1)
        assert self.check(tmp_path, capsys) == (0, "serving")
        made.update(rank=0, knobs={"GLM_API_PORT": "9", "GLM_API_HOST": "0.0.0.0"})
        asked = []
        monkeypatch.setattr(health, "is_healthy", lambda base: bool(asked.append(base)))
        assert self.check(tmp_path, capsys) == (1, "http://127.0.0.1:9/health does not answer")
        assert asked == ["http://127.0.0.1:9"]

    def test_plain_server_is_not_watched(self, capsys):
        assert cli.main(["health"], {}) == 0


def test_a_failure_that_no_disk_takes_is_no_end_that_was_asked_for(tmp_path, clock, monkeypatch):
    made = StateFile(tmp_path, "gb10-2x", clock)
    made.begin("load")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(state, "replace_file", full)
        with pytest.raises(OSError, match="No space"):
            made.fail("vLLM ended with 1")
    assert (made.stage, made.document()["error"]) == ("failed", "vLLM ended with 1")
