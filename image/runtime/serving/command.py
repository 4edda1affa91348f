"""The command line of `vllm serve` and the environment that goes with it, from a plan.

Arguments are a list and never a string for a shell: JSON arrives as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import glm_mla_route

from serving import places, speculation
from serving.cluster import Membership
from serving.kinds import Value
from serving.knobs import Knob
from serving.resolve import Plan


class Found(NamedTuple):
    """What the plan leaves to the checkpoint.

    Attributes:
        moe_backend: value of --moe-backend.
        template: file with the edited chat template.
    """

    moe_backend: str
    template: Path


def serve(plan: Plan, membership: Membership, found: Found) -> list[str]:
    """The arguments of vLLM's process on a rank that runs one."""
    return ["vllm", "serve", *_arguments(plan, membership, found)]


def _arguments(plan: Plan, membership: Membership, found: Found) -> Iterator[str]:
    s = plan.settings
    yield s.text("MODEL_DIR")
    for knob in s.knobs.values():
        if knob.flag:
            yield from _flag(knob, s.values[knob.name])
    yield from ("--tensor-parallel-size", str(plan.tp))
    yield from _placement(plan, membership)
    if s.number("KV_CACHE_BYTES"):
        yield from ("--kv-cache-memory-bytes", str(s.number("KV_CACHE_BYTES")))
    if plan.graph_size:
        yield from ("--max-cudagraph-capture-size", str(plan.graph_size))
    yield from ("--moe-backend", found.moe_backend)
    if s.text("AUTOTUNE") == "off":
        yield "--no-enable-flashinfer-autotune"
    yield from _parsers(plan, found)
    config = speculation.config_of(s)
    if config is not None:
        yield from ("--speculative-config", as_json(config))
    yield from ("--host", s.text("API_HOST"), "--port", s.text("API_PORT"))
    yield from plan.extra


def _flag(knob: Knob, value: Value) -> Iterator[str]:
    if value is None:
        return
    if value is True:
        yield knob.flag
    elif value is False:
        if knob.flag.startswith("--enable-"):
            # 0.33 hides this form from its help and still takes it; older ones have no other.
            yield f"--no-{knob.flag.removeprefix('--')}"
    else:
        yield knob.flag
        yield as_json(value) if isinstance(value, (dict, list)) else str(value)


def _placement(plan: Plan, membership: Membership) -> Iterator[str]:
    if plan.cluster != "none":
        yield from ("--distributed-executor-backend", "ray")
        return
    yield from ("--distributed-executor-backend", "mp")
    if plan.nodes == 1:
        return
    yield from ("--nnodes", str(membership.ranks), "--node-rank", str(membership.rank))
    yield from ("--master-addr", membership.head_address)
    yield from ("--master-port", str(plan.settings.number("MASTER_PORT")))
    if membership.rank:
        yield "--headless"


def _parsers(plan: Plan, found: Found) -> Iterator[str]:
    parser = plan.settings.text("TOOL_PARSER")
    yield from ("--chat-template", str(found.template))
    yield "--enable-auto-tool-choice"
    plugin = places.TOOL_PARSERS.get(parser)
    if plugin:
        yield from ("--tool-parser-plugin", str(plugin))
    yield from ("--tool-call-parser", parser)


def as_json(value: Value) -> str:
    """JSON in one way only, so that equal values are equal arguments."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def environment(
    plan: Plan, *parts: Mapping[str, str], member: Membership | None = None
) -> dict[str, str]:
    """The variables that vLLM gets beside the container's own.

    Args:
        plan: the plan.
        parts: of the network and of the caches; a knob wins over them.
        member: this rank, once it has joined.
    """
    s = plan.settings
    made: dict[str, str] = {}
    for part in parts:
        made.update(part)
    for knob in s.knobs.values():
        value = s.values[knob.name]
        if knob.env and value is not None:
            made[knob.env] = str(int(value)) if isinstance(value, bool) else str(value)
    made[glm_mla_route.VARIABLE] = plan.route
    if plan.profile.is_unified:
        made.setdefault("TORCH_MEM_STATS_DIR", s.text("LOG_DIR"))
    if plan.cluster == "ray":
        # On unified memory the weights are the machine's memory: Ray's monitor would kill a healthy
        # rank at 95 %, and its object store would take 30 % of what is left.
        made["RAY_memory_monitor_refresh_ms"] = "0"
    if plan.cluster != "none" and member is not None:
        made["RAY_ADDRESS"] = f"{member.head_address}:{s.number('RAY_PORT')}"
    if plan.cluster == "mentat":
        made |= _mentat(plan, is_head=member is not None and member.rank == 0)
    return made


def _mentat(plan: Plan, *, is_head: bool) -> dict[str, str]:
    """What mentat's agent reads: its group, its layout, and what it tells others of this node."""
    s = plan.settings
    made = {"MENTAT_GROUP": s.text("GROUP"), "MENTAT_MCP_API": f"{s.text('STATUS_PORT')}/mcp"}
    if plan.is_ring:
        made["MENTAT_CLAIM_LAYOUT"] = "ring"
    if is_head:
        made["MENTAT_OPENAI_API"] = f"{s.text('API_PORT')}/v1"
        made["MENTAT_MODEL_PROVIDER"] = "vllm"
    return made


def child_environment(
    own: Mapping[str, str], made: Mapping[str, str], api_key: str = ""
) -> dict[str, str]:
    """The whole environment of vLLM: the container's, ours on top, and the key of the API."""
    env = {**own, **made}
    env.pop(glm_mla_route.FORMER, None)
    if api_key:
        env["VLLM_API_KEY"] = api_key
    return env


def ray_start(plan: Plan, membership: Membership, own_address: str) -> list[str]:
    """The agent of Ray or mentat on this node; it stays in the foreground."""
    port = plan.settings.number("RAY_PORT")
    store = ["--object-store-memory", str(4 << 30)] if plan.cluster == "ray" else []
    where = (
        ["--head", f"--port={port}"]
        if membership.rank == 0
        else [f"--address={membership.head_address}:{port}"]
    )
    return ["ray", "start", "--block", *where, f"--node-ip-address={own_address}", *store]
