"""Version ranges over releases, without `packaging`: this runs inside the base.

A range compares the *release* a version leads to: `0.33.0rc1.dev3+g12ab` counts as 0.33.0, so
that between two ranges there is neither a gap nor an overlap. A version that a build tool made up
because it knew no tag (`0.1.dev20051+g487ecf187`) leads to no release; `is_release_known` says so,
and the caller identifies such a tree by commit or fingerprint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)(.*)", re.IGNORECASE | re.DOTALL)
_BOUND = re.compile(r"(>=|<)\s*(\d+(?:\.\d+)*)")
# setuptools-scm and its kind number from 0.1 on when they see no tag.
_UNTAGGED = re.compile(r"0\.[01](?:\.0)*\.dev\d+")


def release(version: str) -> tuple[int, ...]:
    """Release numbers without trailing zeros: "0.31.0rc1" gives (0, 31).

    Raises:
        ValueError: the text does not start with a number.
    """
    match = _VERSION.fullmatch(version.strip())
    if not match:
        raise ValueError(f"{version!r} is not a version")
    numbers = [int(part) for part in match.group(1).split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_release_known(version: str) -> bool:
    """Whether the version says which release the tree leads to; "dev" and "unknown" do not."""
    return bool(_VERSION.fullmatch(version.strip())) and not _UNTAGGED.match(version.strip())


@dataclass(frozen=True)
class VersionRange:
    """Releases from `low` up to but without `high`; `high` is None when open above."""

    low: tuple[int, ...]
    high: tuple[int, ...] | None

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Reads ">=0.31,<0.34" or ">=0.32".

        Raises:
            ValueError: anything else, or a range that holds nothing.
        """
        bounds: dict[str, tuple[int, ...]] = {}
        for part in text.split(","):
            match = _BOUND.fullmatch(part.strip())
            if not match or match.group(1) in bounds:
                raise ValueError(f"{text!r} is not a range such as '>=0.31,<0.34'")
            bounds[match.group(1)] = release(match.group(2))
        if ">=" not in bounds:
            raise ValueError(f"{text!r} has no lower bound, such as '>=0.31'")
        low, high = bounds[">="], bounds.get("<")
        if high is not None and high <= low:
            raise ValueError(f"{text!r} holds no version")
        return cls(low, high)

    def __contains__(self, version: str) -> bool:
        numbers = release(version)
        return self.low <= numbers and (self.high is None or numbers < self.high)

    def is_before(self, version: str) -> bool:
        """Whether the whole range ends before `version`."""
        return self.high is not None and release(version) >= self.high

    def is_after(self, version: str) -> bool:
        """Whether the range starts after `version`."""
        return release(version) < self.low

    def overlaps(self, other: VersionRange) -> bool:
        """Whether some release lies in both."""
        below = other.high is None or self.low < other.high
        return below and (self.high is None or other.low < self.high)
