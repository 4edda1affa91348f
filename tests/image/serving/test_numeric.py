"""The numeric check's answers become a start, or a sentence with the route that would work."""

from __future__ import annotations

import json
import os

import pytest
from serving import numeric
from serving.errors import CheckError, EnvironmentFault
from serving.resolve import resolve

from tests.image.serving.standins import check

WELL = json.dumps({"schema": 1, "cases": [], "flashkda": [], "exit_code": 0})
MISS = json.dumps({
    "schema": 1,
    "cases": [{"case": "decode 64", "ok": False}, {"case": "prefill", "ok": True}],
    "flashkda": [],
})  # fmt: skip
KDA = json.dumps({
    "schema": 1,
    "cases": [],
    "flashkda": [{"test": "increments", "value": None, "expected": "< 1e-3", "ok": False}],
})  # fmt: skip
UNABLE = json.dumps({"schema": 1, "error": "torch: expected it", "exit_code": 5})


def run(command, **knobs):
    said = []
    plan = resolve({"GLM_DEPLOYMENT": "rtx6000-4x"} | knobs)
    numeric.check(plan, dict(os.environ), said.append, command)
    return said


def problems(kind, command, **knobs):
    with pytest.raises(kind) as caught:
        run(command, **knobs)
    return caught.value.problems


def test_all_well_and_well_as_far_as_it_ran(tmp_path):
    assert run(check(tmp_path / "c", 0, WELL)) == ["numeric check: all well"]
    assert run(check(tmp_path / "c", 1, WELL)) == ["numeric check: well, as far as it ran"]


def test_a_miss_names_the_case_and_the_routes_that_work(tmp_path):
    command = check(tmp_path / "c", 3, MISS)
    (sentence,) = problems(CheckError, command)
    assert "wrong values on this card (decode 64)" in sentence
    assert "GLM_MLA_ROUTE=stock does without it, and so does sm90" in sentence
    (sentence,) = problems(CheckError, command, GLM_KV_CACHE_DTYPE="bfloat16")
    assert sentence.endswith("GLM_MLA_ROUTE=sm90 does without it")


def test_a_miss_of_flashkda_names_its_switch(tmp_path):
    (sentence,) = problems(CheckError, check(tmp_path / "c", 3, KDA))
    assert "FlashKDA increments: expected < 1e-3, found None" in sentence
    assert "--kda-prefill-backend" in sentence


def test_the_advice_is_a_start_that_the_rules_allow():
    for route in ("stock", "sm90"):
        resolve({"GLM_DEPLOYMENT": "rtx6000-4x", "GLM_MLA_ROUTE": route})
    advice = numeric._FLASHKDA_ADVICE.partition("=")[2].partition(" does")[0]
    resolve({"GLM_DEPLOYMENT": "rtx6000-4x", "GLM_EXTRA_ARGS": advice})


def test_other_routes_check_flashkda_alone(tmp_path):
    command = check(tmp_path / "c", 0, WELL, "assert sys.argv[1:] == ['--only', 'flashkda']")
    for route in ("stock", "sm90", "triton"):
        assert run(command, GLM_MLA_ROUTE=route) == ["numeric check: all well"]
    extra = '["--kda-prefill-backend","triton"]'
    (said,) = run(["/no/such/command"], GLM_MLA_ROUTE="stock", GLM_EXTRA_ARGS=extra)
    assert "nothing of ours runs" in said


def test_one_that_hangs_or_is_killed(tmp_path):
    command = check(tmp_path / "c", before="time.sleep(600)")
    (sentence,) = problems(CheckError, command, GLM_NUMERIC_CHECK_TIMEOUT_S="1")
    assert "did not end in 1 s: GLM_MLA_ROUTE=stock" in sentence
    (sentence,) = problems(CheckError, check(tmp_path / "c", before="os.kill(os.getpid(), 11)"))
    assert "killed by signal 11" in sentence


@pytest.mark.parametrize(
    ("code", "document", "part"),
    [
        (5, UNABLE, "(exit 5): torch: expected it"),
        (0, "Traceback", "(exit 0): - here"),
        (3, "[]", "(exit 3): - here"),
        (1, "", "(exit 1): - here"),
        (2, '{"schema": 2}', "(exit 2): - here"),
    ],
)
def test_one_that_cannot_be_run_is_the_environment(tmp_path, code, document, part):
    (sentence,) = problems(EnvironmentFault, check(tmp_path / "c", code, document))
    assert part in sentence
    assert "GLM_NUMERIC_CHECK=0" in sentence


def test_a_miss_that_says_nothing_is_still_one(tmp_path):
    (sentence,) = problems(CheckError, check(tmp_path / "c", 3, WELL))
    assert "run it by hand" in sentence


def test_no_command():
    (sentence,) = problems(EnvironmentFault, ["/no/such/command"])
    assert "cannot be run" in sentence
