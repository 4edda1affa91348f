"""What the container's arguments mean, through the entry point itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.image.serving.standins import program

ENTRYPOINT = Path(__file__).resolve().parents[3] / "image" / "runtime" / "entrypoint.py"


@pytest.fixture
def run(tmp_path):
    program(
        tmp_path / "vllm", "import json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))"
    )

    def call(*arguments, **environ):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
        command = [sys.executable, "-B", str(ENTRYPOINT), *arguments]
        started = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        out, err = started.communicate(timeout=60)
        assert "Traceback" not in err
        return started, out, err

    return call


@pytest.mark.parametrize("words", [("vllm", "serve"), ()])
def test_plain_takes_the_place_of_the_process(run, words):
    started, out, _err = run(*words, "a b", "--port=1", GLM_MLA_ROUTE="cuda")
    assert json.loads(out) == [started.pid, ["serve", "a b", "--port=1"]]


def test_knobs_without_a_deployment(run):
    started, out, err = run("model", GLM_TP="2", GLM_STATE_DIR="")
    assert (started.returncode, out) == (2, "")
    assert err.startswith("glm53: error: GLM_TP: set, but GLM_DEPLOYMENT is not")


def test_nothing_at_all(run):
    started, _out, err = run()
    assert started.returncode == 2
    assert "gb10-2x, gb10-4x, rtx6000-4x" in err


def test_no_vllm(run, tmp_path):
    (tmp_path / "vllm").unlink()
    started, _out, err = run("model", PATH=str(tmp_path))
    assert started.returncode == 5
    assert "vllm cannot be started" in err


def test_plan_shows_each_rank_and_starts_nothing(run):
    started, out, _err = run("plan", "--seed=1", GLM_DEPLOYMENT="gb10-2x")
    assert started.returncode == 0
    assert out.count("\nvllm serve ") == 2
    assert out.count("--headless") == 1
    assert "GLM_MLA_ROUTE=cuda" in out
    assert out.rstrip().endswith("--seed=1")


def test_knobs_show_their_values(run):
    _started, out, err = run("knobs", GLM_DEPLOYMENT="gb10-2x", GLM_MAX_NUM_SEQS="4", TP="2")
    assert "GLM_MAX_NUM_SEQS=4  (set)" in out
    assert "GLM_TP=2  (default)" in out
    assert "TP='2' is not read here; the knob is GLM_TP" in err


def test_contradiction_is_told_by_plan_too(run):
    started, out, err = run("plan", GLM_DEPLOYMENT="gb10-2x", GLM_TP="4")
    assert (started.returncode, out) == (2, "")
    assert "expected 2" in err


@pytest.mark.parametrize("name", ["GLM_API_KEY_FILE", "GLM_STATUS_TOKEN_FILE", "GLM_API_KEY"])
def test_a_secret_where_its_file_should_be_is_not_shown(run, name):
    started, out, err = run("plan", GLM_DEPLOYMENT="rtx6000-4x", **{name: "hunter2"})
    assert started.returncode == 2
    assert name in err and "hunter2" not in out + err


@pytest.mark.parametrize("value", [
    "--api-key hunter2", '["--api-key","hunter2"', '["--api_key=hunter2"]', "{hf_token: hunter2}",
    '["--api-key","hunter2"]', '["--hf-token", "hunter2"',
])  # fmt: skip
def test_a_secret_among_arguments_is_not_shown(run, value):
    started, out, err = run("plan", GLM_DEPLOYMENT="rtx6000-4x", GLM_EXTRA_ARGS=value)
    assert started.returncode == 2 and err
    assert "hunter2" not in out + err


def test_a_token_as_an_argument_is_refused_and_told_where_it_belongs(run):
    started, _out, err = run("plan", "--hf-token", "x", GLM_DEPLOYMENT="rtx6000-4x")
    assert started.returncode == 2 and "set HF_TOKEN" in err


@pytest.mark.parametrize("verb", ["plan", "knobs"])
def test_output_that_nobody_takes_is_a_sentence(verb):
    env = {"PATH": os.environ["PATH"], "GLM_DEPLOYMENT": "rtx6000-4x"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-B", str(ENTRYPOINT), verb], env=env, stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert done.returncode == 5
    assert done.stderr == "glm53: error: the output cannot be written: No space left on device\n"


def test_a_path_that_is_no_text_is_shown_escaped():
    env = {b"PATH": os.fsencode(os.environ["PATH"]), b"GLM_DEPLOYMENT": b"rtx6000-4x",
           b"GLM_MODEL_DIR": b"/m/\xff", b"PYTHONIOENCODING": b"utf-8:strict"}  # fmt: skip
    done = subprocess.run([sys.executable, "-B", str(ENTRYPOINT), "knobs"], env=env,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "GLM_MODEL_DIR=/m/\\udcff  (set)" in done.stdout


def test_the_code_is_the_start_s_also_when_nobody_reads_its_output():
    """Python ends with 120 when it cannot write at exit what is left."""
    code = (f"import sys; sys.path.insert(0, {str(ENTRYPOINT.parent)!r})\n"
            "from serving import cli, main\n"
            "main.main = lambda *_: sys.stdout.buffer.write(b'vLLM says') and 4\n"
            "sys.exit(cli.main(['x'], {'GLM_DEPLOYMENT': 'rtx6000-4x'}))")  # fmt: skip
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-B", "-c", code], stdout=full, env={},
                              stderr=subprocess.PIPE, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (4, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("words", "knobs", "code"), [
    ([], {"GLM_DEPLOYMENT": "rtx6000-4x"}, 0), (["health"], {"GLM_DEPLOYMENT": "rtx6000-4x"}, 130),
    (["model"], {}, 130),
])  # fmt: skip
def test_a_signal_while_python_still_imports(tmp_path, number, words, knobs, code):
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "__init__.py").touch()
    slow = "import sys, time\nprint('ready', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "serving" / "cli.py").write_text(slow)
    entry = tmp_path / "entrypoint.py"
    entry.write_bytes(ENTRYPOINT.read_bytes())
    with subprocess.Popen([sys.executable, str(entry), *words], env=knobs, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as started:  # fmt: skip
        assert started.stdout.readline() == b"ready\n"
        started.send_signal(number)
        _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (code, b"")
