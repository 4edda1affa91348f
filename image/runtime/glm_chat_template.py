"""Edits the checkpoint's own GLM-5.3 chat template, with the engine of the patch series.

The entry point calls `apply_template` at each start and hands the result to vLLM; a template that
the edits do not fit stops the start, since a prompt that is a little wrong is never noticed. Needs
`imagebuild.patching` and `imagebuild.errors` beside it on the path, and nothing outside of the
standard library. It reads no file and knows no default.

The template is not shipped here, and there is more than one: GLM-5.3's own opens the think block
always and has no thinking switch; copies in quantised checkpoints got a switch that closes the
block at once, which the model was never trained to continue. Afterwards each of them follows one
rule: `reasoning_effort` low or high holds; else low where thinking is off; else max; and the prompt
ends with the assistant's tag and an open think block.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from imagebuild.errors import BrokenError, raise_collected
from imagebuild.patching import text as source
from imagebuild.patching.patch import Answer, Edit, Outcome, Patch, Probe, Variant
from imagebuild.patching.tree import Identity, Tree
from imagebuild.patching.workspace import State, Workspace

NAME = "chat_template.jinja"
# vLLM's parser also takes a switch that is none for one that is not given.
_OFF = " or ".join(
    f"({switch} is defined and {switch} is not none and not {switch})"
    for switch in ("thinking", "enable_thinking")
)


def apply_template(text: str) -> str:
    """The template with thinking off meaning low effort, and with an open think block at its end.

    A second application changes nothing.

    Raises:
        BrokenError: the edits fit in no variant; one sentence for each, with the nearest line.
    """
    try:
        source.decode(text.encode("utf-8"))
    except (source.TextError, UnicodeEncodeError) as error:
        raise BrokenError(f"the chat template cannot be edited: it {error}") from error
    problems: list[str] = []
    for patch in (_EFFORT, _OPENING):
        text = _apply(patch, text, problems)
    if not problems:
        # The anchors say what was understood; the effects, that nothing else is in the way.
        answers = [patch.effect.check(_OneText(text)) for patch in (_EFFORT, _OPENING)]
        problems = [a.evidence for a in answers if a.outcome is not Outcome.HOLDS]
    raise_collected(
        BrokenError,
        "the chat template is none that we know how to edit",
        problems,
        hint="compare the checkpoint's template with the variants in glm_chat_template.py",
    )
    return text


class _OneText:
    """A tree whose only file is the template (see `imagebuild.patching.tree.Tree`)."""

    identity = Identity(version="0")

    def __init__(self, text: str) -> None:
        self.data = text.encode("utf-8")

    def read(self, path: str) -> bytes:
        if path != NAME:
            raise FileNotFoundError(path)
        return self.data

    def exists(self, path: str) -> bool:
        return path == NAME

    def iter(self, prefix: str = "") -> Iterator[str]:
        return iter([NAME] if NAME.startswith(prefix) else [])

    def prefetch(self, paths: Iterable[str]) -> None:
        """Nothing to fetch."""


def _apply(patch: Patch, text: str, problems: list[str]) -> str:
    """The text after the first variant that fits; adds to `problems` when none does."""
    for variant in patch.variants:
        workspace = Workspace(_OneText(text))
        states = {report.state for report in workspace.run(patch, variant, {})}
        if states == {State.PENDING}:
            return workspace.changed()[NAME].decode("utf-8")
        if states == {State.APPLIED}:
            return text
    edits = [edit for variant in patch.variants for edit in variant.edits]
    problems.append(f"{patch.name} / {_nearest(text, edits)}")
    return text


def _nearest(text: str, edits: Iterable[Edit]) -> str:
    """Tells the miss of the edit that came closest.

    The engine's own search compares whole lines, and these anchors are parts of lines.
    """
    best = (-1.0, "")
    for edit in edits:
        matcher = difflib.SequenceMatcher(b=edit.anchor, autojunk=False)
        for number, line in enumerate(text.splitlines(), start=1):
            matcher.set_seq1(line)
            found = text.count(edit.anchor)
            shared = sum(block.size for block in matcher.get_matching_blocks() if block.size > 3)
            likeness = shared / len(edit.anchor) + found
            if likeness > best[0]:
                best = (
                    likeness,
                    f"'{edit.label}': expected {edit.anchor!r} once, found it {found} times; "
                    f"the nearest line is {number}: {line.strip()!r}",
                )
    return best[1] or "the template is empty"


# ---- the edits -----------------------------------------------------------------------------------


def _variant(label: str, anchor: str, text: str) -> Variant:
    # Anchors are parts of lines on purpose: copies differ in what stands around them.
    edit = Edit(label=label, path=NAME, anchor=anchor, text=text)
    return Variant(versions=">=0", edits=(edit,))


def _kept(label: str, anchor: str) -> Variant:
    """A shape that is right as it is, named so that an unknown one is a miss."""
    return _variant(label, anchor, anchor)


def _text(tree: Tree) -> str:
    return tree.read(NAME).decode("utf-8")


def _by_the_switch(tree: Tree) -> Answer:
    """Whether the effort is chosen by the thinking switch, on one line or through a variable."""
    switched = _text(tree).partition("effective_reasoning_effort")[2].partition("%}")[0]
    evidence = f"{NAME}: the effort is set by {' '.join(switched.split())!r}"
    return Answer.of("thinking" in switched, evidence)


def _not_by_the_switch(tree: Tree) -> Answer:
    answer = _by_the_switch(tree)
    return Answer.of(answer.outcome is not Outcome.HOLDS, answer.evidence)


def _stays_open(tree: Tree) -> Answer:
    """Whether the part that opens the assistant's turn opens a think block and closes none."""
    text = _text(tree)
    tail = text.rpartition("add_generation_prompt")[2]
    if "</think>" in tail:
        line = text[: text.rindex("</think>")].count("\n") + 1
        return Answer.of(False, f"{NAME}: line {line} closes the think block of the prompt")
    return Answer.of("<think>" in tail, f"{NAME}: whether the prompt ends in an open think block")


