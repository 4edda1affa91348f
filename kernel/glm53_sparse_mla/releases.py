"""What differs between the vLLM releases that the backend is for; nothing else asks for a version.

Standard library only at import: the plug-in loader swallows what an import raises.
"""

from __future__ import annotations

import re
from typing import Any

# Each was read and is tested; a release that nobody looked at may call a backend in another way.
SUPPORTED = ((0, 31), (0, 32), (0, 33))
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def check(version: str) -> None:
    """Makes sure that the backend is for this vLLM.

    Raises:
        RuntimeError: it is not, or the version cannot be read.
    """
    found = _NUMBERS.match(version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise RuntimeError(f"expected vLLM {known}, found {version}")


def layouts() -> tuple[Any, ...] | None:
    """Layouts of the KV cache that the backend can read, None for any.

    vLLM 0.31 lays the model's caches out layer by layer and knows no alignment of blocks; from
    0.32 on they share blocks, and `whole_rows` keeps those apart by whole rows.
    """
    from vllm.v1.attention.backends.mla import sparse_utils

    if hasattr(sparse_utils, "align_blocks_to_rows"):
        return None
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.LBHNC,)


def whole_rows(spec: Any) -> Any:  # noqa: ANN401 - an AttentionSpec of the release
    """A KV cache's spec with blocks that are whole rows apart, where the release can say so."""
    from vllm.v1.attention.backends.mla import sparse_utils

    align = getattr(sparse_utils, "align_blocks_to_rows", None)
    return align(spec) if align else spec
