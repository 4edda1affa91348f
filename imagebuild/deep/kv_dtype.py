"""Runs what vLLM does with the KV type: by backend name, and in the plan of the SM90 backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from imagebuild.deep.base import About, require

ABOUT = About(
    claim="SM120 packs its rows, SM90 keeps the type asked for and plans fp8 as float8_e4m3fn",
    patches=("vllm_mla_sm90_on_sm12x", "vllm_sm90_fp8_kv_dtype"),
    imports=(
        "vllm.model_executor.layers.attention.mla_attention",
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90",
    ),
)
_ASKED = ("auto", "bfloat16", "fp8", "fp8_e4m3")


def probe() -> str:
    """Compares the served type by backend, and the planned type by storage type."""
    packed = {kind: _served("FLASHINFER_MLA_SPARSE_SM120", kind) for kind in _ASKED}
    wanted = dict.fromkeys(_ASKED, "fp8_ds_mla") | {"bfloat16": "bfloat16"}
    require(packed == wanted, f"SM120 serves {packed}, expected {wanted}")
    plain = {kind: _served("FLASHINFER_MLA_SPARSE_SM90", kind) for kind in _ASKED}
    require(plain == {kind: kind for kind in _ASKED}, f"SM90 does not keep the type: {plain}")
    planned = {kind: _planned(kind) for kind in ("uint8", "bfloat16")}
    wanted = {"uint8": "torch.float8_e4m3fn", "bfloat16": "torch.bfloat16"}
    require(planned == wanted, f"SM90 plans {planned}, expected {wanted}")
    return "SM120 packs auto and fp8, SM90 keeps every type and plans stored uint8 as float8_e4m3fn"


def _served(backend: str, kind: str) -> str:
    from vllm.model_executor.layers.attention import mla_attention

    named = SimpleNamespace(get_name=lambda: backend)
    return str(mla_attention._canonicalize_sparse_mla_kv_cache_dtype(named, kind))


def _planned(stored: str) -> str:
    """The type that the real builder hands to its plan for a cache stored as that type."""
    import torch
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90 as sm90

    builder = sm90.FlashInferMLASparseSM90Builder
    parent = builder.__mro__[1]
    given: list[Any] = []
    keep = parent.__init__, sm90._SM90State
    parent.__init__ = lambda *_arguments, **_named: None
    sm90._SM90State = lambda *arguments, **_named: given.extend(arguments)
    try:
        builder(SimpleNamespace(dtype=getattr(torch, stored)), ["layer"], _config(sm90), "cpu")
    finally:
        parent.__init__, sm90._SM90State = keep
    kinds = [str(item) for item in given if isinstance(item, torch.dtype)]
    require(len(kinds) == 1, f"the plan of SM90 is given {len(kinds)} types, expected one")
    return kinds[0]


def _config(sm90: Any) -> SimpleNamespace:  # noqa: ANN401 - a module of the tree
    """As much of a VllmConfig as the builder reads."""
    import torch

    impl = sm90.FlashInferMLASparseSM90Impl.__new__(sm90.FlashInferMLASparseSM90Impl)
    impl.topk_indices_buffer = torch.zeros(1, 2176, dtype=torch.int32)
    impl.num_heads, impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = 16, 512, 0, 1.0
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(impl=impl)}
        ),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=2048)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        speculative_config=None,
    )
