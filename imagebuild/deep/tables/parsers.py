"""Where content, reasoning and tool calls land, by pair of parsers: docs/parsers.md is made of it.

Template, tokenizer and replies are those of the probe parser_contract; parsers are the release's
own. Run it through `imagebuild.deep.run`, with the tree first on `sys.path`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from imagebuild.deep import glm_stand_in, parser_cases, parser_contract
from imagebuild.deep.base import About
from imagebuild.deep.parser_cases import Case

ABOUT = About(claim="where replies land, by pair of parsers", imports=("vllm.parser.glm47_moe",))
PAIRS = (
    ("glm45", "glm47_failclosed"),
    ("deepseek_r1", "glm47_failclosed"),
    ("deepseek_r1", "glm47"),
)
CASES = (
    "no switch",
    "enable_thinking false",
    "reasoning_effort low",
    "cut off while thinking",
    "a call",
    "text, then a call",
    "a call that ends the reasoning",
    "two calls, the first one bad",
    "broken markup",
)
_STRIDE = 5


def probe() -> str:
    """The rows as JSON: {"case", "pair", "how", "reasoning", "content", "calls"}."""
    parser_contract.prepare()
    served = parser_contract.served_template()
    tokenizer = glm_stand_in.tokenizer(served, special_markup=True)
    known = {c.name: c for c in [*parser_cases.thinking_cases(), *parser_cases.call_cases()]}
    rows = []
    for reasoning_parser, tool_parser in PAIRS:
        made = parser_contract.parser_class(reasoning_parser, tool_parser)
        for name in CASES:
            case = known[name]
            for how, got in _read(case, tokenizer, served, made):
                rows.append({"case": name, "pair": f"{reasoning_parser} + {tool_parser}",
                             "how": how, **_land(case, got)})  # fmt: skip
    return json.dumps(rows)


def _read(
    case: Case, tokenizer: Any, served: str, made: Any  # noqa: ANN401  classes of the release
) -> list[tuple[str, dict[str, Any] | str]]:  # fmt: skip
    readings: Sequence[tuple[str, int]] = (("whole", 0), ("streamed", _STRIDE))
    found: list[tuple[str, dict[str, Any] | str]] = []
    for how, stride in readings:
        try:
            got = parser_contract.read(case, tokenizer, served, made, stride)
            found.append((how, {"reasoning": got.reasoning, "content": got.content,
                                "calls": got.calls}))  # fmt: skip
        except Exception as error:
            found.append((how, type(error).__name__))
    return found


def _land(case: Case, got: dict[str, Any] | str) -> dict[str, str]:
    """Each part in words: right, lost, or where it is instead."""
    if isinstance(got, str):
        return dict.fromkeys(("reasoning", "content", "calls"), got)
    reasoning, content = got["reasoning"].strip(), got["content"].strip()
    places = {"content": content, "reasoning": reasoning}
    return {
        "reasoning": _where(case.reasoning.strip(), "reasoning", places),
        "content": _where(case.content.strip(), "content", places),
        "calls": _calls(case, got["calls"], content),
    }


def _where(wanted: str, place: str, places: dict[str, str]) -> str:
    if places[place] == wanted:
        return "right" if wanted else "none"
    other = "content" if place == "reasoning" else "reasoning"
    if wanted and wanted in places[other]:
        return f"in {other}"
    if wanted and wanted in places[place]:
        return "right, with more"
    return "lost" if wanted and not places[place] else f"not asked for: {places[place][:30]!r}"


def _calls(case: Case, calls: list[tuple[str, str]], content: str) -> str:
    if not case.calls:
        return "none" if not calls else "not asked for"
    if not calls:
        return "as text in content" if "<tool_call>" in content else "lost"
    names = [name for name, _ in calls]
    if names != [name for name, _ in case.calls]:
        return "some lost"
    pairs = zip(case.calls, calls, strict=True)
    return ", ".join(_offered(wanted, text) for (_, wanted), (_, text) in pairs)


def _offered(wanted: object, text: str) -> str:
    """A call that is wanted as a mapping is good; as text it is malformed, with that reason."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return "broken JSON to the client"
    is_refused = "_rejected_by_server" in arguments
    if isinstance(wanted, str):
        return "bad one refused with its reason" if is_refused else "bad one given to the client"
    return "right" if arguments == wanted else "refused" if is_refused else "wrong arguments"
