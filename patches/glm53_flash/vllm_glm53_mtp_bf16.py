"""Leave an MTP layer unquantised where the checkpoint holds it so.

Symptom: `The size of tensor a (256) must match the size of tensor b (512)` in
    `RoutedExperts._load_w2` while the MTP layer loads (512 is a bf16 shard at TP 4, 256 packed
    fp4), with a ModelOpt checkpoint such as nvidia/GLM-5.3-Flash-NVFP4.
Cause: the checkpoint holds its MTP layer in bf16, but its config.json quantises every Linear and
    its ignore list leaves that layer out. `ModelOptQuantConfigBase.is_layer_excluded` asks that
    list alone, so `Glm5NextMultiTokenPredictorLayer` is built for packed weights.
Change: before the layer's block is built, a module of ours looks into the checkpoint's
    model.safetensors.index.json, in a local folder or in the local hub cache at the revision that
    is served. If it holds tensors of this layer and no weight scale among them, the layer joins
    the excluded modules. Naming the layer's number is shorter, but breaks a quantised MTP layer of
    another checkpoint; reading hf_quant_config.json would need its own parser of mixed precision.
Upstream: none known.
Drop when: vLLM decides by the checkpoint, or every checkpoint that is served lists the layer.
Cost: one read of the index for each MTP layer at start. Inert unless the quantisation is ModelOpt's
    and MTP is on; an index that cannot be found or read is logged with its cause.
"""

from __future__ import annotations

import ast

from imagebuild.patching.patch import Answer, Edit, NewFile, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    argument,
    assigned,
    assignments,
    calls,
    dotted,
    function,
    keyword,
    only_call,
)
from imagebuild.patching.tree import Tree

_PATH = "vllm/models/glm5next/common/mtp.py"
_SCOPE = "Glm5NextMultiTokenPredictorLayer.__init__"
_MODEL = "vllm/models/glm5next/common/model.py"
_BLOCK = "Glm5NextDecoderLayer"
_QUANT = "vllm/model_executor/layers/quantization/modelopt.py"
_BASE = "ModelOptQuantConfigBase"
_EXCLUDED = f"{_BASE}.is_layer_excluded"
_MODULE = "glm53_mtp_bf16.py"
_ASK = "glm53_mtp_bf16.exclude_unscaled_layer"
_LIST = {"self.exclude_modules", "self.packed_modules_mapping"}


def _asked(tree: Tree) -> set[str]:
    """The attributes by which ModelOpt decides what it leaves alone."""
    check = function(tree, _QUANT, _EXCLUDED)
    names = {dotted(node) for node in ast.walk(check) if isinstance(node, ast.Attribute)}
    return {name for name in names if name.startswith("self.")}


def _block(tree: Tree) -> tuple[Function, ast.Call]:
    init = function(tree, _PATH, _SCOPE)
    return init, only_call(init, _BLOCK)


def _own_config(tree: Tree) -> list[str]:
    """Signs that the MTP block is built with a quantisation of its own."""
    init, made = _block(tree)
    given = argument(made, function(tree, _MODEL, f"{_BLOCK}.__init__"), "vllm_config")
    signs = []
    if dotted(given) != "vllm_config" or assignments(init, "vllm_config"):
        signs.append(f"it is built with {ast.unparse(given)}")
    if keyword(made, "quant_config") is not None:
        signs.append("it is given a quant_config")
    signs += [
        f"line {node.lineno} names {node.attr}"
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and node.attr in ("quant_config", "exclude_modules")
    ]
    return signs


def _by_list_alone(tree: Tree) -> Answer:
    signs, asked = _own_config(tree), _asked(tree)
    return Answer.of(
        not signs and asked <= _LIST,
        f"the MTP block takes the target's quantisation ({'; '.join(signs) or 'unchanged'}); "
        f"what is excluded is asked of {sorted(asked)}",
    )


def _apart(tree: Tree) -> Answer:
    signs, more = _own_config(tree), sorted(_asked(tree) - _LIST)
    return Answer.of(
        bool(signs or more),
        f"signs of a quantisation of its own: {signs or 'none'}; exclusion also asks {more}",
    )


def _excludes(tree: Tree) -> Answer:
    init, made = _block(tree)
    asks = calls(init, _ASK)
    if not asks:
        return Answer.of(False, f"{_SCOPE} does not ask the checkpoint")
    given = [dotted(item) for item in asks[0].args]
    ahead = given == ["vllm_config", "prefix"] and asks[0].lineno < made.lineno
    prefix = dotted(keyword(made, "prefix"))
    # What the module adds is a wildcard, so the list must still be read as wildcards.
    wild = [
        call
        for call in calls(function(tree, _QUANT, _EXCLUDED), "fnmatch")
        if [dotted(item) for item in call.args][:1] == ["prefix"]
    ]
    adds = assigned(
        function(tree, _MODULE, "exclude_unscaled_layer"),
        "vllm_config.quant_config.exclude_modules",
    )
    if not wild:
        raise NotThere(f"{_EXCLUDED} no longer matches wildcards")
    return Answer.of(
        ahead and prefix == "prefix" and len(adds) == 1,
        f"asked at line {asks[0].lineno} with {given}, block built at {made.lineno} below "
        f"{prefix or 'no prefix'}; {_MODULE} adds to the list: {bool(adds)}",
    )


PATCH = Patch(
    name="vllm_glm53_mtp_bf16",
    status="pending",
    upstream="",
    origin="fault and idea of the GX10 recipe; module and text are ours",
    variants=(
        Variant(
            # One shape: the line above says hf_config in 0.31 and hf_text_config from 0.32 on.
            versions=">=0.31,<0.34",
            edits=(
                Edit(
                    label="ask the checkpoint",
                    path=_PATH,
                    scope=_SCOPE,
                    kind="insert_after",
                    anchor="        self.config = config\n",
                    text=(
                        "        # patch: vllm_glm53_mtp_bf16\n"
                        "        import glm53_mtp_bf16\n"
                        "\n"
                        "        glm53_mtp_bf16.exclude_unscaled_layer(vllm_config, prefix)\n"
                    ),
                ),
            ),
            files=(NewFile(source=_MODULE, path=_MODULE),),
            relies_on=(
                # What a name in the list means, and under which names the block asks.
                Symbol(_QUANT, _EXCLUDED),
                Symbol(_QUANT, f"{_BASE}.get_quant_method"),
                Symbol(_QUANT, "ModelOptMixedPrecisionConfig.get_quant_method"),
                Symbol(_MODEL, f"{_BLOCK}.__init__"),
                Symbol(_PATH, "Glm5NextMultiTokenPredictor.__init__"),
            ),
        ),
    ),
    reason=Probe(
        claim="ModelOpt asks only its list, and the MTP block is built with the target's",
        check=_by_list_alone,
        paths=(_PATH, _MODEL, _QUANT),
    ),
    effect=Probe(
        claim="the checkpoint is asked about an MTP layer before its block is built",
        check=_excludes,
        paths=(_PATH, _QUANT, _MODULE),
    ),
    absorbed=Probe(
        claim="upstream decides the quantisation of an MTP layer apart from the target's",
        check=_apart,
        paths=(_PATH, _MODEL, _QUANT),
    ),
)
