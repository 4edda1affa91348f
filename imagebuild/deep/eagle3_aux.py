"""Runs `Glm5NextModel.forward` on CPU tensors and compares the states that it hands out.

The tree must be first on `sys.path`, patched where the release needs it. The layers are stand-ins
that defer their sum as mHC layers do; completing and contracting it is vLLM's own.
"""

from __future__ import annotations

import importlib
from types import MethodType, SimpleNamespace
from typing import Any

from imagebuild.deep.base import About

ABOUT = About(
    claim="GLM-5.3 hands out the completed hidden states that enter its layers",
    patches=("vllm_glm53_eagle3_aux",),
    imports=("vllm.models.glm5next.common.model",),
)
_LAYERS, _TOKENS, _WIDTH, _STREAMS = 6, 5, 8, 4
_ASKED = (1, 3, 6)


def probe() -> str:
    """The interfaces, and the states 1, 3 and 6 of six layers; returns one line.

    Raises:
        RuntimeError: with the sentence that says what is wrong.
    """
    model: Any = importlib.import_module("vllm.models.glm5next.common.model")
    interfaces: Any = importlib.import_module("vllm.model_executor.models.interfaces")
    owners = (model.Glm5NextForCausalLM, model.Glm5NextForConditionalGeneration)
    for owner in owners:
        if not interfaces.supports_eagle3(owner):
            raise RuntimeError(f"{owner.__name__} does not support the EAGLE3 interface")
    if not issubclass(model.Glm5NextModel, interfaces.EagleModelMixin):
        raise RuntimeError("Glm5NextModel cannot be told which states are wanted")
    plain = _forward(model, ())
    hidden, states = _forward(model, _ASKED)
    torch: Any = importlib.import_module("torch")
    if not torch.equal(plain, hidden):
        raise RuntimeError("asking for states changed the model's result")
    wanted = [_entering(model, number) for number in _ASKED]
    if len(states) != len(wanted):
        raise RuntimeError(f"asked for {len(wanted)} states, got {len(states)}")
    for number, state, expected in zip(_ASKED, states, wanted, strict=True):
        worst = float((state - expected).abs().max())
        if state.shape != (_TOKENS, _WIDTH) or worst > 1e-5:
            raise RuntimeError(f"state {number} is off by {worst:g} from the sum by hand")
    return f"{len(owners)} models with EAGLE3; states {_ASKED} equal the sums by hand"


def _stream(model: Any, index: int) -> tuple[Any, Any, Any, Any]:  # noqa: ANN401
    """What layer `index` returns: its raw output, the streams, and how they are to be mixed."""
    torch = model.torch
    if index == _LAYERS - 1:
        return torch.full((_TOKENS, _WIDTH), 7.0), None, None, None
    make = torch.Generator().manual_seed(index)
    raw = torch.randn(_TOKENS, _WIDTH, generator=make)
    residual = torch.randn(_TOKENS, _STREAMS, _WIDTH, generator=make)
    post = torch.rand(_TOKENS, _STREAMS, 1, generator=make)
    comb = torch.diag_embed(torch.rand(_TOKENS, _STREAMS, generator=make))
    return raw, residual, post, comb


def _entering(model: Any, number: int) -> Any:  # noqa: ANN401
    """The stream that enters layer `number`, by the formula: the mean of all mixed streams."""
    raw, residual, post, comb = _stream(model, number - 1)
    if residual is None:
        return raw
    mixed = [post[:, j] * raw + comb[:, j, j, None] * residual[:, j] for j in range(_STREAMS)]
    return sum(mixed) / _STREAMS


def _forward(model: Any, asked: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Runs the real forward on a model without weights."""
    kernels: Any = importlib.import_module("vllm.model_executor.layers.mhc")
    post_op = kernels.mhc_kernels.mhc_post_torch

    class Layer:
        n = _STREAMS
        hc_post = staticmethod(post_op)

        def __init__(self, index: int) -> None:
            self.index = index

        def __call__(self, *_given: object) -> Any:  # noqa: ANN401
            return _stream(model, self.index)

    layers = [Layer(index) for index in range(_LAYERS)]
    target = SimpleNamespace(
        _active_layers=layers, start_layer=0, end_layer=_LAYERS, is_sequence_parallel=False,
        aux_hidden_state_layers=asked, norm=lambda stream: stream * 2, _aux_post_op=post_op,
        config=SimpleNamespace(hc_mult=_STREAMS),
    )  # fmt: skip
    if hasattr(model.Glm5NextModel, "_aux_hidden_state"):
        target._aux_hidden_state = MethodType(model.Glm5NextModel._aux_hidden_state, target)
    kept, model.get_pp_group = model.get_pp_group, lambda: SimpleNamespace(
        is_first_rank=True, is_last_rank=True
    )  # fmt: skip
    try:
        positions = model.torch.arange(_TOKENS)
        embedded = model.torch.zeros(_TOKENS, _WIDTH)
        return model.Glm5NextModel.forward(target, None, positions, None, embedded)
    finally:
        model.get_pp_group = kept
