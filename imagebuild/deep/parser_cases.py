"""Replies of the model and what a client must get of them, for the probes of the parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

THOUGHT = "The user wants 5 < 7, naïvely: a \u201cpath\u201d 数.\n"
ANSWER = "Done: 5 < 7 & naïve 数 </b>."


@dataclass(frozen=True)
class Case:
    """One request and what must come of it.

    Attributes:
        name: for messages.
        reply: what the model writes after the prompt, as text.
        stop: the token by which the model ends its turn, whose text is not given out; "" where the
            output ends without one.
        request: fields of the chat request that bear on the contract.
        effort: what the prompt must ask for.
        reasoning, content: what the client must get; outer space does not count.
        calls: (name, arguments) that it must get; a str in place of the arguments must stand in the
            reason of a refusal.
        tools: whether the request offers tools.
        refused: what must stand in the content as refusals, in this order and before `content`.
    """

    name: str
    reply: str
    request: Mapping[str, Any] = field(default_factory=dict)
    effort: str = "Max"
    reasoning: str = THOUGHT
    content: str = ""
    calls: tuple[tuple[str, Mapping[str, Any] | str], ...] = ()
    tools: bool = False
    stop: str = "<|user|>"
    refused: tuple[str, ...] = ()


def _call(name: str, *pairs: tuple[str, str]) -> str:
    written = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs
    )
    return f"<tool_call>{name}{written}</tool_call>"


def _switched(**kwargs: bool | None) -> dict[str, Any]:
    return {"chat_template_kwargs": kwargs}


def thinking_cases() -> list[Case]:
    """The switch in all its spellings: the effort changes, the split of reasoning never does."""
    spelled: list[tuple[str, dict[str, Any], str]] = [
        ("no switch", {}, "Max"),
        ("enable_thinking true", _switched(enable_thinking=True), "Max"),
        ("thinking none", _switched(thinking=None), "Max"),
        ("enable_thinking false", _switched(enable_thinking=False), "Low"),
        ("thinking false", _switched(thinking=False), "Low"),
        ("reasoning_effort none", {"reasoning_effort": "none"}, "Low"),
        ("reasoning_effort low", {"reasoning_effort": "low"}, "Low"),
        ("reasoning_effort high", {"reasoning_effort": "high"}, "High"),
        ("reasoning_effort medium", {"reasoning_effort": "medium"}, "Max"),
        (
            "reasoning_effort high, enable_thinking false",
            {"reasoning_effort": "high", **_switched(enable_thinking=False)},
            "High",
        ),
    ]
    whole = f"{THOUGHT}</think>{ANSWER}"
    return [
        Case(name, whole, request, effort=effort, content=ANSWER)
        for name, request, effort in spelled
    ] + [Case("cut off while thinking", THOUGHT, stop="")]


def call_cases() -> list[Case]:
    """Calls that are offered as written, and calls that are offered with the reason instead."""
    thought = f"{THOUGHT}</think>"
    read = ("read", {"path": "/a b", "lines": 3})
    written = _call("read", ("path", "/a b"), ("lines", "3"))
    made: list[tuple[str, str, str, tuple[tuple[str, Mapping[str, Any] | str], ...]]] = [
        ("a call", f"{thought}{written}", "", (read,)),
        ("a call without arguments", f"{thought}{_call('read')}", "", (("read", {}),)),
        ("text, then a call", f"{thought}{ANSWER}\n{written}", ANSWER, (read,)),
        ("a call, then text", f"{thought}{written}{ANSWER}", ANSWER, (read,)),
        ("a call that ends the reasoning", f"{THOUGHT}{written}", "", (read,)),
        ("a tail after the name", f"{thought}{_call('bash</arg_key>')}", "", (("bash", {}),)),
        (
            "two calls, the first one bad",
            f"{thought}{_call('read', ('file', 'x'))}{written}",
            "",
            (("read", "no argument 'file'"), read),
        ),
        ("an unknown tool", f"{thought}{_call('bash2')}", "", (("bash2", "no tool 'bash2'"),)),
        ("no name", f"{thought}{_call('8 %')}", "", (("unknown_tool", "not shaped"),)),
        (
            "broken markup",
            f"{thought}<tool_call>bash<arg_key>command</arg_key>ls</tool_call>",
            "",
            (("bash", "no key with its value"),),
        ),
        (
            "a call that is cut off",
            f"{thought}<tool_call>bash<arg_key>command</arg_key><arg_value>rm -rf /tm",
            "",
            (("bash", "cut off"),),
        ),
    ]
    return [
        Case(
            name,
            reply,
            content=content,
            calls=calls,
            tools=True,
            stop="<|observation|>" if reply.endswith(("</tool_call>", ANSWER)) else "",
        )
        for name, reply, content, calls in made
    ]
