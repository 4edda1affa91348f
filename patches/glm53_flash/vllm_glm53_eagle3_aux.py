"""Hand a drafter the completed hidden states of GLM-5.3's layers.

Symptom: `Model does not support EAGLE3 interface` at start when a DFlash2 or EAGLE3 drafter is
    configured.
Cause: the model classes of `vllm/models/glm5next` lack SupportsEagle3, and `Glm5NextModel.forward`
    collects no hidden states.
Change: the three classes take the interface and its mixin, and forward returns the states beside
    its result when layers are asked for. State L is the stream that enters layer L, so it is
    the output of layer L-1, and the last one is the stream before the final norm: a drafter's
    target layer 5 is asked for as 6. An mHC layer defers its `hc_post` to the next one; each state
    is completed by it and its streams are contracted. The mixin's own helper (hidden plus
    residual) is tempting, and wrong here: nothing fails, fewer drafts are accepted.
Upstream: https://github.com/vllm-project/vllm/pull/55423 (also 55682, 56983)
Drop when: base is 0.32 or later, which has the same by `_aux_hidden_state`.
Cost: one contraction for each layer that is asked for. Inert without such a drafter: forward
    returns what it returned. Pipeline parallelism stays unsupported, as for the model itself.
"""

from __future__ import annotations

import ast
import copy
from types import SimpleNamespace
from typing import Any

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Drop, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    bases,
    definition,
    find,
    function,
    imports,
    parse,
    statements,
)
from imagebuild.patching.tree import Tree

_PATH = "vllm/models/glm5next/common/model.py"
_MODEL = "Glm5NextModel"
_FORWARD = f"{_MODEL}.forward"
_TEXT = "Glm5NextForCausalLM"
_VISION = "Glm5NextForConditionalGeneration"
_WANTED = {_MODEL: "EagleModelMixin", _TEXT: "SupportsEagle3", _VISION: "SupportsEagle3"}
_INTERFACES = "vllm/model_executor/models/interfaces.py"
_HOME = "vllm.model_executor.models.interfaces"
_SHARED = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
_LAYERS, _ASKED = 4, (0, 1, 3, 4)
# Layer i returns raw<i> and defers (res, post, comb)<i>; the last one returns the whole stream.
_STATES = ("embedded", "contract(post(raw0,res0,post0,comb0),2)",
           "contract(post(raw2,res2,post2,comb2),2)", "last")  # fmt: skip


def _post(*given: object) -> str:
    return f"post({','.join(str(item) for item in given)})"


class _Layer:
    """A decoder layer with mHC, on names instead of tensors."""

    n = 2

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, *_stream: object) -> tuple[str | None, ...]:
        if self.index == _LAYERS - 1:
            return "last", None, None, None
        kinds = ("raw", "res", "post", "comb")
        return tuple(f"{kind}{self.index}" for kind in kinds)

    hc_post = staticmethod(_post)


def _unrolled(forward: Function, interpreter: Interpreter, model: SimpleNamespace) -> Function:
    """The function with its loop over the layers written out."""
    plain = copy.deepcopy(forward)
    loops = [node for node in statements(plain.body) if isinstance(node, ast.For)]
    if len(loops) != 1 or loops[0] not in plain.body:
        raise NotThere(f"{_FORWARD} has {len(loops)} loops, expected one over the layers")
    (loop,) = loops
    items = interpreter.value(loop.iter, {"self": model})
    if not isinstance(items, list):
        raise NotThere(f"{_FORWARD}: what it loops over cannot be evaluated")
    steps: list[ast.stmt] = []
    for number, item in enumerate(items):
        interpreter.names[f"item_{number}"] = item
        value = ast.Name(f"item_{number}", ast.Load())
        steps += [ast.Assign([loop.target], value, lineno=loop.lineno), *loop.body]
    at = plain.body.index(loop)
    plain.body[at : at + 1] = steps
    return plain


