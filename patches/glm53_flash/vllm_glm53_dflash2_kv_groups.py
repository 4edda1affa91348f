"""Give a drafter's attention layers KV groups of their own beside GLM-5.3.

Symptom: with a DFlash2 drafter the engine dies after the weight load in
    `unify_kv_cache_spec_page_size`: "page size is not divisible by the maximum page size and
    cannot be padded".
Cause: `_get_kv_cache_groups_glm5_next` gives up unless every attention layer is exactly an
    MLAAttentionSpec. A drafter adds SlidingWindowSpec layers (DFlash2: five, window 2,048), so the
    whole model falls to the generic grouping, which cannot give the indexer's 33 bytes a token and
    the MLA's 512 one page size.
Change: the target is grouped as if it were alone, and one group for each kind of draft layer is
    put behind, so that no group of the target changes its number. A block of the pool grows by the
    pages of the draft layers, each in a region of its own after the indexer's; the estimate of
    what a request takes counts their blocks. Draft windows stay out of prefix caching, as the
    k-pool tail does. Their block is the target's, or VLLM_GLM5NEXT_DRAFT_BLOCK_SIZE tokens. The
    arithmetic stands in a module of ours. Letting draft pages share the Mamba or MLA regions, as
    0.32 does, would take no memory, but needs its block-outermost layout, which the backends of
    0.31 refuse for the k-pool tail.
Upstream: https://github.com/vllm-project/vllm/pull/57169 (also 55219)
Drop when: base is 0.32 or later: the generic grouping packs this model, drafter included.
Cost: the draft pages are part of each block of the pool: at 2,304 tokens and two bf16 KV heads of
    128, five layers add 11.8 MB to the 13.8 MB of the target at TP 4. Blocks of 576 tokens add 2.9
    MB instead, but were measured 43 % slower in decode by the GX10 recipe. After a hit in the
    prefix cache the drafter reads old rows for up to one window: fewer drafts are accepted, the
    output is the same. Inert unless a GLM-5.3 has layers of plain attention. vLLM logs that it
    does not know the variable.
"""

from __future__ import annotations

import ast

from imagebuild.patching.interpret import Interpreter, Opaque, Raised
from imagebuild.patching.patch import Answer, Drop, Edit, NewFile, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    assigned,
    bases,
    calls,
    definition,
    dotted,
    find,
    function,
    parse,
    returned,
    statements,
)
from imagebuild.patching.tree import Tree

KNOB = "VLLM_GLM5NEXT_DRAFT_BLOCK_SIZE"
_UTILS = "vllm/v1/core/kv_cache_utils.py"
_PLANNING = "vllm/v1/core/kv_cache_planning.py"  # where 0.33 moved the grouping
_SPECS = "vllm/v1/kv_cache_interface.py"
_LAYOUT = "vllm/v1/kv_cache_layout.py"
_INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_TAIL = "vllm/models/glm5next/common/attention.py"
_REGISTRY = "vllm/v1/kv_cache_spec_registry.py"
_ATTENTION = "vllm/model_executor/layers/attention/attention.py"
_MODEL = "vllm/models/glm5next/common/model.py"
_OWNER = "SupportsKVCacheGrouping"
_MODULE = "glm53_draft_kv.py"
_GROUPS = "get_kv_cache_groups"
_GLM = "_get_kv_cache_groups_glm5_next"
_TENSORS = "_glm5_next_tensor_layout"
_BYTES = "_get_kv_cache_bytes_per_block"
_CONFIG = "get_kv_cache_config_from_groups"
_MEMORY = "_max_memory_usage_bytes_from_groups"
_DRAFT = "glm53_draft_kv"
# Two MLA pages of 100 bytes, two indexer pages of 10, and 7 bytes of draft pages.
_SIZES = {
    "mla_names": ["a", "b"],
    "mla_page": 100,
    "idx_names": ["c", "d"],
    "idx_page": 10,
    "num_blocks": 3,
    "idx_base": 600,
    "total_blocks": 5,
}


def _guarded(grouper: Function) -> list[str]:
    """Types that the layers under the grouper's "exactly MLA" test may have besides MLA."""
    for statement in statements(grouper.body):
        if not isinstance(statement, ast.If) or not isinstance(statement.body[0], ast.Return):
            continue
        for check in calls(statement.test, "all"):
            loop = check.args[0] if check.args else None
            if not isinstance(loop, ast.GeneratorExp):
                continue
            source = loop.generators[0].iter
            layers = source.func.value if isinstance(source, ast.Call) and isinstance(
                source.func, ast.Attribute) else source  # fmt: skip
            for value in assigned(grouper, dotted(layers)):
                kept = calls(value, "isinstance")
                return [
                    dotted(item).rpartition(".")[2]
                    for call in kept
                    for item in ast.walk(call.args[1])
                    if isinstance(item, ast.Name | ast.Attribute)
                ]
    raise NotThere(f"{_GLM} has no test that every attention layer is MLA")


