"""Registers an attention backend as a plug-in does, by slot and by a name of its own."""

from __future__ import annotations

import re

from imagebuild.deep.base import About, ClaimError, require, tree

ABOUT = About(
    claim="a plug-in can take over a slot; a name of its own is found from 0.32 on",
    imports=("vllm.v1.attention.backends.registry",),
)
_NAME = "GLM53_PROBE"
_CLASS = "glm53_probe.Backend"


def probe() -> str:
    """Overrides the SM120 slot and CUSTOM, then registers a string; undoes all of it."""
    from vllm.v1.attention.backends import registry

    slots = registry.AttentionBackendEnum
    for slot in (slots.FLASHINFER_MLA_SPARSE_SM120, slots.CUSTOM):
        registry.register_backend(slot, _CLASS)
        try:
            require(slot.get_path() == _CLASS, f"{slot.name} still leads to {slot.get_path()}")
        finally:
            slot.clear_override()
    require(_CLASS not in slots.FLASHINFER_MLA_SPARSE_SM120.get_path(), "the override stays")
    is_found = _is_found()
    require(is_found == (_release() >= (0, 32)),
            f"a string name is {'found' if is_found else 'not found'} in "
            f"{'.'.join(map(str, _release()))}")  # fmt: skip
    named = "found" if is_found else "stored and never found, so take a slot"
    return f"FLASHINFER_MLA_SPARSE_SM120 and CUSTOM can be overridden; a string name is {named}"


def _is_found() -> bool:
    from vllm.v1.attention.backends import registry

    registry.register_backend(_NAME, _CLASS)
    try:
        return bool(registry.AttentionBackendEnum[_NAME].get_path() == _CLASS)
    except ValueError:
        return False


def _release() -> tuple[int, int]:
    """Major and minor version as the tree writes them."""
    text = (tree() / "vllm" / "_version.py").read_text("utf-8")
    found = re.search(r"^__version__ = .*'(\d+)\.(\d+)", text, flags=re.MULTILINE)
    if found is None:
        raise ClaimError("vllm/_version.py names no version")
    return int(found[1]), int(found[2])
