"""Split reasoning from content even where a request turns thinking off.

Symptom: with `enable_thinking: false` (or `thinking: false`, or reasoning effort none) the answer's
    `content` starts with the model's reasoning and a stray `</think>`.
Cause: `Glm47MoeParser.__init__` takes the switch as "no reasoning will come" and parses everything
    as content. Our chat template never closes the block: off means low effort, and the prompt
    still ends with `<think>`. From 0.32 on upstream ignores the switch where
    `_glm53_always_thinks` recognises a template without one; ours mentions enable_thinking, so it
    is not recognised.
Change: `thinking_enabled` is always true. Rewording our template so that upstream's check passes
    is tempting, but the check is a list of substrings that may change with any release, and then
    only a reply would show it.
Upstream: https://github.com/vllm-project/vllm/pull/54276 (issue 54744)
Drop when: the parser goes by the rendered prompt, or our template has no thinking switch.
Cost: other GLM-4.x models served by this image with thinking off get their content as reasoning;
    this image is for one model. Ling3Parser, which inherits, has its own `__init__` and is not
    touched.
"""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Edit, Outcome, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import NotThere, calls, dotted, function, imports, parse
from imagebuild.patching.tree import Tree

_PATH = "vllm/parser/glm47_moe.py"
_CLASS = "Glm47MoeParser"
_SCOPE = f"{_CLASS}.__init__"
_ADAPTERS = "vllm/parser/engine/registered_adapters.py"
# A stand-in with all that upstream looks for, and with the switch, as our template has it.
_TEMPLATE = (
    "[gMASK]<sop><|system|>Reasoning Effort: {{ 'Low' if enable_thinking is false else 'Max' }}"
    "<tool_call><arg_key><arg_value><|assistant|><think>"
)
_SETTINGS: tuple[bool | None, ...] = (None, True, False)


def _splits(tree: Tree, thinking: bool | None, enable_thinking: bool | None) -> bool:
    """Whether the parser that a request with these switches gets splits reasoning."""
    given = {"thinking": thinking, "enable_thinking": enable_thinking}
    switches = {name: value for name, value in given.items() if value is not None}
    parser = SimpleNamespace()
    Interpreter(parse(tree, _PATH)).call(
        function(tree, _PATH, _SCOPE),
        self=parser,
        tokenizer=SimpleNamespace(chat_template=_TEMPLATE),
        tools=None,
        chat_template_kwargs=switches,
    )
    enabled = getattr(parser, "thinking_enabled", Opaque("self.thinking_enabled"))
    if isinstance(enabled, Opaque):
        raise NotThere(f"{_SCOPE}: thinking_enabled is {enabled.text}, which cannot be evaluated")
    return bool(enabled)


def _lost(tree: Tree) -> list[str]:
    return [
        f"thinking={thinking} enable_thinking={enable}"
        for thinking in _SETTINGS
        for enable in _SETTINGS
        if not _splits(tree, thinking, enable)
    ]


def _loses_some(tree: Tree) -> Answer:
    lost = _lost(tree)
    return Answer.of(bool(lost), f"reasoning is not split for: {'; '.join(lost) or 'no switch'}")


def _splits_all(tree: Tree) -> Answer:
    lost = _lost(tree)
    return Answer.of(not lost, f"reasoning is not split for: {'; '.join(lost) or 'no switch'}")


def _serves(tree: Tree) -> Answer:
    splits = _splits_all(tree)
    if splits.outcome is not Outcome.HOLDS:
        return splits
    adapters = parse(tree, _ADAPTERS)
    made = [dotted(item) for call in calls(adapters, "make_adapters") for item in call.args]
    origin = imports(adapters).get(_CLASS, "nowhere")
    ours = f"{_PATH.removesuffix('.py').replace('/', '.')}.{_CLASS}"
    return Answer.of(
        _CLASS in made and origin == ours,
        f"{splits.evidence}; adapters made of it: {_CLASS in made}, of {origin}",
    )


_EDIT = Edit(
    label="always enabled",
    path=_PATH,
    scope=_SCOPE,
    anchor=(
        "        self.thinking_enabled = (\n"
        "            True\n"
        "            if thinking is None and enable_thinking is None\n"
        "            else bool(thinking) or bool(enable_thinking)\n"
        "        )\n"
    ),
    text=(
        "        # patch: vllm_glm53_reasoning_always_parsed\n"
        "        self.thinking_enabled = True\n"
    ),
)
_ALWAYS = Probe(
    claim="reasoning is split whatever a request says, with a template that mentions the switch",
    check=_splits_all,
    paths=(_PATH,),
)

PATCH = Patch(
    name="vllm_glm53_reasoning_always_parsed",
    status="inappropriate",  # upstream serves templates that do close the block
    upstream="https://github.com/vllm-project/vllm/pull/54276",
    origin="fault found by the GX10 recipe; the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=(_EDIT,),
            relies_on=(Symbol(_PATH, _CLASS),),
        ),
        # 0.32 neutralises the switch for templates without one; ours is not among them.
        Variant(
            versions=">=0.32,<0.34",
            edits=(_EDIT,),
            relies_on=(
                Symbol(_PATH, _CLASS),
                Symbol(_PATH, "_glm53_always_thinks"),
            ),
        ),
    ),
    reason=Probe(
        claim="a request that turns thinking off gets its reasoning as content, with our template",
        check=_loses_some,
        paths=(_PATH,),
    ),
    effect=Probe(
        claim="reasoning is split whatever a request says, by the parser that requests get",
        check=_serves,
        paths=(_PATH, _ADAPTERS),
    ),
    absorbed=_ALWAYS,
)
