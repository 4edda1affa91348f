"""Finds the first release on which a patch is no longer green, by halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from imagebuild.audit.results import Bisection, Cell, Release, Step, cell_of

# Called with each step before the next one is chosen.
Told = Callable[[Step], None]


@dataclass
class _Search:
    patch: str
    look: Callable[[str], Release]
    told: Told
    releases: list[Release] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def is_bad(self, version: str) -> bool:
        found = self.look(version)
        self.releases.append(found)
        step = Step(version, self._cell(found))
        self.steps.append(step)
        self.told(step)
        return step.cell.code != 0

    def _cell(self, found: Release) -> Cell:
        return next(cell_of(r) for r in found.reports if r.patch.name == self.patch)


def first_bad(
    patch: str, versions: Sequence[str], look: Callable[[str], Release], told: Told
) -> tuple[Bisection, list[Release]]:
    """Looks at the newest, at the oldest, and then always in the middle of what is left.

    A patch that turned good again in between may hide: each release looked at is in the steps,
    and `untested` says how many were not.

    Args:
        patch: its name.
        versions: at least one, oldest first.
        look: audits one release.
        told: is shown each step.

    Returns:
        The search, and the releases that it audited.
    """
    search = _Search(patch, look, told)
    good, bad = "", ""
    if search.is_bad(versions[-1]):
        bad = versions[-1]
        low, high = 0, len(versions) - 1
        if high and search.is_bad(versions[0]):
            bad, high = versions[0], 0
        while high - low > 1:
            middle = (low + high) // 2
            if search.is_bad(versions[middle]):
                high = middle
            else:
                low = middle
        if high:
            good, bad = versions[low], versions[high]
    else:
        good = versions[-1]
    found = Bisection(patch, tuple(search.steps), bad, good, len(versions) - len(search.steps))
    return found, search.releases
