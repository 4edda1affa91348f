"""Whatever the environment holds: a plan without contradictions or sentences, never a traceback.

What a started set may be is told here a second time, from the command line and not from the rules.
"""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import cli, command
from serving.cluster import Membership
from serving.errors import KnobError
from serving.knobs import DEPLOYMENTS
from serving.resolve import IMAGE_CLUSTER, resolve
from serving.table import KNOBS

from tests.image.serving.test_rules import CASES

FOUND = command.Found("flashinfer_cutlass", Path("/run/glm53/chat_template.jinja"))
KV = {
    "stock": {"auto", "fp8", "fp8_e4m3", "fp8_ds_mla"},
    "sm90": {"auto", "bfloat16", "fp8", "fp8_e4m3"},
}
# What people and shells make of values.
ODD = st.sampled_from(
    ["0", "1", "2", "4", "7", "256", "2304", "auto", "none", "RING4", "-1", "1e9", "٣", "a b",
     "$(id)", "/d", "{}", '{"method":"mtp"}', "{method:mtp}", "[]", '["--port","1"]', "'\"",
     "\x00", "true", "10.0.0.1", "10.0.0.1,10.0.0.2", "eth1", "0.88", "0.95", "head", "worker",
     "mtp", "dflash2", "stock", "cuda", "bfloat16"]
) | st.text(max_size=12)  # fmt: skip
ROUTES = st.sampled_from(["stock", "sm90", "cuda", "triton"])
VALID = {
    "GLM_MLA_ROUTE": ROUTES,
    "GLM_KV_CACHE_DTYPE": st.sampled_from(["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"]),
    "GLM_TP": st.sampled_from(["2", "4", "RING4"]),
    "GLM_SPECULATION": st.sampled_from(["mtp", "dflash2", "none"]),
    "GLM_SPECULATIVE_TOKENS": st.integers(1, 16).map(str),
    "GLM_BLOCK_SIZE": st.integers(1, 40).map(lambda n: str(n * 128)),
    "GLM_MAX_NUM_BATCHED_TOKENS": st.integers(8, 64).map(lambda n: str(n * 256)),
    "GLM_MAX_NUM_SEQS": st.integers(1, 1024).map(str),
    "GLM_GPU_MEMORY_UTILIZATION": st.sampled_from(["0.80", "0.88", "0.90", "0.95"]),
    "GLM_TORCH_MEMORY_FRACTION": st.sampled_from(["0.85", "0.92", "1.0"]),
    "GLM_KV_CACHE_BYTES": st.sampled_from(["0", "8589934592"]),
    "GLM_ENFORCE_EAGER": st.sampled_from(["0", "1"]),
    "GLM_CUDAGRAPH_MAX_SIZE": st.sampled_from(["auto", "64"]),
    "GLM_COMMERCIAL": st.sampled_from(["0", "1"]),
    "GLM_AUTOTUNE": st.sampled_from(["fresh", "persist", "off"]),
    "GLM_TOOL_PARSER": st.sampled_from(["glm47", "glm47_failclosed"]),
    "GLM_ROLE": st.sampled_from(["head", "worker"]),
    "GLM_HEAD": st.just("10.0.0.1"),
    "GLM_RANK": st.integers(0, 4).map(str),
    "GLM_RING_NEXT": st.sampled_from(["eth1", "eth2"]),
    "GLM_RING_PREVIOUS": st.sampled_from(["eth1", "eth2"]),
    "GLM_EXTRA_ARGS": st.sampled_from(['["--max-logprobs","5"]', '["--tool-call","x"]', "[]"]),
    IMAGE_CLUSTER: st.sampled_from(["none", "ray", "mentat"]),
    "VLLM_GLM53_CUDA_SPARSE_MLA": st.sampled_from(["0", "1"]),
    "VLLM_GLM53_NOPE_PE_PAD": st.sampled_from(["", "1"]),
}
NAMES = [*KNOBS, IMAGE_CLUSTER, "VLLM_GLM53_CUDA_SPARSE_MLA", "VLLM_PLUGINS", "VLLM_API_KEY",
         "GLM_X", "NCCL_DEBUG", "TP", "GLOO_SOCKET_IFNAME"]  # fmt: skip
