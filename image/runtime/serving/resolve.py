"""From the environment and the container's arguments to one frozen plan, or every problem at once.

Nothing of the machine is looked at: the same input gives the same plan anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import glm_mla_route

from serving import extra, rules, speculation
from serving.errors import KnobError, raise_all
from serving.knobs import DEPLOYMENT, Settings, read
from serving.profiles import Profile
from serving.table import KNOBS

# The cluster that the image was built with; the Dockerfile sets it.
IMAGE_CLUSTER = "IMAGEBUILD_CLUSTER"


@dataclass(frozen=True)
class Plan:
    """What is to be started.

    Attributes:
        settings: values of all knobs.
        route: the sparse-MLA route, a key of `glm_mla_route.ROUTES`.
        cluster: none, ray or mentat.
        tp: tensor parallel size over all nodes.
        speculation: mtp, dflash2, none, or a method of vLLM's that JSON asked for.
        tokens: guessed in a step; 0 without speculation.
        extra: arguments of the user's, checked.
        notices: sentences for the log.
    """

    settings: Settings
    route: str
    cluster: str
    tp: int
    speculation: str
    tokens: int
    extra: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def profile(self) -> Profile:
        """The deployment."""
        return self.settings.profile

    @property
    def nodes(self) -> int:
        """How many machines, each with one container."""
        return self.profile.nodes

    @property
    def is_ring(self) -> bool:
        """Whether the fabric has no switch."""
        return self.settings.text("TP") == "RING4"

    @property
    def local_gpus(self) -> int:
        """GPUs that this node brings."""
        return self.tp // self.nodes

    @property
    def graph_size(self) -> int:
        """Largest batch with a CUDA graph, tokens; 0: vLLM's choice."""
        size = self.settings["CUDAGRAPH_MAX_SIZE"]
        if size == "auto" and not self.settings.is_on("ENFORCE_EAGER"):
            return min(self.settings.number("MAX_NUM_SEQS") * (1 + self.tokens), 512)
        return size if isinstance(size, int) else 0


def resolve(environ: Mapping[str, str], arguments: Sequence[str] = ()) -> Plan:
    """Decides everything that can be decided without looking at the machine.

    Args:
        environ: the container's environment.
        arguments: of the container, which are further arguments of `vllm serve`.

    Raises:
        KnobError: all problems, a sentence each.
    """
    problems: list[str] = []
    settings = read(environ, KNOBS, problems)
    if environ.get(DEPLOYMENT) != settings.profile.name:
        # What contradicts what depends on it.
        raise_all(KnobError, problems)
    cluster = environ.get(IMAGE_CLUSTER) or "none"
    if cluster not in ("none", "ray", "mentat"):
        problems.append(f"{IMAGE_CLUSTER}={cluster!r}: expected none, ray or mentat")
    route, notices = _route(environ, settings, problems)
    more = (*settings.texts("EXTRA_ARGS"), *arguments)
    problems += rules.contradictions(settings, route, cluster, environ)
    problems += _speculation_problems(settings)
    problems += extra.problems(more, KNOBS.values())
    raise_all(KnobError, problems)
    return Plan(
        settings=settings,
        route=route,
        cluster=cluster,
        tp=4 if settings.text("TP") == "RING4" else int(settings.text("TP")),
        speculation=speculation.method_of(settings),
        tokens=speculation.tokens_of(settings),
        extra=more,
        notices=(*settings.notices, *notices),
    )


def _route(
    environ: Mapping[str, str], settings: Settings, problems: list[str]
) -> tuple[str, tuple[str, ...]]:
    default = settings.profile.route
    if not settings.has("MLA_ROUTE"):
        # A value that names no route is among the problems already.
        environ = {**environ, glm_mla_route.VARIABLE: ""}
    try:
        choice = glm_mla_route.choose(environ, default)
    except ValueError as error:
        problems.append(str(error))
        return default, ()
    return choice.route, (choice.notice,) if choice.notice else ()


def _speculation_problems(settings: Settings) -> list[str]:
    """What is wrong inside of the JSON, as far as the entry point relies on it."""
    config = settings["SPECULATIVE_CONFIG"]
    if not isinstance(config, dict):
        return []
    problems = []
    if not isinstance(config.get("method"), str):
        problems.append('GLM_SPECULATIVE_CONFIG: expected "method", such as "mtp"')
    tokens = config.get("num_speculative_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= 64:
        problems.append('GLM_SPECULATIVE_CONFIG: expected "num_speculative_tokens", from 1 to 64')
    return problems
