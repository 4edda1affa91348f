"""A language model of one layer, built and not trained, that needs attention and experts both.

Its tokens are 0 to 15, and it continues any two with their sum modulo 16. Attention fetches the
token before the last; the experts know the table of sums. Their result is added to the embedding of
the last token, which is also read out: without the experts the last token comes again, for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel.probe.moe import Experts, forward

TOKENS = 16
_CURRENT, _PREVIOUS, _ONE = 0, TOKENS, 2 * TOKENS  # where in the hidden state
_WIDTH, _EXPERTS = 48, 4
_SHARP = 16.0

# values [T, 16] of all positions and the wanted position -> [16]
Attention = Callable[[Tensor, int], Tensor]


def dense(values: Tensor, wanted: int) -> Tensor:
    """Softmax over every position."""
    scores = torch.full((len(values),), -_SHARP, device=values.device)
    scores[wanted] = _SHARP
    return scores.softmax(0) @ values


def sparse(values: Tensor, wanted: int) -> Tensor:
    """Softmax over a list of positions in which -1 is nothing."""
    return _sparse(values, wanted, is_masked=True)


def sparse_faulty(values: Tensor, wanted: int) -> Tensor:
    """The same with -1 read as row 0, and not masked: the older kernel's fault."""
    return _sparse(values, wanted, is_masked=False)


BACKENDS: dict[str, Attention] = {"dense": dense, "sparse": sparse, "sparse, faulty": sparse_faulty}
RIGHT = ("dense", "sparse")


def _sparse(values: Tensor, wanted: int, *, is_masked: bool) -> Tensor:
    chosen = torch.tensor([wanted, -1, -1, -1], device=values.device)
    scores = torch.full((4,), _SHARP, device=values.device)
    if is_masked:
        scores[chosen < 0] = -torch.inf
    return scores.softmax(0) @ values[chosen.clamp(min=0)]


def experts(device: str) -> Experts:
    """The table of sums: expert e knows the pairs whose last token is e modulo 4."""
    each = TOKENS // _EXPERTS * TOKENS
    router = torch.zeros(_EXPERTS, _WIDTH)
    gate_up = torch.zeros(_EXPERTS, 2 * each, _WIDTH)
    down = torch.zeros(_EXPERTS, _WIDTH, each)
    for last in range(TOKENS):
        number = last % _EXPERTS
        router[number, _CURRENT + last] = _SHARP
        for before in range(TOKENS):
            unit = last // _EXPERTS * TOKENS + before
            # Above zero only where both are there.
            gate_up[number, unit, _CURRENT + last] = _SHARP
            gate_up[number, unit, _PREVIOUS + before] = _SHARP
            gate_up[number, unit, _ONE] = -1.5 * _SHARP
            gate_up[number, each + unit, _ONE] = 1.0
            down[number, _CURRENT + (last + before) % TOKENS, unit] += 4.0 / _SHARP
    return Experts(router.to(device), gate_up.to(device), down.to(device), top=1)


def generate(
    attention: Attention, table: Experts, count: int, *, is_a16: bool, device: str
) -> list[int]:
    """Continues 0, 1 by `count` tokens, the likeliest each time."""
    told = [0, 1]
    for _ in range(count):
        hidden = torch.zeros(_WIDTH, device=device)
        hidden[_CURRENT + told[-1]] = 1.0
        hidden[_ONE] = 1.0
        values = torch.nn.functional.one_hot(torch.tensor(told, device=device), TOKENS).float()
        hidden[_PREVIOUS:_ONE] = attention(values, len(told) - 2)
        hidden = hidden + forward(table, hidden[None], is_a16=is_a16)[0]
        told.append(int(hidden[_CURRENT:_PREVIOUS].nan_to_num(nan=-torch.inf).argmax()))
    return told[2:]


def sums(count: int) -> list[int]:
    """What is right."""
    told = [0, 1]
    for _ in range(count):
        told.append((told[-1] + told[-2]) % TOKENS)
    return told[2:]


def inputs(device: str) -> Tensor:
    """[256, 48] every hidden state that the experts can see, for calibration."""
    states = torch.zeros(TOKENS * TOKENS, _WIDTH)
    for number in range(TOKENS * TOKENS):
        states[number, [_CURRENT + number // TOKENS, _PREVIOUS + number % TOKENS, _ONE]] = 1.0
    return states.to(device)
