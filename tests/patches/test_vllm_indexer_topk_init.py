"""Both pool top-k buffers start as -1."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from imagebuild.patching.evaluate import ask
from imagebuild.patching.patch import Outcome
from imagebuild.patching.structure import assigned, function
from tests.patches.harness import VERSIONS, PatchContract, changed, patched

PATH = "vllm/models/glm5next/nvidia/sparse_indexer.py"
SCOPE = "sparse_attn_indexer_kpool"


class TestTopkInit(PatchContract):
    name = "vllm_indexer_topk_init"
    upstream_fix = (
        (
            PATH,
            r"^( +)topk_dst = pool_topk$",
            r"\1pool_topk.fill_(-1)\n\1topk_dst = pool_topk",
        ),
    )


def probe(kind):
    return getattr(TestTopkInit().patch, kind)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_buffers_are_made_full_of_minus_one(real_tree, version):
    made = []

    def full(size, value, **words):
        made.append((size, value, words))

    names = {
        "torch": SimpleNamespace(full=full, int32="int32"),
        "logits": SimpleNamespace(device="cuda:1"),
        "num_rows": 7,
        "select_k": 512,
    }
    tree = patched(TestTopkInit.name, real_tree(version))
    for value in assigned(function(tree, PATH, SCOPE), "pool_topk"):
        eval(compile(ast.Expression(value), PATH, "eval"), names)
    assert made == [((7, 512), -1, {"dtype": "int32", "device": "cuda:1"})] * 2


@pytest.mark.parametrize(
    "fill",
    [
        "torch.full((num_rows, select_k), fill_value=-1, dtype=torch.int32)",
        "logits.new_full((num_rows, select_k), -1)",
        "torch.empty((num_rows, select_k), dtype=torch.int32).fill_(-1)",
    ],
)
def test_other_spellings_count_as_filled(real_tree, fill):
    change = (PATH, r"pool_topk = torch\.empty\(\n[^\n]+\n +\)", f"pool_topk = {fill}")
    tree = changed(real_tree("0.32.0"), [change])
    assert ask(probe("absorbed"), tree).outcome is Outcome.HOLDS


@pytest.mark.parametrize(
    "fill",
    [
        "torch.full((num_rows, select_k), 0, dtype=torch.int32)",
        "torch.empty((num_rows, select_k), dtype=torch.int32).fill_(0)",
    ],
)
def test_another_value_does_not(real_tree, fill):
    change = (PATH, r"pool_topk = torch\.empty\(\n[^\n]+\n +\)", f"pool_topk = {fill}")
    tree = changed(real_tree("0.32.0"), [change])
    assert ask(probe("absorbed"), tree).outcome is Outcome.FAILS


def test_one_filled_buffer_is_not_enough(real_tree):
    change = (PATH, r"^ {16}pool_topk = torch\.empty\(\n[^\n]+\n +\)",
              " " * 16 + "pool_topk = logits.new_full((num_rows, select_k), -1)")  # fmt: skip
    tree = changed(real_tree("0.31.0"), [change])
    assert ask(probe("absorbed"), tree).outcome is Outcome.FAILS
    assert ask(probe("reason"), tree).outcome is Outcome.HOLDS


def test_a_fill_of_another_branch_does_not_count(real_tree):
    # 0.33 fills the destination itself, for empty logits only.
    assert b"topk_dst.fill_(-1)" in real_tree("0.33.0").read(PATH)
    assert ask(probe("absorbed"), real_tree("0.33.0")).outcome is Outcome.FAILS


def test_a_renamed_buffer_is_followed(real_tree):
    tree = changed(real_tree("0.33.0"), [(PATH, r"\bpool_topk\b", "pools")])
    assert ask(probe("reason"), tree).outcome is Outcome.HOLDS


def test_without_the_expansion_the_answer_is_unknown(real_tree):
    tree = changed(real_tree("0.33.0"), [(PATH, r"expand_pools_and_append_tail", "other")])
    assert ask(probe("reason"), tree).outcome is Outcome.UNKNOWN
