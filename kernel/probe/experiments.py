"""The experiments: what the scale does, what memory holds, and two explanations put to the test."""

from __future__ import annotations

from typing import Any

import torch

from kernel.probe import moe, nvfp4, toy
from kernel.probe.moe import Experts

Rows = list[dict[str, Any]]
# By which the calibrated scale is off, as powers of two.
SWEEP = (-60, -30, -20, -14, -10, -7, -4, -2, 0, 2, 4, 7, 10, 14, 20, 30, 60)
# Calibrated scales of this model's published checkpoint, and the constant that was advised.
PUBLISHED = {"smallest": 5.58e-4, "median": 1.58e-3, "largest": 3.72e-2, "advised 1.0": 1.0}
_TOKENS, _COUNT, _WIDTH, _INNER = 32, 4, 128, 64
_LOOKED_AT = 16  # numbers of an allocation
_GENERATED = 14


def run(device: str) -> dict[str, Rows]:
    """All experiments, by name."""
    return {
        "scale": scale(device),
        "one constant": one_constant(device),
        "memory": memory(device),
        "hypothesis 1: swapping attention backends": swapping_attention(device),
        "hypothesis 2: one MoE backend is broken": swapping_moe(device),
    }


def scale(device: str) -> Rows:
    """The experts' output under scales that are off by a power of two, against 16-bit weights."""
    experts, x = _layer(device)
    exact = moe.forward(experts, x, is_a16=True)
    first, second = moe.activations(experts, x)
    rows = []
    for power in SWEEP:
        factor = 2.0**power
        out = moe.forward(experts.with_scales(first * factor, second * factor), x, is_a16=False)
        rows.append({"scale is off by": f"2^{power}", **_compared(out, exact)})
    return rows


def one_constant(device: str) -> Rows:
    """What one constant for all does to blocks of activations, by their largest value."""
    normal = torch.randn(4096, nvfp4.BLOCK, generator=torch.Generator().manual_seed(2)).to(device)
    normal = normal / normal.abs().amax(-1, keepdim=True)
    rows = []
    for largest in (100.0, 10.0, 1.0, 0.1, 0.03, 0.01, 0.003):
        row: dict[str, Any] = {"largest of the block": largest}
        for name, constant in PUBLISHED.items():
            x = normal * largest
            values, blocks = nvfp4.quantise(x, torch.tensor(constant, device=device))
            back = (values * blocks[..., None] * constant).flatten(-2)
            row[f"error at {name} ({constant:g})"] = float((back - x).norm() / x.norm())
        rows.append(row)
    return rows


def memory(device: str) -> Rows:
    """What an allocation without a value holds when its memory was used before."""
    experts, x = _layer(device)
    exact = moe.forward(experts, x, is_a16=True)
    first, second = moe.activations(experts, x)
    rows = []
    for name in ("packed 4-bit weights", "bf16 weights", "zeros"):
        found = _stale(name, device)[:_LOOKED_AT]
        outputs = [
            _compared(moe.forward(experts.with_scales(float(one), float(one) * second / first), x,
                                  is_a16=False), exact)
            for one in found
        ]  # fmt: skip
        rows.append({
            "memory held": name,
            "first values": [f"{float(one):.1e}" for one in found[:3]],
            "experts right to 20 %": sum(one["error"] < 0.2 for one in outputs),
            "vanished (< 1 %)": sum(one["size of the output"] < 0.01 for one in outputs),
            "NaN": sum(not one["error"] < float("inf") for one in outputs),
            "of": len(outputs),
        })  # fmt: skip
    return rows


def _stale(name: str, device: str) -> torch.Tensor:
    """fp32 numbers of an allocation without a value, after one of its size that held `name`."""
    count = 1 << 10  # small, so that the allocator gives the same memory again
    dice = torch.Generator().manual_seed(3)
    if name == "packed 4-bit weights":
        used = torch.randint(0, 256, (4 * count,), generator=dice).to(torch.uint8)
    elif name == "bf16 weights":
        used = (torch.randn(2 * count, generator=dice) * 0.02).bfloat16()
    else:
        used = torch.zeros(count)
    held = [used.to(device, copy=True) for _ in range(4)]
    del held
    # An allocator may write its own notes into the first bytes.
    return torch.empty(count, device=device)[64:].clone()


def swapping_attention(device: str) -> Rows:
    """With experts that vanish, every attention gives the same tokens, a faulty one too."""
    table, right = _toy(device)
    garbage = table.with_scales(1e20, 1e20)
    rows = []
    for state, experts in (("right scale", right), ("uninitialised scale", garbage)):
        for name, attention in toy.BACKENDS.items():
            told = toy.generate(attention, experts, _GENERATED, is_a16=False, device=device)
            rows.append({"experts": state, "attention": name, "continues 0 1 with": told,
                         "right": told == toy.sums(_GENERATED)})  # fmt: skip
    return rows


def swapping_moe(device: str) -> Rows:
    """4-bit activations are right with the right scale; 16-bit ones are with any, or with none."""
    table, right = _toy(device)
    rows = []
    for state, experts in (("calibrated", right), ("uninitialised", table.with_scales(1e20, 1e20)),
                           ("none", table)):  # fmt: skip
        for name, is_a16 in (("4-bit activations", False), ("16-bit (as Marlin)", True)):
            try:
                told = toy.generate(toy.sparse, experts, _GENERATED, is_a16=is_a16, device=device)
            except ValueError as error:
                rows.append({"scale in the checkpoint": state, "experts compute with": name,
                             "continues 0 1 with": str(error), "right": False})  # fmt: skip
                continue
            rows.append({"scale in the checkpoint": state, "experts compute with": name,
                         "continues 0 1 with": told,
                         "right": told == toy.sums(_GENERATED)})  # fmt: skip
    return rows


def _layer(device: str) -> tuple[Experts, torch.Tensor]:
    experts = moe.random_experts(_COUNT, _WIDTH, _INNER, device)
    x = torch.randn(_TOKENS, _WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    return experts, x


def _toy(device: str) -> tuple[Experts, Experts]:
    table = toy.experts(device)
    return table, table.with_scales(*moe.activations(table, toy.inputs(device)))


def _compared(out: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    if not bool(out.isfinite().all()):
        return {"size of the output": float("nan"), "error": float("inf"), "cosine": 0.0}
    norm = float(exact.norm())
    both = float(out.flatten() @ exact.flatten())
    return {
        "size of the output": float(out.norm()) / norm,
        "error": float((out - exact).norm()) / norm,
        "cosine": both / max(norm * float(out.norm()), 1e-30),
    }
