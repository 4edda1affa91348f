"""The attention backend for vLLM: one class, with two kernels behind it.

Every token, of prefill and decode alike, goes through the sparse kernel over the plain rows of the
paged KV cache: 512 values of bf16 or e4m3 each, never the packed rows of 656 bytes. What differs
between releases of vLLM is in `releases`. Imported when vLLM takes the class out of its slot, so
nothing here may be imported by `register`.
"""

# ruff: noqa: ANN401 - configurations and layers are of the release, which type checkers do not see

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)

from glm53_sparse_mla import releases

WIDTH = 512
MAX_HEADS = 64
# vLLM's kernel that turns token positions into rows takes columns by this many.
_COLUMNS = 128
# Features of an attention layer that the kernels do not have, as MLAAttention names them.
_REFUSED = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")


@dataclass(kw_only=True)
class Metadata(SparseMLACommonMetadata):
    """What a step needs beside vLLM's own: device memory for the partial sums of its launches."""

    workspace: torch.Tensor | None = None


class MetadataBuilder(SparseMLACommonMetadataBuilder[Metadata]):
    """vLLM's builder, and the workspace of the layers that it builds for.

    They run one after the other, so one workspace serves them all. It is made once: captured CUDA
    graphs keep its address.
    """

    metadata_cls = Metadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Drafts to verify are a decode, of one token and the drafts.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        if not isinstance(impl, SparseImpl):
            raise TypeError(f"{layer_names[0]}: expected an implementation of glm53_sparse_mla, "
                            f"found {type(impl).__name__}")  # fmt: skip
        self._workspace = impl.workspace(
            vllm_config.scheduler_config.max_num_batched_tokens, device
        )

    def build(self, *arguments: Any, **named: Any) -> Metadata:
        """What vLLM builds of a batch, with the workspace."""
        metadata: Metadata = super().build(*arguments, **named)
        metadata.workspace = self._workspace
        return metadata


class SparseImpl(SparseMLACommonImpl[Metadata]):
    """Sparse MLA of one layer; a subclass says which kernel runs it."""

    # Dense attention over short prompts would need another kernel, in another memory layout.
    supports_dense_mha_prefill = False
    supports_pcp = False
    supports_dcp = False

    def __init__(self, **named: Any) -> None:
        refused = [name for name in _REFUSED if named.get(name)]
        if refused or named.get("attn_type", "decoder") != "decoder":
            raise NotImplementedError(
                f"sparse MLA: expected a plain decoder layer, found {', '.join(refused)} "
                f"{named.get('attn_type', '')}".rstrip()
            )
        super().__init__(**named)
        config = get_current_vllm_config()
        if config.attention_config.hisparse_config is not None:
            raise NotImplementedError("sparse MLA: HiSparse keeps KV on the host, which is not "
                                      "supported; drop its configuration")  # fmt: skip
        if self.num_heads > MAX_HEADS:
            raise ValueError(f"sparse MLA: expected at most {MAX_HEADS} heads a rank, found "
                             f"{self.num_heads}; raise --tensor-parallel-size")  # fmt: skip
        self.supports_quant_query_input = False
        # How many columns of the indices are in use: the chosen ones, and the tail of a pool.
        text = config.model_config.hf_text_config
        pool = max(int(getattr(text, "index_kpool", 1) or 1), 1)
        self.used_columns = int(text.index_topk) + pool - 1
        buffer = self.topk_indices_buffer
        columns = 0 if buffer is None else buffer.shape[1]
        if columns < self.used_columns or columns % _COLUMNS:
            raise ValueError(
                f"sparse MLA: expected a buffer of at least {self.used_columns} indices a token, a "
                f"multiple of {_COLUMNS}, found {columns}"
            )
        self.splits = 1 if envs.VLLM_BATCH_INVARIANT else 0

    def workspace(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Device memory that is enough for launches of up to so many tokens."""
        raise NotImplementedError

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        out: torch.Tensor,
        *,
        workspace: torch.Tensor,
        kv_scale: float,
    ) -> None:
        """Launches the kernel; tensors as in `glm53_sparse_mla.ops`."""
        raise NotImplementedError

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Metadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of all tokens of a batch; there is no rope part, so that of `q` is empty."""
        query = q[0] if isinstance(q, tuple) else q
        tokens = query.shape[0]
        buffer, workspace = self.topk_indices_buffer, attn_metadata.workspace
        if buffer is None or workspace is None:
            raise RuntimeError(
                "sparse MLA: expected a buffer of indices and a workspace, found none"
            )
        positions = buffer[:tokens]
        cache = kv_c_and_k_pe_cache
        if cache.dtype == torch.uint8:
            cache = cache.view(torch.float8_e4m3fn)
        rows, rows_per_block = flat_kv_row_view(cache, attn_metadata.block_size)
        # All columns: the last ones hold the tail of a pool, the newest tokens of all.
        indices = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            positions,
            BLOCK_SIZE=attn_metadata.block_size,
            BLOCK_STRIDE_ROWS=rows_per_block,
            NUM_TOPK_TOKENS=positions.shape[1],
        )
        out = query.new_empty((tokens, self.num_heads, WIDTH))
        is_plain = cache.dtype == torch.bfloat16
        kv_scale = 1.0 if is_plain else float(layer._k_scale_float or 1.0)
        self.attend(query, rows, indices, out, workspace=workspace, kv_scale=kv_scale)
        return out, None


