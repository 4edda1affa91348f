"""The forms that recipes use where ours differ: short anchors, one shape for every release.

Written for these tests; each is a claim with its probes, so that only the edits are naive.
"""

from __future__ import annotations

import ast
import hashlib

from imagebuild.patching import cpp
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    calls,
    find,
    function,
    module_names,
    parse,
)
from imagebuild.patching.tree import Tree
from imagebuild.verify import fatbin, flashkda
from patches.glm53_flash import vllm_mla_sm90_on_sm12x as sm90_on_12
from tests.patches.harness import extract

ALL = ">=0.30,<0.34"
SINCE_31 = ">=0.31,<0.34"


def patch(name: str, variant: Variant, reason: Probe, effect: Probe) -> Patch:
    return Patch(
        name=name, status="inappropriate", upstream="", origin="written for a test",
        variants=(variant,), reason=reason, effect=effect,
    )  # fmt: skip


# F2: the backend of Hopper ahead of the stock one, "because the stock one cannot do it".

CUDA = "vllm/platforms/cuda.py"
LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
MODELS = "flashinfer/data/include/flashinfer/attention/sparse_mla_sm120/model/model_type.h"
OLD_CHECK, NEW_CHECK = b"pe_dim must be 64 for fp8_ds_mla", b"pe_dim must be 64 or 0 for fp8_ds_mla"


def _no_stock_kernel(tree: Tree) -> Answer:
    known = [word for word in cpp.tokens(tree, MODELS, "ModelType") if word.isidentifier()]
    return Answer.of("GLM53_NOPE" not in known, f"the stock sparse kernels have {known}")


def _refuses_rows_without_rope(tree: Tree) -> Answer:
    data = tree.read(LIBRARY)
    if (OLD_CHECK in data) is (NEW_CHECK in data):
        raise NotThere(f"{LIBRARY}: the check of pe_dim is not one that we know")
    text = OLD_CHECK if OLD_CHECK in data else NEW_CHECK
    return Answer.of(OLD_CHECK in data, f"the binary says {text.decode()!r}")


def _sm90_first(tree: Tree) -> Answer:
    offered = sm90_on_12._offered(tree, 12, "stock")
    return Answer.of("FLASHINFER_MLA_SPARSE_SM90" in offered[:2], f"offered: {offered}")


BINARY_REASON = Probe(
    claim="the packed layout has no room for rows without rope",
    check=_refuses_rows_without_rope,
    paths=(LIBRARY,),
)
SM90_FIRST = patch(
    "vllm_mla_sm90_first",
    Variant(
        versions=ALL,
        edits=(
            Edit(
                label="list for capability 12",
                path=CUDA,
                kind="insert_before",
                anchor="                AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120,\n",
                text="                AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM90,\n",
            ),
        ),
    ),
    Probe(claim="no stock kernel serves rows without rope", check=_no_stock_kernel,
          paths=(MODELS,)),
    Probe(claim="SM90 is tried before SM120", check=_sm90_first, paths=(CUDA,)),
)  # fmt: skip


# F6: what a stale file does to weights, by running the loader.

EXPERTS = "vllm/model_executor/layers/fused_moe/routed_experts.py"
INDEXED = "        mapping_by_expert = _index_expert_mapping(expert_mapping)\n"


class _Weight:
    """A tensor by its shape alone; `part` says what was cut from it."""

    def __init__(self, rank: int, part: str = "whole") -> None:
        self.rank, self.part = rank, part

    def dim(self) -> int:
        return self.rank

    def chunk(self, _pieces: int, dim: int) -> list[_Weight]:
        return [_Weight(self.rank, f"piece {at} of axis {dim}") for at in range(2)]

    def unsqueeze(self, _dim: int) -> _Weight:
        return _Weight(self.rank + 1, self.part)

    def unbind(self) -> list[_Weight]:
        # Two slices, where the first axis is taken for the experts.
        many = self.rank == 3
        return (
            [_Weight(self.rank - 1, f"{self.part}, slice {at}") for at in range(2)]
            if many
            else [_Weight(self.rank - 1, self.part)]
        )


