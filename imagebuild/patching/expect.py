"""What a series relies on upstream to have fixed: data that verify asserts on the finished tree."""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.patching.patch import Probe


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A fault that upstream has fixed, and whose fix must really be in the base.

    Attributes:
        name: what is asserted, `<project>_<area>_<effect>`.
        upstream: the pull request or issue, as `vllm#58720`.
        since: first release that has it, such as "0.31".
        probe: holds on every tree from `since` on.
    """

    name: str
    upstream: str
    since: str
    probe: Probe
