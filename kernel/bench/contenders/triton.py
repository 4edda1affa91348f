"""vLLM's Triton kernels, run from their own source files without vLLM.

`triton_decode_attention` reads the top-k as a block table of pages of one row. vLLM's rule gives
four splits for 2,048 keys; what more would do in decode, and fewer in prefill, are variants, as is
the sparse kernel that vLLM has for another vendor's GPUs.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.bench.cases import HEAD_DIM, SM_SCALE, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

DECODE, SPARSE = "triton_decode_attention.py", "xpu_mla_sparse.py"
VLLM_SPLITS = 4


def contender(parts: Path) -> Contender:
    """Raises OSError where a source file is missing, ImportError without Triton."""
    decode, sparse = _load(parts / DECODE), _load(parts / SPARSE)

    def plans(case: Case) -> Iterator[Plan]:
        if case.phase == "decode":
            yield Plan(_decode(decode, VLLM_SPLITS))
            if case.size <= 8 and case.dtype == "bf16":
                yield Plan(_decode(decode, 16), "splits16")
            return
        if case.heads == 32:  # each variant compiles for seconds; 16 and 64 bracket it
            return
        yield Plan(_decode(decode, 1))
        if case.dtype == "bf16" and case.size == 4096:
            yield Plan(_sparse(sparse), "xpu_mla_sparse")

    return Contender("triton", plans)


def _load(path: Path) -> Any:  # noqa: ANN401 - a module of vLLM's
    """A file of vLLM with the two names that it imports from vLLM."""
    import triton
    import triton.language as tl

    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected vLLM's kernel, found no file")
    platforms, utils = types.ModuleType("vllm.platforms"), types.ModuleType("vllm.triton_utils")
    platforms.__dict__["current_platform"] = types.SimpleNamespace(
        is_rocm=lambda: False, is_xpu=lambda: False, is_cuda=lambda: True
    )
    utils.__dict__.update(tl=tl, triton=triton, LOG2E=1.4426950408889634,
                          LOGE2=0.6931471805599453)  # fmt: skip
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules |= {"vllm.platforms": platforms, "vllm.triton_utils": utils}
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks a function's source up by its module
    spec.loader.exec_module(module)
    return module


def _decode(module: Any, splits: int) -> Callable[[Sequence[Set]], Call]:  # noqa: ANN401
    def prepare(sets: Sequence[Set]) -> Call:
        import torch

        tokens, heads, _ = sets[0].q.shape
        width = sets[0].indices.shape[1]
        out = torch.empty_like(sets[0].q)
        lse = torch.empty(tokens, heads, device="cuda")
        partial = torch.empty(tokens, heads, splits, HEAD_DIM + 1, device="cuda")
        lengths = torch.full((tokens,), width, dtype=torch.int32, device="cuda")
        one = torch.ones(1, device="cuda")

        def call(i: int) -> Tensor:
            rows = sets[i].kv.view(-1, 1, 1, HEAD_DIM)
            module.decode_attention_fwd(
                sets[i].q, rows, rows, out, lse, sets[i].indices, lengths, partial, splits,
                SM_SCALE, page_size=1, k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip
            return out

        return call

    return prepare


def _sparse(module: Any) -> Callable[[Sequence[Set]], Call]:  # noqa: ANN401
    def prepare(sets: Sequence[Set]) -> Call:
        def call(i: int) -> Tensor:
            one = sets[i]
            result = module.triton_bf16_mla_sparse_interface(
                one.q, one.kv.view(-1, 1, HEAD_DIM), one.indices[:, None, :], SM_SCALE,
                block_dpe=0,
            )  # fmt: skip
            out: Tensor = result[0]
            return out

        return call

    return prepare
