"""Splits a reply with vLLM's own GLM parser, whatever a request says about thinking."""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.deep.base import About, require

ABOUT = About(
    claim="reasoning never reaches the content, with a template that mentions the switch",
    patches=("vllm_glm53_reasoning_always_parsed",),
    imports=("vllm.parser.glm47_moe",),
)
# All that upstream's check looks for, and the switch that our template has and upstream's lacks.
_TEMPLATE = (
    "[gMASK]<sop><|system|>Reasoning Effort: {{ 'Low' if enable_thinking is false else 'Max' }}"
    "<tool_call><arg_key><arg_value><|assistant|><think>"
)
_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>",
    "<|endoftext|>",
)  # fmt: skip
_REPLY, _REASONING, _CONTENT = "Two and two.</think>Four.", "Two and two.", "Four."
_SWITCHES: tuple[bool | None, ...] = (None, True, False)


def probe() -> str:
    """Splits one reply under all nine settings of both switches."""
    wrong = {}
    for thinking in _SWITCHES:
        for enable in _SWITCHES:
            found = _split(thinking, enable)
            if found != (_REASONING, _CONTENT):
                wrong[f"thinking={thinking} enable_thinking={enable}"] = found
    first = next(iter(wrong.items()), None)
    require(first is None, f"{len(wrong)} of 9 settings lose the split, such as {first}")
    return "reasoning and content are split under all 9 settings of thinking and enable_thinking"


def _split(thinking: bool | None, enable: bool | None) -> tuple[str | None, str | None]:
    """Reasoning and content of the reply, as the server would return them."""
    from vllm.parser.glm47_moe import Glm47MoeParser

    given = {"thinking": thinking, "enable_thinking": enable}
    switches = {name: value for name, value in given.items() if value is not None}
    parser = Glm47MoeParser(_Tokenizer(), chat_template_kwargs=switches)
    request = SimpleNamespace(tools=None, tool_choice="none", include_reasoning=True)
    reasoning, content = parser.extract_reasoning(_REPLY, request)
    return reasoning, content


class _Tokenizer:
    """The vocabulary of special tokens that the parser asks for; it encodes nothing."""

    chat_template = _TEMPLATE
    all_special_tokens = _TOKENS

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(_TOKENS, start=1000)}
