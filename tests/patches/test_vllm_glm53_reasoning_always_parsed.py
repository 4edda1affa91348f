"""Reasoning is split for every combination of the two thinking switches."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import ask
from imagebuild.patching.patch import Outcome
from tests.patches.harness import VERSIONS, PatchContract, changed, extract, patched

PATH = "vllm/parser/glm47_moe.py"
NAME = "vllm_glm53_reasoning_always_parsed"
STOCK = "[gMASK]<sop>Reasoning Effort: Max<tool_call><arg_key><arg_value>"
OURS = STOCK + "{% if enable_thinking is false %}Low{% endif %}"


class TestReasoning(PatchContract):
    name = NAME
    upstream_fix = (
        (
            PATH,
            r"else bool\(thinking\) or bool\(enable_thinking\)$",
            'else bool(thinking) or "Reasoning Effort:" in tokenizer.chat_template',
        ),
    )


def parser(tree, template, **switches):
    config = MagicMock()
    names = {"glm47_moe_config": config, "logger": MagicMock()}
    also = ("_glm53_always_thinks",) if b"def _glm53_always_thinks" in tree.read(PATH) else ()
    owner = extract(tree, PATH, "Glm47MoeParser.__init__", names, also)
    made = owner(SimpleNamespace(chat_template=template), None, chat_template_kwargs=switches)
    # The parser's grammar is built from the same answer.
    assert config.call_args.kwargs == {"thinking": made.thinking_enabled}
    return made


COMBINATIONS = [
    {name: value for name, value in pair.items() if value is not None}
    for pair in (
        {"thinking": thinking, "enable_thinking": enable}
        for thinking in (None, True, False)
        for enable in (None, True, False)
    )
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("template", [STOCK, OURS, None])
@pytest.mark.parametrize("switches", COMBINATIONS)
def test_always_split(real_tree, version, template, switches):
    tree = patched(NAME, real_tree(version))
    assert parser(tree, template, **switches).thinking_enabled is True


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_goes_by_the_switches_with_our_template(real_tree, version):
    tree = real_tree(version)
    split = [parser(tree, OURS, **switches).thinking_enabled for switches in COMBINATIONS]
    #        none  enable  disable | think: none enable disable | no think: none enable disable
    assert split == [True, True, False, True, True, True, False, True, False]


@pytest.mark.parametrize(("version", "split"), [("0.31.0", False), ("0.32.0", True)])
def test_upstream_recognises_its_own_template_from_0_32(real_tree, version, split):
    made = parser(real_tree(version), STOCK, enable_thinking=False)
    assert made.thinking_enabled is split


def test_absorbed_once_upstream_recognises_our_template(real_tree):
    change = (PATH, r"^        and \"enable_thinking\" not in template\n", "")
    tree = changed(real_tree("0.33.0"), [change])
    assert ask(TestReasoning().patch.absorbed, tree).outcome is Outcome.HOLDS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_inheriting_parser_is_not_touched(real_tree, version):
    pristine, path = real_tree(version), "vllm/parser/ling3.py"
    names = {"glm47_moe_config": MagicMock(), "replace": MagicMock(), "ParserEngine": MagicMock()}
    for tree in (pristine, patched(NAME, pristine)):
        made = extract(tree, path, "Ling3Parser.__init__", names)(
            None, None, chat_template_kwargs={"thinking": False}
        )
        assert made.thinking_enabled is False