def _refused(tree: Tree) -> Answer:
    if not calls(function(tree, _UTILS, _GROUPS), _GLM):
        return Answer.of(False, f"{_GROUPS} has no grouping of its own for GLM-5.3")
    grouper = function(tree, _UTILS, _GLM)
    apart = _guarded(grouper)
    drafts = {"SlidingWindowSpec", "AttentionSpec"} & set(apart)
    return Answer.of(
        not drafts,
        f"{_GLM} takes {apart} apart and wants MLA of every other attention layer",
    )


def _ours(tree: Tree) -> Interpreter:
    return Interpreter(
        parse(tree, _UTILS),
        {
            f"{_DRAFT}.has_draft": lambda specs: "draft" in specs,
            f"{_DRAFT}.grouped": lambda build, config, specs: "grouped by ours",
            f"{_DRAFT}.without_draft": lambda groups: "the target's",
            f"{_DRAFT}.bytes_per_block": lambda groups: 7,
            f"{_DRAFT}.blocks_per_request": lambda config, groups: 2,
        },
    )


def _amount(tree: Tree, expression: ast.expr) -> int:
    local = {**_SIZES, _DRAFT: Opaque(_DRAFT)}
    value = _ours(tree).value(expression, local)
    if not isinstance(value, int):
        raise NotThere(f"{ast.unparse(expression)} cannot be evaluated")
    return value


def _sizes(tree: Tree) -> dict[str, int]:
    """What the edited sums give for `_SIZES`: bytes of a block, three times, and a region."""
    counted = function(tree, _UTILS, _BYTES)
    config = function(tree, _UTILS, _CONFIG)
    memory = function(tree, _UTILS, _MEMORY)

    def glm_return(scope: Function) -> ast.expr:
        for statement in statements(scope.body):
            if isinstance(statement, ast.If) and calls(statement.test, _TENSORS):
                for inner in statement.body:
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        return inner.value
        raise NotThere(f"{scope.name} returns nothing for GLM-5.3's layout")

    added = [
        node.value
        for node in ast.walk(memory)
        if isinstance(node, ast.AugAssign) and calls(node.value, f"{_DRAFT}.blocks_per_request")
    ]
    return {
        "a block": _amount(tree, glm_return(counted)),
        "in the pool": _amount(tree, assigned(config, "bytes_per_block")[0]),
        "in a request": _amount(tree, glm_return(memory)),
        "more blocks": sum(_amount(tree, value) for value in added),
        "drafts from": sum(
            _amount(tree, call.args[2]) for call in calls(config, f"{_DRAFT}.place")
        ),
    }


def _module_works(tree: Tree) -> bool:
    owner = definition(tree, _MODULE, "DraftSlidingWindowSpec")
    hidden = ast.unparse(returned(function(tree, _MODULE, f"{owner.name}.prefix_cacheable")))
    interpreter = Interpreter(parse(tree, _MODULE))
    size = function(tree, _MODULE, "block_size")

    def asked(setting: str) -> object:
        try:
            return interpreter.call(size, target_block=2304, environ={KNOB: setting})
        except Raised:
            return "refused"

    found = [asked(setting) for setting in ("", "576", "100", "0", "-64", "1024", "all")]
    inherits = isinstance(owner, ast.ClassDef) and bases(owner) == ["SlidingWindowSpec"]
    return inherits and hidden == "False" and found == [2304, 576, *["refused"] * 5]


def _grouped_by_ours(tree: Tree) -> Answer:
    interpreter, grouper = _ours(tree), function(tree, _UTILS, _GLM)
    if not calls(grouper, f"{_DRAFT}.grouped"):
        return Answer.of(False, f"{_GLM} hands nothing to {_DRAFT}")
    result = interpreter.call(grouper, vllm_config=Opaque("vllm_config"),
                              kv_cache_spec={"draft": 1})  # fmt: skip
    if result != "grouped by ours":
        return Answer.of(False, f"{_GLM} does not hand a model with a drafter to {_DRAFT}")
    layout = function(tree, _UTILS, _TENSORS)
    sees = [interpreter.value(value, {_DRAFT: Opaque(_DRAFT), "kv_cache_groups": []})
            for value in assigned(layout, "kv_cache_groups")]  # fmt: skip
    sizes, works = _sizes(tree), _module_works(tree)
    # 2 x 100 + 2 x 10 + 7 = 227 bytes a block; regions of drafts start at 3 x 220.
    wanted = {"a block": 227, "in the pool": 227, "in a request": 5 * 227, "more blocks": 2,
              "drafts from": 660}  # fmt: skip
    return Answer.of(
        sees == ["the target's"] and sizes == wanted and works,
        f"layout read from {sees}, sums {sizes}, {_MODULE} as it should be: {works}",
    )


