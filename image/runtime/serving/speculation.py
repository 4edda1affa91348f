"""Speculative decoding: from the knobs to vLLM's --speculative-config."""

from __future__ import annotations

from collections.abc import Mapping

from serving.kinds import Value
from serving.knobs import Settings

# A verified step: one block of the drafter is the last token and these.
_DFLASH_TOKENS = 7
# LibertAI runs mtp with 3; GX10, on four GB10, with 4.
_MTP_TOKENS: Mapping[str, int] = {"gb10-2x": 3, "gb10-4x": 4, "rtx6000-4x": 3}
# vLLM's names of what needs the drafter.
_DFLASH = "dflash"


def method_of(s: Settings) -> str:
    """mtp, dflash2, none, or the name of another method that the JSON asks for."""
    config = s["SPECULATIVE_CONFIG"]
    if isinstance(config, dict):
        method = str(config.get("method", "unnamed"))
        return "dflash2" if method == _DFLASH else method
    if s.is_on("COMMERCIAL") and not s.has("SPECULATION"):
        return "mtp"
    return s.text("SPECULATION")


def tokens_of(s: Settings) -> int:
    """Tokens that are guessed in a step; 0 without speculation."""
    config = s["SPECULATIVE_CONFIG"]
    if isinstance(config, dict):
        count = config.get("num_speculative_tokens", 0)
        return count if isinstance(count, int) else 0
    method = method_of(s)
    if method == "none":
        return 0
    default = _DFLASH_TOKENS if method == "dflash2" else _MTP_TOKENS[s.profile.name]
    return s.number("SPECULATIVE_TOKENS") or default


def config_of(s: Settings) -> Value:
    """The value of --speculative-config, or None."""
    if s["SPECULATIVE_CONFIG"] is not None:
        return s["SPECULATIVE_CONFIG"]
    method, tokens = method_of(s), tokens_of(s)
    if method == "none":
        return None
    if method == "dflash2":
        drafter = s.text("DRAFTER_DIR")
        return {"method": _DFLASH, "model": drafter, "num_speculative_tokens": tokens}
    return {"method": method, "num_speculative_tokens": tokens}
