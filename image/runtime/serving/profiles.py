"""The deployments: what a machine is, which no knob changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Profile:
    """One deployment.

    Attributes:
        name: value of GLM_DEPLOYMENT.
        text: for people.
        nodes: how many machines, each with one container.
        gpus: GPUs of a node.
        capability: compute capability of each.
        gpu_names: part of the name that nvidia-smi gives; any of them.
        gpu_memory: bytes a GPU has at least; on unified memory, of the machine.
        is_unified: GPU and host share their memory, and the machine hangs when it runs out.
        layouts: values of GLM_TP that make sense here.
        route: the sparse-MLA route unless asked otherwise.
        has_fabric: whether ranks talk over RDMA.
    """

    name: str
    text: str
    nodes: int
    gpus: int
    capability: tuple[int, int]
    gpu_names: tuple[str, ...]
    gpu_memory: int
    is_unified: bool
    layouts: tuple[str, ...]
    route: str
    has_fabric: bool

    @property
    def arch(self) -> str:
        """Such as sm_121."""
        return "sm_{}{}".format(*self.capability)


def _gb10(name: str, text: str, nodes: int, layouts: tuple[str, ...], route: str) -> Profile:
    # 121.69 GiB are seen of 128 GB; less means that something has reserved memory.
    return Profile(
        name, text, nodes, 1, (12, 1), ("GB10",), 119 * GIB, True, layouts, route, True
    )  # fmt: skip


_RTX = Profile(
    "rtx6000-4x", "one machine with four RTX PRO 6000 Blackwell", 1, 4, (12, 0),
    ("RTX PRO 6000",), 94 * GIB, False, ("4", "2"), "cuda", False,
)  # fmt: skip

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        _gb10("gb10-2x", "two GB10 (DGX Spark, ASUS GX10), one rank each", 2, ("2",), "cuda"),
        _gb10(
            "gb10-4x", "four GB10, one rank each, by a switch or in a ring", 4, ("4", "RING4"),
            "sm90",
        ),
        _RTX,
    )
}  # fmt: skip
