"""Shows that FlashKDA's fp32 state is bf16 at the edges of a call: python3 THIS LIBRARY.

Needs a GPU and a torch that can load the library. Exits 1 where the state is narrowed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

HEADS, DIM, TOKENS = 8, 128, 16384
LOGITS = (-9.0, -11.0, -13.0)
CALLS = (16384, 4096, 1024, 256, 64)


def main(arguments: list[str]) -> int:
    """Prints both findings."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        sys.stderr.write(f"usage: {Path(__file__).name} _flashkda_C.abi3.so\n")
        return 2
    try:
        import torch
    except ImportError:
        sys.stderr.write("torch: expected it with CUDA, found none\n")
        return 2
    if not torch.cuda.is_available():
        sys.stderr.write("GPU: expected one, found none\n")
        return 2
    torch.ops.load_library(arguments[0])
    start = torch.rand(1, HEADS, DIM, DIM, device="cuda")
    end = call(torch, -math.inf, start, 64)
    narrowed = torch.equal(end, start.bfloat16().float())
    kept = torch.equal(end, start)
    sys.stdout.write(f"a call that changes nothing: state kept {kept}, narrowed {narrowed}\n\n")
    sys.stdout.write(f"| logit | {' | '.join(f'calls of {size}' for size in CALLS)} |\n")
    sys.stdout.write("|---" * (1 + len(CALLS)) + "|\n")
    for logit in LOGITS:
        shares = [f"{share(torch, logit, size):.3f}" for size in CALLS]
        sys.stdout.write(f"| {logit:g} | {' | '.join(shares)} |\n")
    return 1 if narrowed else 0


def share(torch, logit: float, size: int) -> float:  # noqa: ANN001 - the module
    """Of the exact gain of all tokens, what is there after calls of `size` tokens each."""
    state = torch.zeros(1, HEADS, DIM, DIM, device="cuda")
    state[..., 0] = 0.5
    for _ in range(TOKENS // size):
        state = call(torch, logit, state, size)
    step = 1 / (1 + math.exp(-logit))
    exact = 0.5 - 0.5 * (1 - step) ** TOKENS
    return (float(state[0, 0, 0, 0]) - 0.5) / exact


def call(torch, logit: float, state, size: int) -> object:  # noqa: ANN001 - torch's tensors
    """One prefill of `size` equal tokens with key e0, value 1, step sigmoid(logit) and no decay."""
    ops = torch.ops._flashkda_C
    ones = torch.ones(1, size, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    key = torch.zeros_like(ones)
    key[..., 0] = 1
    beta = torch.full((1, size, HEADS), max(logit, -1e4), device="cuda", dtype=torch.bfloat16)
    shut = torch.full((HEADS, DIM), -1e4, device="cuda")
    final = torch.full_like(state, math.nan)
    workspace = torch.zeros(ops.get_workspace_size(size, HEADS, 1), dtype=torch.uint8,
                            device="cuda")  # fmt: skip
    ends = torch.tensor([0, size], dtype=torch.int32, device="cuda")
    ops.fwd(ones, key, ones, torch.zeros_like(ones), beta, DIM**-0.5, torch.empty_like(ones),
            workspace, torch.zeros(HEADS, device="cuda"), shut, -5.0, state, final, ends, None,
            None)  # fmt: skip
    torch.cuda.synchronize()
    return final


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
