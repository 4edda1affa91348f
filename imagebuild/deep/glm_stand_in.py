"""Stand-ins for what the GLM-5.3 checkpoint ships and cannot be had offline: template, tokenizer.

They follow the grammar that vLLM's parsers accept and the lines by which the checkpoint's template
is known; texts, vocabulary and ids are made up. Nothing here is served.
"""

from __future__ import annotations

import importlib
from typing import Any

# What opens the assistant's turn, by where it was seen.
OPENINGS = {
    "own": "    <|assistant|>{{- '<think>' -}}\n",
    "switched": (
        "    <|assistant|>{{- '<think>' if enable_thinking is not defined or enable_thinking "
        "else '<think></think>' -}}\n"
    ),
    "glm-5.2": (
        "    <|assistant|>{{- '<think></think>' if (enable_thinking is defined and "
        "not enable_thinking) else '<think>' -}}\n"
    ),
    "branches": (
        "    <|assistant|>\n"
        "    {%- if thinking is defined and not thinking -%}\n"
        "        {{- '<think></think>' -}}\n"
        "    {%- else -%}\n"
        "        {{- '<think>' -}}\n"
        "    {%- endif -%}\n"
    ),
}

_HEAD = """\
[gMASK]<sop>
{%- set effective_reasoning_effort = reasoning_effort if reasoning_effort is defined and \
reasoning_effort in ['low', 'high'] else 'max' -%}
<|system|>Reasoning Effort: {{ effective_reasoning_effort | capitalize }}
{%- if tools -%}
<|system|>Tools:
{% for tool in tools %}{{ (tool.function or tool) | tojson }}
{% endfor -%}
A call: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}\
</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else -%}
<|{{ m.role }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
"""

_CONTROL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
_MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)


def template(opening: str = "own") -> str:
    """A template of GLM-5.3's shape that opens the assistant's turn as `OPENINGS` has it."""
    return _HEAD + OPENINGS[opening] + "{%- endif -%}\n"


def tokenizer(chat_template: str, *, special_markup: bool) -> Any:  # noqa: ANN401 - transformers'
    """A fast tokenizer with one token a byte, and one for each of GLM's tokens.

    Args:
        chat_template: what the checkpoint ships with it.
        special_markup: whether the think and call tags count as special tokens, which decoding
            leaves out unless it is told not to.
    """
    library: Any = importlib.import_module("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    letters = {letter: i for i, letter in enumerate(sorted(byte_level.alphabet()))}
    fast = library.Tokenizer(library.models.BPE(vocab=letters, merges=[]))
    fast.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    fast.decoder = library.decoders.ByteLevel()
    fast.add_special_tokens([library.AddedToken(token, special=True) for token in _CONTROL])
    markup = [
        library.AddedToken(token, special=special_markup, normalized=False) for token in _MARKUP
    ]
    (fast.add_special_tokens if special_markup else fast.add_tokens)(markup)
    end, *others = _CONTROL
    transformers: Any = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=end,
        pad_token=end,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[*others, *(_MARKUP if special_markup else ())],
    )
