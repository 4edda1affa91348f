"""What of this host would stop a deployment: its engine, GPUs, network, space and weights.

The checks of the machine are those that the container makes at its start, from
image/runtime/serving, without what only a container has. It looks, and changes nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.errors import UsageError, raise_collected
from imagebuild.runtime import make_importable

if TYPE_CHECKING:
    from serving.machine import Machine
    from serving.resolve import Plan

GIB = 1 << 30
# An image of 20 to 30 GB, and room for the one before it.
_IMAGES = 60 * GIB


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: fail, warn or ok.
        code: of the check, such as "gpu".
        message: what was expected and found.
        fix: the next step, or "".
    """

    level: str
    code: str
    message: str
    fix: str = ""

    def document(self) -> dict[str, object]:
        """For JSON, in the words that all verbs share."""
        level = {"fail": "error", "warn": "warning", "ok": "info"}[self.level]
        return {"level": level, "code": self.code, "file": None, "line": None,
                "message": self.message, "fix": self.fix or None}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the host is to run.

    Attributes:
        deployment: such as gb10-2x.
        model: folder of the checkpoint on this host, or None.
        knobs: as the container would get them.
    """

    deployment: str
    model: Path | None
    knobs: dict[str, str]


class Tools:
    """The commands of the host; tests replace `output`."""

    def output(self, *command: str) -> str | None:
        """Standard output; None when the command is missing, fails or hangs."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None


def plan_of(asked: Asked, runtime: Path) -> Plan:
    """What the entry point would make of the knobs.

    Raises:
        UsageError: they are unknown, malformed or contradict each other.
    """
    make_importable(runtime)
    from serving.errors import KnobError
    from serving.resolve import IMAGE_CLUSTER, resolve

    given = {"GLM_DEPLOYMENT": asked.deployment, **asked.knobs}
    given[IMAGE_CLUSTER] = given.get("GLM_CLUSTER", "none")
    if asked.model is not None:
        given["GLM_MODEL_DIR"] = str(asked.model.resolve())
    try:
        return resolve(given)
    except KnobError as error:
        raise_collected(UsageError, "the deployment cannot be started", error.problems)
        raise


def examine(plan: Plan, asked: Asked, machine: Machine, tools: Tools) -> list[Finding]:
    """Looks at everything; each check gives at least one finding."""
    checks: Sequence[tuple[str, str, Callable[[], Iterator[Finding]]]] = (
        ("engine", "docker, buildx and compose answer", lambda: _engine(tools)),
        ("runtime", "docker knows the GPUs", lambda: _runtime(tools)),
        ("gpu", f"{plan.local_gpus} x {plan.profile.gpu_names[0]}", lambda: _gpus(plan, machine)),
        ("ports", "the ports are free", lambda: _ports(plan, machine)),
        ("network", "RDMA ports are up", lambda: _network(plan)),
        ("space", "there is room for images", lambda: _space(tools, machine)),
        ("weights", "the checkpoint is whole and fits", lambda: _weights(plan, asked, machine)),
    )
    found: list[Finding] = []
    for code, well, check in checks:
        mine = list(check())
        found += mine or [Finding("ok", code, well)]
    return found


def _engine(tools: Tools) -> Iterator[Finding]:
    server = tools.output("docker", "version", "--format", "{{.Server.Version}}")
    if server is None:
        yield Finding("fail", "engine", "docker does not answer", "install or start Docker")
        return
    for name in ("buildx", "compose"):
        if tools.output("docker", name, "version") is None:
            yield Finding("fail", "engine", f"docker {name} is not installed", f"install {name}")


def _runtime(tools: Tools) -> Iterator[Finding]:
    text = tools.output("docker", "info", "--format", "{{json .Runtimes}}")
    try:
        names = json.loads(text) if text else None
    except ValueError:
        names = None
    if names is None:
        yield Finding("warn", "runtime", "docker does not say which runtimes it has")
    elif "nvidia" not in names and tools.output("nvidia-ctk", "--version") is None:
        yield Finding("fail", "runtime", "docker has no nvidia runtime, and nvidia-ctk is missing",
                      "install the NVIDIA container toolkit")  # fmt: skip


def _gpus(plan: Plan, machine: Machine) -> Iterator[Finding]:
    from serving import preflight
    from serving.machine import MachineError

    warnings: list[str] = []
    try:
        problems = list(preflight.gpu_problems(plan, machine, warnings))
    except MachineError as error:
        problems = [str(error)]
    yield from (Finding("fail", "gpu", problem) for problem in problems)
    yield from (Finding("warn", "gpu", warning) for warning in warnings)


def _ports(plan: Plan, machine: Machine) -> Iterator[Finding]:
    from serving import preflight

    for problem in preflight.port_problems(plan, machine):
        yield Finding("fail", "ports", problem, "stop what holds it, or set another by the knob")


def _network(plan: Plan) -> Iterator[Finding]:
    from serving import network, ring
    from serving.errors import EnvironmentFault

    try:
        if plan.is_ring:  # NCCL's version is the image's, and nothing is written here
            found = ring.derive(plan, "", {}, nccl=lambda: "", save=lambda file, data: None)
        else:
            found = network.derive(plan, "", {})
    except EnvironmentFault as error:
        yield Finding("fail", "network", str(error))
        return
    yield from (Finding("warn", "network", notice) for notice in found.notices)


def _space(tools: Tools, machine: Machine) -> Iterator[Finding]:
    root = tools.output("docker", "info", "--format", "{{.DockerRootDir}}")
    folder = Path(root.strip()) if root and root.strip() else Path("/var/lib/docker")
    free = machine.free(folder)
    if free < _IMAGES:
        message = (f"{folder}: expected {_IMAGES / GIB:.0f} GiB for images, found "
                   f"{free / GIB:.0f}")  # fmt: skip
        yield Finding("fail", "space", message, "docker system df shows what takes it")


def _weights(plan: Plan, asked: Asked, machine: Machine) -> Iterator[Finding]:
    from serving import checkpoint, preflight
    from serving.errors import ServingError

    if asked.model is None:
        yield Finding("warn", "weights", "not looked at", "name the checkpoint by --model-dir")
        return
    try:
        found = checkpoint.read(asked.model)
        problems = list(checkpoint.config_problems(plan, found))
        checkpoint.moe_backend(plan, found, preflight.gpu_memory(plan, machine))
    except ServingError as error:
        problems = list(error.problems)
    yield from (Finding("fail", "weights", problem) for problem in problems)
    kind = machine.filesystem(asked.model.resolve())
    if kind.startswith(preflight.NETWORK_FILESYSTEMS):
        yield Finding("warn", "weights", f"{asked.model} is on {kind}", "copy it to a local disk")


def exit_code(findings: Sequence[Finding], *, is_strict: bool) -> int:
    """3 for a failure, 1 for a warning where those count, else 0."""
    levels = {finding.level for finding in findings}
    if "fail" in levels:
        return 3
    return 1 if is_strict and "warn" in levels else 0
