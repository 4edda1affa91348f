"""The release's own parser takes every command line of the entry point, and means the same by it.

All deployments, speculations, routes, clusters, ranks and MoE backends. The tree must be first on
`sys.path`; vLLM's argument classes are imported. No GPU, and nothing is written.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imagebuild.deep.base import About, ClaimError, require

ABOUT = About(
    claim="the command lines of the entry point are known to the parser of `vllm serve`",
    imports=("vllm.utils.argparse_utils",),
)
_RUNTIME = Path(__file__).resolve().parents[2] / "image" / "runtime"
_PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
_HEAD = "10.0.0.1"
# Knobs that change the shape of a command line, each alone.
_SHAPES: tuple[dict[str, str], ...] = (
    {},
    {"GLM_AUTOTUNE": "off"},
    {"GLM_PREFIX_CACHING": "0"},
    {"GLM_TRUST_REMOTE_CODE": "1"},
    {"GLM_TOOL_PARSER": "glm47", "GLM_REASONING_PARSER": "deepseek_r1"},
    {"GLM_ENFORCE_EAGER": "0", "GLM_CUDAGRAPH_MAX_SIZE": "auto"},
    {"GLM_KV_CACHE_BYTES": "0", "GLM_LOAD_STRATEGY": "prefetch", "GLM_TOPK_BACKEND": "torch"},
    {"GLM_LIMIT_MM": '{"image":16,"video":0}', "GLM_LONG_PREFILL_TOKENS": "2304"},
    {"GLM_SPECULATIVE_CONFIG": '{"method":"ngram","num_speculative_tokens":4}'},
)
_ROUTES = ("stock", "sm90", "cuda", "triton")
_SPECULATIONS = ("mtp", "dflash2", "none")
_MOE = ("flashinfer_cutlass", "marlin", "humming", "b12x", "flashinfer_b12x")


def command_lines() -> Iterator[tuple[str, ...]]:
    """The arguments after `vllm serve`, each different one once."""
    if str(_RUNTIME) not in sys.path:
        sys.path.append(str(_RUNTIME))
    seen: set[tuple[str, ...]] = set()
    for environ, backend in _settings():
        for line in _lines(environ, backend):
            if line not in seen:
                seen.add(line)
                yield line


def _settings() -> Iterator[tuple[dict[str, str], str]]:
    layouts = (
        ("gb10-2x", ("none", "ray", "mentat")),
        ("gb10-4x", ("none", "ray", "mentat")),
        ("rtx6000-4x", ("none",)),
    )
    for name, clusters in layouts:
        for cluster, route, kind in itertools.product(clusters, _ROUTES, _SPECULATIONS):
            base = {"GLM_DEPLOYMENT": name, "IMAGEBUILD_CLUSTER": cluster}
            asked = {"GLM_MLA_ROUTE": route, "GLM_SPECULATION": kind}
            yield base | asked, _MOE[0]
        for shape in _SHAPES:
            yield base | shape, _MOE[0]
        for backend in _MOE:
            yield base, backend
        if name == "gb10-4x":
            ring = {"GLM_TP": "RING4", "GLM_RING_PREVIOUS": "e1", "GLM_RING_NEXT": "e2"}
            yield base | ring | {"IMAGEBUILD_CLUSTER": "none"}, _MOE[0]


def _lines(environ: dict[str, str], backend: str) -> Iterator[tuple[str, ...]]:
    command = importlib.import_module("serving.command")
    plan = importlib.import_module("serving.resolve").resolve(environ, ("--max-logprobs", "5"))
    member = importlib.import_module("serving.cluster").Membership
    found = command.Found(backend, Path("/run/glm53/chat_template.jinja"))
    for rank in range(plan.nodes if plan.cluster == "none" else 1):
        yield tuple(command.serve(plan, member(rank, plan.nodes, _HEAD), found)[2:])


def probe() -> str:
    """Parses them all."""
    parser = _parser()
    count, flags = 0, set()
    for line in command_lines():
        unknown = [word for word in line if word.startswith("--")
                   and word not in parser._option_string_actions]  # fmt: skip
        require(not unknown, f"the parser has no {', '.join(unknown)}")
        _same(line, _parsed(parser, line))
        count += 1
        flags |= {word for word in line if word.startswith("--")}
    _refused_or_free(parser)
    return f"the parser takes {count} command lines with {len(flags)} flags"


def _parser() -> Any:  # noqa: ANN401 - vLLM's
    platforms = importlib.import_module("vllm.platforms")
    # No GPU is here, and the defaults of some flags ask for the kind of device.
    platforms.current_platform.device_type = "cuda"
    utils = importlib.import_module("vllm.utils.argparse_utils")
    for name in _PARSERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(utils.FlexibleArgumentParser(prog="vllm serve"))
    raise ClaimError(f"none of {', '.join(_PARSERS)} is there")


def _parsed(parser: Any, line: tuple[str, ...]) -> Any:  # noqa: ANN401
    try:
        return parser.parse_args(list(line))
    except SystemExit as error:
        raise ClaimError(f"the parser refuses {' '.join(line)}") from error


def _same(line: tuple[str, ...], found: Any) -> None:  # noqa: ANN401
    """What was meant arrives: a flag that takes the next word, or none, would shift all."""
    pairs = dict(itertools.pairwise(line))
    wanted = {
        "model_tag": line[0],
        "tool_call_parser": pairs["--tool-call-parser"],
        "enable_auto_tool_choice": True,
        "block_size": int(pairs["--block-size"]),
        "moe_backend": pairs["--moe-backend"],
        "headless": "--headless" in line,
        "max_logprobs": 5,
    }
    if "--no-enable-flashinfer-autotune" in line:
        wanted["enable_flashinfer_autotune"] = False
    if "--no-enable-prefix-caching" in line:
        wanted["enable_prefix_caching"] = False
    for name, value in wanted.items():
        got = getattr(found, name)
        require(got == value, f"{name}: expected {value!r}, found {got!r}")


def _refused_or_free(parser: Any) -> None:  # noqa: ANN401
    """Every other spelling of a guarded flag that this parser knows is refused from outside."""
    extra = importlib.import_module("serving.extra")
    knobs = importlib.import_module("serving.table").KNOBS.values()
    owned = set(extra.owned_flags(knobs))
    for action in {id(a): a for a in parser._option_string_actions.values()}.values():
        if not owned & set(action.option_strings):
            continue
        known = [name for name, one in parser._option_string_actions.items() if one is action]
        free = [name for name in known if not extra.problems([name], knobs)]
        require(not free, f"{', '.join(free)} would undo {action.option_strings[0]}")
