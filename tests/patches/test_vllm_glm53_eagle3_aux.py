"""The model hands out completed hidden states: by ours on 0.31, by itself from 0.32 on.

`forward` runs with plain lists for tensors: two tokens, two streams of one value each.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from imagebuild.patching.evaluate import Verdict, ask
from imagebuild.patching.patch import Outcome
from tests.patches.harness import PatchContract, changed, extract, patched, run

PATH = "vllm/models/glm5next/common/model.py"
NAME = "vllm_glm53_eagle3_aux"
LAYERS = 4
INTERFACES = "vllm.model_executor.models.interfaces"


class TestEagle3Aux(PatchContract):
    name = NAME
    versions = ("0.31.0",)
    # Another way to write it: states are taken behind each layer.
    upstream_fix = (
        (
            PATH,
            r"^    HasInnerState,\n    IsHybrid,\n    MixtureOfExperts,\n    SupportsPP,\n\)",
            "    EagleModelMixin,\n    HasInnerState,\n    IsHybrid,\n    MixtureOfExperts,\n"
            "    SupportsEagle3,\n    SupportsPP,\n)",
        ),
        (
            PATH,
            r"^class Glm5NextModel\(nn\.Module\):",
            "class Glm5NextModel(EagleModelMixin, nn.Module):",
        ),
        (
            PATH,
            r"SupportsPP, MixtureOfExperts, IsHybrid\n",
            "SupportsPP, SupportsEagle3, IsHybrid\n",
        ),
        (
            PATH,
            r"Glm4vForConditionalGeneration, HasInnerState, IsHybrid, MixtureOfExperts\n",
            "Glm4vForConditionalGeneration, HasInnerState, IsHybrid, SupportsEagle3\n",
        ),
        (
            PATH,
            r"^        for layer in self\._active_layers:\n((?:            .*\n)+)",
            "        taken = []\n"
            "        if 0 in self.aux_hidden_state_layers:\n"
            "            taken.append(hidden_states)\n"
            "        for number, layer in enumerate(self._active_layers, 1):\n"
            "\\1"
            "            if number in self.aux_hidden_state_layers:\n"
            "                taken.append(\n"
            "                    hidden_states\n"
            "                    if post is None\n"
            "                    else hc_contract(\n"
            "                        layer.hc_post(hidden_states, residual, post, comb), layer.n\n"
            "                    )\n"
            "                )\n",
        ),
        (
            PATH,
            r"^        hidden_states = self\.norm\(hidden_states\)\n        return hidden_states\n",
            "        hidden_states = self.norm(hidden_states)\n"
            "        return (hidden_states, taken) if taken else hidden_states\n",
        ),
    )


class Rows(list):
    """A tensor of one value a token."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Rows(found) if isinstance(index, slice) else found


class Layer:
    """Returns rows of 10 x index, and streams that its hc_post adds to them."""

    n = 2

    def __init__(self, index, is_plain):
        self.index, self.is_plain = index, is_plain

    def __call__(self, _positions, hidden, _residual, _post, _comb):
        raw = Rows(10.0 * (self.index + 1) for _ in hidden)
        if self.is_plain or self.index == LAYERS - 1:
            return raw, (Rows(hidden) if self.is_plain else None), None, None
        streams = [(1.0, 3.0)] * len(hidden)
        return raw, streams, 2.0, 0.5

    @staticmethod
    def hc_post(hidden, streams, post, comb):
        return [[post * x + comb * r for r in row] for x, row in zip(hidden, streams, strict=True)]


def contract(streams, n):
    assert all(len(row) == n for row in streams)
    return Rows(sum(row) / n for row in streams)


def forward(tree, asked, *, is_plain=False, is_sequence_parallel=False):
    names = {
        "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "hc_contract": contract,
        # Each of two ranks holds half of the tokens, padded to three.
        "sp_shard": lambda rows: Rows([*rows, 0.0][:3]),
        "sp_all_gather": lambda rows: Rows([*rows, *rows]),
        "torch": None,
    }
    owner = extract(tree, PATH, "Glm5NextModel.forward", names)
    layers = [Layer(index, is_plain) for index in range(LAYERS)]
    model = owner()
    vars(model).update(
        _active_layers=layers, start_layer=0, end_layer=LAYERS, aux_hidden_state_layers=asked,
        is_sequence_parallel=is_sequence_parallel, config=SimpleNamespace(hc_mult=2),
        norm=lambda rows: Rows(-row for row in rows), _aux_post_op=Layer.hc_post,
    )  # fmt: skip
    if b"def _aux_hidden_state(" in tree.read(PATH):
        helper = extract(tree, PATH, "Glm5NextModel._aux_hidden_state", names)
        model._aux_hidden_state = helper._aux_hidden_state.__get__(model)
    positions = SimpleNamespace(shape=(4 if is_sequence_parallel else 2,))
    embedded = Rows([1.0] * positions.shape[0])
    return model.forward(None, positions, None, embedded)


