"""Installed projects of a site-packages folder, read from their dist-info; nothing is imported."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.7.1", "transformers (>=5.10.4,<5.18.0)".
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<range>[^()]*)\)?")
_VERSION = re.compile(
    r"(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<pre>a|b|rc)(?P<number>\d+))?"
    r"(?:\.post(?P<post>\d+))?(?:\.dev(?P<dev>\d+))?"
)
_NO_DEV = 1 << 60
_FINAL = ((3, 0), -1, _NO_DEV)
_PART = re.compile(r"(===|==|~=|!=|>=|<=|>|<)\s*(.+)")


@dataclass(frozen=True)
class Row:
    """One line of a RECORD. `digest` is "algorithm=base64", "" where the line has none."""

    path: str
    digest: str
    size: int | None


@dataclass(frozen=True)
class Distribution:
    """One installed project.

    Attributes:
        project: normalised name, such as "flashinfer-python".
        version: as its METADATA says; "" when that cannot be read.
        folder: its dist-info.
    """

    project: str
    version: str
    folder: Path

    def requirements(self) -> dict[str, str]:
        """What it requires without an extra, as the lock writes it.

        That is "2.13.0" for one exact version, else the sorted range, such as "<5.18.0,>=5.10.4".
        A project that is required in several ways (by marker) is left out.
        """
        found: dict[str, set[str]] = {}
        for value in _headers(self.folder, "Requires-Dist"):
            requirement, _, marker = value.partition(";")
            match = _REQUIREMENT.fullmatch(requirement.strip())
            if match and "extra" not in marker:
                parts = sorted(part.strip() for part in match["range"].split(","))
                exact = [part for part in parts if part.startswith("==") and "*" not in part]
                wanted = exact[0].lstrip("= ") if exact else ",".join(parts)
                found.setdefault(normalise(match["name"]), set()).add(wanted)
        return {name: wanted.pop() for name, wanted in found.items() if len(wanted) == 1}

    def rows(self) -> list[Row]:
        """Its RECORD. Raises OSError or ValueError when that cannot be read."""
        text = (self.folder / "RECORD").read_bytes().decode("utf-8")
        rows = []
        for row in csv.reader(io.StringIO(text)):
            if not row:
                continue
            path, digest, size = (*row, "", "")[:3]
            pure = PurePosixPath(path)
            # Console scripts stand outside of site-packages and are not ours to judge.
            if not pure.is_absolute() and ".." not in pure.parts:
                rows.append(Row(pure.as_posix(), digest, int(size) if size else None))
        return rows


def normalise(name: str) -> str:
    """The one spelling of a project's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_range(wanted: str) -> bool:
    """Whether a lock's pin is a range and not one version."""
    return not wanted[:1].isdigit()


def fits(version: str, wanted: str) -> bool:
    """Whether an installed version is the one, or in the range, that is wanted.

    The local part of a version (2.13.0+cu130) counts only where one is wanted.
    """
    if not is_range(wanted):
        wanted, version = wanted.lower(), version.lower()
        return wanted == (version if "+" in wanted else version.partition("+")[0])
    return all(_fits_part(version, part.strip()) for part in wanted.split(","))


def _fits_part(version: str, part: str) -> bool:
    match = _PART.fullmatch(part)
    if not match:
        return False
    operator, bound = match.groups()
    is_prefix = bound.endswith(".*")
    have, limit = _key(version), _key(bound.removesuffix(".*"))
    if have is None or limit is None:
        return False
    numbers = [int(number) for number in bound.removesuffix(".*").split(".") if number.isdigit()]
    start = tuple(numbers[: len(numbers) - (operator == "~=")])
    is_within = (*have[0], *[0] * len(start))[: len(start)] == start
    if operator in ("==", "===", "!="):
        is_equal = is_within if is_prefix else have == limit
        return is_equal != (operator == "!=")
    if operator == "~=":
        return have >= limit and is_within
    if operator in (">=", "<="):
        return have >= limit if operator == ">=" else have <= limit
    # PEP 440: "<5.18" leaves out 5.18rc1, ">5.18" leaves out 5.18.post1.
    is_same_release = have[0] == limit[0] and limit[1:] == _FINAL
    return not is_same_release and (have > limit if operator == ">" else have < limit)


def _key(version: str) -> tuple[tuple[int, ...], tuple[int, int], int, int] | None:
    """Sorts versions as their releases do: dev < a < b < rc < final < post."""
    match = _VERSION.fullmatch(version.strip().lower().partition("+")[0])
    if not match:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    order = {"a": 0, "b": 1, "rc": 2}
    dev = int(match["dev"]) if match["dev"] else None
    is_early = dev is not None and match["pre"] is None and match["post"] is None
    pre = (order[match["pre"]], int(match["number"])) if match["pre"] else (3, 0)
    post = int(match["post"]) if match["post"] else -1
    return tuple(release), (-1, 0) if is_early else pre, post, _NO_DEV if dev is None else dev


def distributions(folders: Iterable[Path]) -> dict[str, list[Distribution]]:
    """Installed projects by name, in the order of the folders."""
    found: dict[str, list[Distribution]] = {}
    for folder in folders:
        for info in sorted(folder.glob("*.dist-info")):
            name = next(iter(_headers(info, "Name")), info.name.partition("-")[0])
            version = next(iter(_headers(info, "Version")), "")
            one = Distribution(normalise(name), version, info)
            found.setdefault(one.project, []).append(one)
    return found


def _headers(folder: Path, name: str) -> list[str]:
    """Values of one header of METADATA, which end at the first empty line."""
    try:
        text = (folder / "METADATA").read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    head = text.replace("\r\n", "\n").partition("\n\n")[0]
    prefix = f"{name.lower()}:"
    return [
        line.partition(":")[2].strip()
        for line in head.split("\n")
        if line.lower().startswith(prefix)
    ]