def _grouping(tree: Tree) -> str:
    """The file that groups layers in this release."""
    for path in (_PLANNING, _UTILS):
        if tree.exists(path) and find(parse(tree, path), _GROUPS):
            return path
    raise NotThere(f"neither {_UTILS} nor {_PLANNING} defines {_GROUPS}")


def _is_apart(tree: Tree) -> bool:
    """Whether a sliding window shares no bucket with full attention, MLA included, nor with less.

    A bucket asks its first layer: full attention wants everything to be FullAttentionSpec, a
    sliding window wants everything to be one with its window.
    """
    uniform = returned(function(tree, _SPECS, "SlidingWindowSpec.is_uniform_with_collection"))
    wants = [ast.unparse(call.args[1]) for call in calls(uniform, "isinstance")]
    same = "spec.sliding_window == self.sliding_window" in ast.unparse(uniform)
    lineage, name = [], "SlidingWindowSpec"
    while name and name != "KVCacheSpec":
        owner = definition(tree, _SPECS, name)
        lineage.append(name)
        name = bases(owner)[0] if isinstance(owner, ast.ClassDef) and owner.bases else ""
    mla = definition(tree, _SPECS, "MLAAttentionSpec")
    full = isinstance(mla, ast.ClassDef) and bases(mla) == ["FullAttentionSpec"]
    return wants == ["SlidingWindowSpec"] and same and full and "FullAttentionSpec" not in lineage


def _outermost(tree: Tree) -> dict[str, bool]:
    """The layouts that the k-pool tail allows, and whether each has blocks outermost."""
    backend = returned(function(tree, _TAIL, "Glm5NextTailCache.get_attn_backend"))
    asks = function(tree, _INDEXER, f"{dotted(backend)}.supported_kv_cache_layouts")
    allowed = Interpreter(parse(tree, _INDEXER)).call(asks)
    if not isinstance(allowed, tuple) or not all(isinstance(item, Opaque) for item in allowed):
        raise NotThere(f"{dotted(backend)}: its layouts cannot be evaluated")
    names = [item.text.rpartition(".")[2] for item in allowed]
    layouts = definition(tree, _LAYOUT, "KVCacheLayout")
    orders = {name: [ast.unparse(value) for value in assigned(layouts, name)] for name in names}
    # Logical dimension 1 is the block.
    return {name: bool(order) and order[0].startswith("(1,") for name, order in orders.items()}


def _carried_natively(tree: Tree) -> Answer:
    path = _grouping(tree)
    groups = function(tree, path, _GROUPS)
    special = [dotted(call.func) for call in calls(groups, _GLM)]
    # From 0.33 on a model may bring its own grouping.
    special += [
        f"{owner.name}.{_GROUPS}"
        for owner in parse(tree, _MODEL).body
        if isinstance(owner, ast.ClassDef)
        and (_OWNER in bases(owner) or find(parse(tree, _MODEL), f"{owner.name}.{_GROUPS}"))
    ]
    outermost, apart = _outermost(tree), _is_apart(tree)
    packed = calls(groups, "_get_packed_kv_cache_groups")
    unified = calls(groups, "unify_kv_cache_spec_page_size")
    first = bool(packed) and all(packed[0].lineno < call.lineno for call in unified)
    packer = function(tree, path, "_get_packed_kv_cache_groups")
    buckets = bool(calls(packer, "UniformTypeKVCacheSpecs.is_uniform_type"))
    return Answer.of(
        not special and first and buckets and apart and all(outermost.values()),
        f"{path}: grouping of its own for GLM-5.3: {special or 'none'}; packs before it unifies "
        f"pages: {first}, by kind of layer: {buckets}; windows stay apart from MLA: {apart}; "
        f"layouts of the k-pool tail, blocks outermost: {outermost}",
    )