def _may_close(tree: Tree) -> Answer:
    answer = _stays_open(tree)
    return Answer.of(answer.outcome is not Outcome.HOLDS, answer.evidence)


_LISTED = "reasoning_effort in ['low', 'high'] else "
_OPEN = "{{- '<think>' -}}{#- thinking off is low effort -#}"

_EFFORT = Patch(
    name="glm_template_effort",
    status="inappropriate",  # the model's authors give no thinking switch
    upstream="",
    origin="rule of the GX10 recipe; the text is ours",
    variants=(
        _variant(
            "default effort",
            f"{_LISTED}'max'",
            f"{_LISTED}('low' if {_OFF} else 'max')",
        ),
        _kept("default effort of the GX10 recipe", f"{_LISTED}('low' if thinking_off else 'max')"),
    ),
    reason=Probe(claim="thinking off does not change the effort", check=_not_by_the_switch),
    effect=Probe(claim="thinking off changes the effort", check=_by_the_switch),
)
_OPENING = Patch(
    name="glm_template_opening",
    status="inappropriate",
    upstream="",
    origin="rule of the GX10 recipe; the text is ours",
    variants=(
        # GLM-5.3's own.
        _kept("opened always", "<|assistant|>{{- '<think>' -}}"),
        _variant(
            "opened unless switched off",
            "{{- '<think>' if enable_thinking is not defined or enable_thinking "
            "else '<think></think>' -}}",
            _OPEN,
        ),
        # GLM-5.2's, kept by some checkpoints.
        _variant(
            "closed when switched off",
            "{{- '<think></think>' if (enable_thinking is defined and not enable_thinking) "
            "else '<think>' -}}",
            _OPEN,
        ),
        # One branch of an if that stands around it. History is written without the dashes.
        _variant("closing branch", "{{- '<think></think>' -}}", _OPEN),
    ),
    reason=Probe(claim="the prompt may end in a closed think block", check=_may_close),
    effect=Probe(claim="the prompt ends in an open think block", check=_stays_open),
)
