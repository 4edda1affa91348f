"""Arguments that the user adds to `vllm serve`: passed on as they are, or refused with a sentence.

argparse takes the last of two equal flags, accepts abbreviations, `_` for `-`, and `--no-x` for
`--x`: in each of these ways a string from outside could undo what a knob sets, the tool parser
above all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from serving.knobs import Knob

# Flags that the entry point sets or that undo what it guards, with what to do instead.
RESERVED: Mapping[str, str] = {
    "--model": "set GLM_MODEL_DIR",
    "--config": "a file of flags cannot be checked; use knobs",
    "--tensor-parallel-size": "set GLM_TP",
    "--pipeline-parallel-size": "the deployment sets it",
    "--data-parallel-size": "the deployment sets it",
    "--distributed-executor-backend": "GLM_CLUSTER sets it",
    "--nnodes": "the deployment sets it",
    "--node-rank": "set GLM_RANK",
    "--master-addr": "set GLM_HEAD",
    "--master-port": "set GLM_MASTER_PORT",
    "--headless": "GLM_ROLE sets it",
    "--attention-backend": "set GLM_MLA_ROUTE",
    "--attention-config": "set GLM_MLA_ROUTE",
    "--kernel-config": "set GLM_MOE_BACKEND, GLM_TOPK_BACKEND and GLM_AUTOTUNE",
    "--moe-backend": "set GLM_MOE_BACKEND",
    "--enable-flashinfer-autotune": "set GLM_AUTOTUNE",
    "--kv-cache-memory-bytes": "set GLM_KV_CACHE_BYTES",
    "--max-cudagraph-capture-size": "set GLM_CUDAGRAPH_MAX_SIZE",
    "--device-memory-utilization": "set GLM_GPU_MEMORY_UTILIZATION",
    "--chat-template": "set GLM_CHAT_TEMPLATE_FILE",
    "--tool-call-parser": "set GLM_TOOL_PARSER",
    "--tool-parser-plugin": "set GLM_TOOL_PARSER",
    "--enable-auto-tool-choice": "it is always on",
    "--reasoning-parser-plugin": "set GLM_REASONING_PARSER",
    "--structured-outputs-config": "it can replace the reasoning parser; set GLM_REASONING_PARSER",
    "--speculative-config": "set GLM_SPECULATION or GLM_SPECULATIVE_CONFIG",
    "--spec-method": "set GLM_SPECULATION",
    "--spec-model": "set GLM_DRAFTER_DIR",
    "--spec-tokens": "set GLM_SPECULATIVE_TOKENS",
    "--api-key": "it would stand in the process list; set GLM_API_KEY_FILE",
    "--hf-token": "it would stand in the process list; set HF_TOKEN",
    "--host": "set GLM_API_HOST",
    "--port": "set GLM_API_PORT",
    "--uds": "set GLM_API_PORT",
    "--grpc": "the self-test and the status page need the HTTP API",
}
_NUMBER = re.compile(r"-[0-9.]+")
_NEGATED = re.compile(r"--(no-|disable-|no-enable-|no-disable-)")


def owned_flags(knobs: Iterable[Knob]) -> dict[str, str]:
    """Every flag that is not the user's, with what to do instead."""
    owned = {knob.flag: f"set {knob.name}" for knob in knobs if knob.flag}
    return {**RESERVED, **owned}


def problems(arguments: Sequence[str], knobs: Iterable[Knob]) -> list[str]:
    """A sentence for each argument that cannot be passed on."""
    return list(_problems(arguments, owned_flags(knobs)))


def _problems(arguments: Sequence[str], owned: Mapping[str, str]) -> Iterator[str]:
    if arguments and not arguments[0].startswith("-"):
        yield (
            f"argument {arguments[0]!r}: the first one must be a flag; the model is "
            "GLM_MODEL_DIR's, and `vllm serve` is started by the container itself"
        )
    seen: set[str] = set()
    for argument in arguments:
        if not argument.startswith("-") or _NUMBER.fullmatch(argument):
            continue
        if not argument.startswith("--") or argument == "--":
            yield f"argument {argument!r}: expected a flag in full, such as --max-logprobs"
            continue
        flag = argument.partition("=")[0].partition(".")[0].rstrip("+").replace("_", "-")
        clash = _clash(flag, owned)
        if clash:
            yield f"argument {flag} is {clash}'s: {owned[clash]}"
        if flag in seen and "." not in argument:
            yield f"argument {flag} stands twice"
        seen.add(flag)


def _clash(flag: str, owned: Mapping[str, str]) -> str:
    """The owned flag that argparse would, or could, take a flag for; "" for none."""
    stem = _NEGATED.sub("--", flag)
    for name in owned:
        forms = (name, name.replace("--enable-", "--"))
        # "--tool-call" is --tool-call-parser to argparse.
        if any(form.startswith(candidate) for form in forms for candidate in (flag, stem)):
            return name
    return ""
