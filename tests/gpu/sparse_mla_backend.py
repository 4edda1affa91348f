"""Runs our attention backend inside a real vLLM on a GPU, without a model, against float64.

A user with a card starts it with the image's Python; so does a test, to rehearse it without one:

    python3 tests/gpu/sparse_mla_backend.py                  # the vLLM that is installed
    python3 tests/gpu/sparse_mla_backend.py --site TREE --stubs --library FILE

Of vLLM it takes the class hierarchy as it is: the metadata builder, the conversion of token
positions into rows, and the forward call. The batches mix verification of drafts, decode, chunked
and short prefills; pages lie scattered and with gaps in a cache whose other rows are NaN; and a
uniform decode batch is captured into a CUDA graph and replayed with other inputs. `--rehearse` puts
plain torch in place of what needs a GPU: Triton, the library and the graph. The last line is JSON.
"""

# ruff: noqa: N803 - a stand-in has the names of what it stands for

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BLOCK, TOPK, POOL = 512, 64, 2048, 4
COLUMNS = 2176
MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH, BLOCKS = 512, 32, 8192, 640
LAYER = "model.layers.3.self_attn.attn"
# kernel.md: bf16 outputs alone differ from float64 by 1.65e-3 (norm) of them.
MAX_NORM, MAX_RELATIVE, MIN_COSINE = 2.0e-3, 4.1e-3, 0.999998
# (tokens in this step, tokens so far with these): drafts, decodes, a chunk, a short prompt.
MIXED = ((4, 6000), (1, 1), (1, 2048), (1, 2051), (4, 3000), (37, 5037), (9, 9), (70, 2100))
UNIFORM = tuple((4, length) for length in (4, 700, 2048, 2051, 4096, 5001, 6003, 8000))
# The same kinds of requests in a smaller cache, for a rehearsal.
QUICK_MIXED = ((4, 2600), (1, 1), (1, 2051), (21, 2537), (9, 9))
QUICK_UNIFORM = tuple((4, length) for length in (4, 2049, 2600))
QUICK_BLOCKS = 140


@dataclass
class Batch:
    """Requests and where their tokens lie.

    Attributes:
        requests: (tokens in this step, tokens so far with these) of each.
        blocks: [requests, blocks] of the cache, for each request's blocks in order.
    """

    requests: tuple[tuple[int, int], ...]
    blocks: Any

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.requests)

    def contexts(self) -> Iterator[tuple[int, int]]:
        """For each token its request, and how many tokens it may look at."""
        for number, (new, length) in enumerate(self.requests):
            for step in range(new):
                yield number, length - new + step + 1


