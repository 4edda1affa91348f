"""What would stop this start ten minutes later, found before: this machine against the plan.

Every check gives sentences; all of them are collected. `doctor` asks the same of a host.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from serving import checkpoint, places, smallfile, template
from serving.checkpoint import Checkpoint
from serving.errors import CheckError, ServingError, raise_all
from serving.machine import Gpu, Machine, MachineError
from serving.profiles import GIB
from serving.resolve import Plan

_PLUGIN = "glm53_sparse_mla"
_DRIVER = 580  # the first with CUDA 13
_SHM_FOLDER = "dev/shm"
_SHM = 2 * GIB
_SPACE = {"CACHE_DIR": 10 * GIB, "LOG_DIR": GIB}
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p")
_DRAFTER_LICENCE = "CC BY-NC-ND 4.0: no commercial use, no changed copies"


@dataclass(frozen=True)
class Ready:
    """What preflight found out for the start.

    Attributes:
        moe_backend: that fits the checkpoint.
        template: the edited chat template.
        notices: sentences for the log.
    """

    moe_backend: str
    template: bytes
    notices: tuple[str, ...]


def check(plan: Plan, machine: Machine, *, site: Path) -> Ready:
    """Looks at everything.

    Args:
        plan: the plan.
        machine: the machine.
        site: the folder of packages that holds vLLM.

    Raises:
        CheckError: every problem. With GLM_PREFLIGHT=warn, problems of the machine are notices; a
            checkpoint or a template that cannot be right stops the start all the same.
    """
    warnings: list[str] = []
    problems = machine_problems(plan, machine, warnings)
    problems += tree_problems(plan, site)
    if plan.settings.text("PREFLIGHT") == "warn":
        warnings += [f"(GLM_PREFLIGHT=warn) {problem}" for problem in problems]
        problems = []
    backend, edited = "", b""
    try:
        found = checkpoint.read(Path(plan.settings.text("MODEL_DIR")))
        problems += checkpoint.config_problems(plan, found)
        backend = checkpoint.moe_backend(plan, found, gpu_memory(plan, machine))
        _make_room(plan, machine, found, warnings)
    except ServingError as error:
        problems += error.problems
    try:
        edited = template.edited(plan)
    except ServingError as error:
        problems += error.problems
    problems += drafter_problems(plan, warnings)
    problems += key_problems(plan)
    raise_all(CheckError, problems)
    return Ready(backend, edited, tuple(warnings))


def machine_problems(plan: Plan, machine: Machine, warnings: list[str]) -> list[str]:
    """What the machine lacks; a sentence each."""
    checks: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: gpu_problems(plan, machine, warnings),
        lambda: _limits(plan, machine, warnings),
        lambda: _shared_memory(machine),
        lambda: port_problems(plan, machine),
        lambda: _space(plan, machine),
        lambda: _model_disk(plan, machine, warnings),
    )
    problems: list[str] = []
    for one in checks:
        try:
            problems += one()
        except (MachineError, OSError) as error:
            problems.append(str(error))
    return problems


def gpu_memory(plan: Plan, machine: Machine) -> int:
    """Memory of a GPU, or of the machine where it is unified; the deployment's if nobody says."""
    try:
        if plan.profile.is_unified:
            return machine.memory()["MemTotal"]
        return min((gpu.memory for gpu in machine.gpus() if gpu.memory), default=0) or (
            plan.profile.gpu_memory
        )
    except (MachineError, KeyError):
        return plan.profile.gpu_memory


def gpu_problems(plan: Plan, machine: Machine, warnings: list[str]) -> Iterator[str]:
    """Whether the deployment's GPUs are there and free, with a driver that is new enough."""
    profile = plan.profile
    try:
        gpus = machine.gpus()
    except MachineError as error:
        yield f"no GPU can be seen ({error}); was the container started with its GPUs?"
        return
    if len(gpus) < plan.local_gpus:
        yield f"expected {plan.local_gpus} GPUs for {profile.name}, found {len(gpus)}"
    for gpu in gpus[: plan.local_gpus]:
        yield from _gpu(plan, gpu, warnings)
    if profile.is_unified:
        total = machine.memory().get("MemTotal", 0)
        if total < profile.gpu_memory:
            yield (
                f"expected {profile.gpu_memory / GIB:.0f} GiB of memory, found {total / GIB:.1f}; "
                "has something reserved a part?"
            )
    busy = machine.gpu_processes()
    if busy:
        yield (
            f"the GPU is in use by {', '.join(busy)}; workers of an earlier start keep its memory "
            "until they are killed by number"
        )


def _gpu(plan: Plan, gpu: Gpu, warnings: list[str]) -> Iterator[str]:
    profile = plan.profile
    expected = "{}.{}".format(*profile.capability)
    if gpu.capability != expected:
        yield (
            f"GPU {gpu.index} ({gpu.name}): expected compute capability {expected} for "
            f"{profile.name}, found {gpu.capability}"
        )
    elif not any(name in gpu.name for name in profile.gpu_names):
        warnings.append(f"GPU {gpu.index} is a {gpu.name}, expected {profile.gpu_names[0]}")
    if gpu.memory and gpu.memory < profile.gpu_memory and not profile.is_unified:
        yield (
            f"GPU {gpu.index} ({gpu.name}): expected {profile.gpu_memory / GIB:.0f} GiB, found "
            f"{gpu.memory / GIB:.1f}"
        )
    major = gpu.driver.partition(".")[0]
    if not major.isdecimal() or int(major) < _DRIVER:
        yield f"driver {gpu.driver}: CUDA 13 needs {_DRIVER} or later"


