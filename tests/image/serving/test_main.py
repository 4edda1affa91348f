"""The whole story with stand-ins for vLLM and its checks: each end as documented, nothing left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from serving import state

from tests.image.serving.machines import checkpoint, environ, site
from tests.image.serving.standins import VLLM, check, program

RANK = Path(__file__).with_name("rank.py")
WELL = '{"schema": 1, "cases": [], "flashkda": []}'
LIMIT = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """One rank and what can be seen of it."""

    def __init__(self, folder: Path, deployment: str, *arguments: str, **knobs: str) -> None:
        self.folder = folder
        self.port = free_port()
        env = environ(deployment, folder, GLM_API_PORT=str(self.port), GLM_API_HOST="127.0.0.1",
                      GLM_STATUS_PORT=str(free_port()), **knobs)  # fmt: skip
        env |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder),
                "STANDIN_RECORD": str(folder / "record"), "NCCL_IB_DISABLE": "1"}  # fmt: skip
        env |= {name: value for name, value in knobs.items() if not name.startswith("GLM_")}
        self.process = subprocess.Popen(
            [sys.executable, str(RANK), str(folder), deployment, *arguments], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output = ""

    @property
    def state(self):
        return state.read(self.folder / "state") or {}

    @property
    def stages(self) -> dict[str, str]:
        return {entry["name"]: entry["state"] for entry in self.state.get("stages", [])}

    def until(self, stage: str) -> None:
        end = time.monotonic() + LIMIT
        while self.state.get("stage") != stage:
            assert self.process.poll() is None, self.ended()
            assert time.monotonic() < end, (stage, self.state)
            time.sleep(0.02)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """Exit code and output; nothing that it started is left."""
        self.output += self.process.communicate(timeout=LIMIT)[0]
        assert "Traceback" not in self.output
        pids = self.folder / "record.pids"
        alive = [pid for pid in pids.read_text().split() if is_alive(pid)] if pids.exists() else []
        assert alive == []
        return self.process.returncode, self.output


def ask_slowly(port: int) -> bytes:
    """A request that takes a moment."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/slow", timeout=LIMIT) as answer:
        return answer.read()


def is_alive(pid: str) -> bool:
    try:
        text = Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path / "model")
    site(tmp_path / "site")
    program(tmp_path / "bin" / "vllm", VLLM)
    program(tmp_path / "bin" / "selftest", "print('ok   paris')\n")
    program(tmp_path / "bin" / "fabric", "print('fabric well')\n")
    check(tmp_path / "bin" / "numeric", 0, WELL)
    return tmp_path


@pytest.fixture
def start(folder):
    made: list[Rank] = []

    def begin(deployment="rtx6000-4x", *arguments, **knobs):
        made.append(Rank(folder, deployment, *arguments, **knobs))
        return made[-1]

    yield begin
    for rank in made:
        rank.process.kill()
        rank.process.communicate()
        with contextlib.suppress(OSError, ValueError):
            for pid in (folder / "record.pids").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def test_from_start_to_stop(folder, start):
    (folder / "key").write_text("hunter2\n")
    rank = start("rtx6000-4x", "--max-logprobs", "5", GLM_API_KEY_FILE=str(folder / "key"),
                 VLLM_GLM53_CUDA_SPARSE_MLA="1")  # fmt: skip
    rank.until("serving")
    found = rank.state
    assert (found["rank"], found["ranks"], found["route"], found["serving"]) == (0, 1, "cuda", True)
    assert found["knobs"]["GLM_BLOCK_SIZE"] == "256"
    assert len(found["fingerprint"]["digest"]) == 64
    assert [name for name, one in rank.stages.items() if one == "done"] == list(state.STAGES[:7])
    times = [entry["started"] for entry in found["stages"][:8]]
    assert times == sorted(times)

    record = json.loads((folder / "record").read_text())
    argv, env = record["argv"], record["env"]
    assert argv[:2] == ["serve", str(folder / "model")]
    assert argv[-2:] == ["--max-logprobs", "5"]
    template = Path(argv[argv.index("--chat-template") + 1])
    assert "thinking off is low effort" in template.read_text() or "<think>" in template.read_text()
    assert env["GLM_MLA_ROUTE"] == "cuda"
    assert "VLLM_GLM53_CUDA_SPARSE_MLA" not in env
    assert env["VLLM_API_KEY"] == "hunter2"
    assert env["TRITON_CACHE_DIR"].startswith(str(folder / "cache"))
    assert "NCCL_IB_HCA" not in env

    rank.signal()
    code, output = rank.ended()
    assert code == 0
    assert rank.state["stage"] == "stopped"
    assert rank.stages["draining"] == "done"
    assert "hunter2" not in output + (folder / "state" / "state.json").read_text()
    assert "ready" in (folder / "logs" / "vllm.log").read_text()


def test_requests_in_flight_end_before_it_does(folder, start):
    rank = start()
    rank.until("serving")
    answers: list[bytes] = []

    def ask():
        with urllib.request.urlopen(f"http://127.0.0.1:{rank.port}/slow") as answer:
            answers.append(answer.read())

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.2)
    rank.signal()
    code, output = rank.ended()
    client.join()
    assert (code, answers) == (0, [b"done"])
    assert output.index("draining") < output.index("drained")


