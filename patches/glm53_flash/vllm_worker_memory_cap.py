"""Cap the CUDA memory of a worker right after its device is set.

Symptom: on a machine whose GPU shares the system's memory, a worker that takes more than planned
    (a long prefill, a JIT workspace) freezes the whole node instead of failing with OOM.
Cause: vLLM sizes its KV cache by `gpu_memory_utilization`, but nothing in `Worker.init_device` or
    elsewhere bounds the allocator: `set_per_process_memory_fraction` is never called.
Change: after `set_device_index` the worker calls `spark_mem_trace.arm(self.device)`, a module of
    ours that this patch adds. It caps the allocator at TORCH_MEM_FRACTION, and can write statistics
    and a snapshot of the first OOM. It runs before NCCL and the first snapshot, so that the cap
    holds for all that follows. Doing it in a plugin is tempting, but plugins load before the
    device of the rank is known.
Upstream: none known.
Drop when: vLLM bounds the allocator itself, by a flag that means a share of the device.
Cost: one import in each worker. Inert unless TORCH_MEM_FRACTION, TORCH_MEM_STATS_DIR or
    TORCH_MEM_TRACE_DIR is set; a malformed value stops the start with a sentence.
"""

from __future__ import annotations

import ast

from imagebuild.patching.patch import Answer, Edit, NewFile, Patch, Probe, Variant
from imagebuild.patching.structure import NotThere, calls, dotted, function, parse
from imagebuild.patching.tree import Tree

_PATH = "vllm/v1/worker/gpu_worker.py"
_SCOPE = "Worker.init_device"
_MODULE = "spark_mem_trace.py"
_CAP = "set_per_process_memory_fraction"


def _capped_by_upstream(tree: Tree) -> Answer:
    lines = [call.lineno for call in calls(parse(tree, _PATH), _CAP)]
    return Answer.of(bool(lines), f"{_PATH} calls {_CAP} at lines {lines}")


def _uncapped(tree: Tree) -> Answer:
    lines = [call.lineno for call in calls(parse(tree, _PATH), _CAP)]
    return Answer.of(not lines, f"{_PATH} calls {_CAP} at lines {lines}")


def _line(node: ast.AST, name: str) -> int:
    found = calls(node, name)
    if not found:
        raise NotThere(f"{_SCOPE} does not call {name}")
    return found[0].lineno


def _armed(tree: Tree) -> Answer:
    init = function(tree, _PATH, _SCOPE)
    device, snapshot = _line(init, "set_device_index"), _line(init, "MemorySnapshot")
    arms = [
        call.lineno
        for call in calls(init, "spark_mem_trace.arm")
        if [dotted(item) for item in call.args] == ["self.device"]
    ]
    if not tree.exists(_MODULE):
        return Answer.of(False, f"the tree has no {_MODULE}")
    # The module is ours, yet another file of that name would silently cap nothing.
    caps = bool(calls(function(tree, _MODULE, "arm"), _CAP))
    placed = len(arms) == 1 and device < arms[0] < snapshot
    return Answer.of(
        placed and caps,
        f"device set at line {device}, arm(self.device) at {arms}, snapshot at {snapshot}; "
        f"arm calls {_CAP}: {caps}",
    )


PATCH = Patch(
    name="vllm_worker_memory_cap",
    status="pending",
    upstream="",
    origin="idea of the GX10 recipe; module and text are ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=(
                Edit(
                    label="arm the cap",
                    path=_PATH,
                    scope=_SCOPE,
                    kind="insert_after",
                    anchor="            torch.accelerator.set_device_index(self.device)\n",
                    text=(
                        "            # patch: vllm_worker_memory_cap\n"
                        "            import spark_mem_trace\n"
                        "\n"
                        "            spark_mem_trace.arm(self.device)\n"
                    ),
                ),
            ),
            files=(NewFile(source="spark_mem_trace.py", path=_MODULE),),
        ),
    ),
    reason=Probe(
        claim="nothing in the worker bounds the memory that its process may allocate",
        check=_uncapped,
        paths=(_PATH,),
    ),
    effect=Probe(
        claim="each worker caps its memory between setting its device and the first snapshot",
        check=_armed,
        paths=(_PATH, _MODULE),
    ),
    absorbed=Probe(
        claim="the worker bounds its memory by itself",
        check=_capped_by_upstream,
        paths=(_PATH,),
    ),
    knob="TORCH_MEM_FRACTION",
)
