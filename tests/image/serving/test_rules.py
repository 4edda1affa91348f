"""Each contradiction is one sentence that names both sides, and its mirror image starts."""

from __future__ import annotations

import pytest
from serving.errors import KnobError
from serving.resolve import IMAGE_CLUSTER, resolve

GB2, GB4, RTX = "gb10-2x", "gb10-4x", "rtx6000-4x"
HEAD = {"GLM_HEAD": "10.0.0.1"}
RING = {"GLM_TP": "RING4", "GLM_RING_PREVIOUS": "eth1", "GLM_RING_NEXT": "eth2"}
MTP = {"GLM_SPECULATION": "mtp"}
JSON = {"GLM_SPECULATIVE_CONFIG": '{"method":"mtp","num_speculative_tokens":2}'}

# deployment, knobs, part of the one sentence, what to change so that it starts.
CASES = [
    (GB2, {"GLM_TP": "4"}, "expected 2", {"GLM_TP": "2"}),
    (RTX, {"GLM_TP": "RING4"}, "expected 4 or 2", {"GLM_TP": "2"}),
    (GB2, {"GLM_CLUSTER": "ray"}, "built with none", {IMAGE_CLUSTER: "ray"}),
    (RTX, {IMAGE_CLUSTER: "ray"}, "needs no cluster", {IMAGE_CLUSTER: "none"}),
    (GB2, {IMAGE_CLUSTER: "slurm"}, "expected none, ray or mentat", {IMAGE_CLUSTER: "none"}),
    (RTX, HEAD, "is one machine; unset it", {"GLM_HEAD": ""}),
    (RTX, {"GLM_RANK": "0"}, "is one machine; unset it", {"GLM_RANK": ""}),
    (RTX, {"GLM_ROLE": "worker"}, "which is the head", {"GLM_ROLE": "head"}),
    (GB2, {"GLM_ROLE": "head"}, "needs GLM_HEAD", HEAD),
    (GB2, {"GLM_RANK": "1"}, "needs GLM_HEAD", HEAD),
    (GB2, {"GLM_RANK": "2"} | HEAD, "has ranks 0 to 1", {"GLM_RANK": "1"}),
    (GB2, {"GLM_RANK": "0", "GLM_ROLE": "worker"} | HEAD, "rank 0 is the head",
     {"GLM_ROLE": "head"}),
    (GB2, {"GLM_PEERS": "a,b,c"}, "names 3 nodes", {"GLM_PEERS": "a,b"}),
    (GB2, {"GLM_PEERS": "a,b", "GLM_HEAD": "c"}, "is none of GLM_PEERS", {"GLM_HEAD": "a"}),
    (GB2, {"GLM_GPU_MEMORY_UTILIZATION": "0.85"}, "is ignored by vLLM",
     {"GLM_KV_CACHE_BYTES": "0"}),
    (GB2, {"GLM_GPU_MEMORY_UTILIZATION": "0.9", "GLM_KV_CACHE_BYTES": "0"}, "hangs above 0.88",
     {"GLM_GPU_MEMORY_UTILIZATION": "0.88"}),
    (GB2, {"GLM_TORCH_MEMORY_FRACTION": "1.0"}, "caps nothing", {"GLM_TORCH_MEMORY_FRACTION": ""}),
    (GB2, {"GLM_TORCH_MEMORY_FRACTION": "0.8"}, "must be above",
     {"GLM_TORCH_MEMORY_FRACTION": "0.9"}),
    (RTX, {"GLM_TORCH_MEMORY_FRACTION": "0.94"}, "must be above",
     {"GLM_TORCH_MEMORY_FRACTION": "0.95"}),
    (RTX, {"GLM_BLOCK_SIZE": "2176"}, "no multiple of 256", {"GLM_BLOCK_SIZE": "2304"}),
    (RTX, {"GLM_MAX_NUM_BATCHED_TOKENS": "512", "GLM_BLOCK_SIZE": "768"}, "whole blocks",
     {"GLM_BLOCK_SIZE": "512"}),
    (RTX, {"GLM_MAX_NUM_BATCHED_TOKENS": "256", "GLM_MAX_NUM_SEQS": "300"},
     "less than GLM_MAX_NUM_SEQS=300", {"GLM_MAX_NUM_SEQS": "256"}),
    (RTX, {"GLM_LONG_PREFILL_TOKENS": "2304", "GLM_MAX_MODEL_LEN": "2048"}, "is more than",
     {"GLM_MAX_MODEL_LEN": "4096"}),
    (GB2, {"GLM_CUDAGRAPH_MAX_SIZE": "64"}, "makes no graphs", {"GLM_ENFORCE_EAGER": "0"}),
    (GB2, {"GLM_BREAKABLE_GRAPHS": "1"}, "makes no graphs", {"GLM_ENFORCE_EAGER": "0"}),
    (RTX, {"GLM_MLA_ROUTE": "stock", "GLM_KV_CACHE_DTYPE": "bfloat16"}, "the route stock reads",
     {"GLM_MLA_ROUTE": "sm90"}),
    (RTX, {"GLM_KV_CACHE_DTYPE": "fp8_ds_mla"}, "the route cuda reads", {"GLM_MLA_ROUTE": "stock"}),
    (RTX, {"VLLM_PLUGINS": "other"}, "leaves out glm53_sparse_mla",
     {"VLLM_PLUGINS": "other,glm53_sparse_mla"}),
    (RTX, JSON | {"GLM_SPECULATIVE_TOKENS": "2"}, "stands for all of speculation",
     {"GLM_SPECULATIVE_TOKENS": ""}),
    (RTX, {"GLM_SPECULATION": "none", "GLM_SPECULATIVE_TOKENS": "3"}, "guesses nothing",
     {"GLM_SPECULATIVE_TOKENS": ""}),
    (GB4, {"GLM_SPECULATIVE_TOKENS": "4"}, "must be 7", MTP),
    (RTX, {"GLM_DRAFTER_DIR": "/d"}, "is for dflash2", {"GLM_SPECULATION": "dflash2"}),
    (GB4, {"GLM_COMMERCIAL": "1", "GLM_SPECULATION": "dflash2"}, "forbids commercial use", MTP),
    (RTX, {"GLM_COMMERCIAL": "1",
           "GLM_SPECULATIVE_CONFIG": '{"method":"dflash","num_speculative_tokens":7}'},
     "forbids commercial use", {"GLM_COMMERCIAL": "0"}),
    (RTX, {"GLM_SPECULATIVE_CONFIG": '{"num_speculative_tokens":2}'}, 'expected "method"', JSON),
    (RTX, {"GLM_SPECULATIVE_CONFIG": '{"method":"mtp"}'}, 'expected "num_speculative_tokens"',
     JSON),
    (GB4, {"GLM_RING_NEXT": "eth1"}, "is for GLM_TP=RING4", RING),
    (GB4, {"GLM_TP": "RING4"}, "GLM_RING_PREVIOUS and GLM_RING_NEXT", RING),
    (GB4, {"GLM_TP": "RING4", "GLM_RING_NEXT": "eth1"}, "needs GLM_RING_PREVIOUS,", RING),
    (GB4, {"GLM_TP": "RING4"}, "without mentat", {IMAGE_CLUSTER: "mentat"}),
    (GB4, RING | {"GLM_RING_NEXT": "eth1"}, "are both eth1", RING),
    (GB4, RING | {"GLM_IB_GID_INDEX": "3"}, "in a ring each port has its own",
     {"GLM_IB_GID_INDEX": ""}),
    (RTX, {"GLM_API_PORT": "8082"}, "GLM_API_PORT and GLM_STATUS_PORT are both 8082",
     {"GLM_STATUS_PORT": "8090"}),
    (RTX, {"GLM_API_KEY_FILE": "/k", "VLLM_API_KEY": "s"}, "unset VLLM_API_KEY",
     {"VLLM_API_KEY": ""}),
    (RTX, {"VLLM_API_KEY": "s"}, "which the self-test does not know", {"GLM_SELF_TEST": "0"}),
    (RTX, {"GLM_STATUS_HOST": "0.0.0.0"}, "needs GLM_STATUS_TOKEN_FILE",
     {"GLM_STATUS_TOKEN_FILE": "/t"}),
]  # fmt: skip


@pytest.mark.parametrize(("deployment", "knobs", "part", "remedy"), CASES)
def test_contradiction_is_one_sentence_and_its_remedy_starts(deployment, knobs, part, remedy):
    environ = {"GLM_DEPLOYMENT": deployment} | knobs
    with pytest.raises(KnobError) as caught:
        resolve(environ)
    (sentence,) = caught.value.problems
    assert part in sentence
    resolve(environ | remedy)


def test_a_company_gets_mtp_without_asking():
    plan = resolve({"GLM_DEPLOYMENT": GB4, "GLM_COMMERCIAL": "1"})
    assert (plan.speculation, plan.tokens) == ("mtp", 4)
