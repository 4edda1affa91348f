"""A mixture of experts in NVFP4, with both ways to multiply and the scales of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel.probe import nvfp4


@dataclass(frozen=True)
class Experts:
    """Weights of E experts, and the activation scales that a checkpoint may lack.

    Attributes:
        router: [E, K].
        gate_up: [E, 2N, K].
        down: [E, K, N].
        top: experts a token.
        input_scales: of the activations before `gate_up` and before `down`, one fp32 number each;
            None for weights alone, which only `is_a16` can run.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top: int
    input_scales: tuple[Tensor, Tensor] | None = None

    def with_scales(self, first: float, second: float) -> Experts:
        """The same experts with these activation scales."""
        scales = (torch.tensor(first, device=self.down.device),
                  torch.tensor(second, device=self.down.device))  # fmt: skip
        return Experts(self.router, self.gate_up, self.down, self.top, scales)


def random_experts(count: int, width: int, inner: int, device: str) -> Experts:
    """Experts with normal weights, the size of a layer's output near that of its input."""
    dice = torch.Generator().manual_seed(7)

    def normal(*shape: int, size: float) -> Tensor:
        return (torch.randn(*shape, generator=dice) * size).to(device)

    return Experts(normal(count, width, size=width**-0.5),
                   normal(count, 2 * inner, width, size=width**-0.5),
                   normal(count, width, inner, size=2 * inner**-0.5), top=2)  # fmt: skip


def forward(experts: Experts, x: Tensor, *, is_a16: bool) -> Tensor:
    """[T, K] -> [T, K]: the layer without its residual."""
    weights, chosen = (x @ experts.router.T).softmax(-1).topk(experts.top, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for number in range(len(experts.router)):
        token, place = (chosen == number).nonzero(as_tuple=True)
        if len(token):
            result = _expert(experts, number, x[token], is_a16=is_a16)
            out.index_add_(0, token, result * weights[token, place, None])
    return out


def activations(experts: Experts, x: Tensor) -> tuple[float, float]:
    """The calibrated scales of both activations, over all experts, as a calibration finds them."""
    inner = torch.cat([_inner(x @ w.T) for w in experts.gate_up])
    return nvfp4.calibrated(x), nvfp4.calibrated(inner)


def _expert(experts: Experts, number: int, x: Tensor, *, is_a16: bool) -> Tensor:
    gate_up, down = experts.gate_up[number], experts.down[number]
    scales = [torch.tensor(nvfp4.calibrated(w), device=x.device) for w in (gate_up, down)]
    if is_a16:
        inner = _inner(nvfp4.product_a16(x, gate_up, scales[0]))
        return nvfp4.product_a16(inner, down, scales[1])
    if experts.input_scales is None:
        raise ValueError("4-bit activations need input scales")
    first, second = experts.input_scales
    inner = _inner(nvfp4.product(x, first, gate_up, scales[0]))
    return nvfp4.product(inner, second, down, scales[1])


def _inner(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
