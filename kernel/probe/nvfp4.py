"""NVFP4 in torch: 4-bit values in blocks of 16, a scale each in e4m3, and one fp32 scale for all.

What is stored of a tensor x with global scale s: per block of 16 the number b = e4m3(amax / 6 / s),
and per value e2m1(x / (b * s)). What comes back is b * s times the 4-bit value. So s must be near
amax / (6 * 448): far above it every b rounds to zero, far below it every b saturates at 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
MAX_VALUE, MAX_BLOCK_SCALE = 6.0, 448.0  # of e2m1 and of e4m3
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def calibrated(x: Tensor) -> float:
    """The global scale under which the largest block scale is the largest e4m3 number."""
    return float(x.abs().max()) / (MAX_VALUE * MAX_BLOCK_SCALE)


def quantise(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Values and block scales as a kernel stores them, given the global scale.

    It is computed as the kernels do it: from 1 / scale, in fp32, with saturation. Nothing checks
    the scale, as nothing does there.

    Args:
        x: [..., K], K a multiple of 16.
        scale: one fp32 number.

    Returns:
        values [..., K / 16, 16] out of e2m1, and block scales [..., K / 16] out of e4m3; both fp32.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    inverse = 1.0 / scale.float()
    amax = blocks.abs().amax(-1)
    block_scale = (amax / MAX_VALUE * inverse).clamp(-MAX_BLOCK_SCALE, MAX_BLOCK_SCALE)
    block_scale = block_scale.to(torch.float8_e4m3fn).float()
    factor = torch.where(block_scale == 0, 0.0, inverse / block_scale)
    return _round(blocks * factor[..., None]), block_scale


def _round(x: Tensor) -> Tensor:
    """To the nearest e2m1 number, saturating; NaN becomes the largest, as the conversion has it."""
    magnitudes = torch.tensor(_MAGNITUDES, device=x.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = x.abs().nan_to_num(nan=MAX_VALUE, posinf=MAX_VALUE)
    return torch.copysign(magnitudes[torch.bucketize(size, middles)], x)


def product(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """`x @ w.T` with both in NVFP4: 4-bit products, block scales, at the end `x_scale * w_scale`.

    The factor at the end is what vLLM calls alpha: it is made from the same two scales once, when
    the weights are loaded.
    """
    x_values, x_blocks = quantise(x, x_scale)
    w_values, w_blocks = quantise(w, w_scale)
    left = (x_values * x_blocks[..., None]).flatten(-2)
    right = (w_values * w_blocks[..., None]).flatten(-2)
    alpha = x_scale.float() * w_scale.float()
    return left @ right.T * alpha


def product_a16(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """The same with 16-bit activations, as Marlin does it: there is no activation scale to read."""
    values, blocks = quantise(w, w_scale)
    weights = (values * blocks[..., None] * w_scale.float()).flatten(-2)
    return x.bfloat16().float() @ weights.bfloat16().float().T
