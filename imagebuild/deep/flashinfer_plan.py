"""Runs FlashInfer's own plan gate, which can refuse fp8 rows, with the limits of each card."""

from __future__ import annotations

import inspect
from typing import Any

from imagebuild.deep.base import About, require

ABOUT = About(
    claim="FlashInfer plans this model's rows, fp8 and bf16, on capability 12 as on 9",
    patches=("flashinfer_mla_fp8_sm12x",),
    imports=("flashinfer.mla._batch_mla._backends._fa_common",),
)
# Bytes of shared memory a multiprocessor, and a block at most, as the cards report them.
_LIMITS = {(12, 0): (102_400, 101_376), (12, 1): (102_400, 101_376), (9, 0): (233_472, 232_448)}
_KINDS = {"fp8": ("float8_e4m3fn", "kv-per-tensor"), "bf16": ("bfloat16", "default")}


def probe() -> str:
    """Plans both types on 12.1 and 12.0 by FA2, and on 9.0 by FA3."""
    refused = {}
    for capability in _LIMITS:
        backend = "fa3" if capability[0] == 9 else "fa2"
        for kind in _KINDS:
            why = refusal(capability, kind, backend)
            if why:
                refused[f"{kind} on {capability[0]}.{capability[1]} by {backend}"] = why
    first = next((f"{what}: {why}" for what, why in refused.items()), "")
    require(not refused, f"{len(refused)} of 6 plans are refused; {first}")
    return "fp8 and bf16 rows of 512 are planned on 12.1 and 12.0 by fa2, on 9.0 by fa3"


def refusal(capability: tuple[int, int], kind: str, backend: str) -> str:
    """Why such a plan is refused on a card of that capability; "" where it is accepted."""
    import torch
    from flashinfer.mla._batch_mla._backends import _fa_common as gate

    stored, scale = _KINDS[kind]
    row = torch.zeros(3, dtype=torch.int32)
    keep = _pretend(gate, capability)
    try:
        gate._validate_generated_fa_plan(
            backend=backend,
            device=torch.device("cuda"),
            qo_indptr=row,
            kv_indptr=row,
            kv_indices=row,
            kv_len_arr=torch.zeros(2, dtype=torch.int32),
            head_dim_ckv=512,
            head_dim_kpe=0,  # GLM-5.3 has no rotary part
            q_data_type=torch.bfloat16,
            kv_data_type=getattr(torch, stored),
            output_dtype=torch.bfloat16,
            scale_mode=scale,
        )
    except ValueError as error:
        return str(error)
    finally:
        vars(gate).update(keep)
    return ""


def _pretend(gate: Any, capability: tuple[int, int]) -> dict[str, object]:  # noqa: ANN401
    """Replaces what the gate asks of the device; returns what was there."""
    answers = {
        "get_compute_capability": lambda _device: capability,
        "is_sm90a_supported": lambda _device: capability == (9, 0),
        "_get_fa_shared_memory_limits": lambda _device: _LIMITS[capability],
    }
    known = {name: answer for name, answer in answers.items() if name in vars(gate)}
    keep = {name: vars(gate)[name] for name in known}
    require("get_compute_capability" in known and inspect.ismodule(gate),
            "FlashInfer's gate no longer asks for the capability by this name")  # fmt: skip
    vars(gate).update(known)
    return keep
