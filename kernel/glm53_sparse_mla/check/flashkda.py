"""Whether a FlashKDA keeps its state in fp32 from tile to tile: two tests that can tell.

FlashKDA is the linear attention of GLM-5.3's other layers. Up to vLLM 0.30.0 it rounded the state
to bf16 every 16 tokens, which swallows small increments whole: the model forgets slowly and nobody
sees an error. Passing a state through, or splitting a prompt over calls, shows no difference
between the two (a fixed build even fails the second), so neither is tested here.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = "_flashkda_C.abi3.so"
# Share of the exact increment that is found in the state. Measured on an H200, 2026-11-29: vLLM
# 0.31.0 has 1.004, 0.945 and 0.848, vLLM 0.30.0 exactly nothing.
MIN_CAPTURED = 0.8
# Relative error of the state under a slow gate: 3.4e-3 and 2.2e-2 there.
MAX_STATE_ERROR = 1e-2
INCREMENT_LOGITS = (-9.0, -11.0, -13.0)
_TOKENS, _HEADS, _DIM = 4096, 8, 128
_LOWER_BOUND = -5.0  # of the gate, as GLM-5.3 has it
_SLOW_GATE = -12.0


@dataclass(frozen=True)
class Outcome:
    """One test: what was found, and what is expected of it."""

    name: str
    value: float
    expected: str
    is_well: bool


def installed() -> Path | None:
    """The library of the vLLM that is installed, without importing it; None where there is none."""
    found = importlib.util.find_spec("vllm")
    places = list(found.submodule_search_locations or ()) if found else []
    return next((p for p in (Path(place) / LIBRARY for place in places) if p.is_file()), None)


def check(library: Path, *, is_quick: bool = False) -> list[Outcome]:
    """Runs both tests on the GPU; of a quick run the slow gate, with its reference, is left out.

    Two libraries cannot be checked in one process: both register the same operators.

    Raises:
        RuntimeError, OSError: the library cannot be loaded or the call fails.
    """
    import torch

    torch.ops.load_library(str(library))
    ops = torch.ops._flashkda_C
    outcomes = [small_increments(ops, logit) for logit in INCREMENT_LOGITS]
    return outcomes if is_quick else [*outcomes, slow_gate(ops)]


def small_increments(ops: Any, logit: float) -> Outcome:  # noqa: ANN401 - torch's namespace
    """Every token adds the same little to one value of the state, and nothing decays.

    With a constant key, value 1 and step b = sigmoid(logit) the state has a closed form:
    1 - 0.5 (1 - b)^T. Each addition is less than half a unit of bf16 at 0.5.
    """
    import torch

    ones = torch.ones(1, _TOKENS, _HEADS, _DIM, device="cuda")
    key = torch.zeros_like(ones)
    key[..., 0] = 1.0
    state = torch.zeros(1, _HEADS, _DIM, _DIM, device="cuda")
    state[..., 0] = 0.5
    step = torch.full((1, _TOKENS, _HEADS), logit, device="cuda").bfloat16()
    call = _Call(
        q=ones.bfloat16(), k=key.bfloat16(), v=ones.bfloat16(),
        g=torch.zeros_like(ones).bfloat16(), beta=step,
        decay=torch.zeros(_HEADS, device="cuda"),
        bias=torch.full((_HEADS, _DIM), -1e4, device="cuda"),  # the gate is shut: no decay
        state=state,
    )  # fmt: skip
    found = float(call.run(ops)[0, 0, 0, 0])
    exact = exact_increment(logit)
    share = (found - 0.5) / (exact - 0.5)
    return Outcome(f"small increments, logit {logit:g}", share, f">= {MIN_CAPTURED} captured",
                   share >= MIN_CAPTURED)  # fmt: skip


def exact_increment(logit: float) -> float:
    """The state's value after all tokens, from 0.5."""
    step = 1.0 / (1.0 + math.exp(-logit))
    return 1.0 - 0.5 * (1.0 - step) ** _TOKENS


def slow_gate(ops: Any) -> Outcome:  # noqa: ANN401 - torch's namespace
    """Random tokens under a gate that hardly forgets: roundings of the state add up."""
    import torch

    dice = torch.Generator(device="cuda").manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, device="cuda")

    shape = (1, _TOKENS, _HEADS, _DIM)
    call = _Call(
        q=random(*shape).bfloat16(), k=random(*shape).bfloat16(), v=random(*shape).bfloat16(),
        g=random(*shape).bfloat16(), beta=(random(*shape[:3]) - 4).bfloat16(),
        decay=torch.zeros(_HEADS, device="cuda"),
        bias=torch.full((_HEADS, _DIM), _SLOW_GATE, device="cuda"),
        state=random(1, _HEADS, _DIM, _DIM) * 0.5,
    )  # fmt: skip
    found, expected = call.run(ops)[0].double(), recurrence(call)
    error = float((found - expected).norm() / expected.norm())
    return Outcome(f"slow gate, shift {_SLOW_GATE:g}", error, f"< {MAX_STATE_ERROR} state error",
                   error < MAX_STATE_ERROR)  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """Arguments of one prefill: q, k, v, g [1, T, H, D] bf16; beta [1, T, H] bf16; decay [H],
    bias [H, D] and state [1, H, D, D] fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    decay: Tensor
    bias: Tensor
    state: Tensor

    def run(self, ops: Any) -> Tensor:  # noqa: ANN401 - torch's namespace
        """The state after all tokens. Every output is NaN before, so what is not written shows."""
        import torch

        out = torch.full_like(self.q, torch.nan)
        final = torch.full_like(self.state, torch.nan)
        size = ops.get_workspace_size(_TOKENS, _HEADS, 1)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        ends = torch.tensor([0, _TOKENS], dtype=torch.int32, device="cuda")
        ops.fwd(self.q, self.k, self.v, self.g, self.beta, _DIM**-0.5, out, workspace, self.decay,
                self.bias, _LOWER_BOUND, self.state, final, ends, None, None)  # fmt: skip
        torch.cuda.synchronize()
        return final


def recurrence(call: _Call) -> Tensor:
    """The gated delta rule, token by token in fp64: the state [H, D, D], values by keys."""
    import torch

    k, v, g = (one[0].double() for one in (call.k, call.v, call.g))
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    rate = torch.exp(call.decay.double())[None, :, None]
    keep = torch.exp(_LOWER_BOUND * torch.sigmoid(rate * (g + call.bias.double()[None])))
    step = torch.sigmoid(call.beta[0].double())
    state = call.state[0].double().clone()
    for t in range(len(k)):
        state *= keep[t][:, None, :]
        missing = step[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state += missing[:, :, None] * k[t][:, None, :]
    return state
