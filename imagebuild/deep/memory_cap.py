"""Runs vLLM's real `Worker.init_device` up to its first snapshot, on a torch that only notes."""

from __future__ import annotations

import builtins
import inspect
from types import SimpleNamespace
from typing import Any

from imagebuild.deep.base import About, environment, require

ABOUT = About(
    claim="a worker caps its memory after setting its device and before NCCL and the snapshot",
    patches=("vllm_worker_memory_cap",),
    imports=("vllm.v1.worker.gpu_worker",),
)
_KNOB = "TORCH_MEM_FRACTION"
_DEVICE, _CAP = "torch.accelerator.set_device_index", "cap"
_NCCL, _SNAPSHOT = "init_worker_distributed_environment", "MemorySnapshot"
_REAL = frozenset(["os", "gc", "logger"])


def probe() -> str:
    """Starts a worker with a cap, without one and with a malformed one."""
    capped = _events("0.8")
    wanted = [_DEVICE, f"{_CAP} 0.8", _NCCL, _SNAPSHOT]
    seen = [event for event in capped if event in wanted or event.startswith(_CAP)]
    require(seen == wanted, f"with {_KNOB}=0.8 the worker does {seen}, expected {wanted}")
    free = [event for event in _events(None) if event.startswith(_CAP)]
    require(not free, f"without {_KNOB} the worker is capped: {free}")
    try:
        _events("1.5")
    except ValueError:
        return f"{_KNOB}=0.8 caps between set_device_index and NCCL; unset caps nothing; 1.5 stops"
    require(False, f"{_KNOB}=1.5 is taken")
    return ""


class _Reached(Exception):  # noqa: N818  a signal within this module, not an error
    """The first snapshot is about to be taken: what follows needs a card."""


class _Noting:
    """Takes every attribute and call, and notes the calls by their dotted name."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def __getattr__(self, name: str) -> _Noting:
        return _Noting(f"{self._name}.{name}", self._events)

    def __getitem__(self, _key: object) -> _Noting:
        return self

    def __call__(self, *_arguments: object, **_named: object) -> Any:  # noqa: ANN401
        self._events.append(self._name)
        if self._name == _SNAPSHOT:
            raise _Reached
        return 1 if self._name.endswith("device_count") else self


def _events(fraction: str | None) -> list[str]:
    """What a worker calls until its first snapshot, with the knob at `fraction`."""
    import torch
    from vllm.v1.worker import gpu_worker

    events: list[str] = []
    code = inspect.unwrap(gpu_worker.Worker.init_device).__code__
    # All that the method reads from its module; what it imports itself stays real.
    names = [name for name in code.co_names if name in vars(gpu_worker) and name not in _REAL
             and not hasattr(builtins, name)]  # fmt: skip
    keep = {name: vars(gpu_worker)[name] for name in names}
    cap = torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction = lambda share, _device=None: events.append(
        f"{_CAP} {share:g}"
    )
    vars(gpu_worker).update({name: _Noting(name, events) for name in names})
    try:
        with environment(_KNOB, fraction):
            gpu_worker.Worker.init_device(_worker(gpu_worker, events))
    except _Reached:
        pass
    finally:
        vars(gpu_worker).update(keep)
        torch.cuda.set_per_process_memory_fraction = cap
    return events


def _worker(gpu_worker: Any, events: list[str]) -> Any:  # noqa: ANN401 - a module of the tree
    """A worker of one rank, with as much state as the method reads before the snapshot."""
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    other = _Noting("config", events)
    parallel = SimpleNamespace(
        distributed_executor_backend="mp",
        data_parallel_backend="mp",
        nnodes_within_dp=1,
        data_parallel_rank_local=0,
        data_parallel_index=0,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        tensor_parallel_size=1,
        assigned_physical_gpu_ids=None,
        get_local_gpu_index=lambda rank: rank,
    )
    vars(worker).update(
        device_config=SimpleNamespace(device_type="cuda", device="cuda"),
        parallel_config=parallel,
        vllm_config=other,
        model_config=SimpleNamespace(dtype="bfloat16", seed=0),
        cache_config=other,
        load_config=other,
        use_v2_model_runner=False,
        rank=0,
        local_rank=0,
        distributed_init_method="",
    )
    return worker
