"""Serve capability 12 by the sparse MLA route that is asked for, or stop.

Symptom: the kernel of a plug-in was asked for, and the server runs without it: the plug-in failed
    to import, one line of the log says so, and the stock backend serves. Or it runs, and fp8 rows
    of 512 bytes arrive in the packed format of 656 that it cannot read.
Cause: `load_plugins_by_group` swallows what an import raises. `_get_backend_priorities` offers
    whatever class stands in a slot, and `get_attn_backend_cls` takes it. A plug-in has to stand in
    the slot FLASHINFER_MLA_SPARSE_SM120 to be offered at all, and
    `_canonicalize_sparse_mla_kv_cache_dtype` rewrites the KV type by the name of the slot. Ray's
    older executor and its data-parallel actors copy the variables that `get_env_vars_to_copy`
    lists, and GLM_MLA_ROUTE is none of them.
Change: where vLLM has chosen a backend, by priority or by --attention-backend, the route table
    says whether it is that of GLM_MLA_ROUTE: if so it logs the route, if not it raises what is
    missing. A class that declares a route of ours keeps the KV type that it was given. The list
    for Ray names the variable. The table also reads the former variable of this recipe and refuses
    a retired one. Making the plug-in loader raise would stop servers for plug-ins of others, and a
    check in the plug-in cannot run when the plug-in does not import.
Upstream: none; the routes are ours.
Drop when: one backend serves capability 12 in every deployment.
Cost: one comparison an attention layer at start. Inert unless GLM_MLA_ROUTE or its former variable
    is set, on other capabilities, and for attention that is not sparse MLA; a class without the
    attribute `glm_mla_route` has its KV type rewritten as ever. RayExecutorV2 copies every
    variable, but a node's own value wins there: set the same route on all nodes.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from imagebuild.patching.interpret import Interpreter, Opaque, Raised
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    NotThere,
    assigned,
    calls,
    definition,
    function,
    parameters,
    parse,
    statements,
)
from imagebuild.patching.tree import Tree

_CUDA = "vllm/platforms/cuda.py"
_CHOOSE = "CudaPlatformBase.get_attn_backend_cls"
_MLA = "vllm/model_executor/layers/attention/mla_attention.py"
_CANONICAL = "_canonicalize_sparse_mla_kv_cache_dtype"
_RAY = "vllm/ray/ray_env.py"
_RAY_LIST = "DEFAULT_EXTRA_ENV_VARS"
_PLUGINS = "vllm/plugins/__init__.py"
_ROUTE = "glm_mla_route.py"
_CONFIRM = "glm_mla_route.confirm"
_ATTRIBUTE = "glm_mla_route"
_VARIABLE = "GLM_MLA_ROUTE"
_SM120, _SM90 = "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90"


def _backend(name: str, route: str = "") -> SimpleNamespace:
    """A member of the enum whose class serves a route, "" for upstream's own class."""
    served = {_ATTRIBUTE: route} if route else {}
    cls = SimpleNamespace(
        name=name, get_name=lambda: name, validate_configuration=lambda **_words: [], **served
    )
    return SimpleNamespace(name=name, cls=cls, is_overridden=lambda: bool(route))


def _chosen(tree: Tree, backend: SimpleNamespace, *, by_name: bool, asked: str) -> str:
    """Name of the class that vLLM takes on capability 12, "" when it refuses to start."""
    seen: list[dict[str, Any]] = []

    def confirm(**words: Any) -> None:  # noqa: ANN401 - whatever the source passes
        seen.append(words)
        names = parameters(function(tree, _ROUTE, "confirm"))
        if not words.keys() <= names.keys():
            raise NotThere(f"confirm has no parameter {sorted(words.keys() - names.keys())}")
        # What the real one asks, for a route of a plug-in; its own tests show the rest.
        served = getattr(words["backend_class"], _ATTRIBUTE, "")
        if words["major"] == 12 and words["config"].use_sparse and asked and served != asked:
            raise ValueError("the route's backend was not chosen")

    config = SimpleNamespace(use_mla=True, use_sparse=True, block_size=None, _asdict=dict)
    candidate = SimpleNamespace(backend_class=backend.cls, backend=backend, priority=1)
    platform = SimpleNamespace(
        device_name="GPU",
        get_device_capability=lambda: SimpleNamespace(major=12, minor=1),
        get_valid_backends=lambda **_words: ([candidate], {}),
    )
    names = {
        _CONFIRM: confirm,
        "_get_attn_backend_class": lambda chosen: chosen.cls,
        "_backend_cls_path": lambda cls: cls.name,
        "min": lambda items, key: items[0],
        "logger.info_once": lambda *_words: None,
    }
    choose = function(tree, _CUDA, _CHOOSE)
    try:
        found = Interpreter(parse(tree, _CUDA), names).call(
            choose,
            cls=platform,
            selected_backend=backend if by_name else None,
            attn_selector_config=config,
            num_heads=16,
        )
    except Raised:
        if seen:
            return ""
        raise
    if not isinstance(found, str):
        raise NotThere(f"{_CHOOSE}: what it returns cannot be evaluated")
    return found


