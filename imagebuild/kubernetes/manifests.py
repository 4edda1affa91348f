"""Renders LeaderWorkerSet manifests for a deployment whose knobs the entry point would take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import yaml

from imagebuild.errors import UsageError, raise_collected
from imagebuild.runtime import make_importable

if TYPE_CHECKING:
    from serving.resolve import Plan

_TEMPLATE = Path(__file__).with_name("manifests.yaml.j2")
_NAME = re.compile(
    r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?"
)  # source: RFC 1035 labels, with room for -0-1
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9_.-]+")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# The name that the shared RDMA device plugin's own example uses.
RDMA = "rdma/hca_shared_devices_a"
# How long a start may take in all: until then the entry point gives up by itself, and says why.
_WAITS = ("JOIN_TIMEOUT_S", "NUMERIC_CHECK_TIMEOUT_S", "LOAD_TIMEOUT_S", "SELF_TEST_TIMEOUT_S",
          *["FABRIC_CHECK_TIMEOUT_S"] * 3)  # fmt: skip
_SETTLE_S = 120
# What the manifest itself sets from the controller.
_OURS = ("GLM_DEPLOYMENT", "GLM_HEAD", "GLM_RANK", "GLM_ROLE", "GLM_PEERS", "GLM_API_KEY_FILE")


@dataclass(frozen=True)
class Wanted:
    """What is to be rendered.

    Attributes:
        deployment: such as "gb10-4x".
        image: that every rank runs.
        model_path: folder of the checkpoint on each node.
        cache_path: folder on each node for compiled kernels.
        drafter_path: folder of the DFlash2 drafter on each node; "" without it.
        name, namespace: of the objects.
        replicas: groups of ranks.
        cluster: how the image places ranks: none, ray or mentat.
        knobs: GLM_ variables.
        selector: labels that a node must have.
        rdma: resource of the device plugin for RDMA, for deployments with a fabric.
        api_key_secret: a Secret with the key `api-key`; "" for none.
    """

    deployment: str
    image: str
    model_path: str
    cache_path: str = "/var/cache/glm53"
    drafter_path: str = ""
    name: str = "glm53"
    namespace: str = "default"
    replicas: int = 1
    cluster: str = "none"
    knobs: Mapping[str, str] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    rdma: str = RDMA
    api_key_secret: str = ""


def render(wanted: Wanted, runtime: Path) -> str:
    """The manifests as YAML documents.

    Args:
        wanted: what to render.
        runtime: the folder image/runtime, whose code decides what is a good set of knobs.

    Raises:
        UsageError: a name is malformed, or the entry point would refuse the knobs; all at once.
    """
    _check(wanted)
    plan = _plan(wanted, runtime)
    settings = plan.settings
    if (plan.speculation == "dflash2") != bool(wanted.drafter_path):
        needed = "found none" if plan.speculation == "dflash2" else "which nothing uses, found one"
        raise UsageError(f"--drafter-path: speculation is {plan.speculation}; expected the "
                         f"drafter's folder with dflash2 alone, {needed}",
                         hint="or --set GLM_SPECULATION=mtp")  # fmt: skip
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=False, keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  YAML: every value goes through tojson
    )  # fmt: skip
    environment.filters["yaml"] = _yaml
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    return template.render(
        deployment=wanted.deployment,
        name=wanted.name,
        namespace=wanted.namespace,
        image=wanted.image,
        replicas=wanted.replicas,
        ranks=plan.nodes,
        gpus=plan.local_gpus,
        fabric=plan.profile.has_fabric,
        rdma=wanted.rdma if plan.profile.has_fabric else "",
        selector=dict(wanted.selector),
        # Kubernetes reads $(NAME) in a value, and $$ as one $.
        knobs={
            name: value.replace("$", "$$")
            for name, value in {"GLM_DEPLOYMENT": wanted.deployment, **wanted.knobs}.items()
        },
        start=sum(settings.number(name) for name in _WAITS) + _SETTLE_S,
        port=settings.number("API_PORT"),
        drain=settings.number("DRAIN_TIMEOUT_S"),
        model_dir=settings.text("MODEL_DIR"),
        cache_dir=settings.text("CACHE_DIR"),
        log_dir=settings.text("LOG_DIR"),
        model_path=wanted.model_path,
        cache_path=wanted.cache_path,
        drafter_dir=settings.text("DRAFTER_DIR") if wanted.drafter_path else "",
        drafter_path=wanted.drafter_path,
        api_key_secret=wanted.api_key_secret,
    )


def _check(wanted: Wanted) -> None:
    problems = [
        f"{what}: expected a name such as glm53-a, found {value!r}"
        for what, value in (("--name", wanted.name), ("--namespace", wanted.namespace))
        if not _NAME.fullmatch(value)
    ]
    if wanted.api_key_secret and not _NAME.fullmatch(wanted.api_key_secret):
        problems.append(f"--api-key-secret: expected a name, found {wanted.api_key_secret!r}")
    if not _RESOURCE.fullmatch(wanted.rdma):
        problems.append(f"--rdma: expected a resource such as {RDMA}, found {wanted.rdma!r}")
    paths = {"--model-path": wanted.model_path, "--cache-path": wanted.cache_path,
             "--drafter-path": wanted.drafter_path or "/"}  # fmt: skip
    for what, path in paths.items():
        # A hostPath with ".." is refused by Kubernetes, and only when it is applied.
        if not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
            problems.append(f"{what}: expected an absolute path on the nodes, found {path!r}")
    if not _IMAGE.fullmatch(wanted.image):
        problems.append(f"--image: expected the name of an image, found {wanted.image!r}")
    for label, value in wanted.selector.items():
        if not _LABEL.fullmatch(label) or (value and not _LABEL.fullmatch(value)) or "/" in value:
            problems.append(f"--node-label: expected a label such as gpu=gb10, found "
                            f"{f'{label}={value}'!r}")  # fmt: skip
    problems += [f"--set {name}: the manifest sets it itself" for name in _OURS
                 if name in wanted.knobs]  # fmt: skip
    problems += [f"--set {name}: expected a name that starts with GLM_" for name in wanted.knobs
                 if not name.startswith("GLM_")]  # fmt: skip
    raise_collected(UsageError, "manifests cannot be rendered", problems)


def _plan(wanted: Wanted, runtime: Path) -> Plan:
    """What the entry point would make of it, with head and rank as the controller gives them."""
    make_importable(runtime)
    from serving.errors import KnobError
    from serving.profiles import PROFILES
    from serving.resolve import IMAGE_CLUSTER, resolve

    given = {"GLM_DEPLOYMENT": wanted.deployment, **wanted.knobs, IMAGE_CLUSTER: wanted.cluster}
    profile = PROFILES.get(wanted.deployment)
    if profile is not None and profile.nodes > 1:
        given |= {"GLM_HEAD": "leader", "GLM_RANK": "0"}
    try:
        return resolve(given)
    except KnobError as error:
        raise_collected(UsageError, "the entry point would refuse these knobs", error.problems,
                        hint="docs/knobs.md has them")  # fmt: skip
        raise


def _yaml(value: Mapping[str, Any], indent: int) -> str:
    """A mapping as YAML, to stand where `indent` spaces are before it."""
    text = yaml.safe_dump(dict(value), default_flow_style=False).rstrip()
    return text.replace("\n", "\n" + " " * indent)
