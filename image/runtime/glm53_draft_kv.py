"""KV groups of a drafter's plain attention layers beside the groups of GLM-5.3.

Called by the patched `vllm/v1/core/kv_cache_utils.py` of vLLM 0.31 only. It knows nothing of the
target's own groups but their block size, and acts on no model that has no such drafter.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)

BLOCK_SIZE = "VLLM_GLM5NEXT_DRAFT_BLOCK_SIZE"
# The largest block that FlashInfer's kernels take on capability 12; others take multiples of 16.
_UNIT = 64


@dataclass(frozen=True, kw_only=True)
class DraftSlidingWindowSpec(SlidingWindowSpec):
    """A drafter's sliding window, kept out of prefix caching.

    The target decides what is a hit. A window of other blocks beside its groups would shorten
    hits to what both have; so after a hit the drafter sees old rows for up to one window, which
    lowers acceptance for a while and never changes the output.
    """

    @property
    def prefix_cacheable(self) -> bool:
        """No hits are looked up, and no blocks are kept, for this group."""
        return False


def has_draft(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Whether any layer has plain attention; GLM-5.3's own layers never do."""
    return any(_is_draft(spec) for spec in specs.values())


def grouped(
    build_target: Callable[[Any, dict[str, KVCacheSpec]], list[KVCacheGroupSpec] | None],
    vllm_config: Any,  # noqa: ANN401 - vLLM's own
    specs: Mapping[str, KVCacheSpec],
) -> list[KVCacheGroupSpec] | None:
    """The target's groups as if it were alone, then those of the drafter.

    Returns:
        None when the target is no GLM-5.3. The draft groups come last, so that every group of
        the target keeps its number.

    Raises:
        ValueError: the block size that is asked for cannot be used, or a layer cannot be carried.
    """
    target = build_target(vllm_config, {n: s for n, s in specs.items() if not _is_draft(s)})
    if target is None:
        return None
    block = target[0].kv_cache_spec.block_size  # its attention group is the first
    alike: defaultdict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        if _is_draft(spec):
            alike[_carried(name, spec, block)].append(name)
    return [*target, *(KVCacheGroupSpec(names, spec) for spec, names in alike.items())]


def block_size(target_block: int, environ: Mapping[str, str] | None = None) -> int:
    """Tokens in a block of a sliding draft layer: the target's, unless the knob says less.

    Raises:
        ValueError: the knob is no positive multiple of 64 that divides the target's block.
    """
    setting = (os.environ if environ is None else environ).get(BLOCK_SIZE, "").strip()
    if not setting:
        return target_block
    size = int(setting) if setting.isascii() and setting.isdigit() else 0
    if size <= 0 or size % _UNIT or target_block % size:
        raise ValueError(
            f"{BLOCK_SIZE}={setting!r}: expected a positive multiple of {_UNIT} that divides the "
            f"target's block of {target_block} tokens"
        )
    return size


def without_draft(groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    """The target's groups."""
    return [group for group in groups if not _is_draft(group.kv_cache_spec)]


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """What the draft layers add to one block of the pool, in bytes: their regions share nothing."""
    return sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes
               for group in _draft(groups))  # fmt: skip


def blocks_per_request(vllm_config: Any, groups: Sequence[KVCacheGroupSpec]) -> int:  # noqa: ANN401
    """Blocks of the pool that one request of the maximum length takes for its draft groups."""
    return sum(
        -(-group.kv_cache_spec.max_memory_usage_bytes(vllm_config)
          // group.kv_cache_spec.page_size_bytes)
        for group in _draft(groups)
    )  # fmt: skip


def place(
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int,
    offset: int,
    add_tensor: Callable[[str, KVCacheSpec, int], None],
) -> None:
    """Gives each draft layer a region of its own, one behind the other.

    Args:
        groups: all groups of the worker.
        num_blocks: blocks in the pool.
        offset: bytes that the target's regions take.
        add_tensor: records (layer, spec, offset in bytes).
    """
    for group in _draft(groups):
        for name in group.layer_names:
            add_tensor(name, group.kv_cache_spec, offset)
            offset += group.kv_cache_spec.page_size_bytes * num_blocks


def _is_draft(spec: KVCacheSpec) -> bool:
    # Exact types: MLA and the k-pool tail derive from these two.
    return type(spec) in (SlidingWindowSpec, FullAttentionSpec, DraftSlidingWindowSpec)


def _draft(groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    # A pipeline stage without draft layers has the groups, but no layers in them.
    return [group for group in groups if _is_draft(group.kv_cache_spec) and group.layer_names]


def _carried(name: str, spec: Any, target_block: int) -> KVCacheSpec:  # noqa: ANN401
    """The spec under which a draft layer is allocated."""
    if spec.page_size_padded is not None:
        raise ValueError(
            f"{name}: its KV page is padded to {spec.page_size_padded} bytes; draft layers beside "
            "GLM-5.3 need pages of their natural size"
        )
    if isinstance(spec, SlidingWindowSpec):
        return replace_as(spec, DraftSlidingWindowSpec, block_size=block_size(target_block))
    if target_block % spec.block_size:
        raise ValueError(
            f"{name}: the target's block of {target_block} tokens is no multiple of its block of "
            f"{spec.block_size}"
        )
    return spec.copy_with_new_block_size(target_block)
