"""Which sparse-MLA path serves capability 12: the one truth table of GLM_MLA_ROUTE.

Imported by the patched vLLM, by the entry point and by the kernel plug-in, so it is standard
library only and imports nothing of theirs. It owns no default of a deployment: unset is stock.

A plug-in registers its backend in the slot of its route when `active_route()` names that route, and
its backend class says so in the attribute `glm_mla_route`. Rows of such a class are plain: the KV
type that the user asked for is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

VARIABLE = "GLM_MLA_ROUTE"
# The variable of the recipes before us that chose their plug-in, and one that they retired.
FORMER = "VLLM_GLM53_CUDA_SPARSE_MLA"
RETIRED = "VLLM_GLM53_NOPE_PE_PAD"
# What a backend class of a plug-in names its route in.
ATTRIBUTE = "glm_mla_route"
CAPABILITY_MAJOR = 12


class Backend(Protocol):
    """What is asked of a member of vLLM's AttentionBackendEnum."""

    @property
    def name(self) -> str: ...

    def is_overridden(self) -> bool: ...


class Config(Protocol):
    """What is asked of vLLM's AttentionSelectorConfig."""

    @property
    def use_mla(self) -> bool: ...

    @property
    def use_sparse(self) -> bool: ...


class Route(NamedTuple):
    """One path.

    Attributes:
        slot: the member of vLLM's AttentionBackendEnum that serves it.
        is_plugin: whether the class in that slot comes from a plug-in.
        text: what it is, for people.
    """

    slot: str
    is_plugin: bool
    text: str


ROUTES: Mapping[str, Route] = {
    "stock": Route(
        "FLASHINFER_MLA_SPARSE_SM120", False, "vLLM's own choice, packed rows of 656 bytes"
    ),
    "sm90": Route(
        "FLASHINFER_MLA_SPARSE_SM90", False, "the SM90 backend on FA2, plain bf16 or fp8 rows"
    ),
    "cuda": Route(
        "FLASHINFER_MLA_SPARSE_SM120", True, "the CUDA kernel of ours, plain bf16 or fp8 rows"
    ),
    "triton": Route(
        "FLASHINFER_MLA_SPARSE_SM120", True, "the portable Triton kernel, plain bf16 or fp8 rows"
    ),
}


class Choice(NamedTuple):
    """What the environment asks for.

    Attributes:
        route: a key of ROUTES.
        is_asked: False where nothing asks, so that the default holds.
        notice: a sentence for the log about a former variable, or "".
    """

    route: str
    is_asked: bool
    notice: str


def choose(environ: Mapping[str, str] | None = None, default: str = "stock") -> Choice:
    """Reads the route from the environment; empty values count as unset.

    Args:
        environ: the process environment when None.
        default: the deployment's route, for when nothing asks for one.

    Raises:
        ValueError: a value names no route, two variables contradict each other, or a retired one
            is set.
    """
    environ = os.environ if environ is None else environ
    if environ.get(RETIRED):
        raise ValueError(
            f"{RETIRED}={environ[RETIRED]!r} is not supported: no route pads the rows of this "
            f"model, which have no rope part; unset it and choose a route by {VARIABLE}"
        )
    asked = environ.get(VARIABLE, "")
    for name, value in ((VARIABLE, asked), ("the default route", default)):
        if value and value not in ROUTES:
            raise ValueError(
                f"{name}={value!r} names no route; expected one of {', '.join(ROUTES)}, or unset"
            )
    former, notice = _former(environ, asked or default)
    if asked and former and asked != former:
        raise ValueError(
            f"{VARIABLE}={asked!r} and {FORMER}={environ[FORMER]!r} contradict each other; "
            f"unset {FORMER}"
        )
    return Choice(asked or former or default, bool(asked or former), notice)


def _former(environ: Mapping[str, str], otherwise: str) -> tuple[str, str]:
    """The route that the former variable asks for, or "", and a notice about it."""
    if FORMER not in environ:
        return "", ""
    value = environ[FORMER]
    if value.lower() not in ("", "0", "false", "1", "true"):
        raise ValueError(
            f"{FORMER}={value!r} is no switch; expected 0 or 1, or rather {VARIABLE} with one of "
            f"{', '.join(ROUTES)}"
        )
    route = "cuda" if value.lower() in ("1", "true") else ""
    return route, (
        f"{FORMER}={value!r} is read as {VARIABLE}={route or otherwise}; set {VARIABLE} instead"
    )


def active_route(environ: Mapping[str, str] | None = None) -> str:
    """The route that is asked for; unset or empty means "stock".

    Raises:
        ValueError: see `choose`.
    """
    return choose(environ).route


def confirm(
    *,
    major: int,
    config: Config,
    backend: Backend,
    backend_class: type[object],
    log: Callable[[str], object],
    environ: Mapping[str, str] | None = None,
) -> None:
    """Makes sure that the attention backend that vLLM chose is that of the route, and logs it.

    Does nothing off capability 12, for attention that is not sparse MLA, and where nothing asks
    for a route.

    Args:
        major: of the device's compute capability.
        config: what the attention layer needs.
        backend: the chosen member.
        backend_class: the class that it stands for now.
        log: takes a sentence.
        environ: the process environment when None.

    Raises:
        ValueError: another backend was chosen, or see `choose`.
    """
    if major != CAPABILITY_MAJOR or not (config.use_mla and config.use_sparse):
        return
    choice = choose(environ)
    if choice.notice:
        log(choice.notice)
    if not choice.is_asked:
        return
    name, route = choice.route, ROUTES[choice.route]
    place = f"{backend_class.__module__}.{backend_class.__qualname__}"
    if backend.name == route.slot and served_by(backend_class, backend) == name:
        log(f"{VARIABLE}={name}: sparse MLA on capability 12 is {route.text} ({place})")
        return
    if route.is_plugin and backend.name == route.slot and not backend.is_overridden():
        raise ValueError(
            f"{VARIABLE}={name} needs a plug-in that has not registered its backend in this "
            "process: look for 'Failed to load plugin' above, make sure that it is installed and "
            "that VLLM_PLUGINS does not leave it out, or choose another route: "
            f"{', '.join(key for key, item in ROUTES.items() if not item.is_plugin)}"
        )
    raise ValueError(
        f"{VARIABLE}={name} asks for {route.text} in {route.slot}, but vLLM chose {backend.name} "
        f"({place}); drop --attention-backend and plug-ins of others, or change {VARIABLE}"
    )


def served_by(backend_class: type[object], backend: Backend) -> str:
    """The route that a backend class serves, or "" for one that belongs to no route."""
    declared = getattr(backend_class, ATTRIBUTE, "")
    if declared or backend.is_overridden():
        return str(declared)
    own = (key for key, route in ROUTES.items() if not route.is_plugin)
    return next((key for key in own if ROUTES[key].slot == backend.name), "")
