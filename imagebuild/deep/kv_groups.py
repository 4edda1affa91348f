"""Runs vLLM's own KV grouping and placement for GLM-5.3 at TP 4, alone and with a DFlash2 drafter.

The tree must be first on `sys.path`, patched where the release needs it. It imports vLLM and
torch; it allocates no cache.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from imagebuild.deep.base import About

ABOUT = About(
    claim="a DFlash2 drafter's windows get a KV group of their own beside GLM-5.3",
    patches=("vllm_glm53_dflash2_kv_groups",),
    imports=("vllm.v1.core.kv_cache_utils", "vllm.v1.attention.backends.mla.indexer"),
)
# Tokens in a block: a multiple of 256 whose fp8 MLA page holds a KDA state at TP 4.
_BLOCK = 2304
_MLA_PAGE = _BLOCK * 512
_INDEX_PAGE = _BLOCK // 4 * 132
# Two bf16 KV heads of 128, keys and values.
_DRAFT_ROW = 2 * 2 * 128 * 2
_LAYERS, _DRAFTS, _WINDOW = 45, 5, 2048
_MLA_LAYERS = 11
_MODEL_LEN, _IN_FLIGHT = 262_144, 8192
_KNOB = "VLLM_GLM5NEXT_DRAFT_BLOCK_SIZE"


def probe() -> str:
    """Groups, placement and block arithmetic; returns what was seen in one line.

    Raises:
        RuntimeError: with the sentence that says what is wrong.
    """
    planner = _planner()
    before = os.environ.pop(_KNOB, None)
    try:
        alone = _plan(planner, drafts=0)
        served = _plan(planner, drafts=_DRAFTS)
        _check_groups(alone, served)
        is_shared = not hasattr(planner, "_get_kv_cache_groups_glm5_next")
        seen = [f"{len(served.groups)} groups, the last with the drafter's {_DRAFTS} windows"]
        seen.append(_check_bytes(alone, served, _BLOCK, is_shared))
        if not is_shared:
            os.environ[_KNOB] = "576"
            seen.append(_check_bytes(alone, _plan(planner, drafts=_DRAFTS), 576, is_shared))
    finally:
        os.environ.pop(_KNOB, None)
        if before is not None:
            os.environ[_KNOB] = before
    return "; ".join(seen)


def _planner() -> Any:  # noqa: ANN401 - a module of vLLM
    """The module that groups layers: 0.33 moved it."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def _specs(drafts: int) -> dict[str, Any]:
    """The KV spec of each layer, as the model and the drafter declare them at TP 4."""
    kv = importlib.import_module("vllm.v1.kv_cache_interface")
    torch = importlib.import_module("torch")
    specs: dict[str, Any] = {}
    for index in range(_LAYERS):
        name = f"model.layers.{index}"
        if index % 4 != 3:
            specs[f"{name}.kda"] = kv.MambaSpec(
                block_size=_BLOCK, shapes=((16, 128, 128), (3, 6144)),
                dtypes=(torch.float32, torch.bfloat16), mamba_cache_mode="align",
                num_speculative_blocks=7,
            )  # fmt: skip
            continue
        mla = {"block_size": _BLOCK, "num_kv_heads": 1, "dtype": torch.uint8}
        specs[f"{name}.mla"] = kv.MLAAttentionSpec(
            **mla, head_size=512, cache_dtype_str="fp8", block_stride_alignment=512
        )
        specs[f"{name}.indexer"] = kv.MLAAttentionSpec(**mla, head_size=132, tokens_per_state=4)
        ring = {"block_size": 16, "num_kv_heads": 2, "head_size": 128, "head_size_v": 0}
        if hasattr(kv, "KpoolTailSpec"):
            tail = kv.KpoolTailSpec(**ring, dtype=torch.bfloat16, sliding_window=16)
        else:
            tail = kv.CircularBufferSpec(**ring, dtype=torch.bfloat16, dcp_sharded=False)
        specs[f"{name}.tail"] = tail
    for index in range(drafts):
        specs[f"draft.layers.{index}"] = kv.SlidingWindowSpec(
            block_size=_BLOCK, num_kv_heads=2, head_size=128, dtype=torch.bfloat16,
            sliding_window=_WINDOW,
        )  # fmt: skip
    return specs


def _config() -> Any:  # noqa: ANN401 - stands for vLLM's own
    layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    tail = importlib.import_module("vllm.v1.attention.backends.mla.indexer").KpoolTailBackend
    (name,) = (layout.name for layout in tail.supported_kv_cache_layouts())
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layouts[name], num_gpu_blocks_override=None,
            mamba_cache_mode="align", prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=4
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=_MODEL_LEN, supports_kv_cache_grouping=False,
            hf_config=SimpleNamespace(model_type="glm5_next"),
        ),
        speculative_config=None, max_in_flight_tokens=_IN_FLIGHT,
    )  # fmt: skip