def _limits(plan: Plan, machine: Machine, warnings: list[str]) -> Iterator[str]:
    if plan.profile.has_fabric and machine.soft_limit(resource.RLIMIT_MEMLOCK) != -1:
        yield (
            "expected an unlimited memlock, which RDMA needs; start the container with "
            "--ulimit memlock=-1"
        )
    if machine.soft_limit(resource.RLIMIT_CORE) != 0:
        warnings.append(
            "core dumps are on: one of 90 GiB holds the GPU's driver for a quarter of an hour; "
            "start the container with --ulimit core=0"
        )


def _shared_memory(machine: Machine) -> Iterator[str]:
    size = machine.size(machine.root / _SHM_FOLDER)
    if size < _SHM:
        yield (
            f"/{_SHM_FOLDER}: expected {_SHM / GIB:.0f} GiB, found {size / GIB:.2f}; start the "
            "container with --ipc=host or --shm-size"
        )


def port_problems(plan: Plan, machine: Machine) -> Iterator[str]:
    """Whether the ports that a rank listens on can be had."""
    names = ["API_PORT"]
    if plan.nodes > 1:
        names += ["RENDEZVOUS_PORT", *(["MASTER_PORT"] if plan.cluster == "none" else [])]
    for name in names:
        host = plan.settings.text("API_HOST") if name == "API_PORT" else places.EVERYWHERE[0]
        port = plan.settings.number(name)
        if not machine.is_free(host, port):
            yield f"GLM_{name}={port} is in use, or {host} is none of this node's addresses"


def _space(plan: Plan, machine: Machine) -> Iterator[str]:
    for name, need in _SPACE.items():
        folder = Path(plan.settings.text(name))
        if not machine.is_writable(folder):
            yield f"GLM_{name}={folder} cannot be written to"
        elif machine.free(folder) < need:
            free = machine.free(folder)
            yield (
                f"GLM_{name}={folder}: expected {need / GIB:.0f} GiB of space, found "
                f"{free / GIB:.1f}"
            )


def _model_disk(plan: Plan, machine: Machine, warnings: list[str]) -> Iterator[str]:
    folder = Path(plan.settings.text("MODEL_DIR"))
    kind = machine.filesystem(folder)
    if kind.startswith(NETWORK_FILESYSTEMS):
        warnings.append(f"{folder} is on {kind}: loading takes as long as the network does")
    if not machine.which("vllm"):
        yield "there is no command vllm; is this the serving image?"


def _make_room(
    plan: Plan, machine: Machine, found: Checkpoint, warnings: list[str]
) -> None:  # fmt: skip
    """On unified memory, the files read by an earlier start are in the way of this one."""
    if not plan.profile.is_unified:
        return
    try:
        free = machine.memory().get("MemFree", 0)
    except MachineError:
        return
    need = found.weights // plan.tp + plan.settings.number("KV_CACHE_BYTES")
    if free < need:
        machine.forget(sorted(found.folder.glob("*.safetensors")))
        warnings.append(f"{free / GIB:.0f} GiB were free of {need / GIB:.0f}: the checkpoint's "
                        "page cache was dropped")  # fmt: skip


def tree_problems(plan: Plan, site: Path) -> Iterator[str]:
    """Whether vLLM is as the build left it, and the parts of the route are there."""
    path = site / places.MANIFEST
    try:
        files = json.loads(path.read_bytes())["files"]
        expected = {name: entry["after"] for name, entry in files.items()}
    except FileNotFoundError:
        yield f"{path} is not there: this vLLM is not a patched one"
        return
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        yield f"{path}: the build's manifest cannot be read: {error}"
        return
    for name, digest in sorted(expected.items()):
        # Byte code and RECORD are consequences; mounted files show in the sources.
        if digest and name.endswith(".py") and _sha256(site / name) != digest:
            yield f"{site / name} is not as the build left it; is something mounted over it?"
    is_ours = plan.route in ("cuda", "triton")
    if is_ours and not (site / _PLUGIN).is_dir() and importlib.util.find_spec(_PLUGIN) is None:
        yield f"the route {plan.route} needs the package {_PLUGIN}, which is not installed"


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def drafter_problems(plan: Plan, warnings: list[str]) -> Iterator[str]:
    """Whether the drafter is there; its licence is said at each start."""
    if plan.speculation != "dflash2":
        return
    config = plan.settings["SPECULATIVE_CONFIG"]
    given = config.get("model") if isinstance(config, dict) else plan.settings.text("DRAFTER_DIR")
    folder = Path(str(given))
    warnings.append(
        f"the DFlash2 drafter's licence is {_DRAFTER_LICENCE}; GLM_COMMERCIAL=1 uses mtp"
    )
    if not (folder / "config.json").is_file():
        yield (
            f"{folder / 'config.json'} is not there: expected the DFlash2 drafter; mount it, or "
            "set GLM_SPECULATION=mtp"
        )


def key_problems(plan: Plan) -> Iterator[str]:
    """Whether the file of the API key holds one."""
    if not plan.settings.text("API_KEY_FILE"):
        return
    try:
        api_key(plan)
    except CheckError as error:
        yield from error.problems


def api_key(plan: Plan) -> str:
    """The key of the API, "" for none. It must not be logged.

    Raises:
        CheckError: the file cannot be read or holds something else.
    """
    name = plan.settings.text("API_KEY_FILE")
    if not name:
        return ""
    try:
        key = smallfile.read(Path(name), smallfile.KEY_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no ASCII text"
        raise CheckError(f"GLM_API_KEY_FILE={name} cannot be read: {reason}") from None
    if not key or len(key.split()) != 1:
        raise CheckError(f"GLM_API_KEY_FILE={name}: expected one key on one line")
    return key
