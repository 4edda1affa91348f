"""The three deployments by compose, each rank a project in a network of its own, vLLM a stand-in.

Stand-ins: vllm, nvidia-smi and the numeric check, which need GPUs; the checkpoint, of a few bytes.
All else is the product: image, entry point, compose files, status, self-test, ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image.serving.machines import checkpoint
from tests.support.images import ROOT, First, docker

HERE = Path(__file__).with_name("serving")
COMPOSE = ROOT / "compose"
RANKS = {"gb10-2x": 2, "gb10-4x": 4, "rtx6000-4x": 1}
OVERRIDES = {"gb10-2x": ("status",), "gb10-4x": ("drafter",), "rtx6000-4x": ()}
# Without RDMA the neighbours are not looked for; the layout is.
RING = {"GLM_RING_PREVIOUS": "eth1", "GLM_RING_NEXT": "eth2"}
TOKEN = "0123456789abcdef0123456789abcdef"
PATIENCE = 120.0
KEPT = ("PATH", "HOME", "DOCKER_HOST")
ASK = """\
import json, urllib.request
body = json.dumps({"messages": [{"content": "France"}]}).encode()
print(urllib.request.urlopen("http://127.0.0.1:8002/v1/chat/completions", body).read().decode())
"""
STATUS = f"""\
import sys, urllib.request
asked = urllib.request.Request("http://127.0.0.1:8082/" + sys.argv[1])
asked.add_header("Authorization", "Bearer {TOKEN}")
print(urllib.request.urlopen(asked).read().decode())
"""
KILL = """\
import os, pathlib
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"/usr/local/bin/vllm" in file.read_bytes():
        os.kill(int(file.parent.name), 9)
"""
# The stand-ins come first on the paths; the check's package is beside our own, not in its place.
DERIVED = """\
FROM {first}
COPY vllm nvidia-smi /usr/local/bin/
COPY check.py /standin/glm53_sparse_mla/check.py
RUN touch /standin/glm53_sparse_mla/__init__.py && chmod 755 /usr/local/bin/vllm \
    /usr/local/bin/nvidia-smi
