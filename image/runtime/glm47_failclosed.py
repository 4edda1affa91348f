"""Tool parser `glm47_failclosed`: refuses a tool call that cannot be checked, and says why.

vLLM loads this file with `--tool-parser-plugin` and takes it for
`--tool-call-parser glm47_failclosed`. It is the release's own glm47 parser with two changes: a call
is given out whole, once it has ended and has been checked, and a call that fails is offered with
the single argument `_rejected_by_server` holding the reason. No client accepts that argument, so an
agent gets an error that it can answer; upstream drops a call with a wrong name, which ends the
turn, and passes wrong keys on.

- GLM47_FAIL_CLOSED: 1 (default) or 0, which registers the release's own parser under our name.
- GLM47_REJECT_AS_TEXT: 1 puts the refusal into the content instead; 0 (default).

The checks are plain functions; without vLLM the file can be imported and registers nothing. An
error in here stops the start: vLLM logs it, and then finds no parser of that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.glm47_failclosed")

NAME = "glm47_failclosed"
REASON_KEY = "_rejected_by_server"
# Stands in where the model wrote nothing that a client would take for a name.
UNNAMED = "unknown_tool"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_PAIR = re.compile(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>.*?</arg_value>",
    re.DOTALL,
)
# Keywords by which a schema accepts keys that its `properties` do not list.
_OPEN_KEYWORDS = ("patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
# Reasons go into prompts and logs.
_QUOTED = 80

_Convert = Callable[[str, bool], str]
# The tools of a request: name -> the keys it takes, None where any key may be right.
Offer = Mapping[str, frozenset[str] | None]


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    fail_closed: bool
    reject_as_text: bool


@dataclass(frozen=True)
class Verdict:
    """What is offered to the client for one call.

    Attributes:
        name: of the tool.
        arguments: a JSON object, as text.
        reason: why the call was refused; "" when it was not.
    """

    name: str
    arguments: str
    reason: str = ""


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads both knobs; empty counts as unset.

    Raises:
        ValueError: a knob is neither 0 nor 1.
    """
    given = os.environ if environ is None else environ
    return Settings(
        fail_closed=_switch(given, "GLM47_FAIL_CLOSED", default=True),
        reject_as_text=_switch(given, "GLM47_REJECT_AS_TEXT", default=False),
    )


def _switch(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1, or unset for {int(default)}")
    return value == "1" if value else default


def known_keys(schema: Mapping[str, Any] | None) -> frozenset[str] | None:
    """The keys that a tool's parameter schema admits; None when it does not close the set."""
    properties = (schema or {}).get("properties")
    if schema is None or not isinstance(properties, Mapping):
        return None
    # Not JSON Schema's default, which is open: a tool that lists its arguments means the list.
    if schema.get("additionalProperties") or any(word in schema for word in _OPEN_KEYWORDS):
        return None
    return frozenset(properties)


def resolve(written: str, offered: Iterable[str]) -> str | None:
    """The offered tool that a written name means: itself, or its longest offered beginning.

    What follows the beginning must be no part of a name, so that `bash</arg_key>` is `bash` and
    `bash2` is not.
    """
    names = set(offered)
    if written in names:
        return written
    for name in sorted(names, key=len, reverse=True):
        rest = written[len(name) :]
        if name and written.startswith(name) and not _is_name_character(rest[0]):
            return name
    return None


def _is_name_character(character: str) -> bool:
    return character.isalnum() or character in "_.-"


def decide(name: str, raw: str, *, closed: bool, offer: Offer, convert: _Convert) -> Verdict:
    """Checks one call.

    Args:
        name: as the model wrote it.
        raw: all that the model wrote between the name and the end of the call.
        closed: whether the model ended the call itself.
        offer: the request's tools; an empty one leaves names and keys unchecked.
        convert: the parser's own conversion of `raw` into JSON text (see `ParserEngineConfig`).
    """
    written = name.strip()
    tool = resolve(written, offer) if offer else None
    shaped = _NAME.fullmatch(written) is not None
    try:
        known = _tool_of(written, tool, shaped=shaped, offer=offer)
        return Verdict(known, _arguments(known, raw, closed=closed, offer=offer, convert=convert))
    except _RefusedError as refused:
        reason = str(refused)
        refusal = json.dumps({REASON_KEY: reason}, ensure_ascii=False)
        return Verdict(tool or (written if shaped else UNNAMED), refusal, reason)


class _RefusedError(Exception):
    """The reason, as a sentence without its end."""


def _tool_of(written: str, tool: str | None, *, shaped: bool, offer: Offer) -> str:
    # A name that the client offered is right, however it is spelled.
    if tool is not None:
        return tool
    if not shaped:
        raise _RefusedError(f"the tool name {_quoted(written)} is not shaped like a name")
    if offer:
        raise _RefusedError(
            f"there is no tool {_quoted(written)}; the tools are {', '.join(sorted(offer))}"
        )
    return written


def _arguments(tool: str, raw: str, *, closed: bool, offer: Offer, convert: _Convert) -> str:
    if not closed:
        # The converter leaves an unfinished value out, and the rest would look complete.
        raise _RefusedError(f"the call of {tool} was cut off before its end")
    try:
        text = convert(raw, False)
        given = json.loads(text)
    except (ValueError, TypeError) as error:
        raise _RefusedError(f"the arguments of {tool} are no JSON: {error}") from error
    if not isinstance(given, dict):
        raise _RefusedError(
            f"the arguments of {tool} are a JSON {type(given).__name__}, expected an object"
        )
    # The converter passes over what it cannot read, and the last of two equal keys wins.
    if rest := _PAIR.sub("", raw).strip():
        raise _RefusedError(
            f"the arguments of {tool} hold {_quoted(rest)}, which is no key with its value"
        )
    keys = [match["key"].strip() for match in _PAIR.finditer(raw)]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise _RefusedError(f"the arguments of {tool} give {_quoted(twice[0])} more than once")
    known = offer.get(tool)
    unknown = [key for key in given if known is not None and key not in known]
    if known is not None and unknown:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise _RefusedError(f"{tool} has no argument {_quoted(unknown[0])}; {takes}")
    if "" in given:
        raise _RefusedError(f"the arguments of {tool} hold a value without a key")
    return text


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "...")


