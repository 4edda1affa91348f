"""Nothing of a reply is lost or misplaced: template, thinking switch and both parsers agree.

Each case goes the way of a request: the edited stand-in template is rendered by vLLM's renderer,
the prompt and a made-up reply of the model become tokens, and the parsers that the release builds
for `--reasoning-parser glm45 --tool-call-parser glm47_failclosed` read the reply, whole and
streamed. The tree must be first on `sys.path` and patched; vLLM, transformers and tokenizers are
imported. No GPU, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from imagebuild.deep import glm_stand_in
from imagebuild.deep.base import About, ClaimError
from imagebuild.smoke.stubs import Placeholder

ABOUT = About(
    claim="reasoning, content and calls come out as written, with our template and flags",
    patches=("vllm_glm53_reasoning_always_parsed",),
    imports=("vllm.parser.glm47_moe",),
)
RUNTIME = Path(__file__).resolve().parents[2] / "image" / "runtime"
REASONING_PARSER = "glm45"
TOOL_PARSER = "glm47_failclosed"
# Tokens in one delta: alone, as speculative decoding gives them, and all at once.
_STRIDES = (1, 5, 10_000)

_THOUGHT = "The user wants 5 < 7, naïvely: a \u201cpath\u201d 数.\n"
_ANSWER = "Done: 5 < 7 & naïve 数 </b>."
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in keys.items()},
            },
        },
    }
    for name, keys in {
        "read": {"path": "string", "lines": "integer"},
        "read_all": {"path": "string"},
        "bash": {"command": "string"},
    }.items()
]


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
    reasoning: str = _THOUGHT
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
    whole = f"{_THOUGHT}</think>{_ANSWER}"
    return [
        Case(name, whole, request, effort=effort, content=_ANSWER)
        for name, request, effort in spelled
    ] + [Case("cut off while thinking", _THOUGHT, stop="")]


def call_cases() -> list[Case]:
    """Calls that are offered as written, and calls that are offered with the reason instead."""
    thought = f"{_THOUGHT}</think>"
    read = ("read", {"path": "/a b", "lines": 3})
    written = _call("read", ("path", "/a b"), ("lines", "3"))
    made: list[tuple[str, str, str, tuple[tuple[str, Mapping[str, Any] | str], ...]]] = [
        ("a call", f"{thought}{written}", "", (read,)),
        ("a call without arguments", f"{thought}{_call('read')}", "", (("read", {}),)),
        ("text, then a call", f"{thought}{_ANSWER}\n{written}", _ANSWER, (read,)),
        ("a call, then text", f"{thought}{written}{_ANSWER}", _ANSWER, (read,)),
        ("a call that ends the reasoning", f"{_THOUGHT}{written}", "", (read,)),
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
            stop="<|observation|>" if reply.endswith(("</tool_call>", _ANSWER)) else "",
        )
        for name, reply, content, calls in made
    ]


def probe() -> str:
    """Runs every case on the vLLM that can be imported.

    Returns:
        one line of evidence.

    Raises:
        RuntimeError: a case does not hold; the message says which and how.
    """
    if importlib.util.find_spec("mistral_common") is None:
        importlib.import_module("transformers")  # it looks for mistral_common, and must not find it
        sys.meta_path.append(_Unused())
    offered = _parser_class()
    runs = 0
    for case, tokenizer, served, where in settings():
        runs += _run(case, tokenizer, served, where, offered)
    # Refusals as text: the same cases, with the reason in the content.
    as_text = _parser_class(GLM47_REJECT_AS_TEXT="1")
    for case, tokenizer, served, where in settings():
        if case.calls:
            runs += _run(_refused_as_text(case), tokenizer, served, f"{where}, as text", as_text)
    version = importlib.import_module("vllm.version").__version__
    return (
        f"vLLM {version}: {runs} replies read by {REASONING_PARSER} and {TOOL_PARSER}, whole and "
        f"streamed: reasoning, content and calls as written, {len(glm_stand_in.OPENINGS)} templates"
    )


def settings() -> Iterator[tuple[Case, Any, str, str]]:
    """Each case with a tokenizer, the template that is served, and words for messages."""
    edit = _load("glm_chat_template").apply_template
    for opening in glm_stand_in.OPENINGS:
        shipped = glm_stand_in.template(opening)
        served = edit(shipped)
        # Ours is given with --chat-template, or stands in the checkpoint's place.
        for place, own in (("beside", shipped), ("in place of", served)):
            tokenizer = glm_stand_in.tokenizer(own, special_markup=True)
            for case in thinking_cases():
                where = f"{case.name} (our template {place} the checkpoint's {opening!r})"
                yield case, tokenizer, served, where
    for special in (True, False):
        tokenizer = glm_stand_in.tokenizer(served, special_markup=special)
        for case in call_cases():
            yield case, tokenizer, served, f"{case.name} ({'special' if special else 'plain'} tags)"


class _UnusedModule(ModuleType):
    def __getattr__(self, name: str) -> type[Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class _Unused(MetaPathFinder, Loader):
    """Answers for mistral_common where it is not installed, as in the smoke environment.

    vLLM imports the parsers of all models together; Mistral's are never called here.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        mine = fullname.partition(".")[0] == "mistral_common"
        return ModuleSpec(fullname, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _UnusedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module answers by itself."""


def _load(name: str) -> Any:  # noqa: ANN401 - a module of image/runtime, which is no package
    spec = importlib.util.spec_from_file_location(name, RUNTIME / f"{name}.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{RUNTIME / name}.py cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _refused_as_text(case: Case) -> Case:
    refused = [reason for _, reason in case.calls if isinstance(reason, str)]
    kept = tuple(call for call in case.calls if not isinstance(call[1], str))
    return dataclasses.replace(case, calls=kept, refused=tuple(refused))


def _parser_class(**knobs: str) -> Any:  # noqa: ANN401 - a class of the release
    """What the API server builds for our flags with these variables, and no other of ours."""
    tool_parsers = importlib.import_module("vllm.tool_parsers")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLM47_")}
    with mock.patch.dict(os.environ, kept | knobs, clear=True):
        tool_parsers.ToolParserManager.import_tool_parser(str(RUNTIME / f"{TOOL_PARSER}.py"))
    manager = importlib.import_module("vllm.parser.parser_manager").ParserManager
    return manager.get_parser(
        tool_parser_name=TOOL_PARSER,
        reasoning_parser_name=REASONING_PARSER,
        enable_auto_tools=True,
        model_name="stand-in",
    )


def _run(case: Case, tokenizer: Any, served: str, where: str, parser_class: Any) -> int:  # noqa: ANN401
    """Checks one case whole and at every stride; returns how many replies were read."""
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    fields: dict[str, Any] = {**case.request}
    if case.tools:
        fields |= {"tools": _TOOLS, "tool_choice": "auto"}
    request = protocol.ChatCompletionRequest(
        model="stand-in", messages=[{"role": "user", "content": "Hi"}], **fields
    )
    # As `_effective_chat_template_kwargs` of the API server.
    params = request.build_chat_params(served, "auto").with_defaults(None)
    prompt = _render(tokenizer, request, params)
    text = tokenizer.decode(prompt)
    _expect(where, "the end of the prompt", text[-20:], "<|assistant|><think>")
    head = text.partition("Reasoning Effort: ")[2].partition("<|")[0]
    _expect(where, "the effort of the prompt", head, case.effort)

    def parser() -> Any:  # noqa: ANN401
        made = parser_class(
            tokenizer,
            request.tools,
            chat_template_kwargs=params.chat_template_kwargs,
            model_config=None,
        )
        made.adjust_request(request.model_copy(deep=True))
        return made

    ids = tokenizer.encode(case.reply, add_special_tokens=False)
    stop = [tokenizer.convert_tokens_to_ids(case.stop)] if case.stop else []
    whole = parser()
    if hasattr(whole, "set_prompt_token_ids"):  # from 0.32 on
        whole.set_prompt_token_ids(prompt)
    _judge(case, f"{where}, whole", _whole(whole, case.reply, request, ids + stop))
    for stride in _STRIDES:
        reader = parser()
        deltas = _deltas(tokenizer, ids, stop, stride)
        got = _streamed(reader, request, prompt, deltas)
        _judge(case, f"{where}, streamed by {stride}", got)
        # The responses API reads the whole reply once more with the parser that streamed it.
        again = _whole(reader, case.reply, request, ids + stop)
        _judge(case, f"{where}, read again after {stride}", again)
    return 1 + 2 * len(_STRIDES)


def _render(tokenizer: Any, request: Any, params: Any) -> list[int]:  # noqa: ANN401
    hf = importlib.import_module("vllm.renderers.hf")
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    kwargs = params.get_apply_chat_template_kwargs() | {"tools": tools, "tokenize": True}
    return list(hf.safe_apply_chat_template(None, tokenizer, request.messages, **kwargs))


@dataclass
class _Got:
    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def _whole(parser: Any, text: str, request: Any, ids: Sequence[int]) -> _Got:  # noqa: ANN401
    reasoning, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return _Got(reasoning or "", content or "", [(c.name, c.arguments) for c in calls or []])


_Delta = tuple[list[int], str, bool]


def _streamed(parser: Any, request: Any, prompt: list[int], deltas: Iterator[_Delta]) -> _Got:  # noqa: ANN401
    got = _Got("", "", [])
    started: dict[int, str] = {}
    for delta_ids, delta_text, last in deltas:
        delta = parser.parse_delta(
            delta_text, delta_ids, request, prompt_token_ids=prompt, finished=last
        )
        if delta is None:
            continue
        got.reasoning += delta.reasoning or ""
        got.content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.index in started or not (call.id and call.function and call.function.name):
                raise ClaimError(f"call {call.index} was streamed in more than one piece: {call}")
            started[call.index] = call.id
            got.calls.append((call.function.name, call.function.arguments))
    return got


def _deltas(
    tokenizer: Any,  # noqa: ANN401
    ids: Sequence[int],
    stop: Sequence[int],
    stride: int,
) -> Iterator[_Delta]:
    """Tokens and the text that they complete; characters of several tokens come with the last."""
    given = 0
    everything = [*ids, *stop]
    for start in range(0, len(everything), stride):
        end = start + stride
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        whole = text.removesuffix("\ufffd")
        yield everything[start:end], whole[given:], end >= len(everything)
        given = len(whole)


def _judge(case: Case, where: str, got: _Got) -> None:
    _expect(where, "the reasoning", got.reasoning.strip(), case.reasoning.strip())
    content = got.content.strip()
    for reason in case.refused:
        head, _, content = content.partition("]")
        if not head.startswith("[tool call refused: ") or reason not in head:
            raise ClaimError(f"{where}: expected a refusal with {reason!r}, found {head!r}")
    _expect(where, "the content", content.strip(), case.content.strip())
    _expect(where, "the tools called", [name for name, _ in got.calls], [n for n, _ in case.calls])
    for (name, text), (_, wanted) in zip(got.calls, case.calls, strict=True):
        arguments = json.loads(text)
        if isinstance(wanted, str):
            _expect(where, f"the arguments of {name}", list(arguments), ["_rejected_by_server"])
            reason = arguments["_rejected_by_server"]
            if wanted not in reason:
                raise ClaimError(f"{where}: expected a refusal with {wanted!r}, found {reason!r}")
        else:
            _expect(where, f"the arguments of {name}", arguments, dict(wanted))


def _expect(where: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ClaimError(f"{where}: {what}: expected {expected!r}, found {found!r}")