ENV PYTHONPATH=/standin
"""


@pytest.fixture(scope="module")
def image(first: First, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built image with the stand-ins."""
    folder = tmp_path_factory.mktemp("serving")
    for name in ("vllm", "nvidia-smi", "check.py"):
        shutil.copy(HERE / name, folder)
    (folder / "Dockerfile").write_text(DERIVED.format(first=first.tag))
    tag = "imagebuild-test/serving:one"
    done = docker("build", "--quiet", "--tag", tag, str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    yield tag
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="module")
def another(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of another build: one file of the entry point differs."""
    folder = tmp_path_factory.mktemp("another")
    line = "echo '# another' >> /opt/glm53/serving/places.py"
    (folder / "Dockerfile").write_text(f"FROM {image}\nRUN {line}\n")
    tag = "imagebuild-test/serving:another"
    done = docker("build", "--quiet", "--tag", tag, str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    yield tag
    docker("image", "rm", "--force", tag)


@pytest.fixture(scope="module")
def network(engine: None) -> Iterator[tuple[str, str]]:
    """A network for the ranks: its name and the first three numbers of its addresses."""
    name = f"imagebuild-test-{uuid.uuid4().hex[:8]}"
    for number in range(200, 250):
        prefix = f"172.31.{number}"
        if docker("network", "create", "--subnet", f"{prefix}.0/24", name).returncode == 0:
            break
    else:
        pytest.fail("no free network from 172.31.200.0/24 to 172.31.249.0/24")
    yield name, prefix
    docker("network", "rm", name)


class Deployment:
    """The ranks of a deployment, started by its own compose file."""

    def __init__(self, name: str, image: str, folder: Path, network: tuple[str, str]) -> None:
        self.name = name
        self.overrides = list(OVERRIDES[name])
        self.count = RANKS[name]
        self.prefix = network[1]
        self.folder = folder
        self.project = f"imagebuild-{uuid.uuid4().hex[:8]}"
        self.environ = {
            **{key: os.environ[key] for key in KEPT if key in os.environ},
            "IMAGE": image, "RANK_NETWORK": network[0], "MODEL_HOST_DIR": str(folder / "model"),
            "DRAFTER_HOST_DIR": str(folder / "drafter"), "RESTART": "no", "STOP_GRACE": "20s",
            "STATUS_TOKEN_HOST_FILE": str(folder / "token"), "GLM_JOIN_TIMEOUT_S": "60",
            # A machine of the tests has less memory than those of the deployments.
            "GLM_KV_CACHE_BYTES": str(1 << 30),
        }  # fmt: skip
        self._pids: set[str] = set()
        if self.count > 1:
            self.environ["GLM_HEAD"] = self.address(0)

    def address(self, rank: int) -> str:
        return f"{self.prefix}.{10 + rank}"

    def compose(self, rank: int, *words: str, **environ: str) -> None:
        overrides = [COMPOSE / "overrides" / f"{name}.yaml" for name in self.overrides]
        files = [COMPOSE / f"{self.name}.yaml", *overrides, HERE / "ranks.yaml"]
        command = ["docker", "compose", "--project-name", f"{self.project}-{rank}",
                   "--project-directory", str(self.folder)]  # fmt: skip
        command += [word for file in files for word in ("--file", str(file))]
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False,
            env=self.environ | {"RANK_ADDRESS": self.address(rank)} | environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]

    def up(self, odd: int = -1, **environ: str) -> None:
        """Starts all ranks, workers first; `environ` is for the rank `odd` alone."""
        for rank in reversed(range(self.count)):
            self.compose(rank, "up", "--detach", **(environ if rank == odd else {}))

    def container(self, rank: int) -> str:
        return f"{self.project}-{rank}-glm53-1"

    def state(self, rank: int) -> dict[str, Any]:
        done = docker("container", "inspect", "--format", "{{json .State}}", self.container(rank))
        return dict(json.loads(done.stdout))

    def restarts(self, rank: int) -> int:
        done = docker("container", "inspect", "--format", "{{.RestartCount}}", self.container(rank))
        return int(done.stdout)

    def log(self, rank: int) -> str:
        done = docker("logs", self.container(rank))
        return done.stdout + done.stderr

    def when(self, rank: int, line: str) -> str:
        """The time at which a line of vLLM's came, as text that sorts."""
        done = docker("logs", "--timestamps", self.container(rank))
        [time_and_line] = [each for each in done.stdout.splitlines() if each.endswith(f" {line}")]
        return time_and_line.partition(" ")[0]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(self.log(rank)[-1500:] for rank in range(self.count))
                pytest.fail(f"{what} was not so within {PATIENCE:.0f} s:\n{logs}")
            time.sleep(0.2)

    def healthy(self, *, may_restart: bool = False) -> None:
        def all_are() -> bool:
            states = [self.state(rank) for rank in range(self.count)]
            ended = [rank for rank, state in enumerate(states) if not state["Running"]]
            assert may_restart or not ended, "\n".join(
                f"{states[r]}\n{self.log(r)[-1500:]}" for r in ended
            )
            return all(state["Health"]["Status"] == "healthy" for state in states)

        self.until(all_are, "every rank healthy")
        for rank in range(self.count):
            words = docker("top", self.container(rank), "-eo", "pid").stdout.split()
            seen = {word for word in words if word.isdecimal()}
            assert len(seen) > 1 and all((Path("/proc") / pid).exists() for pid in seen), (
                "the engine must run on this machine"
            )
            self._pids |= seen

    def codes(self) -> list[int]:
        """Waits until no rank runs, and gives their exit codes."""
        self.until(lambda: not any(self.state(r)["Running"] for r in range(self.count)), "an end")
        left = [pid for pid in self._pids if (Path("/proc") / pid / "exe").exists()]
        assert not left, f"processes of ended containers: {left}"
        return [int(self.state(rank)["ExitCode"]) for rank in range(self.count)]

    def status(self, rank: int, page: str) -> dict[str, Any]:
        """What the rank's status server answers, asked in its container."""
        done = docker("exec", self.container(rank), "python3", "-c", STATUS, page)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def down(self) -> None:
        for rank in range(self.count):
            docker("rm", "--force", "--volumes", self.container(rank))
            docker("volume", "rm", *(f"{self.project}-{rank}_{name}" for name in ("cache", "logs")))


@pytest.fixture
def start(
    image: str, network: tuple[str, str], tmp_path: Path
) -> Iterator[Callable[..., Deployment]]:
    """Makes a deployment, and takes all of it away afterwards."""
    checkpoint(tmp_path / "model")
    checkpoint(tmp_path / "drafter")
    (tmp_path / "token").write_text(TOKEN)
    made: list[Deployment] = []

    def new(name: str) -> Deployment:
        made.append(Deployment(name, image, tmp_path, network))
        return made[-1]

    yield new
    for deployment in made:
        deployment.down()


@pytest.mark.parametrize("name", RANKS)
def test_each_deployment_gets_healthy_and_stops(
    start: Callable[..., Deployment], name: str
) -> None:
    ranks = start(name)
    ranks.up()
    ranks.healthy()
    state = ranks.status(0, "status.json")
    assert state["deployment"] == name and state["stage"] == "serving"
    assert {stage["state"] for stage in state["stages"][:7]} == {"done"}
    digests = {self_digest(ranks, rank) for rank in range(ranks.count)}
    assert len(digests) == 1
    assert "--tool-call-parser" in ranks.log(0)
    if name == "gb10-2x":
        assert_each_rank_shows_all(ranks)
    for rank in range(ranks.count):
        ranks.compose(rank, "stop")
    # Workers that have seen the head go before their own signal say that they lost it.
    codes = ranks.codes()
    assert codes[0] == 0 and set(codes[1:]) <= {0, 5}
    assert "drained" in ranks.log(0)


def test_a_ring_starts_as_well(start: Callable[..., Deployment]) -> None:
    """Over TCP: no test machine has cables."""
    ranks = start("gb10-4x")
    ranks.overrides.append("ring")
    ranks.environ |= RING
    ranks.up()
    ranks.healthy()
    assert ranks.status(3, "status.json")["knobs"]["GLM_TP"] == "RING4"
    assert "'--tensor-parallel-size', '4'" in ranks.log(3)


def assert_each_rank_shows_all(ranks: Deployment) -> None:
    """By the status override, which binds off loopback and asks for a token."""
    for asked in range(ranks.count):
        found = ranks.status(asked, "cluster.json")["ranks"]
        assert [(one["rank"], one["healthy"]) for one in found] == [(0, True), (1, True)]
        assert [one["address"] for one in found] == [f"{ranks.address(r)}:8082" for r in (0, 1)]
        assert len({one["fingerprint"] for one in found}) == 1
    refused = STATUS.replace(TOKEN, "wrong")
    done = docker("exec", ranks.container(0), "python3", "-c", refused, "cluster.json")
    assert "401" in done.stderr


def self_digest(ranks: Deployment, rank: int) -> str:
    lines = [line for line in ranks.log(rank).splitlines() if "fingerprint " in line]
    return lines[0].rpartition(" ")[2]


@pytest.mark.parametrize(("killed", "left"), [(0, 1), (1, 0)], ids=["head", "worker"])
def test_a_killed_rank_ends_the_other(
    start: Callable[..., Deployment], killed: int, left: int
) -> None:
    ranks = start("gb10-2x")
    ranks.up()
    ranks.healthy()
    docker("kill", ranks.container(killed))
    codes = ranks.codes()
    assert codes[killed] == 137 and codes[left] == 5
    assert "is lost" in ranks.log(left) or "cannot be reached" in ranks.log(left)
    # What is left ends in order, too.
    assert left or "drained" in ranks.log(left)


def test_a_dead_vllm_ends_all_and_docker_starts_them_again(
    start: Callable[..., Deployment],
) -> None:
    ranks = start("gb10-2x")
    ranks.environ["RESTART"] = "unless-stopped"
    ranks.up()
    ranks.healthy()
    docker("exec", ranks.container(1), "python3", "-c", KILL)
    ranks.until(lambda: all(ranks.restarts(rank) for rank in range(2)), "a restart of both")
    assert "vLLM was killed by signal 9" in ranks.log(1)
    assert "has ended: vLLM was killed" in ranks.log(0)
    ranks.healthy(may_restart=True)


def test_a_rank_that_never_comes(start: Callable[..., Deployment]) -> None:
    ranks = start("gb10-2x")
    ranks.environ["GLM_JOIN_TIMEOUT_S"] = "2"
    ranks.compose(0, "up", "--detach")
    ranks.until(lambda: not ranks.state(0)["Running"], "an end")
    assert ranks.state(0)["ExitCode"] == 5
    assert f"expected 2 ranks within 2 s, found 1: {ranks.address(0)}" in ranks.log(0)


def test_another_image_on_one_rank_stops_both_before_the_load(
    start: Callable[..., Deployment], another: str
) -> None:
    ranks = start("gb10-2x")
    ranks.up(odd=1, IMAGE=another)
    assert ranks.codes() == [4, 4]
    for rank in range(2):
        assert "runtime: the head (" in ranks.log(rank)
        assert "build.py ship" in ranks.log(rank)
        assert "Loading weights" not in ranks.log(rank)


def test_a_failing_self_test_stops_all(start: Callable[..., Deployment]) -> None:
    ranks = start("gb10-2x")
    ranks.up(odd=0, STANDIN_MODE="nonsense")
    assert ranks.codes() == [3, 5]
    assert "found 'lock' over and over" in ranks.log(0)
    assert "has ended: self-test" in ranks.log(1)


def test_a_failing_numeric_check_stops_all_before_the_load(
    start: Callable[..., Deployment],
) -> None:
    ranks = start("gb10-2x")
    ranks.up(odd=1, STANDIN_NUMERIC="wrong")
    assert ranks.codes() == [5, 3]
    assert "computes wrong values on this card" in ranks.log(1)
    assert "GLM_MLA_ROUTE=" in ranks.log(1)
    assert "Loading weights" not in ranks.log(1)


def test_a_signal_under_load_lets_the_request_end(start: Callable[..., Deployment]) -> None:
    ranks = start("rtx6000-4x")
    ranks.up(odd=0, STANDIN_MODE="slow", GLM_SELF_TEST="0")
    ranks.healthy()
    with subprocess.Popen(["docker", "exec", ranks.container(0), "python3", "-c", ASK], text=True,
                          stdout=subprocess.PIPE) as request:  # fmt: skip
        ranks.until(lambda: "took a request" in ranks.log(0), "a request in flight")
        docker("kill", "--signal", "TERM", ranks.container(0))
        answer, _ = request.communicate(timeout=PATIENCE)
    assert "Paris" in answer
    assert ranks.codes() == [0] and "drained" in ranks.log(0)


def test_a_stopped_worker_stays_until_the_head_has_answered(
    start: Callable[..., Deployment],
) -> None:
    """What is in flight needs every rank; who stops a cluster stops its ranks in any order."""
    ranks = start("gb10-2x")
    ranks.environ |= {"STANDIN_MODE": "slow", "GLM_SELF_TEST": "0"}
    ranks.up()
    ranks.healthy()
    with subprocess.Popen(["docker", "exec", ranks.container(0), "python3", "-c", ASK], text=True,
                          stdout=subprocess.PIPE) as request:  # fmt: skip
        ranks.until(lambda: "took a request" in ranks.log(0), "a request in flight")
        docker("kill", "--signal", "TERM", ranks.container(1))
        ranks.until(lambda: "rank 1 (" in ranks.log(0), "the head knows")
        docker("kill", "--signal", "TERM", ranks.container(0))
        answer, _ = request.communicate(timeout=PATIENCE)
    assert "Paris" in answer
    assert ranks.codes() == [5, 0]
    assert ranks.when(0, "drained") < ranks.when(1, "ended")


def test_knobs_that_contradict_start_nothing(start: Callable[..., Deployment]) -> None:
    ranks = start("rtx6000-4x")
    # The misspelt one is in no compose file: only .env as a whole can bring it.
    (ranks.folder / ".env").write_text("GLM_TOOL_PARSR=x\nGLM_TP=3\n")
    ranks.up()
    assert ranks.codes() == [2]
    assert "GLM_TP='3': expected one of 2, 4, RING4" in ranks.log(0)
    assert "did you mean GLM_TOOL_PARSER" in ranks.log(0)
    assert "Traceback" not in ranks.log(0)