class CudaImpl(SparseImpl):
    """The CUDA kernel of the library."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        from glm53_sparse_mla import ops

        # Before the weights are loaded: a GPU without code for it must not be found out after that.
        ops.library().require()

    def workspace(self, tokens: int, device: torch.device) -> torch.Tensor:
        from glm53_sparse_mla import ops

        return ops.workspace(tokens, self.num_heads, self.splits, device)

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        out: torch.Tensor,
        *,
        workspace: torch.Tensor,
        kv_scale: float,
    ) -> None:
        torch.ops.glm53_sparse_mla.forward_out(
            q, kv, indices, self.scale, kv_scale, self.used_columns, self.splits,
            out, None, workspace,
        )  # fmt: skip


class TritonImpl(SparseImpl):
    """The portable kernel, whose programs share nothing."""

    def workspace(self, tokens: int, device: torch.device) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=device)

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        out: torch.Tensor,
        *,
        workspace: torch.Tensor,
        kv_scale: float,
    ) -> None:
        from glm53_sparse_mla import triton_kernel

        triton_kernel.forward(q, kv, indices, out, sm_scale=self.scale, kv_scale=kv_scale)


class SparseBackend(AttentionBackend):
    """What vLLM's selector asks; a subclass names route, cards and implementation.

    The name is our own: by that of the slot vLLM would pack the rows, and tune FlashInfer for them.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]
    # By it the patched vLLM knows whose class it chose: see glm_mla_route.
    glm_mla_route: ClassVar[str] = ""

    @staticmethod
    def get_name() -> str:
        return "GLM53_SPARSE_MLA"

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [WIDTH]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        return releases.layouts()

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return releases.whole_rows(spec)

    @classmethod
    def supports_combination(cls, *_arguments: Any, **_named: Any) -> str | None:
        """Why this model cannot be served, None where it can."""
        config = get_current_vllm_config().model_config
        if config is None:
            return None
        # Multimodal configurations keep these one level down; this is vLLM's way to either.
        text = config.hf_text_config
        if getattr(text, "index_topk", None) is None:
            return "sparse MLA needs a model with a sparse indexer (index_topk)"
        found = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
        if found != (WIDTH, 0):
            return (f"sparse MLA needs kv_lora_rank={WIDTH} and qk_rope_head_dim=0, found "
                    f"{found[0]} and {found[1]}")  # fmt: skip
        return None


class CudaBackend(SparseBackend):
    """Route `cuda`. Beside capability 12 it takes 9, which the library has code for, for tests."""

    glm_mla_route = "cuda"

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return CudaImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return int(capability.major) in (9, 12)


class TritonBackend(SparseBackend):
    """Route `triton`: every card whose tensor cores take bf16."""

    glm_mla_route = "triton"

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return TritonImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return int(capability.major) >= 8