# ---- vLLM 0.31 to 0.33 ---------------------------------------------------------------------------

# Where each release keeps what we use. A name that moves gets a second place here.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "Glm47MoeParser": ("vllm.parser.glm47_moe",),
    "Glm47MoeModelToolParser": ("vllm.tool_parsers.glm47_moe_tool_parser",),
    "ToolParserManager": ("vllm.tool_parsers.abstract_tool_parser",),
    "iter_response_function_tool_info": ("vllm.tool_parsers.utils",),
    "DeltaFunctionCall": ("vllm.entrypoints.generate.base.protocol",),
    "DeltaMessage": ("vllm.entrypoints.generate.base.protocol",),
    "DeltaToolCall": ("vllm.entrypoints.generate.base.protocol",),
    "ExtractedToolCallInformation": ("vllm.entrypoints.generate.base.protocol",),
    "FunctionCall": ("vllm.entrypoints.generate.base.protocol",),
    "ToolCall": ("vllm.entrypoints.generate.base.protocol",),
}
# Members of the release's parser that ours overrides or reads. Were one renamed, an override would
# silently do nothing, and calls would go out unchecked.
_MEMBERS = (
    "_build_extracted_result",
    "_ensure_tool_id",
    "_events_to_delta",
    "_fix_arg_types",
    "_handle_arg_chunk",
    "_handle_tool_end",
    "_reset",
    "_strip_content_whitespace",
)


def _find(name: str) -> Any:  # noqa: ANN401 - whatever vLLM has under that name
    """Imports one of `_PLACES`. Raises ImportError with the places that were tried."""
    tried = []
    for place in _PLACES[name]:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError) as error:
            tried.append(f"{place} ({error})")
    raise ImportError(
        f"{NAME}: this vLLM keeps {name} in none of {'; '.join(tried)}. "
        "It was written for 0.31 to 0.33"
    )


def offer_of(tools: Iterable[Any] | None, response_tools: Callable[[Any], Any]) -> Offer:
    """The tools of a chat or responses request.

    Args:
        tools: as the request holds them, of any API.
        response_tools: gives (name, schema) for each function in one tool of the responses API,
            and nothing for a tool that is no function.
    """
    offer: dict[str, frozenset[str] | None] = {}
    for tool in tools or ():
        function = getattr(tool, "function", None)
        named = (
            [(function.name, function.parameters)]
            if function is not None
            else list(response_tools(tool))
        )
        offer.update({name: known_keys(schema) for name, schema in named})
    return offer