def _result(tree: Tree, asked: tuple[int, ...]) -> Any:  # noqa: ANN401 - what forward returns
    """What forward returns for a model of four mHC layers, of which some states are asked for."""
    module, forward = parse(tree, _PATH), function(tree, _PATH, _FORWARD)
    interpreter = Interpreter(
        module,
        {
            "enumerate": lambda items, start=0: list(enumerate(items, start)),
            "hc_contract": lambda stream, n: f"contract({stream},{n})",
            "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        },
    )
    layers = [_Layer(index) for index in range(_LAYERS)]
    model = SimpleNamespace(
        _active_layers=layers, layers=layers, start_layer=0, end_layer=_LAYERS,
        aux_hidden_state_layers=asked, is_sequence_parallel=False,
        config=SimpleNamespace(hc_mult=_Layer.n), norm=lambda stream: f"norm({stream})",
        _aux_post_op=_post,
    )  # fmt: skip
    helper = find(module, f"{_MODEL}._aux_hidden_state")
    if isinstance(helper, Function):
        names = ("hidden_states", "residual", "post", "comb")
        model._aux_hidden_state = lambda *stream: interpreter.call(
            helper, self=model, **dict(zip(names, stream, strict=True))
        )
    return interpreter.call(
        _unrolled(forward, interpreter, model), self=model, input_ids=None,
        positions=SimpleNamespace(shape=(3,)), intermediate_tensors=None, inputs_embeds="embedded",
    )  # fmt: skip


def _lacking(tree: Tree) -> list[str]:
    """The classes without the interface that they need."""
    origins = imports(parse(tree, _PATH))
    lacking = []
    for owner, wanted in _WANTED.items():
        node = definition(tree, _PATH, owner)
        names = bases(node) if isinstance(node, ast.ClassDef) else []
        if not any(origins.get(name) == f"{_HOME}.{wanted}" for name in names):
            lacking.append(owner)
    return lacking


def _served(tree: Tree) -> tuple[bool, str]:
    lacking = _lacking(tree)
    if lacking:
        return False, f"without the interface: {', '.join(lacking)}"
    plain, full = _result(tree, ()), _result(tree, _ASKED)
    if isinstance(full, Opaque) or isinstance(plain, Opaque):
        raise NotThere(f"{_FORWARD}: what it returns cannot be evaluated")
    states = full[1] if isinstance(full, tuple) and len(full) == 2 else None
    holds = plain == "norm(last)" and full == ("norm(last)", list(_STATES))
    return holds, f"asked for states {_ASKED} it returns {states}; for none, {plain}"


def _not_served(tree: Tree) -> Answer:
    holds, evidence = _served(tree)
    return Answer.of(not holds, evidence)


def _is_served(tree: Tree) -> Answer:
    return Answer.of(*_served(tree))


_SERVED = Probe(
    claim="the model hands out completed hidden states, by the number of the layer they enter",
    check=_is_served,
    paths=(_PATH,),
)
_LOOP = """\
        for layer in self._active_layers:
            hidden_states, residual, post, comb = layer(
"""
_COLLECT = """\
        # patch: vllm_glm53_eagle3_aux
        aux_hidden_states: list[torch.Tensor] = []
        for index, layer in enumerate(self._active_layers, start=self.start_layer):
            if index in self.aux_hidden_state_layers:
                # The layer before deferred its hc_post to this one. It has no
                # weights, so this layer's completes the stream that enters.
                aux = hidden_states
                if post is not None:
                    aux = layer.hc_post(aux, residual, post, comb)
                    aux = hc_contract(aux, layer.n)
                if self.is_sequence_parallel:
                    aux = sp_all_gather(aux)[:full_num_tokens]
                aux_hidden_states.append(aux)
            hidden_states, residual, post, comb = layer(
"""
_NORM = """\
        hidden_states = self.norm(hidden_states)
        return hidden_states
"""
_HAND_OUT = """\
        # patch: vllm_glm53_eagle3_aux
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states)  # complete: the last layer defers nothing
        hidden_states = self.norm(hidden_states)
        if aux_hidden_states:
            return hidden_states, aux_hidden_states
        return hidden_states
"""
_EDITS = (
    Edit(
        label="interfaces",
        path=_PATH,
        anchor=(
            f"from {_HOME} import (\n"
            "    HasInnerState,\n"
            "    IsHybrid,\n"
            "    MixtureOfExperts,\n"
            "    SupportsPP,\n"
        ),
        text=(
            f"from {_HOME} import (\n"
            "    EagleModelMixin,\n"
            "    HasInnerState,\n"
            "    IsHybrid,\n"
            "    MixtureOfExperts,\n"
            "    SupportsEagle3,\n"
            "    SupportsPP,\n"
        ),
    ),
    Edit(
        label="mixin",
        path=_PATH,
        scope=_MODEL,
        anchor=f"class {_MODEL}(nn.Module):\n",
        text=f"class {_MODEL}(nn.Module, EagleModelMixin):\n",
    ),
    Edit(label="collect", path=_PATH, scope=_FORWARD, anchor=_LOOP, text=_COLLECT),
    Edit(label="hand out", path=_PATH, scope=_FORWARD, anchor=_NORM, text=_HAND_OUT),
    Edit(
        label="text model",
        path=_PATH,
        scope=_TEXT,
        anchor="    nn.Module, HasInnerState, SupportsPP, MixtureOfExperts, IsHybrid\n",
        text=(
            "    nn.Module,\n"
            "    HasInnerState,\n"
            "    SupportsPP,\n"
            "    MixtureOfExperts,\n"
            "    IsHybrid,\n"
            "    SupportsEagle3,\n"
        ),
    ),
    Edit(
        label="vision model",
        path=_PATH,
        scope=_VISION,
        anchor="    Glm4vForConditionalGeneration, HasInnerState, IsHybrid, MixtureOfExperts\n",
        text=(
            "    Glm4vForConditionalGeneration,\n"
            "    HasInnerState,\n"
            "    IsHybrid,\n"
            "    MixtureOfExperts,\n"
            "    SupportsEagle3,\n"
        ),
    ),
)

PATCH = Patch(
    name="vllm_glm53_eagle3_aux",
    status="backport",
    upstream="https://github.com/vllm-project/vllm/pull/55423",
    origin="fault and idea of the GX10 recipe; the rule is that of vLLM 0.32; the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=_EDITS,
            relies_on=(
                # What a layer defers, what the interface asks of a model, whose numbers they are.
                Symbol(_PATH, "Glm5NextDecoderLayer.forward"),
                Symbol(_PATH, "Glm5NextDecoderLayer.hc_post"),
                Symbol(_INTERFACES, "EagleModelMixin"),
                Symbol(_INTERFACES, "SupportsEagle3"),
                Symbol(_SHARED, "set_eagle3_aux_hidden_state_layers"),
                Symbol(_SHARED, "get_eagle3_aux_layers_from_config"),
            ),
        ),
    ),
    reason=Probe(
        claim="GLM-5.3 does not hand out its layers' hidden states",
        check=_not_served,
        paths=(_PATH,),
    ),
    effect=_SERVED,
    absorbed=_SERVED,
    drops=(
        Drop(
            versions=">=0.32",
            proof=_SERVED,
            sentence="vLLM 0.32 hands out the same states itself (vllm#55423).",
        ),
    ),
)