@pytest.fixture(params=["0.31.0", "0.32.0", "0.33.0"])
def served(request, real_tree):
    """A tree that hands states out: ours, and upstream's."""
    tree = real_tree(request.param)
    return patched(NAME, tree) if request.param == "0.31.0" else tree


def test_states_are_the_streams_that_enter_a_layer(served):
    hidden, states = forward(served, (0, 1, 3, 4))
    assert hidden == [-40.0, -40.0]
    # Behind layer 0: 2 x 10 + 0.5 x 1 and 2 x 10 + 0.5 x 3, averaged; behind layer 2 with 30.
    assert states == [[1.0, 1.0], [21.0, 21.0], [61.0, 61.0], [40.0, 40.0]]


def test_layers_that_defer_nothing_give_their_output(served):
    hidden, states = forward(served, (2, 4), is_plain=True)
    assert (hidden, states) == ([-40.0, -40.0], [[20.0, 20.0], [40.0, 40.0]])


def test_sequence_parallel_states_cover_all_tokens(served):
    hidden, states = forward(served, (1, 4), is_sequence_parallel=True)
    assert hidden == [-40.0] * 4
    assert states == [[21.0] * 4, [40.0] * 4]


def test_without_a_drafter_the_result_is_stock(real_tree, served):
    stock = forward(real_tree("0.31.0"), ())
    assert forward(served, ()) == stock == [-40.0, -40.0]


def test_a_layer_that_is_not_there_is_not_handed_out(served):
    assert forward(served, (9,)) == [-40.0, -40.0]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_declared_drop_is_proven(real_tree, version):
    (report,) = run(NAME, real_tree(version)).reports
    assert (report.verdict, report.declared, report.exit_code) == (Verdict.ABSORBED, True, 0)


# The name SupportsEagle3 stands in all of these, as on a tree that a marker would call good.
LOST = {
    "states behind the layer": (r"^            if idx in self", "            if idx + 1 in self"),
    "not contracted": (
        r"return hc_contract\(completed, self\.config\.hc_mult\)",
        "return completed",
    ),
    "not completed": (
        r"completed = self\._aux_post_op\(hidden_states, residual, post, comb\)",
        "completed = hidden_states + residual",
    ),
    "no last state": (
        r"^        if self\.end_layer in self\.aux_hidden_state_layers:",
        "        if False:",
    ),
    "not returned": (
        r"^            return hidden_states, aux_hidden_states$",
        "            return hidden_states",
    ),
    "vision model without it": (
        r"^    MixtureOfExperts,\n    SupportsEagle3,\n\):",
        "    MixtureOfExperts,\n):",
    ),
    "another class of that name": (
        r"^    SupportsEagle3,\n    SupportsPP,\n\)",
        "    SupportsPP,\n)\nSupportsEagle3 = object",
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_behaviour_defeats_the_drop(real_tree, lost):
    pattern, text = LOST[lost]
    tree = changed(real_tree("0.33.0"), [(PATH, pattern, text)])
    assert b"SupportsEagle3" in tree.read(PATH)
    (report,) = run(NAME, tree).reports
    assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)


def test_effect_sees_wrong_states(real_tree):
    after = patched(NAME, real_tree("0.31.0"))
    effect = TestEagle3Aux().patch.effect
    for pattern, text in (
        (r"start=self\.start_layer\)", "start=self.start_layer + 1)"),
        (r"^                    aux = hc_contract\(aux, layer\.n\)\n", ""),
        (r"^            aux_hidden_states\.append\(hidden_states\)  #.*\n", "            pass\n"),
    ):
        assert ask(effect, changed(after, [(PATH, pattern, text)])).outcome is Outcome.FAILS


def test_what_cannot_be_followed_is_unknown(real_tree):
    tree = changed(real_tree("0.33.0"), [(PATH, r"\benumerate\(", "numbered(")])
    assert ask(TestEagle3Aux().patch.effect, tree).outcome is Outcome.UNKNOWN