def loaded(tree: Tree) -> list[tuple[int, str]]:
    """Expert and part for each piece that a 3-D weight of the named expert 1 is loaded as."""
    seen: list[tuple[int, str]] = []

    class Parameter:
        def weight_loader(self, **words: object) -> bool:
            weight = words["loaded_weight"]
            assert isinstance(weight, _Weight)
            seen.append((int(str(words["expert_id"])), weight.part))
            return True

    class _Quiet:
        def debug(self, *_words: object) -> None: ...

    names = {
        "logger": _Quiet(),
        "FusedMoeWeightScaleSupported": type("S", (), {"BLOCK": type("B", (), {"value": 0})}),
    }
    owner = extract(tree, EXPERTS, "RoutedExperts.load_weights", names, _index_functions(tree))
    module = owner()
    module.layer_name, module.is_fused_checkpoint_transposed = "experts", False
    module.w2_weight, module._orient_fused_weight = Parameter(), lambda weight, _turn: weight
    module.get_expert_mapping = lambda include_fused: [
        ("w2_", f"experts.{expert}.down_proj.", expert, "w2") for expert in range(2)
    ]
    list(module.load_weights([("1.down_proj.weight", _Weight(3))]))
    return seen


def _index_functions(tree: Tree) -> tuple[str, ...]:
    name = "_index_expert_mapping"
    return (name,) if find(parse(tree, EXPERTS), name) else ()


def _loads_by_name(tree: Tree) -> Answer:
    pieces = loaded(tree)
    return Answer.of(pieces == [(1, "whole")], f"a 3-D weight of expert 1 is loaded as {pieces}")


LOADS_BY_NAME = Probe(
    claim="a 3-D weight of a named expert goes to that expert, whole", check=_loads_by_name,
    paths=(EXPERTS,),
)  # fmt: skip


# F7: a plug-in that supplies an input scale. It edits nothing: what it hooks into is watched.

MODELOPT = "vllm/model_executor/layers/quantization/modelopt.py"
MOE = "ModelOptNvFp4FusedMoE"


def mode(tree: Tree, activations: object) -> str:
    """The mode that upstream takes for a checkpoint that says NVFP4, by running its code."""
    owner = extract(tree, MODELOPT, "ModelOptNvFp4Config._from_config", {})
    config = {"config_groups": {"group_0": {"input_activations": activations}}}
    chosen: str = owner._from_config(
        lambda method, *_rest, **_words: method, quant_method="NVFP4", kv_cache_quant_method=None,
        exclude_modules=[], original_config=config, group_size=16,
    )  # fmt: skip
    return chosen


def _scale_counts(tree: Tree) -> Answer:
    found = mode(tree, None)
    return Answer.of(found == "NVFP4", f"a checkpoint of weights alone is served as {found}")


def _hooks_are_there(tree: Tree) -> Answer:
    created = function(tree, MODELOPT, f"{MOE}.create_weights")
    names = [ast.literal_eval(call.args[0]) for call in calls(created, "layer.register_parameter")
             if isinstance(call.args[0], ast.Constant)]  # fmt: skip
    both = {"w13_input_scale", "w2_input_scale"} <= set(names)
    return Answer.of(both, f"registered: {names}")


INPUT_SCALE = patch(
    "plugin_moe_input_scale",
    Variant(
        versions=ALL,
        relies_on=(
            Symbol(MODELOPT, f"{MOE}.create_weights"),
            Symbol(MODELOPT, f"{MOE}.process_weights_after_loading"),
        ),
    ),
    Probe(claim="a checkpoint without input scales is served in the mode that reads them",
          check=_scale_counts, paths=(MODELOPT,)),
    Probe(claim="the parameters that the plug-in fills are registered", check=_hooks_are_there,
          paths=(MODELOPT,)),
)  # fmt: skip


# F8: a plug-in that brings an attention backend.

