"""What this series relies on upstream to have fixed, asserted on every base and on the image.

Each was once a patch of ours or of the recipes before us; it must not come back by a base that
lost it. The fixed FlashKDA is a binary and is asserted elsewhere.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

from imagebuild.patching.expect import Fix
from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Probe
from imagebuild.patching.structure import (
    Function,
    NotThere,
    assigned,
    assignments,
    calls,
    definition,
    dotted,
    function,
    keyword,
    only_call,
    parse,
    returned,
    statements,
    table,
)
from imagebuild.patching.tree import Tree

_EXPERTS = "vllm/model_executor/layers/fused_moe/routed_experts.py"
_TAIL = "vllm/models/glm5next/common/attention.py"
_SAMPLER = "vllm/v1/worker/gpu/sample/sampler.py"
_INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_MAMBA = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
_MODELS = "vllm/model_executor/models/"
_REGISTRY = f"{_MODELS}registry.py"
_DRAFTERS = "vllm/v1/worker/gpu/spec_decode/"
_KERNEL = "vllm/config/kernel.py"
_ARGS = "vllm/engine/arg_utils.py"
_FLAG = "sparse_indexer_topk_backend"


def _reads(scope: ast.AST, name: str) -> list[int]:
    """Lines that read `name`, a name or an attribute chain."""
    return [
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and dotted(node) == name
    ]


def _expert_index(tree: Tree) -> Answer:
    load = function(tree, _EXPERTS, "RoutedExperts.load_weights")
    names = [
        dotted(target)
        for statement in statements(load.body)
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and dotted(statement.value.func) == "_index_expert_mapping"
        for target in statement.targets
    ]
    lines = [line for name in names for line in _reads(load, name)]
    return Answer.of(bool(lines), f"load_weights reads the index {names} at lines {lines}")


def _ring_slots(tree: Tree, pool: int, drafts: int) -> int:
    spec = function(tree, _TAIL, "Glm5NextTailCache.get_kv_cache_spec")
    made = returned(spec)
    if not isinstance(made, ast.Call):
        raise NotThere(f"{_TAIL}: the tail cache returns no new spec")
    names = {
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
        dotted(made.func): SimpleNamespace,
    }
    built = Interpreter(parse(tree, _TAIL), names).call(
        spec,
        self=SimpleNamespace(
            _index_kpool=pool, head_dim=128, cache_config=SimpleNamespace(block_size=2304)
        ),
        vllm_config=SimpleNamespace(num_speculative_tokens=drafts),
    )
    slots = getattr(built, "block_size", Opaque("block_size"))
    if not isinstance(slots, int):
        raise NotThere(f"{_TAIL}: the size of the tail ring cannot be evaluated")
    return slots


def _tail_ring(tree: Tree) -> Answer:
    # A pool in progress of four tokens, with no, three and seven drafts behind it.
    slots = {drafts: _ring_slots(tree, 4, drafts) for drafts in (0, 3, 7)}
    holds = all(size >= 4 + drafts and size % 4 == 0 for drafts, size in slots.items())
    return Answer.of(holds, f"slots of the tail ring by drafts, pools of 4: {slots}")


def _thinking_budget(tree: Tree) -> Answer:
    sample = function(tree, _SAMPLER, "Sampler.apply_sampling_params")
    applied = [
        call.lineno
        for call in calls(sample, "self.thinking_budget_state.apply")
        if call.args and dotted(call.args[0]) == "logits"
    ]
    heated = [call.lineno for call in calls(sample, "apply_temperature")]
    added = calls(
        function(tree, _SAMPLER, "Sampler.add_request"), "thinking_budget_state.add_request"
    )
    first = bool(applied) and bool(heated) and max(applied) < min(heated)
    return Answer.of(
        first and bool(added),
        f"budget applied to the logits at lines {applied}, temperature at {heated}; "
        f"requests registered: {bool(added)}",
    )


def _root(scope: Function, node: ast.expr | None) -> str:
    """The attribute that a buffer is a view of, through slices, methods and local names."""
    for _step in range(8):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Name) and len(assigned(scope, node.id)) == 1:
            node = assigned(scope, node.id)[0]
        else:
            break
    return dotted(node)


def _slot_buffer(tree: Tree) -> Answer:
    owner = definition(tree, _INDEXER, "KpoolTailMetadataBuilder")
    build = function(tree, _INDEXER, "KpoolTailMetadataBuilder.build")
    init = function(tree, _INDEXER, "KpoolTailMetadataBuilder.__init__")
    call = only_call(build, "compute_kpool_tail_slot_mapping")
    root = _root(build, keyword(call, "out"))
    kept = root.startswith("self.") and bool(assignments(init, root))
    return Answer.of(
        kept, f"{owner.name} writes slots into {root or 'a new tensor'}, made once: {kept}"
    )


def _mamba_positions(tree: Tree) -> Answer:
    prepare = function(tree, _MAMBA, "MambaHybridModelState.prepare_attn")
    passed = dotted(keyword(only_call(prepare, "build_attn_metadata"), "positions"))
    return Answer.of(
        passed.endswith(".positions"), f"prepare_attn passes positions={passed or 'nothing'}"
    )


def _dflash(tree: Tree) -> Answer:
    known = table(parse(tree, _REGISTRY), "_SPECULATIVE_DECODING_MODELS")
    problems = []
    for name in ("DFlashDraftModel", "DFlash2DraftModel"):
        entry = known.get(name)
        file = entry.elts[0] if isinstance(entry, ast.Tuple) else None
        if not isinstance(file, ast.Constant):
            problems.append(f"{name} is not registered")
        elif not tree.exists(f"{_MODELS}{file.value!s}.py"):
            problems.append(f"{name} is registered as {file.value!s}, which is missing")
    made = parse(tree, f"{_DRAFTERS}__init__.py")
    for folder, name in (("dflash", "DFlashSpeculator"), ("dflash2", "DFlash2Speculator")):
        if not tree.exists(f"{_DRAFTERS}{folder}/speculator.py") or not calls(made, name):
            problems.append(f"{name} is missing or never made")
    return Answer.of(not problems, "; ".join(problems) or "both drafters registered and made")


def _topk_flag(tree: Tree) -> Answer:
    choices = [
        item.value
        for value in assigned(parse(tree, _KERNEL), "SparseIndexerTopkBackend")
        for item in ast.walk(value)
        if isinstance(item, ast.Constant)
    ]
    fields = assigned(definition(tree, _KERNEL, "KernelConfig"), _FLAG)
    flags = [
        call
        for call in calls(parse(tree, _ARGS), "add_argument")
        if any(ast.unparse(item) == "'--sparse-indexer-topk-backend'" for item in call.args)
    ]
    taken = assignments(
        function(tree, _ARGS, "EngineArgs.create_engine_config"), f"kernel_config.{_FLAG}"
    )
    return Answer.of(
        "per_row" in choices and bool(fields) and bool(flags) and bool(taken),
        f"per_row a choice: {'per_row' in choices}, field: {bool(fields)}, "
        f"argument: {bool(flags)}, handed on: {bool(taken)}",
    )


FIXES: tuple[Fix, ...] = (
    Fix(
        name="vllm_moe_expert_mapping_index",
        upstream="vllm#58720",
        since="0.31",
        probe=Probe(
            claim="expert weights are looked up by an index while loading",
            check=_expert_index,
            paths=(_EXPERTS,),
        ),
    ),
    Fix(
        name="vllm_kpool_tail_ring",
        upstream="vllm#58454",
        since="0.31",
        probe=Probe(
            claim="the k-pool tail ring holds the pool in progress and every draft behind it",
            check=_tail_ring,
            paths=(_TAIL,),
        ),
    ),
    Fix(
        name="vllm_sampler_thinking_budget",
        upstream="vLLM 0.30.0",
        since="0.30",
        probe=Probe(
            claim="the sampler applies the thinking budget before the temperature",
            check=_thinking_budget,
            paths=(_SAMPLER,),
        ),
    ),
    Fix(
        name="vllm_indexer_slot_buffer",
        upstream="vLLM 0.30.0",
        since="0.30",
        probe=Probe(
            claim="the k-pool tail slots go into a buffer that outlives graph capture",
            check=_slot_buffer,
            paths=(_INDEXER,),
        ),
    ),
    Fix(
        name="vllm_mamba_hybrid_positions",
        upstream="vLLM 0.30.0",
        since="0.30",
        probe=Probe(
            claim="the hybrid model state passes token positions to the attention metadata",
            check=_mamba_positions,
            paths=(_MAMBA,),
        ),
    ),
    Fix(
        name="vllm_dflash_drafters",
        upstream="vLLM 0.30.0",
        since="0.30",
        probe=Probe(
            claim="the DFlash and DFlash2 drafters are registered, present and made",
            check=_dflash,
            paths=(_REGISTRY, f"{_DRAFTERS}__init__.py"),
        ),
    ),
    Fix(
        name="vllm_indexer_topk_flag",
        upstream="vLLM 0.30.0",
        since="0.30",
        probe=Probe(
            claim="--sparse-indexer-topk-backend is an argument, takes per_row and is handed on",
            check=_topk_flag,
            paths=(_KERNEL, _ARGS),
        ),
    ),
)