def test_a_state_that_cannot_be_written_costs_no_request(folder, start):
    rank = start()
    rank.until("serving")
    (folder / "state").rename(folder / "state.gone")
    (folder / "state").write_text("a disk that takes nothing")
    rank.signal()
    code, output = rank.ended()
    assert code == 0 and "drained" in output


def test_second_signal_does_not_wait(start):
    rank = start(STANDIN_MODE="deaf")
    rank.until("serving")
    rank.signal()
    rank.until("draining")
    rank.signal(signal.SIGINT)
    code, _output = rank.ended()
    assert code == 130


def test_signal_before_the_weights(folder, start):
    (folder / "wait").touch()
    rank = start("gb10-2x", GLM_CLUSTER_SUBNET="127.0.0.0/8")
    rank.until("join")
    rank.signal()
    code, _output = rank.ended()
    assert code == 0
    assert rank.state["stage"] == "stopped"
    assert (folder / "left").read_text() == ""
    assert not (folder / "record").exists()


def test_vllm_that_dies(start):
    rank = start(STANDIN_MODE="dies")
    code, output = rank.ended()
    assert code == 5
    assert "OutOfMemoryError" in output
    assert rank.state["error"] == "vLLM ended with 7; its log has the reason"
    assert rank.state["stage"] == "failed"


def test_vllm_that_is_killed_while_it_serves(folder, start):
    rank = start(STANDIN_MODE="crashes")
    rank.until("serving")
    (folder / "record.crash").touch()
    code, _output = rank.ended()
    assert code == 5
    assert "vLLM was killed by signal 9" in rank.state["error"]


def test_vllm_that_never_answers(start):
    rank = start(STANDIN_MODE="never", GLM_LOAD_TIMEOUT_S="1")
    code, _output = rank.ended()
    assert code == 5
    assert "within GLM_LOAD_TIMEOUT_S=1" in rank.state["error"]
    assert rank.stages["warmup"] == "failed"


def test_self_test_that_fails(folder, start):
    program(folder / "bin" / "selftest", "print('FAIL paris (0.1 s): found London')\nexit(3)\n")
    rank = start()
    code, _output = rank.ended()
    assert code == 3
    assert rank.state["error"] == "self-test: paris (0.1 s): found London"
    assert rank.stages["self_test"] == "failed"
    assert rank.state["serving"] is False


def test_self_test_that_hangs_or_breaks(folder, start):
    program(folder / "bin" / "selftest", "import time\ntime.sleep(600)\n")
    rank = start(GLM_SELF_TEST_TIMEOUT_S="1")
    assert rank.ended()[0] == 3
    assert "did not end within 1 s" in rank.state["error"]


def test_numeric_check_that_fails(folder, start):
    check(folder / "bin" / "numeric", 3,
          '{"schema": 1, "cases": [{"case": "decode", "ok": false}]}')  # fmt: skip
    rank = start()
    code, _output = rank.ended()
    assert code == 3
    assert "GLM_MLA_ROUTE=stock" in rank.state["error"]
    assert rank.stages["numeric_check"] == "failed"
    assert not (folder / "record").exists()


def test_preflight_that_fails(folder, start):
    (folder / "model" / "config.json").unlink()
    rank = start()
    code, output = rank.ended()
    assert code == 3
    assert "glm53: error: " in output
    assert rank.stages == dict.fromkeys(state.STAGES, "waiting") | {"preflight": "failed"}


def test_contradiction_starts_nothing(folder, start):
    rank = start(GLM_BLOCK_SIZE="300")
    code, output = rank.ended()
    assert code == 2
    assert "GLM_BLOCK_SIZE=300" in output
    assert rank.state["stage"] == "failed"
    assert not (folder / "logs").exists()


def test_status_page_that_cannot_bind_is_a_sentence(folder, start):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        rank = start(GLM_STATUS_HOST="192.0.2.1", GLM_STATUS_TOKEN_FILE="/nowhere")
        code, output = rank.ended()
    assert code == 5
    assert "GLM_STATUS_TOKEN_FILE=/nowhere cannot be used: No such file" in output
    (folder / "token").write_text("0123456789abcdef")
    rank = start(GLM_STATUS_HOST="192.0.2.1", GLM_STATUS_TOKEN_FILE=str(folder / "token"))
    code, output = rank.ended()
    assert code == 5
    assert "the status server cannot be started" in output and "0123456789" not in output


def test_a_fault_of_our_own_is_a_sentence_too(folder, start):
    (folder / "bin" / "numeric").unlink()
    (folder / "state").mkdir()
    (folder / "state" / "chat_template.jinja").mkdir()
    code, output = start().ended()
    assert code == 5
    assert "error: " in output


