"""Sparse MLA in TileLang, written for this bench: what its compiler makes of the plain algorithm.

One block a token and up to 64 heads; no split over keys, so small batches leave the card idle.
"""

# No postponed annotations: TileLang evaluates those of its programs where they stand.
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kernel.bench.cases import HEAD_DIM, SM_SCALE, TOPK, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

_TILE, _STAGES, _THREADS = 64, 2, 256
_CASES = {"decode bs64 h16 bf16", "decode bs64 h64 bf16", "prefill 4096 h16 bf16",
          "prefill 4096 h64 bf16"}  # fmt: skip


def contender() -> Contender:
    """Raises ImportError without TileLang."""
    import tilelang  # noqa: F401 - asks whether it is there

    def plans(case: Case) -> Iterator[Plan]:
        if case.name in _CASES:  # each compiles for several seconds
            yield Plan(_prepare)

    return Contender("tilelang", plans)


def _prepare(sets: Sequence[Set]) -> Call:
    import torch

    tokens, heads, _ = sets[0].q.shape
    kernel = compile_kernel(tokens, heads, len(sets[0].kv))
    out = torch.empty_like(sets[0].q)

    def call(i: int) -> "Tensor":
        kernel(sets[i].q, sets[i].kv, sets[i].indices, out)
        return out

    return call


def compile_kernel(tokens: int, heads: int, rows: int) -> Any:  # noqa: ANN401 - TileLang's
    """Compiles for one shape; the result takes q, kv, indices and out."""
    import tilelang
    import tilelang.language as T  # noqa: N812 - as every TileLang program calls it

    group = max(16, heads)  # rows of the tensor cores' tiles
    log2e = SM_SCALE * 1.4426950408889634

    @T.prim_func  # type: ignore[untyped-decorator]
    def sparse_mla(  # type: ignore[no-untyped-def]  # noqa: ANN202 - TileLang reads the source
        q: T.Tensor((tokens, heads, HEAD_DIM), "bfloat16"),  # type: ignore[valid-type]
        kv: T.Tensor((rows, HEAD_DIM), "bfloat16"),  # type: ignore[valid-type]
        indices: T.Tensor((tokens, TOPK), "int32"),  # type: ignore[valid-type]
        out: T.Tensor((tokens, heads, HEAD_DIM), "bfloat16"),  # type: ignore[valid-type]
    ):
        with T.Kernel(tokens, threads=_THREADS) as token:
            q_tile = T.alloc_shared((group, HEAD_DIM), "bfloat16")
            rows_tile = T.alloc_shared((_TILE, HEAD_DIM), "bfloat16")
            weights = T.alloc_shared((group, _TILE), "bfloat16")
            scores = T.alloc_fragment((group, _TILE), "float32")
            sums = T.alloc_fragment((group, HEAD_DIM), "float32")
            top = T.alloc_fragment((group,), "float32")
            old = T.alloc_fragment((group,), "float32")
            part = T.alloc_fragment((group,), "float32")
            total = T.alloc_fragment((group,), "float32")
            T.fill(sums, 0)
            T.fill(total, 0)
            T.fill(top, -(2.0**30))
            T.copy(q[token, 0:group, 0:HEAD_DIM], q_tile)
            for tile in T.Pipelined(TOPK // _TILE, num_stages=_STAGES):
                for i, d in T.Parallel(_TILE, HEAD_DIM):
                    rows_tile[i, d] = kv[indices[token, tile * _TILE + i], d]
                T.clear(scores)
                T.gemm(q_tile, rows_tile, scores, transpose_B=True,
                       policy=T.GemmWarpPolicy.FullCol)  # fmt: skip
                T.copy(top, old)
                T.reduce_max(scores, top, dim=1, clear=False)
                for h, i in T.Parallel(group, _TILE):
                    scores[h, i] = T.exp2((scores[h, i] - top[h]) * log2e)
                T.reduce_sum(scores, part, dim=1)
                for h in T.Parallel(group):
                    old[h] = T.exp2((old[h] - top[h]) * log2e)
                    total[h] = total[h] * old[h] + part[h]
                for h, d in T.Parallel(group, HEAD_DIM):
                    sums[h, d] = sums[h, d] * old[h]
                T.copy(scores, weights)
                T.gemm(weights, rows_tile, sums, policy=T.GemmWarpPolicy.FullCol)
            for h, d in T.Parallel(group, HEAD_DIM):
                sums[h, d] = sums[h, d] / total[h]
            T.copy(sums, out[token, 0:group, 0:HEAD_DIM])

    return tilelang.compile(sparse_mla, target="cuda")
