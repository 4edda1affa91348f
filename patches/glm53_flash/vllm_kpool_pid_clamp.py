"""Drop pool ids past the end of the request when pools are expanded.

Symptom: a stale or garbage pool id becomes a token position behind the request's own; the
    attention then reads another request's KV rows, or memory that is not mapped.
Cause: `_expand_pools_and_append_tail_kernel` keeps every id that is not negative. It knows the
    request's pool count (`pool_len`), but does not compare with it.
Change: an id counts only in [0, pool_len); others give -1, as a missing pool does. Under DCP the
    ids are request-relative by then, so the same bound holds. Clamping to the last pool instead
    would count that pool twice in the softmax.
Upstream: none known.
Drop when: the kernel bounds the id above.
Cost: one comparison per output column. Inert where every id is valid.
"""

from __future__ import annotations

from typing import Any

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import NotThere, calls, function, parse
from imagebuild.patching.tree import Tree

_PATH = "vllm/models/glm5next/nvidia/ops/kpool_compress.py"
_SCOPE = "_expand_pools_and_append_tail_kernel"
_POOL_SIZE = 4
_SEQ_LEN = 10  # two whole pools and a tail of two tokens
_GROUPS = 8


def _stored(tree: Tree, pool_id: int) -> Any:  # noqa: ANN401 - a value of the evaluated kernel
    """What the kernel stores in column 1 of a row whose first selected pool is `pool_id`."""
    kernel = function(tree, _PATH, _SCOPE)
    if not calls(kernel, "tl.store"):
        raise NotThere(f"{_SCOPE} stores nothing")
    stored: list[Any] = []

    def load(pointer: object, mask: object = True, other: object = None) -> object:
        # Pointers are opaque sums, so which array is read shows in the source text only.
        return pool_id if "pool_ids" in str(pointer) else _SEQ_LEN

    names = {
        "tl.program_id": lambda axis: 0,
        # One lane stands for the block: column 1, the second token of the first pool.
        "tl.arange": lambda start, end: 1,
        "tl.load": load,
        "tl.where": lambda test, yes, no: yes if test else no,
        "tl.store": lambda pointer, value, mask=True: stored.append(value),
        "tl.minimum": min,
        "tl.maximum": max,
    }
    interpreter = Interpreter(parse(tree, _PATH), names, {"to": lambda value, dtype: value})
    sizes = {"topk": _GROUPS * _POOL_SIZE, "out_cols": _GROUPS * _POOL_SIZE + _POOL_SIZE - 1}
    strides = {"pid_s0": _GROUPS, "out_s0": 64}
    interpreter.call(kernel, POOL_SIZE=_POOL_SIZE, BLOCK_COLS=128, **sizes, **strides)
    if len(stored) != 1 or isinstance(stored[0], Opaque):
        raise NotThere(f"{_SCOPE}: what it stores cannot be evaluated")
    return stored[0]


def _row(tree: Tree) -> dict[int, Any]:
    return {pool_id: _stored(tree, pool_id) for pool_id in (-1, 0, 1, 2, 1000)}


def _keeps_far_ids(tree: Tree) -> Answer:
    row = _row(tree)
    return Answer.of(row[2] != -1 or row[1000] != -1, f"pool id to token of two pools: {row}")


def _bounds_ids(tree: Tree) -> Answer:
    row = _row(tree)
    wanted = {-1: -1, 0: 1, 1: 5, 2: -1, 1000: -1}
    return Answer.of(row == wanted, f"pool id to token of two pools: {row}")


_BOUNDED = Probe(
    claim="a pool id at or past the request's pool count is dropped, one below it is kept",
    check=_bounds_ids,
    paths=(_PATH,),
)

PATCH = Patch(
    name="vllm_kpool_pid_clamp",
    status="pending",
    upstream="",
    origin="fault found by MiaAI-Lab (MIT); the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=(
                Edit(
                    label="bound above",
                    path=_PATH,
                    scope=_SCOPE,
                    anchor="    hist_out = tl.where(pid >= 0, hist_val, -1)\n",
                    text=(
                        "    # patch: vllm_kpool_pid_clamp\n"
                        "    hist_out = tl.where((pid >= 0) & (pid < pool_len), hist_val, -1)\n"
                    ),
                ),
            ),
            relies_on=(Symbol(_PATH, "expand_pools_and_append_tail"),),
        ),
    ),
    reason=Probe(
        claim="the kernel turns a pool id past the request's end into a token position",
        check=_keeps_far_ids,
        paths=(_PATH,),
    ),
    effect=_BOUNDED,
    absorbed=_BOUNDED,
)
