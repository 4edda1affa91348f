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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from imagebuild.deep import glm_stand_in
from imagebuild.deep.base import About, ClaimError
from imagebuild.deep.parser_cases import Case, call_cases, thinking_cases
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


def probe() -> str:
    """Runs every case on the vLLM that can be imported.

    Returns:
        one line of evidence.

    Raises:
        RuntimeError: a case does not hold; the message says which and how.
    """
    prepare()
    offered = parser_class()
    runs = 0
    for case, tokenizer, served, where in settings():
        runs += _run(case, tokenizer, served, where, offered)
    # Refusals as text: the same cases, with the reason in the content.
    as_text = parser_class(GLM47_REJECT_AS_TEXT="1")
    for case, tokenizer, served, where in settings():
        if case.calls:
            runs += _run(_refused_as_text(case), tokenizer, served, f"{where}, as text", as_text)
    version = importlib.import_module("vllm.version").__version__
    return (
        f"vLLM {version}: {runs} replies read by {REASONING_PARSER} and {TOOL_PARSER}, whole and "
        f"streamed: reasoning, content and calls as written, {len(glm_stand_in.OPENINGS)} templates"
    )


def prepare() -> None:
    """Lets vLLM's parsers be imported where mistral_common is not installed."""
    if importlib.util.find_spec("mistral_common") is None:
        importlib.import_module("transformers")  # it looks for mistral_common, and must not find it
        sys.meta_path.append(_Unused())


def served_template() -> str:
    """The stand-in of the checkpoint's template, as it is served."""
    edited: str = _load("glm_chat_template").apply_template(glm_stand_in.template("own"))
    return edited


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


def parser_class(reasoning: str = REASONING_PARSER, tool: str = TOOL_PARSER, **knobs: str) -> Any:  # noqa: ANN401 - a class of the release
    """What the API server builds for such flags with these variables, and no other of ours."""
    tool_parsers = importlib.import_module("vllm.tool_parsers")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLM47_")}
    with mock.patch.dict(os.environ, kept | knobs, clear=True):
        tool_parsers.ToolParserManager.import_tool_parser(str(RUNTIME / f"{TOOL_PARSER}.py"))
    manager = importlib.import_module("vllm.parser.parser_manager").ParserManager
    return manager.get_parser(
        tool_parser_name=tool,
        reasoning_parser_name=reasoning,
        enable_auto_tools=True,
        model_name="stand-in",
    )


def _run(case: Case, tokenizer: Any, served: str, where: str, parser_class: Any) -> int:  # noqa: ANN401
    """Checks one case whole and at every stride; returns how many replies were read."""
    asked = _Asked(case, tokenizer, served, parser_class)
    text = tokenizer.decode(asked.prompt)
    _expect(where, "the end of the prompt", text[-20:], "<|assistant|><think>")
    head = text.partition("Reasoning Effort: ")[2].partition("<|")[0]
    _expect(where, "the effort of the prompt", head, case.effort)
    _judge(case, f"{where}, whole", asked.whole(asked.parser(is_streamed=False)))
    for stride in _STRIDES:
        reader = asked.parser(is_streamed=True)
        _judge(case, f"{where}, streamed by {stride}", asked.streamed(reader, stride))
        # The responses API reads the whole reply once more with the parser that streamed it.
        _judge(case, f"{where}, read again after {stride}", asked.whole(reader))
    return 1 + 2 * len(_STRIDES)


def read(case: Case, tokenizer: Any, served: str, parser_class: Any, stride: int = 0) -> Got:  # noqa: ANN401
    """What a client gets of a case, streamed by so many tokens or, with 0, whole."""
    asked = _Asked(case, tokenizer, served, parser_class)
    reader = asked.parser(is_streamed=bool(stride))
    return asked.streamed(reader, stride) if stride else asked.whole(reader)


class _Asked:
    """One case as a request, and its reply as tokens."""

    def __init__(self, case: Case, tokenizer: Any, served: str, parser_class: Any) -> None:  # noqa: ANN401
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        fields: dict[str, Any] = {**case.request}
        if case.tools:
            fields |= {"tools": _TOOLS, "tool_choice": "auto"}
        self._case = case
        self._tokenizer = tokenizer
        self._class = parser_class
        self._request = protocol.ChatCompletionRequest(
            model="stand-in", messages=[{"role": "user", "content": "Hi"}], **fields
        )
        # As `_effective_chat_template_kwargs` of the API server.
        self._params = self._request.build_chat_params(served, "auto").with_defaults(None)
        self.prompt = _render(tokenizer, self._request, self._params)
        self._ids = tokenizer.encode(case.reply, add_special_tokens=False)
        self._stop = [tokenizer.convert_tokens_to_ids(case.stop)] if case.stop else []

    def parser(self, *, is_streamed: bool) -> Any:  # noqa: ANN401
        """As the server makes one for this request."""
        made = self._class(
            self._tokenizer,
            self._request.tools,
            chat_template_kwargs=self._params.chat_template_kwargs,
            model_config=None,
        )
        made.adjust_request(self._request.model_copy(deep=True))
        if not is_streamed and hasattr(made, "set_prompt_token_ids"):  # from 0.32 on
            made.set_prompt_token_ids(self.prompt)
        return made

    def whole(self, parser: Any) -> Got:  # noqa: ANN401
        return _whole(parser, self._case.reply, self._request, self._ids + self._stop)

    def streamed(self, parser: Any, stride: int) -> Got:  # noqa: ANN401
        deltas = _deltas(self._tokenizer, self._ids, self._stop, stride)
        return _streamed(parser, self._request, self.prompt, deltas)


def _render(tokenizer: Any, request: Any, params: Any) -> list[int]:  # noqa: ANN401
    hf = importlib.import_module("vllm.renderers.hf")
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    kwargs = params.get_apply_chat_template_kwargs() | {"tools": tools, "tokenize": True}
    return list(hf.safe_apply_chat_template(None, tokenizer, request.messages, **kwargs))


@dataclass
class Got:
    """What a client gets: `pieces` counts the deltas of a call that name or continue it."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    pieces: dict[int, int] = field(default_factory=dict)


def _whole(parser: Any, text: str, request: Any, ids: Sequence[int]) -> Got:  # noqa: ANN401
    reasoning, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return Got(reasoning or "", content or "", [(c.name, c.arguments) for c in calls or []])


_Delta = tuple[list[int], str, bool]


def _streamed(parser: Any, request: Any, prompt: list[int], deltas: Iterator[_Delta]) -> Got:  # noqa: ANN401
    got = Got("", "", [])
    calls: dict[int, list[str]] = {}
    for delta_ids, delta_text, last in deltas:
        delta = parser.parse_delta(
            delta_text, delta_ids, request, prompt_token_ids=prompt, finished=last
        )
        if delta is None:
            continue
        got.reasoning += delta.reasoning or ""
        got.content += delta.content or ""
        for call in delta.tool_calls or []:
            parts = calls.setdefault(call.index, ["", ""])
            parts[0] += (call.function and call.function.name) or ""
            parts[1] += (call.function and call.function.arguments) or ""
            got.pieces[call.index] = got.pieces.get(call.index, 0) + 1
    got.calls = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
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


def _judge(case: Case, where: str, got: Got) -> None:
    # A call is given out once it is complete and was found good.
    _expect(where, "the pieces of each call", set(got.pieces.values()) - {1}, set())
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