def _kept(tree: Tree, backend: SimpleNamespace, given: str) -> str:
    """The KV type that a layer of a backend gets where `given` was asked for."""
    quantized = {"is_quantized_kv_cache": lambda kind: kind.startswith(("fp8", "nvfp4"))}
    found = Interpreter(parse(tree, _MLA), quantized).call(
        function(tree, _MLA, _CANONICAL), attn_backend=backend.cls, kv_cache_dtype=given
    )
    if isinstance(found, Opaque):
        raise NotThere(f"{_CANONICAL}: what it returns cannot be evaluated")
    return str(found)


def _is_copied(tree: Tree) -> bool:
    """Whether `get_env_vars_to_copy` names our variable, by itself or by a prefix."""
    module = parse(tree, _RAY)
    used = {n.id for n in ast.walk(definition(tree, _RAY, "get_env_vars_to_copy"))
            if isinstance(n, ast.Name)}  # fmt: skip
    known: dict[str, list[str]] = {}
    for name in (_RAY_LIST, "DEFAULT_ENV_VAR_PREFIXES"):
        values = assigned(module, name)
        if len(values) != 1 or not isinstance(values[0], ast.Set) or name not in used:
            raise NotThere(f"{_RAY}: {name} is not one set that get_env_vars_to_copy reads")
        known[name] = [str(e.value) for e in values[0].elts if isinstance(e, ast.Constant)]
    prefixes = tuple(known["DEFAULT_ENV_VAR_PREFIXES"])
    return _VARIABLE in known[_RAY_LIST] or _VARIABLE.startswith(prefixes)


def _is_import_error_lost(tree: Tree) -> bool:
    """Whether the plug-in loader goes on after a plug-in that it could not import."""
    load = function(tree, _PLUGINS, "load_plugins_by_group")
    tries = [
        node
        for node in statements(load.body)
        if isinstance(node, ast.Try) and any(calls(part, "plugin.load") for part in node.body)
    ]
    if not calls(load, "plugin.load"):
        raise NotThere(f"{_PLUGINS}: nothing calls plugin.load")
    handlers = [handler for node in tries for handler in node.handlers]
    return any(
        not any(isinstance(part, ast.Raise) for part in statements(handler.body))
        for handler in handlers
    )


def _faults(tree: Tree) -> list[str]:
    """Which of the causes a tree has."""
    found = []
    if _is_import_error_lost(tree):
        found.append("a plug-in that fails to import is skipped")
    kept = _kept(tree, _backend(_SM120, "cuda"), "fp8")
    if kept != "fp8":
        found.append(f"a plug-in's class gets rows of type {kept} for fp8")
    if not _is_copied(tree):
        found.append(f"{_VARIABLE} is not copied to Ray's workers")
    return found


def _needed(tree: Tree) -> Answer:
    found = _faults(tree)
    return Answer.of(bool(found), "; ".join(found) or "upstream has none of the causes")


def _not_needed(tree: Tree) -> Answer:
    found = _faults(tree)
    return Answer.of(not found, "; ".join(found) or "upstream has none of the causes")


