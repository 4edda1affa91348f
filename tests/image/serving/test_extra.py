"""What a user adds to vLLM's arguments: no spelling of a guarded flag gets through."""

from __future__ import annotations

import pytest
from serving.errors import KnobError
from serving.resolve import resolve

RTX = {"GLM_DEPLOYMENT": "rtx6000-4x"}


def refused(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(KnobError) as caught:
        resolve(RTX, arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    "argument",
    [
        "--tool-call-parser=hermes",
        "--tool-call-parser",
        "--tool_call_parser",
        "--tool-call",  # argparse takes a beginning for the whole
        "--tool-p",
        "--no-enable-auto-tool-choice",
        "--disable-auto-tool-choice",  # 0.33
        "--no-enable-auto",
        "--enable_auto_tool_choice",
        "--speculative-config.method=ngram",
        "--speculative-config.foo+=1",
        "--spec-method",
        "--disable-prefix-caching",
        "--no-enable-prefix-caching",
        "--api-key=s",
        "--config=/tmp/flags.yaml",
        "--conf",
        "--",
        "-tp",
        "-tp=8",
        "-O3",
        "-sc",
    ],
)
def test_a_guarded_flag_is_refused_in_every_spelling(argument):
    (sentence,) = refused("--max-logprobs", "5", argument)
    assert argument.partition("=")[0].partition(".")[0].replace("_", "-") in sentence


def test_the_sentence_names_the_knob():
    (sentence,) = refused("--moe-back", "marlin")
    assert sentence == "argument --moe-back is --moe-backend's: set GLM_MOE_BACKEND"


def test_twice_the_same_and_a_stray_word():
    assert refused("--max-logprobs", "5", "--max_logprobs=6") == (
        "argument --max-logprobs stands twice",
    )
    (sentence,) = refused("serve", "--max-logprobs", "5")
    assert "the first one must be a flag" in sentence


def test_the_rest_goes_through_as_it_is():
    words = ("--max-logprobs", "-1", "--hf-overrides", '{"a b": "$(id)"}',
             "--seed=5", "--compilation-config.level", "3",
             "--compilation-config.use_inductor", "0")  # fmt: skip
    environ = RTX | {"GLM_EXTRA_ARGS": '["--enable-log-requests"]'}
    assert resolve(environ, words).extra == ("--enable-log-requests", *words)
