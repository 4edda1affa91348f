"""Fill the pool top-k buffer with -1 before it is selected into.

Symptom: with short or padded rows the sparse attention reads KV rows that do not belong to the
    request: an illegal memory access, or wrong text after an earlier, longer request.
Cause: `sparse_attn_indexer_kpool` allocates `pool_topk` uninitialised, once for prefill and once
    for decode, and expands every entry of it to token positions. A row with fewer pools than
    `select_k` keeps whatever was in memory where its selection kernel does not pad; there are
    several such kernels, all compiled, chosen by batch size and flag.
Change: both allocations are filled with -1, which the expansion treats as "no pool". Filling the
    expanded buffer instead would not help, since the pool ids are multiplied before anyone looks.
Upstream: none known; 0.32 fills the buffer for empty logits only.
Drop when: upstream initialises both allocations.
Cost: one fill of [rows, 512] int32 per layer and step. Inert for models without an index k-pool.
"""

from __future__ import annotations

import ast

from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    assignments,
    calls,
    dotted,
    function,
    keyword,
    resolve,
    statements,
)
from imagebuild.patching.tree import Tree

_PATH = "vllm/models/glm5next/nvidia/sparse_indexer.py"
_SCOPE = "sparse_attn_indexer_kpool"
_EXPAND = "expand_pools_and_append_tail"
_KPOOL = "vllm/models/glm5next/nvidia/ops/kpool_compress.py"


def _is_minus_one(node: ast.expr | None) -> bool:
    return node is not None and ast.unparse(node) == "-1"


def _fills(call: ast.Call) -> bool:
    """Whether this call yields, or leaves behind, a tensor that is -1 everywhere."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
    if name == "fill_":
        return bool(call.args) and _is_minus_one(call.args[0])
    if name in ("full", "full_like", "new_full"):
        value = keyword(call, "fill_value") or (call.args[1] if len(call.args) > 1 else None)
        return _is_minus_one(value)
    return False


def _sources(scope: Function) -> set[str]:
    """Names of the buffers whose pool ids are expanded to tokens, conversions looked through."""
    names = set()
    for call in calls(scope, _EXPAND):
        pending = [call.args[0]] if call.args else []
        while pending:
            node = pending.pop()
            while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            values = [getattr(s, "value", None) for s in assignments(scope, dotted(node))]
            converted = [v for v in values if isinstance(v, ast.Call) and _converts(v)]
            if converted:
                pending += converted
            else:
                names.add(dotted(node))
    return names - {""}


def _converts(call: ast.Call) -> bool:
    """x.to(...), x.view(...): a tensor made from another one that has a name."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "view", "contiguous")


def _allocations(scope: Function) -> dict[int, bool]:
    """Line of each allocation of a pool buffer, and whether it starts as -1 everywhere."""
    found: dict[int, bool] = {}
    blocks = [scope.body]
    for statement in statements(scope.body):
        blocks += [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    for name in _sources(scope):
        bound = assignments(scope, name)
        for block in blocks:
            for position, statement in enumerate(block):
                if statement not in bound:
                    continue
                value = resolve(scope, getattr(statement, "value", ast.Constant(None)))
                later = block[position + 1 : position + 2]
                found[statement.lineno] = any(
                    isinstance(call, ast.Call) and _fills(call)
                    for call in (value, *(_call_on(name, after) for after in later))
                )
    if not found:
        raise NotThere(f"{_PATH}: no buffer found whose pools {_EXPAND} expands")
    return found


def _call_on(name: str, statement: ast.stmt) -> ast.Call | None:
    """`statement` as a method call on `name`, such as pool.fill_(-1), or None."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    target = statement.value.func
    is_method = isinstance(target, ast.Attribute) and dotted(target.value) == name
    return statement.value if is_method else None


def _uninitialised(tree: Tree) -> Answer:
    found = _allocations(function(tree, _PATH, _SCOPE))
    bare = [line for line, filled in found.items() if not filled]
    return Answer.of(bool(bare), f"allocations at {sorted(found)}, uninitialised {sorted(bare)}")


def _initialised(tree: Tree) -> Answer:
    found = _allocations(function(tree, _PATH, _SCOPE))
    return Answer.of(all(found.values()), f"allocations by line, filled with -1: {found}")


def _edit(label: str, indent: str) -> Edit:
    return Edit(
        label=label,
        path=_PATH,
        scope=_SCOPE,
        anchor=(
            f"{indent}pool_topk = torch.empty(\n"
            f"{indent}    (num_rows, select_k), dtype=torch.int32, device=logits.device\n"
            f"{indent})\n"
        ),
        text=(
            f"{indent}# patch: vllm_indexer_topk_init\n"
            f"{indent}pool_topk = torch.full(\n"
            f"{indent}    (num_rows, select_k), -1, dtype=torch.int32, device=logits.device\n"
            f"{indent})\n"
        ),
    )


_FILLED = Probe(
    claim="every pool top-k buffer is -1 before anything is selected into it",
    check=_initialised,
    paths=(_PATH,),
)

PATCH = Patch(
    name="vllm_indexer_topk_init",
    status="pending",
    upstream="",
    origin="fault found by MiaAI-Lab (MIT); the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=(
                _edit("prefill buffer", " " * 16),
                _edit("decode buffer", " " * 12),
            ),
            relies_on=(
                Symbol(_KPOOL, _EXPAND),
                Symbol(_PATH, "SparseAttnIndexerKpool.forward_cuda"),
            ),
        ),
    ),
    reason=Probe(
        claim="a pool top-k buffer is expanded though it starts uninitialised",
        check=_uninitialised,
        paths=(_PATH,),
    ),
    effect=_FILLED,
    absorbed=_FILLED,
)