def _switched(tree: Tree) -> Answer:
    faults: list[str] = []
    stock, ours = _backend(_SM120), _backend(_SM120, "cuda")
    for by_name in (False, True):
        how = "--attention-backend" if by_name else "the list"
        if _chosen(tree, stock, by_name=by_name, asked="cuda"):
            faults.append(f"{how} serves the stock class though cuda is asked for")
        if _chosen(tree, ours, by_name=by_name, asked="cuda") != _SM120:
            faults.append(f"{how} does not serve the plug-in's class")
        if _chosen(tree, stock, by_name=by_name, asked="") != _SM120:
            faults.append(f"{how} does not serve the stock class where nothing is asked for")
    for backend, given, wanted in (
        (stock, "auto", "fp8_ds_mla"),
        (stock, "fp8", "fp8_ds_mla"),
        (stock, "bfloat16", "bfloat16"),
        (ours, "auto", "auto"),
        (ours, "fp8", "fp8"),
        (_backend(_SM90), "fp8", "fp8"),
        (_backend("FLASHMLA_SPARSE"), "fp8", "fp8_ds_mla"),
    ):
        kept = _kept(tree, backend, given)
        if kept != wanted:
            whose = "a plug-in's" if backend.is_overridden() else "upstream's"
            faults.append(f"{whose} {backend.name} turns {given} into {kept}")
    if not _is_copied(tree):
        faults.append(f"{_VARIABLE} is not copied to Ray's workers")
    return Answer.of(
        not faults, "; ".join(faults) or "the route's own class and rows, on both ways, or a stop"
    )


def _confirmed(label: str, indent: str, backend_class: str) -> Edit:
    """Asks the route table right before a chosen class is returned."""
    lines = (
        "# patch: vllm_mla_route_switch",
        "from glm_mla_route import confirm",
        "",
        "confirm(",
        "    major=device_capability.major,",
        "    config=attn_selector_config,",
        "    backend=selected_backend,",
        f"    backend_class={backend_class},",
        "    log=logger.info_once,",
        ")",
    )
    return Edit(
        label=label,
        path=_CUDA,
        scope=_CHOOSE,
        kind="insert_before",
        anchor=f"{indent}return _backend_cls_path({backend_class})\n",
        text="".join(f"{indent}{line}\n" if line else "\n" for line in lines),
    )


_EDITS = (
    _confirmed("backend by name", " " * 16, "backend_class"),
    _confirmed("backend by priority", " " * 8, "selected_backend_class"),
    Edit(
        label="plain rows",
        path=_MLA,
        scope=_CANONICAL,
        anchor=(
            '    if backend_name == "FLASHINFER_MLA_SPARSE_SM120" and kv_cache_dtype in (\n'
            '        "auto",\n'
        ),
        text=(
            "    # patch: vllm_mla_route_switch\n"
            '    is_plain = bool(getattr(attn_backend, "glm_mla_route", ""))\n'
            '    is_sm120 = backend_name == "FLASHINFER_MLA_SPARSE_SM120"\n'
            "    if is_sm120 and not is_plain and kv_cache_dtype in (\n"
            '        "auto",\n'
        ),
    ),
    Edit(
        label="route for Ray's workers",
        path=_RAY,
        kind="insert_after",
        anchor='DEFAULT_EXTRA_ENV_VARS: set[str] = {\n    "PYTHONHASHSEED",\n',
        text='    # patch: vllm_mla_route_switch\n    "GLM_MLA_ROUTE",\n',
    ),
)

PATCH = Patch(
    name="vllm_mla_route_switch",
    status="inappropriate",  # the routes are ours
    upstream="",
    origin="replaces gb10_plugin_backend of the seed recipe; the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=_EDITS,
            relies_on=(
                # How a slot is overridden, and who swallows what a plug-in's import raises.
                Symbol("vllm/v1/attention/backends/registry.py", "register_backend"),
                Symbol(
                    "vllm/v1/attention/backends/registry.py", "AttentionBackendEnum.is_overridden"
                ),
                Symbol(_PLUGINS, "load_plugins_by_group"),
                Symbol("vllm/v1/executor/ray_env_utils.py", "get_driver_env_vars"),
                # Who asks for the backend, and who for its KV type.
                Symbol("vllm/v1/attention/selector.py", "_cached_get_attn_backend"),
                Symbol(_MLA, "MLAAttention.__init__"),
            ),
        ),
    ),
    reason=Probe(
        claim="a route that is asked for can be lost on the way, or serve the wrong rows",
        check=_needed,
        paths=(_PLUGINS, _MLA, _RAY),
    ),
    effect=Probe(
        claim="capability 12 serves class and rows of the route that is asked for, or stops",
        check=_switched,
        paths=(_CUDA, _MLA, _RAY, _ROUTE),
    ),
    absorbed=Probe(
        claim="upstream stops for a plug-in that does not import, keeps the rows of its class and "
        "copies every variable",
        check=_not_needed,
        paths=(_PLUGINS, _MLA, _RAY),
    ),
    needs=("vllm_mla_sm90_on_sm12x",),
    knob="GLM_MLA_ROUTE",
)