@functools.cache
def parser_class(reject_as_text: bool) -> Any:  # noqa: ANN401 - a class over the release's own
    """The engine's parser with whole, checked calls. Raises ImportError (see `_find`)."""
    upstream = _find("Glm47MoeParser")
    gone = [member for member in _MEMBERS if not callable(getattr(upstream, member, None))]
    if gone:
        raise ImportError(f"{NAME}: Glm47MoeParser of this vLLM has no {', '.join(gone)}")
    function_delta, tool_delta = _find("DeltaFunctionCall"), _find("DeltaToolCall")
    message, extracted = _find("DeltaMessage"), _find("ExtractedToolCallInformation")
    function_call, tool_call = _find("FunctionCall"), _find("ToolCall")
    response_tools = _find("iter_response_function_tool_info")

    class Glm47FailClosedParser(upstream):  # type: ignore[misc, valid-type]
        """One per request, as its base."""

        _deferred_content: str

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self._verdicts: dict[int, Verdict] = {}
            super().__init__(*args, **kwargs)

        def _reset(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self._verdicts.clear()
            super()._reset(*args, **kwargs)

        def _handle_arg_chunk(self, event: Any, deltas: list[Any]) -> None:  # noqa: ANN401
            """Collects only: what has been streamed cannot be taken back."""
            if event.value:
                self._tool_slots[event.tool_index].append_args(event.value)

        def _handle_tool_end(self, event: Any, deltas: list[Any]) -> None:  # noqa: ANN401
            index = event.tool_index
            if not 0 <= index < len(self._tool_slots) or index in self._verdicts:
                return
            slot = self._tool_slots[index]
            verdict = decide(
                slot.name,
                slot.args,
                # An end that the engine adds when the output stops carries no text.
                closed=bool(event.value),
                offer=offer_of(self._tools, response_tools),
                convert=self.parser_engine_config.arg_converter,
            )
            if not verdict.reason:
                typed = self._fix_arg_types(verdict.arguments, verdict.name)
                verdict = Verdict(verdict.name, typed)
            self._verdicts[index] = verdict
            if verdict.reason:
                logger.warning("tool call refused: %s", verdict.reason)
                if reject_as_text:
                    self._deferred_content += f"[tool call refused: {verdict.reason}]"
                    return
            slot.name, slot.name_sent = verdict.name, True
            self._ensure_tool_id(slot, verdict.name)
            function = function_delta(name=verdict.name, arguments=verdict.arguments)
            deltas.append(tool_delta(index=index, id=slot.id, type="function", function=function))

        def _events_to_delta(self, events: Any, finished: bool = False) -> Any:  # noqa: ANN401
            """Also gives out what stands after a call when the output ends with it."""
            delta = super()._events_to_delta(events, finished=finished)
            if finished and self._deferred_content:
                delta = delta or message()
                delta.content = (delta.content or "") + self._deferred_content
                self._deferred_content = ""
            return delta

        def _build_extracted_result(self, *deltas: Any) -> Any:  # noqa: ANN401
            calls = [
                tool_call(
                    id=self._tool_slots[index].id,
                    function=function_call(name=verdict.name, arguments=verdict.arguments),
                )
                for index, verdict in sorted(self._verdicts.items())
                if not (verdict.reason and reject_as_text)
            ]
            parts = [delta.content for delta in deltas if delta is not None and delta.content]
            content = self._strip_content_whitespace("".join(parts), bool(calls))
            return extracted(tools_called=bool(calls), tool_calls=calls, content=content)

    return Glm47FailClosedParser


def register(chosen: Settings) -> None:
    """Makes the parser known to vLLM under `NAME`. Raises ImportError (see `_find`)."""
    tool_parser = _find("Glm47MoeModelToolParser")
    if chosen.fail_closed:
        engine = parser_class(chosen.reject_as_text)
        tool_parser = type(
            "Glm47FailClosedToolParser", (tool_parser,), {"_parser_engine_cls": engine}
        )
    else:
        logger.warning("GLM47_FAIL_CLOSED=0: %s is the release's own glm47 parser", NAME)
    # As a class and not as a module to import later: this file is on no path.
    _find("ToolParserManager").register_module(name=NAME, module=tool_parser)


if importlib.util.find_spec("vllm") is not None:
    register(settings())