_EDITS = (
    Edit(
        label="group the drafter apart",
        path=_UTILS,
        scope=_GLM,
        kind="insert_after",
        anchor='    """Build GLM-5.3-Flash groups with Mamba/MLA and tail/indexer aliasing."""\n',
        text=(
            "    # patch: vllm_glm53_dflash2_kv_groups\n"
            "    import glm53_draft_kv\n"
            "\n"
            "    if glm53_draft_kv.has_draft(kv_cache_spec):\n"
            "        return glm53_draft_kv.grouped(\n"
            "            _get_kv_cache_groups_glm5_next, vllm_config, kv_cache_spec\n"
            "        )\n"
        ),
    ),
    Edit(
        label="recognise the target's groups",
        path=_UTILS,
        scope=_TENSORS,
        kind="insert_after",
        anchor='    """Recognize the GLM-5.3-Flash grouping after optional PP projection."""\n',
        text=(
            "    # patch: vllm_glm53_dflash2_kv_groups\n"
            "    import glm53_draft_kv\n"
            "\n"
            "    kv_cache_groups = glm53_draft_kv.without_draft(kv_cache_groups)\n"
        ),
    ),
    Edit(
        label="bytes of a block",
        path=_UTILS,
        scope=_BYTES,
        anchor="        return len(mla_names) * mla_page + len(idx_names) * idx_page\n",
        text=(
            "        # patch: vllm_glm53_dflash2_kv_groups\n"
            "        import glm53_draft_kv\n"
            "\n"
            "        return (\n"
            "            len(mla_names) * mla_page\n"
            "            + len(idx_names) * idx_page\n"
            "            + glm53_draft_kv.bytes_per_block(kv_cache_groups)\n"
            "        )\n"
        ),
    ),
    Edit(
        label="blocks of the pool",
        path=_UTILS,
        scope=_CONFIG,
        anchor=(
            "        bytes_per_block = len(mla_names) * mla_page + len(idx_names) * idx_page\n"
        ),
        text=(
            "        # patch: vllm_glm53_dflash2_kv_groups\n"
            "        import glm53_draft_kv\n"
            "\n"
            "        bytes_per_block = (\n"
            "            len(mla_names) * mla_page\n"
            "            + len(idx_names) * idx_page\n"
            "            + glm53_draft_kv.bytes_per_block(kv_cache_groups)\n"
            "        )\n"
        ),
    ),
    Edit(
        label="regions of the drafter",
        path=_UTILS,
        scope=_CONFIG,
        kind="insert_after",
        anchor="                add_tensor(tail_name, tail_specs[tail_name], offset)\n",
        text=(
            "\n"
            "        glm53_draft_kv.place(\n"
            "            kv_cache_groups,\n"
            "            num_blocks,\n"
            "            idx_base + len(idx_names) * idx_page * num_blocks,\n"
            "            add_tensor,\n"
            "        )\n"
        ),
    ),
    Edit(
        label="blocks of a request",
        path=_UTILS,
        scope=_MEMORY,
        anchor=(
            "        return total_blocks * "
            "(len(mla_names) * mla_page + len(idx_names) * idx_page)\n"
        ),
        text=(
            "        # patch: vllm_glm53_dflash2_kv_groups\n"
            "        import glm53_draft_kv\n"
            "\n"
            "        total_blocks += glm53_draft_kv.blocks_per_request(\n"
            "            vllm_config, kv_cache_groups\n"
            "        )\n"
            "        return total_blocks * (\n"
            "            len(mla_names) * mla_page\n"
            "            + len(idx_names) * idx_page\n"
            "            + glm53_draft_kv.bytes_per_block(kv_cache_groups)\n"
            "        )\n"
        ),
    ),
)
_NATIVE = "the generic grouping gives a drafter's windows a group of their own beside GLM-5.3"
_READ = (_UTILS, _SPECS, _LAYOUT, _INDEXER, _TAIL, _MODEL)

PATCH = Patch(
    name="vllm_glm53_dflash2_kv_groups",
    status="backport",
    upstream="https://github.com/vllm-project/vllm/pull/57169",
    origin="fault and idea of the GX10 recipe; module and text are ours",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=_EDITS,
            files=(NewFile(source=_MODULE, path=_MODULE),),
            relies_on=(
                # Who calls the grouping, who opts out of prefix caching and how, which specs the
                # drafter's layers and the target's have.
                Symbol(_UTILS, _GROUPS),
                Symbol(_UTILS, "get_kv_cache_configs"),
                Symbol(_UTILS, "resolve_kv_cache_block_sizes"),
                Symbol(_SPECS, "SlidingWindowSpec"),
                Symbol(_SPECS, "KpoolTailSpec"),
                Symbol(_SPECS, "replace_as"),
                Symbol(_REGISTRY, "KVCacheSpecRegistry.get_manager_class"),
                Symbol(_ATTENTION, "Attention.get_kv_cache_spec"),
            ),
        ),
    ),
    reason=Probe(
        claim="the grouping for GLM-5.3 gives up when a layer has plain attention",
        check=_refused,
        paths=(_UTILS,),
    ),
    effect=Probe(
        claim="a drafter's layers get groups, regions and blocks of their own beside GLM-5.3",
        check=_grouped_by_ours,
        paths=(_UTILS, _MODULE),
    ),
    absorbed=Probe(claim=_NATIVE, check=_carried_natively, paths=_READ),
    drops=(
        Drop(
            versions=">=0.32",
            proof=Probe(claim=_NATIVE, check=_carried_natively, paths=(*_READ, _PLANNING)),
            sentence=(
                "vLLM 0.32 packs this model by its generic grouping, where a drafter's windows "
                "are a bucket of their own in blocks of unchanged size (vllm#57169)."
            ),
        ),
    ),
    knob=KNOB,
)