TORCH_UTILS = "vllm/utils/torch_utils.py"
MLA = "vllm/model_executor/layers/attention/mla_attention.py"
REGISTRY = "vllm/v1/attention/backends/registry.py"
CONFIG = "vllm/transformers_utils/configs/glm5_next.py"


def _takes_plugins(tree: Tree) -> Answer:
    there = "register_backend" in module_names(parse(tree, REGISTRY))
    return Answer.of(there, f"register_backend is there: {there}")


def _plugin_fits(tree: Tree) -> Answer:
    has_name = "is_quantized_kv_cache" in module_names(parse(tree, TORCH_UTILS))
    passed = {len(call.args) for call in calls(parse(tree, MLA), "impl.do_kv_cache_update")}
    return Answer.of(
        has_name and passed == {6},
        f"is_quantized_kv_cache can be imported: {has_name}; do_kv_cache_update gets {passed}",
    )


BACKEND = patch(
    "plugin_mla_backend",
    Variant(
        versions=SINCE_31,
        relies_on=(
            Symbol(TORCH_UTILS, "is_quantized_kv_cache"),
            Symbol(CONFIG, "Glm5NextConfig"),
            Symbol(REGISTRY, "register_backend"),
        ),
    ),
    Probe(claim="backends are registered by name", check=_takes_plugins, paths=(REGISTRY,)),
    Probe(claim="the plug-in imports, and its cache update takes what it is given",
          check=_plugin_fits, paths=(TORCH_UTILS, MLA)),
)  # fmt: skip


# F9: an edit of the function that plans the pool.

UTILS = "vllm/v1/core/kv_cache_utils.py"
PLANNING = "vllm/v1/core/kv_cache_planning.py"
PLAN = "get_kv_cache_config_from_groups"


def _plans(tree: Tree) -> Answer:
    there = isinstance(find(parse(tree, UTILS), PLAN), Function)
    return Answer.of(there, f"{UTILS} defines {PLAN}: {there}")


def _plans_with_less(tree: Tree) -> Answer:
    found = calls(function(tree, UTILS, PLAN), "draft_bytes")
    return Answer.of(len(found) == 1, f"{PLAN} asks for the draft's bytes {len(found)} times")


LESS_MEMORY = patch(
    "vllm_kv_draft_memory",
    Variant(
        versions=SINCE_31,
        edits=(
            Edit(
                label="memory of the pool",
                path=UTILS,
                scope=PLAN,
                kind="insert_before",
                anchor="    if vllm_config.attention_config.hisparse_config is not None:\n",
                text="    available_memory -= draft_bytes(vllm_config)\n",
            ),
        ),
    ),
    Probe(claim="the pool is planned in this file", check=_plans, paths=(UTILS,)),
    Probe(claim="the plan leaves room for drafts", check=_plans_with_less, paths=(UTILS,)),
)


# F12: the stage that puts another FlashKDA in the place of the base's.


def _is_broken(tree: Tree) -> Answer:
    data = tree.read(flashkda.LIBRARY)
    digest = hashlib.sha256(data).hexdigest()
    code = flashkda.code_digest(fatbin.device_code(data))
    for known in flashkda.KNOWN:
        if digest == known.file or code == known.code:
            state = "fixed" if known.is_fixed else "broken"
            return Answer.of(not known.is_fixed, f"that of vLLM {known.wheels}, the {state} one")
    raise NotThere(f"{flashkda.LIBRARY}: neither the file nor its sm_120 code is known")


def _has_operators(tree: Tree) -> Answer:
    data = tree.read(flashkda.LIBRARY)
    found = [schema.partition("(")[0] for schema in flashkda.SCHEMAS if schema.encode() in data]
    return Answer.of(len(found) == len(flashkda.SCHEMAS), f"operators as vLLM calls them: {found}")


STAGE = patch(
    "vllm_flashkda_stage",
    Variant(versions=ALL),
    Probe(claim="the base's FlashKDA rounds its state", check=_is_broken,
          paths=(flashkda.LIBRARY,)),
    Probe(claim="the operators are those that vLLM calls", check=_has_operators,
          paths=(flashkda.LIBRARY,)),
)  # fmt: skip