DEPLOYMENT = st.fixed_dictionaries({"GLM_DEPLOYMENT": st.sampled_from(DEPLOYMENTS)})
PLAUSIBLE = st.lists(st.sampled_from(sorted(VALID)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: VALID[name] for name in names})
)
HOSTILE = st.dictionaries(st.sampled_from(NAMES), ODD, max_size=6)
ARGUMENTS = st.lists(ODD | st.sampled_from(["--max-logprobs", "--tool_call-parser=x"]), max_size=3)
QUIET = settings(max_examples=250, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


def commands(plan):
    for rank in range(plan.nodes if plan.cluster == "none" else 1):
        yield command.serve(plan, Membership(rank, plan.nodes, "10.0.0.1"), FOUND)


def options(argv: list[str]) -> dict[str, str]:
    """Flags and their values; a flag that stands twice is a failure."""
    found: dict[str, str] = {}
    assert argv[:2] == ["vllm", "serve"]
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--"):
            name = word.partition("=")[0]
            assert name not in found, argv
            found[name] = after
    return found


def check_started(plan) -> None:
    """What must hold of anything that is started."""
    env = command.environment(plan)
    assert env["GLM_MLA_ROUTE"] == plan.route
    assert "VLLM_GLM53_CUDA_SPARSE_MLA" not in command.child_environment(
        {"VLLM_GLM53_CUDA_SPARSE_MLA": "1"}, env
    )
    for argv in commands(plan):
        flags = options(argv)
        parser = flags["--tool-call-parser"]
        assert parser in ("glm47", "glm47_failclosed")
        assert ("--tool-parser-plugin" in flags) == (parser == "glm47_failclosed")
        assert {"--enable-auto-tool-choice", "--reasoning-parser", "--chat-template"} <= set(flags)
        assert not {"--no-enable-auto-tool-choice", "--api-key", "--config"} & set(flags)
        assert flags["--kv-cache-dtype"] in KV.get(plan.route, KV["sm90"])
        assert int(flags["--block-size"]) % 256 == 0
        assert int(flags["--block-size"]) <= int(flags["--max-num-batched-tokens"])
        if plan.profile.is_unified:
            assert float(flags["--gpu-memory-utilization"]) <= 0.88
            assert float(flags["--gpu-memory-utilization"]) < float(env["TORCH_MEM_FRACTION"]) < 1
        if "--enforce-eager" in flags:
            assert "--max-cudagraph-capture-size" not in flags
        speculation = json.loads(flags.get("--speculative-config", "{}"))
        if speculation.get("method") == "dflash":
            assert not plan.settings.is_on("COMMERCIAL")
        assert ("--nnodes" in flags) == (plan.nodes > 1 and plan.cluster == "none")
        assert int(flags["--tensor-parallel-size"]) % plan.nodes == 0


@QUIET
@given(DEPLOYMENT, PLAUSIBLE)
def test_plausible_sets_start_sound_or_not_at_all(deployment, knobs):
    try:
        plan = resolve(knobs | deployment)
    except KnobError as error:
        assert all(error.problems)
        return
    check_started(plan)


@QUIET
@given(HOSTILE, ARGUMENTS)
def test_hostile_sets_give_sentences(environ, arguments):
    try:
        plan = resolve(environ, arguments)
    except KnobError as error:
        assert len(set(error.problems)) == len(error.problems) > 0
        return
    check_started(plan)


@QUIET
@given(DEPLOYMENT, HOSTILE, PLAUSIBLE, ARGUMENTS)
def test_hostile_values_among_plausible_ones(deployment, hostile, plausible, arguments):
    try:
        plan = resolve(hostile | plausible | deployment, arguments)
    except KnobError as error:
        assert error.problems
        return
    check_started(plan)


@QUIET
@given(st.sampled_from(CASES), PLAUSIBLE, HOSTILE)
def test_a_contradiction_is_never_outvoted(case, plausible, hostile):
    """A contradictory pair stays one, whatever else is set."""
    deployment, knobs, _part, remedy = case
    fixed = {"GLM_DEPLOYMENT": deployment} | dict.fromkeys(remedy, "") | knobs
    for name in ("GLM_ROLE", "GLM_MLA_ROUTE", "GLM_KV_CACHE_BYTES", "GLM_SPECULATION", "GLM_TP"):
        fixed.setdefault(name, "")
    others = {name: value for name, value in (hostile | plausible).items()
              if name in ("GLM_SERVED_NAME", "GLM_AUTOTUNE", "GLM_TOOL_PARSER", "GLM_EXTRA_ARGS",
                          "GLM_LOAD_STRATEGY", "TP", "GLM_X", "GLM_MOE_BACKEND")}  # fmt: skip
    try:
        resolve(others | fixed)
    except KnobError:
        return
    raise AssertionError(f"{others | fixed} started")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(HOSTILE, ARGUMENTS)
def test_the_command_line_ends_with_a_code_of_the_table(environ, arguments):
    """`plan` shows the same problems, and the container's codes are those that are documented."""
    assert cli.main(["plan", *arguments], environ) in (0, 2)