class TestTwoRanks:
    @pytest.fixture
    def two(self, start):
        return lambda **knobs: start("gb10-2x", GLM_CLUSTER_SUBNET="127.0.0.0/8", **knobs)

    def test_no_fabric_is_told_where_it_is_looked_for(self, two):
        rank = two(NCCL_IB_DISABLE="0")
        code, _output = rank.ended()
        assert code == 5
        assert rank.stages["discover"] == "failed"
        assert "expected an RDMA port" in rank.state["error"]

    def test_mismatch(self, folder, two):
        (folder / "mismatch").touch()
        rank = two()
        code, _output = rank.ended()
        assert code == 4
        assert rank.state["error"] == "kernel: rank 0 has sha256:1, rank 1 has sha256:2"
        assert (folder / "left").read_text() == rank.state["error"]

    def test_lost_rank(self, folder, two):
        rank = two()
        rank.until("serving")
        record = json.loads((folder / "record").read_text())
        assert record["argv"][record["argv"].index("--nnodes") + 1] == "2"
        port = rank.state["knobs"]["GLM_STATUS_PORT"]
        assert rank.state["peers"] == [f"127.0.0.1:{port}", f"[::1]:{port}"]
        assert record["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        (folder / "lost").touch()
        code, _output = rank.ended()
        assert code == 5
        assert rank.state["error"] == "rank 1 is lost: it was killed"

    def test_worker_serves_when_the_head_does(self, folder, two):
        (folder / "worker").touch()
        program(folder / "bin" / "selftest", "exit(3)\n")
        rank = two(STANDIN_MODE="never")
        rank.until("warmup")
        record = json.loads((folder / "record").read_text())
        assert "--headless" in record["argv"]
        assert not rank.state["serving"]
        head = program(folder / "head", VLLM)
        env = os.environ | {"STANDIN_RECORD": str(folder / "record2")}
        api = subprocess.Popen([head, "--port", str(rank.port)], env=env, stdout=subprocess.DEVNULL)
        try:
            rank.until("serving")
        finally:
            api.kill()
            api.wait()
            for pid in (folder / "record2.pids").read_text().split()[:2]:
                os.kill(int(pid), signal.SIGKILL)
        assert rank.state["rank"] == 1
        assert rank.stages["self_test"] == "done"
        rank.signal()
        rank.until("draining")
        # The head's requests need this rank until the head has gone.
        self.wait_for(folder / "stopping")
        assert is_alive((folder / "record.pids").read_text().split()[-1])
        (folder / "lost").touch()
        assert rank.ended()[0] == 0

    @staticmethod
    def wait_for(file):
        end = time.monotonic() + LIMIT
        while not file.exists():
            assert time.monotonic() < end
            time.sleep(0.02)

    @pytest.mark.parametrize("how", ["again", "timeout", "vllm"])
    def test_a_worker_waits_for_no_head_for_ever(self, folder, two, how):
        """A second signal, the time for draining, or vLLM's own end ends the wait."""
        (folder / "worker").touch()
        rank = two(
            STANDIN_MODE="never", **({"GLM_DRAIN_TIMEOUT_S": "1"} if how == "timeout" else {})
        )
        rank.until("warmup")
        rank.signal()
        self.wait_for(folder / "stopping")
        if how == "again":
            rank.signal()
        if how == "vllm":
            os.kill(int((folder / "record.pids").read_text().split()[-1]), signal.SIGKILL)
        assert rank.ended()[0] == (130 if how == "again" else 0)

    def test_a_signal_while_a_lost_rank_ends_the_head_cuts_nothing(self, folder, two):
        rank = two()
        rank.until("serving")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask_slowly, rank.port)
            self.wait_for(folder / "record.busy")
            (folder / "lost").touch()
            rank.until("failed")
            rank.signal()
            assert answer.result(LIMIT) == b"done"
        assert rank.ended()[0] == 5

    @pytest.mark.parametrize("cluster", ["ray", "mentat"])
    def test_agent_of_the_cluster_runs_beside_vllm(self, folder, two, cluster):
        code = "import os, sys, time\nprint(sys.argv, flush=True)\ntime.sleep(600)\n"
        program(folder / "bin" / "ray", code)
        rank = two(IMAGEBUILD_CLUSTER=cluster)
        rank.until("serving")
        record = json.loads((folder / "record").read_text())
        assert "--nnodes" not in record["argv"]
        assert record["argv"][record["argv"].index("--distributed-executor-backend") + 1] == "ray"
        assert record["env"]["RAY_ADDRESS"] == "127.0.0.1:6379"
        assert ("MENTAT_OPENAI_API" in record["env"]) == (cluster == "mentat")
        agent = (folder / "logs" / "ray.log").read_text()
        assert "'start', '--block', '--head', '--port=6379'" in agent
        rank.signal()
        assert rank.ended()[0] == 0

    @pytest.mark.parametrize(("end", "code"), [(3, 3), (5, 5)])
    def test_fabric_check_that_fails(self, folder, two, end, code):
        program(folder / "bin" / "fabric", f"print('12 of 180 Gbit/s')\nexit({end})\n")
        rank = two()
        assert rank.ended()[0] == code
        assert "12 of 180 Gbit/s; GLM_FABRIC_CHECK=0" in rank.state["error"]