def _plan(planner: Any, drafts: int) -> SimpleNamespace:  # noqa: ANN401
    config = _config()
    try:
        groups = planner.get_kv_cache_groups(config, _specs(drafts))
    except NotImplementedError as error:
        raise RuntimeError(f"vLLM cannot group {drafts} draft layers: {error}") from error
    # Seven blocks are enough to see regions collide.
    pool_bytes = planner._pool_bytes_per_block
    size = pool_bytes(groups) if _takes(pool_bytes, 1) else pool_bytes(config, groups)
    placed = planner.get_kv_cache_config_from_groups(config, groups, 7 * size)
    return SimpleNamespace(config=config, groups=groups, size=size, placed=placed)


def _takes(function: Any, count: int) -> bool:  # noqa: ANN401
    return bool(function.__code__.co_argcount == count)


def _check_groups(alone: Any, served: Any) -> None:  # noqa: ANN401
    names = [list(group.layer_names) for group in served.groups]
    target = [list(group.layer_names) for group in alone.groups]
    if names[:-1] != target or names[-1] != [f"draft.layers.{i}" for i in range(_DRAFTS)]:
        raise RuntimeError(
            f"expected the target's {len(target)} groups and then one of the drafter's layers, "
            f"found groups of {[group[:2] for group in names]}"
        )
    for plan in (alone, served):
        if plan.placed.num_blocks != 7:
            raise RuntimeError(f"room for 7 blocks gave {plan.placed.num_blocks}")
        _check_regions(plan.placed)


def _regions(placed: Any) -> Iterator[tuple[int, int, int, str]]:  # noqa: ANN401
    """(first byte, byte after the last, block, layer) of each page of the pool."""
    pages = {}
    for group in placed.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = inner.get(name, group.kv_cache_spec)
            pages[name] = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
    for tensor in placed.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            for block in range(placed.num_blocks):
                start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                if start + pages[name] > tensor.size:
                    raise RuntimeError(f"block {block} of {name} ends behind the pool")
                yield start, start + pages[name], block, name


def _check_regions(placed: Any) -> None:  # noqa: ANN401
    """Only pages of one block may share bytes, and only those of different groups."""
    group_of = {
        name: number
        for number, group in enumerate(placed.kv_cache_groups)
        for name in group.layer_names
    }
    pages = list(_regions(placed))
    if {name for *_, name in pages} != set(group_of):
        raise RuntimeError("some layers have no place in the pool")
    for one, other in itertools.combinations(sorted(pages), 2):
        if other[0] >= one[1]:
            continue
        if one[2] != other[2] or group_of[one[3]] == group_of[other[3]]:
            raise RuntimeError(
                f"block {one[2]} of {one[3]} and block {other[2]} of {other[3]} share bytes"
            )


def _check_bytes(alone: Any, served: Any, draft_block: int, is_shared: bool) -> str:  # noqa: ANN401
    """Compares with arithmetic by hand; returns a clause."""
    target = _MLA_LAYERS * (_MLA_PAGE + _INDEX_PAGE)
    draft = _DRAFTS * draft_block * _DRAFT_ROW
    if is_shared:
        # Blocks outermost: the widest group decides, in whole MLA rows of 512 bytes.
        target = wanted = -(-max(target, draft) // 512) * 512
    else:
        wanted = target + draft
    if (alone.size, served.size) != (target, wanted):
        raise RuntimeError(
            f"expected blocks of {target:,} bytes, {wanted:,} with the drafter; found "
            f"{alone.size:,} and {served.size:,}"
        )
    if is_shared:
        return f"a block keeps its {wanted:,} bytes"
    held = _WINDOW - 1 + _IN_FLIGHT
    # Attention, two states and seven drafts in each of four KDA groups, one tail; the window.
    blocks = -(-_MODEL_LEN // _BLOCK) + 4 * 9 + 1
    more = -(-held // draft_block) + 1
    planner = _planner()
    found = [planner._max_memory_usage_bytes_from_groups(plan.config, plan.groups)
             for plan in (alone, served)]  # fmt: skip
    if found != [blocks * target, (blocks + more) * wanted]:
        raise RuntimeError(
            f"expected a request to take {blocks * target:,} bytes, {(blocks + more) * wanted:,} "
            f"with the drafter; found {found}"
        )
    last = served.groups[-1].kv_cache_spec
    if (last.block_size, last.prefix_cacheable) != (draft_block, False):
        raise RuntimeError(
            f"the draft group has blocks of {last.block_size} tokens, prefix caching "
            f"{last.prefix_cacheable}; expected {draft_block} and no prefix caching"
        )
    return f"drafts in blocks of {draft_block}: {wanted:,} bytes a block, {more} more a request"
