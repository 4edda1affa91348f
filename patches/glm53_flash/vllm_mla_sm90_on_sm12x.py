"""Offer the SM90 sparse MLA backend on capability 12 as a route.

Symptom: capability 12 has one sparse MLA backend, FLASHINFER_MLA_SPARSE_SM120. It stores packed
    rows of 656 bytes a token and layer and sends every prefill through the top-k path. A GB10
    that wants rows of 512 bytes and dense prefill below 2,048 tokens has no way to get them.
Cause: three places know of Hopper only: the list of `_get_backend_priorities` for capability 12,
    `FlashInferMLASparseSM90Backend.supports_compute_capability`, and `_SM90State`, which always
    asks FlashInfer for its FA3 kernels, and those exist for capability 9 alone.
Change: with GLM_MLA_ROUTE=sm90 the list names the SM90 backend where it named SM120, and the gate
    admits capability 12; off Hopper the wrapper takes FA2. The route replaces the stock backend
    rather than going ahead of it, so that a route which cannot run stops the start with vLLM's own
    reasons instead of quietly serving another one. Rows of fp8 also need FlashInfer's FA2 kernels
    to accept fp8 on capability 12; bf16 rows do not.
    The version gate (`has_flashinfer_sm90_nope_mla`) is left alone: every FlashInfer that a base
    of this range pins passes it.
Upstream: none; upstream serves capability 12 with its own backend.
Drop when: measurements on hardware say that no deployment should take this route.
Cost: one import of a module of ours a process. Inert unless GLM_MLA_ROUTE=sm90: list, gate and
    wrapper are then stock on every capability. An unknown route stops the start.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Edit, NewFile, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    NotThere,
    assigned,
    definition,
    function,
    keyword,
    only_call,
    parse,
)
from imagebuild.patching.tree import Tree

_CUDA = "vllm/platforms/cuda.py"
_LIST = "_get_backend_priorities"
_SM90 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
_GATE = "FlashInferMLASparseSM90Backend.supports_compute_capability"
_STATE = "_SM90State.__init__"
_SM120 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py"
_MLA = "vllm/model_executor/layers/attention/mla_attention.py"
_REGISTRY = "vllm/v1/attention/backends/registry.py"
_ROUTE = "glm_mla_route.py"
_ASK = "glm_mla_route.active_route"
_PREFIX = "AttentionBackendEnum."
_SM90_NAME = "FLASHINFER_MLA_SPARSE_SM90"
_CLASS_OF_SM90 = f"{_SM90.removesuffix('.py').replace('/', '.')}.{_GATE.partition('.')[0]}"


def _capability(major: int) -> SimpleNamespace:
    return SimpleNamespace(major=major, minor=0, to_int=lambda: major * 10)


def _offered(tree: Tree, major: int, route: str) -> list[str]:
    """Names of the MLA backends that are tried on a capability, in order."""
    interpreter = Interpreter(parse(tree, _CUDA), {_ASK: lambda: route})
    found = interpreter.call(
        function(tree, _CUDA, _LIST),
        use_mla=True,
        device_capability=_capability(major),
        num_heads=16,
        kv_cache_dtype="fp8",
        head_size=512,
    )
    if not isinstance(found, list) or not all(isinstance(item, Opaque) for item in found):
        raise NotThere(f"{_LIST}: the list for major {major} cannot be evaluated")
    return [item.text.rpartition(_PREFIX)[2] for item in found]


def _admitted(tree: Tree, major: int, route: str) -> bool:
    interpreter = Interpreter(parse(tree, _SM90), {_ASK: lambda: route})
    answer = interpreter.call(function(tree, _SM90, _GATE), capability=_capability(major))
    if isinstance(answer, Opaque):
        raise NotThere(f"{_GATE} returns {answer.text}, which cannot be evaluated")
    return bool(answer)


def _kernels(tree: Tree, major: int) -> str:
    """The FlashInfer backend that the SM90 state asks for on a device."""
    call = only_call(function(tree, _SM90, _STATE), "BatchMLAPagedAttentionWrapper")
    chosen = keyword(call, "backend")
    if chosen is None:
        raise NotThere(f"{_STATE}: the wrapper's backend is not named")
    names = {
        "torch.cuda.get_device_capability": lambda device=None: (major, 0),
        "current_platform.get_device_capability": lambda device_id=0: _capability(major),
        "device": Opaque("device"),
    }
    value = Interpreter(parse(tree, _SM90), names).value(chosen)
    if not isinstance(value, str):
        raise NotThere(f"{_STATE}: the wrapper's backend cannot be evaluated")
    return value


def _registered(tree: Tree) -> str:
    """The class that stands for the SM90 backend in the registry."""
    values = assigned(definition(tree, _REGISTRY, "AttentionBackendEnum"), _SM90_NAME)
    if len(values) != 1 or not isinstance(values[0], ast.Constant):
        raise NotThere(f"{_REGISTRY} does not name the class of {_SM90_NAME}")
    return str(values[0].value)


def _not_offered(tree: Tree) -> Answer:
    offered = _offered(tree, 12, "sm90")
    return Answer.of(
        "FLASHINFER_MLA_SPARSE_SM90" not in offered, f"offered on capability 12: {offered}"
    )


def _serves_route(tree: Tree) -> Answer:
    asked = _offered(tree, 12, "sm90")
    stock = [
        _offered(tree, 12, "stock") == ["TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120"],
        not _admitted(tree, 12, "stock"),
        *(_admitted(tree, 9, route) for route in ("stock", "sm90")),
        not _admitted(tree, 10, "sm90"),
        _kernels(tree, 9) == "fa3",
    ]
    registered = _registered(tree)
    served = [
        "FLASHINFER_MLA_SPARSE_SM90" in asked,
        "FLASHINFER_MLA_SPARSE_SM120" not in asked,
        _admitted(tree, 12, "sm90"),
        _kernels(tree, 12) == "fa2",
        registered == _CLASS_OF_SM90,
    ]
    return Answer.of(
        all(served) and all(stock),
        f"route sm90 on capability 12 offers {asked}, admitted {_admitted(tree, 12, 'sm90')}, "
        f"kernels {_kernels(tree, 12)}, class {registered}; stock kept without it: {all(stock)}",
    )


def _offered_by_upstream(tree: Tree) -> Answer:
    # "stock" on purpose: what upstream offers, it offers without our route.
    offered, admitted = _offered(tree, 12, "stock"), _admitted(tree, 12, "stock")
    served = "FLASHINFER_MLA_SPARSE_SM90" in offered and admitted and _kernels(tree, 12) != "fa3"
    return Answer.of(served, f"capability 12 offers {offered}, the SM90 gate says {admitted}")


def _stock_route(tree: Tree) -> Answer:
    offered = "FLASHINFER_MLA_SPARSE_SM120" in _offered(tree, 12, "stock")
    interpreter = Interpreter(parse(tree, _SM120))
    scale = interpreter.call(
        function(tree, _SM120, "_kv_scale_format_for_model"), model_type="glm5_next_text"
    )
    run = function(tree, _SM120, "FlashInferMLASparseSM120Impl._run_mqa_kernel")
    call = only_call(run, "flashinfer_trtllm_batch_decode_with_kv_cache_mla")
    passed = keyword(call, "kv_scale_format") is not None
    return Answer.of(
        offered and passed and scale == "arbitrary_fp32",
        f"SM120 offered: {offered}; scale format for glm: {scale}, passed to the kernel: {passed}",
    )


_EDITS = (
    Edit(
        label="route in the list",
        path=_CUDA,
        scope=_LIST,
        kind="insert_after",
        anchor="        elif device_capability.major == 12:\n",
        text=(
            "            # patch: vllm_mla_sm90_on_sm12x\n"
            "            from glm_mla_route import active_route\n"
            "\n"
        ),
    ),
    Edit(
        label="backend of the route",
        path=_CUDA,
        scope=_LIST,
        anchor="                AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120,\n",
        text=(
            "                AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM90\n"
            '                if active_route() == "sm90"\n'
            "                else AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120,\n"
        ),
    ),
    Edit(
        label="capability gate",
        path=_SM90,
        scope=_GATE,
        anchor="        return capability.major == 9\n",
        text=(
            "        # patch: vllm_mla_sm90_on_sm12x\n"
            "        from glm_mla_route import active_route\n"
            "\n"
            "        return capability.major == 9 or (\n"
            '            capability.major == 12 and active_route() == "sm90"\n'
            "        )\n"
        ),
    ),
    Edit(
        label="FA2 off Hopper",
        path=_SM90,
        scope=_STATE,
        anchor='            backend="fa3",\n',
        text=(
            "            # patch: vllm_mla_sm90_on_sm12x\n"
            '            backend="fa3"\n'
            "            if torch.cuda.get_device_capability(device)[0] == 9\n"
            '            else "fa2",\n'
        ),
    ),
)

PATCH = Patch(
    name="vllm_mla_sm90_on_sm12x",
    status="inappropriate",  # upstream has its own backend for capability 12
    upstream="",
    origin="idea of MiaAI-Lab (MIT); the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=_EDITS,
            files=(NewFile(source="glm_mla_route.py", path=_ROUTE),),
            relies_on=(
                # Who asks for the list, what is done with the KV type by backend name, and the
                # private parts of FlashInfer that the SM90 state reads after a plan.
                Symbol(_CUDA, "CudaPlatformBase.get_valid_backends"),
                Symbol(_MLA, "_canonicalize_sparse_mla_kv_cache_dtype"),
                Symbol(_SM90, "_SM90State._plan"),
            ),
        ),
    ),
    reason=Probe(
        claim="the stock list for capability 12 does not offer FLASHINFER_MLA_SPARSE_SM90",
        check=_not_offered,
        paths=(_CUDA,),
    ),
    effect=Probe(
        claim="GLM_MLA_ROUTE=sm90 serves capability 12 by SM90 and FA2, all else stays stock",
        check=_serves_route,
        paths=(_CUDA, _SM90, _REGISTRY),
    ),
    absorbed=Probe(
        claim="upstream serves capability 12 by the SM90 backend without our route",
        check=_offered_by_upstream,
        paths=(_CUDA, _SM90),
    ),
    knob="GLM_MLA_ROUTE",
    notes=(
        Probe(
            claim="as far as Python shows, capability 12 has a stock route for this model",
            check=_stock_route,
            paths=(_CUDA, _SM120),
        ),
    ),
)