class Rig:
    """One implementation and its builder, on a cache of one type."""

    def __init__(self, options: argparse.Namespace, heads: int, kind: str, gap: int) -> None:
        import torch

        self.torch, self.options, self.heads, self.kind = torch, options, heads, kind
        self.device = torch.device("cpu" if options.rehearse else "cuda")
        self.scale = 256**-0.5
        self.random = torch.Generator(device="cpu").manual_seed(heads * 10 + gap)
        self.buffer = torch.full((MAX_TOKENS, COLUMNS), -1, dtype=torch.int32, device=self.device)
        self.layer = SimpleNamespace(_k_scale_float=0.43 if kind == "fp8" else 1.0)
        self.cache, self.values = self._cache(gap)
        self._make()

    def _cache(self, gap: int) -> tuple[Any, Any]:
        """A cache [blocks, block, width], `gap` blocks of others behind each, and its values."""
        torch, blocks = self.torch, QUICK_BLOCKS if self.options.quick else BLOCKS
        stored = torch.float8_e4m3fn if self.kind == "fp8" else torch.bfloat16
        values = torch.randn(blocks, BLOCK, WIDTH, generator=self.random).to(self.device)
        shape = (blocks, 1 + gap, BLOCK, WIDTH)
        whole = torch.full(shape, float("nan"), device=self.device).to(stored)
        whole[:, 0] = values.to(stored)
        exact = whole[:, 0].to(torch.float32).double() * self.layer._k_scale_float
        return whole[:, 0], exact

    def _make(self) -> None:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        backend = backend_of(self.options.route)
        kind = self.torch.uint8 if self.kind == "fp8" else self.torch.bfloat16
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=kind)
        spec = backend.customize_spec(spec)
        config = config_of(self.heads, self.kind)
        use_config(config)
        self.impl = backend.get_impl_cls()(
            num_heads=self.heads, head_size=WIDTH, scale=self.scale, num_kv_heads=1,
            alibi_slopes=None, sliding_window=None, kv_cache_dtype=self.kind,
            logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
            q_lora_rank=1536, kv_lora_rank=WIDTH, qk_nope_head_dim=256, qk_rope_head_dim=0,
            qk_head_dim=256, v_head_dim=256, kv_b_proj=None, indexer=None,
            topk_indices_buffer=self.buffer,
        )  # fmt: skip
        layer = SimpleNamespace(impl=self.impl, prefill_backend=None)
        config.compilation_config.static_forward_context[LAYER] = layer
        self.builder = backend.get_builder_cls()(spec, [LAYER], config, self.device)

    def batch(self, requests: tuple[tuple[int, int], ...]) -> Batch:
        """Requests with blocks drawn from the whole cache, no block twice."""
        drawn = self.torch.randperm(self.cache.shape[0], generator=self.random).to(self.torch.int32)
        table = self.torch.zeros((len(requests), MAX_LENGTH // BLOCK), dtype=self.torch.int32)
        at = 0
        for number, (_, length) in enumerate(requests):
            need = -(-length // BLOCK)
            table[number, :need] = drawn[at : at + need]
            at += need
        return Batch(requests, table.to(self.device))

    def choose(self, batch: Batch) -> None:
        """Writes positions as the indexer does: the chosen ones, then the tail of a pool."""
        torch = self.torch
        self.buffer.fill_(-1)
        for token, (_, context) in enumerate(batch.contexts()):
            tail = context % POOL if context > TOPK else 0
            whole = context - tail
            chosen = torch.randperm(whole, generator=self.random)[:TOPK].to(torch.int32)
            row = torch.full((COLUMNS,), -1, dtype=torch.int32)
            row[: len(chosen)] = chosen
            # The tail stands behind the chosen ones, where a cut to index_topk would lose it.
            row[TOPK : TOPK + tail] = torch.arange(whole, context, dtype=torch.int32)
            self.buffer[token] = row.to(self.device)

    def queries(self, batch: Batch) -> Any:
        """Random, but with a score of about 8 for the newest token, which a cut would lose."""
        q = self.torch.randn(batch.tokens, self.heads, WIDTH, generator=self.random)
        q = q.to(self.device)
        for token, (number, context) in enumerate(batch.contexts()):
            block = batch.blocks[number, (context - 1) // BLOCK].long()
            row = self.values[block, (context - 1) % BLOCK].float()
            q[token] += row * (8.0 / (self.scale * row.square().sum()))
        return q.to(self.torch.bfloat16)

    def common(self, batch: Batch) -> Any:
        """The batch as vLLM's model runner describes it."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch = self.torch
        lengths = torch.tensor([new for new, _ in batch.requests], dtype=torch.int32)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        seen = torch.tensor([length for _, length in batch.requests], dtype=torch.int32)
        made = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts,
            seq_lens=seen.to(self.device), num_reqs=len(batch.requests),
            num_actual_tokens=batch.tokens, max_query_len=int(lengths.max()),
            max_seq_len=int(seen.max()), block_table_tensor=batch.blocks,
            slot_mapping=torch.zeros(batch.tokens, dtype=torch.int64, device=self.device),
            seq_lens_cpu_upper_bound=seen,
            is_prefilling=torch.tensor([new == length or new > POOL
                                        for new, length in batch.requests]),
        )  # fmt: skip
        if self.options.rehearse:
            owner = [number for number, _ in batch.contexts()]
            made._token_to_req_indices_cache = torch.tensor(owner, dtype=torch.int32)
        return made

    def run(self, metadata: Any, q: Any) -> Any:
        """The forward call as MLAAttention makes it: an empty rope part, a cache in its type."""
        empty = q.new_empty((*q.shape[:2], 0))
        out, lse = self.impl.forward_mqa((q, empty), self.cache, metadata, self.layer)
        assert lse is None
        return out

    def expected(self, batch: Batch, q: Any) -> Any:
        """The formula in float64, from positions and block table alone."""
        torch = self.torch
        out = torch.zeros(q.shape, dtype=torch.float64, device=self.device)
        for token, (number, _) in enumerate(batch.contexts()):
            at = self.buffer[token]
            at = at[at >= 0].long()
            block = batch.blocks[number][at // BLOCK].long()
            rows = self.values[block, at % BLOCK]
            weights = torch.softmax(self.scale * q[token].double() @ rows.T, -1)
            out[token] = weights @ rows
        return out


def config_of(heads: int, kind: str) -> Any:
    """As much of a VllmConfig as builder and implementation read."""
    import torch

    # The model's own configuration is nested, and its top level knows none of these.
    text = SimpleNamespace(
        index_topk=TOPK, index_kpool=POOL, q_lora_rank=1536, kv_lora_rank=WIDTH,
        qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text, hf_config=SimpleNamespace(), dtype=torch.bfloat16,
            max_model_len=MAX_LENGTH,
            model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
            get_num_attention_heads=lambda _parallel: heads,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQUESTS
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype=kind),
        attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=POOL - 1, enable_adaptive_verification=False,
            parallel_drafting=False,
        ),
        use_v2_model_runner=True,
    )  # fmt: skip


def use_config(config: Any) -> None:
    """Makes it what get_current_vllm_config answers."""
    from vllm.config import vllm as module

    module._current_vllm_config = config


def backend_of(route: str) -> Any:
    """The class that the plug-in registers for a route."""
    from glm53_sparse_mla.register import BACKENDS
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(BACKENDS[route])


def difference(found: Any, expected: Any) -> dict[str, float]:
    """Norm-relative, maximal relative and cosine; what is not finite counts as all wrong."""
    if not found.isfinite().all():
        return {"norm": 1.0, "relative": 1.0, "cosine": 0.0}
    found = found.double()
    gap = found - expected
    norm = expected.norm()
    return {
        "norm": float(gap.norm() / norm),
        "relative": float(gap.abs().max() / expected.abs().max()),
        "cosine": float((found * expected).sum() / (norm * found.norm())),
    }


def is_good(one: dict[str, float]) -> bool:
    return (
        one["norm"] <= MAX_NORM and one["relative"] <= MAX_RELATIVE and one["cosine"] >= MIN_COSINE
    )


def mixed(rig: Rig) -> dict[str, Any]:
    """Prefill and decode in one batch, twice: right, and the same bits."""
    batch = rig.batch(QUICK_MIXED if rig.options.quick else MIXED)
    rig.choose(batch)
    q = rig.queries(batch)
    metadata = rig.builder.build(0, rig.common(batch))
    first, second = rig.run(metadata, q), rig.run(metadata, q)
    found: dict[str, Any] = {**difference(first, rig.expected(batch, q))}
    # A row of only masked positions, which padding has, gives zeros whatever else runs.
    rig.buffer[1].fill_(-1)
    masked = rig.run(metadata, q)
    found["repeats"] = bool((first == second).all())
    found["masked is zero"] = bool((masked[1] == 0).all())
    found["decodes"], found["prefills"] = int(metadata.num_decodes), int(metadata.num_prefills)
    found["ok"] = is_good(found) and found["repeats"] and found["masked is zero"]
    return found


def captured(rig: Rig) -> dict[str, Any]:
    """Captures a batch of drafts to verify, and replays it with other requests and queries."""
    torch = rig.torch
    uniform = QUICK_UNIFORM if rig.options.quick else UNIFORM
    batch = rig.batch(uniform)
    rig.choose(batch)
    common, q = rig.common(batch), rig.queries(batch)
    metadata = rig.builder.build_for_cudagraph_capture(common)
    if rig.options.rehearse:
        replay: Callable[[], Any] = lambda: rig.run(metadata, q)  # noqa: E731 - a graph's stand-in
    else:
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            rig.run(metadata, q)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = rig.run(metadata, q)

        def replay() -> Any:
            graph.replay()
            return result

    worst: dict[str, Any] = {"norm": 0.0, "relative": 0.0, "cosine": 1.0, "ok": True}
    for turn in range(3):
        most = 2800 if rig.options.quick else 5003
        lengths = tuple((4, max(4, (length * (turn + 3)) % most)) for _, length in uniform)
        other = rig.batch(lengths)
        rig.choose(other)
        batch.blocks.copy_(other.blocks)
        q.copy_(rig.queries(other))
        # A step rebuilds the metadata into the buffers that the graph reads.
        described = rig.common(Batch(lengths, batch.blocks))
        rig.builder.build(0, described)
        one = difference(replay(), rig.expected(Batch(lengths, batch.blocks), q))
        worst["norm"] = max(worst["norm"], one["norm"])
        worst["relative"] = max(worst["relative"], one["relative"])
        worst["cosine"] = min(worst["cosine"], one["cosine"])
        worst["ok"] = worst["ok"] and is_good(one)
    return worst


def rehearse() -> None:
    """Plain torch in place of Triton's conversion and of both kernels."""
    import torch
    from glm53_sparse_mla import backend

    def convert(
        owner: Any,
        table: Any,
        positions: Any,
        *,
        BLOCK_SIZE: int,
        BLOCK_STRIDE_ROWS: int,
        NUM_TOPK_TOKENS: int,
    ) -> Any:
        assert positions.shape[1] == NUM_TOPK_TOKENS
        at = positions.clamp(min=0)
        block = table[owner.long()[:, None], (at // BLOCK_SIZE).long()]
        rows = block * BLOCK_STRIDE_ROWS + at % BLOCK_SIZE
        return torch.where(positions < 0, -1, rows).to(torch.int32)

    def attend(self: Any, q: Any, kv: Any, indices: Any, out: Any, *, workspace: Any,
               kv_scale: float) -> None:  # fmt: skip
        assert workspace.dtype == torch.uint8
        for token in range(q.shape[0]):
            at = indices[token]
            rows = kv[at[at >= 0].long()].to(torch.float32).double() * kv_scale
            weights = torch.softmax(self.scale * q[token].double() @ rows.T, -1)
            out[token] = (weights @ rows if len(rows) else torch.zeros(q.shape[1:])).to(out.dtype)

    backend.triton_convert_req_index_to_global_index = convert
    backend.CudaImpl.attend = backend.TritonImpl.attend = attend
    backend.CudaImpl.__init__ = backend.SparseImpl.__init__
    backend.CudaImpl.workspace = backend.TritonImpl.workspace


def prepare(options: argparse.Namespace) -> str:
    """Puts vLLM and the package on the path and imports them; vLLM's version."""
    if options.site:
        sys.path.insert(0, str(options.site))
    sys.path[:0] = [str(ROOT / "kernel")]
    sys.path.append(str(ROOT))
    if options.library:
        os.environ["GLM53_SPARSE_MLA_LIBRARY"] = str(options.library)
    if options.stubs:
        from imagebuild.smoke import stubs

        stubs.install()
        from vllm import platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        # A platform would ask for extension modules that a tree of Python files does not have.
        platforms._current_platform = UnspecifiedPlatform()
    import vllm.version
    from vllm.model_executor.layers.attention import sparse_mla_attention

    # No process group is made here.
    sparse_mla_attention.get_tensor_model_parallel_world_size = lambda: 1
    if options.rehearse:
        sparse_mla_attention.PIN_MEMORY = False
        rehearse()
    return str(vllm.version.__version__)


def main() -> int:
    """Runs all cases; 0 when every one is right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", type=Path, help="site-packages with vLLM; default: the installed")
    parser.add_argument("--stubs", action="store_true", help="stand-ins for native modules")
    parser.add_argument("--library", type=Path, help="the kernel library; default: the installed")
    parser.add_argument("--route", action="append", choices=["cuda", "triton"])
    parser.add_argument("--heads", type=int, action="append", help="default: 16 and 64")
    parser.add_argument(
        "--quick", action="store_true", help="few requests, and of the caches fp8 with gaps alone"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, with plain torch")
    asked = parser.parse_args()
    start = time.monotonic()
    version = prepare(asked)
    caches = [(kind, gap) for kind in ("bfloat16", "fp8") for gap in (0, 2)]
    caches = caches[-1:] if asked.quick else caches
    cases = []
    for route in asked.route or ["cuda", "triton"]:
        for heads in asked.heads or [16, 64]:
            for kind, gap in caches:
                options = argparse.Namespace(**{**vars(asked), "route": route})
                rig = Rig(options, heads, kind, gap)
                for name, case in (("mixed", mixed), ("captured", captured)):
                    words = f"{route} h{heads} {kind} gap{gap} {name}"
                    cases.append({"case": words, **case(rig)})
                    print(json.dumps(cases[-1]), flush=True)
    is_ok = all(case["ok"] for case in cases)
    print(json.dumps({
        "vllm": version, "torch": sys.modules["torch"].__version__, "ok": is_ok,
        "cases": len(cases), "seconds": round(time.monotonic() - start, 1),
        "worst_norm": max(case["norm"] for case in cases),
        "worst_relative": max(case["relative"] for case in cases),
        "worst_cosine": min(case["cosine"] for case in cases),
    }))  # fmt: skip
    return int(not is_ok)


if __name__ == "__main__":
    sys.exit(main())
