"""Remembers what an audit found on a wheel, so that asking again costs no reading and no judging.

An entry holds for one wheel by hash, and for one state of this code and of what it judges by. It
lies in the cache, which checks each entry's own hash. What cannot be read back is judged again.
"""

from __future__ import annotations

import enum
import hashlib
import json
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import imagebuild
from imagebuild.audit.results import Evidence
from imagebuild.config import Recipe
from imagebuild.errors import BuildError
from imagebuild.patching.evaluate import Context, Evaluation, Finding, PatchReport, Verdict
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series
from imagebuild.patching.tree import Identity
from imagebuild.patching.workspace import EditReport
from imagebuild.sources.cache import Cache

KIND = "audit"
# What decides a verdict besides recipe, lock and patches; the reports do not.
_CODE = ("patching", "audit", "sources", "config.py", "lock.py", "pins.py", "upstream.py")


@dataclass(frozen=True)
class Judged:
    """What was found on one release.

    Attributes:
        identity, pins, evaluation, evidence, findings: as in `Release`; the evaluation without
            files.
        others: by project, version and sha256 of the other wheels that the tree was made of.
    """

    identity: Identity
    pins: Mapping[str, str]
    evaluation: Evaluation
    evidence: Mapping[str, Evidence]
    findings: tuple[Finding, ...]
    others: Mapping[str, tuple[str, str]]


class Memory:
    """The entries of one recipe, as its files and this code are now."""

    def __init__(
        self, cache: Cache, recipe: Recipe, series: Series, gpu_arch: GpuArch | None
    ) -> None:
        self._cache = cache
        self._series = series
        self._gpu_arch = gpu_arch
        python = ".".join(map(str, sys.version_info[:3]))
        self._state = f"{_digest(_inputs(recipe))} {gpu_arch} {python}"

    def recall(self, sha256: str) -> Judged | None:
        """What is known of a vLLM wheel; None when it has to be judged."""
        try:
            packed = self._cache.get(KIND, f"{self._state} {sha256}")
            return None if packed is None else self._unpack(json.loads(packed))
        except (BuildError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def keep(self, sha256: str, judged: Judged) -> None:
        """Writes down what was found. Raises EngineError: the disk is full."""
        reports = [
            {
                "name": report.patch.name,
                "verdict": report.verdict.value,
                "declared": report.declared,
                "edits": report.edits,
                "contexts": report.contexts,
                "findings": report.findings,
                "is_applied": report.is_applied,
            }
            for report in judged.evaluation.reports
        ]
        content = {**vars(judged), "evaluation": reports}
        packed = json.dumps(content, default=_plain).encode()
        self._cache.put(KIND, f"{self._state} {sha256}", packed)

    def _unpack(self, content: Mapping[str, Any]) -> Judged:
        identity = _load(Identity, content["identity"])
        reports = tuple(self._report(one, identity) for one in content["evaluation"])
        if [report.patch.name for report in reports] != [p.name for p in self._series.patches]:
            raise ValueError("another series")
        return Judged(
            identity=identity,
            pins=_load(Mapping[str, str], content["pins"]),
            evaluation=Evaluation(reports, {}),
            evidence=_load(Mapping[str, Evidence], content["evidence"]),
            findings=_load(tuple[Finding, ...], content["findings"]),
            others=_load(Mapping[str, tuple[str, str]], content["others"]),
        )

    def _report(self, content: Mapping[str, Any], identity: Identity) -> PatchReport:
        patch = self._series.patch(content["name"])
        return PatchReport(
            patch=patch,
            selection=select(patch, identity, self._gpu_arch),
            verdict=Verdict(content["verdict"]),
            declared=bool(content["declared"]),
            edits=_load(list[EditReport], content["edits"]),
            contexts=_load(list[Context], content["contexts"]),
            findings=_load(list[Finding], content["findings"]),
            is_applied=bool(content["is_applied"]),
        )


def _inputs(recipe: Recipe) -> Iterable[Path]:
    """Every file that has a say in a verdict."""
    package = Path(imagebuild.__file__).parent
    roots = [package / name for name in _CODE]
    roots += [recipe.series_file.parent, recipe.root / "patches", recipe.patches_dir]
    roots.append(recipe.root / "image" / "runtime")
    for root in roots:
        yield from sorted(root.rglob("*")) if root.is_dir() else [root]


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file() and path.suffix not in (".pyc", ".j2", ".css", ".js"):
            content = path.read_bytes()
            digest.update(f"{path} {len(content)}\n".encode("utf-8", "surrogateescape"))
            digest.update(content)
    return digest.hexdigest()


def _plain(value: object) -> object:
    """What JSON has no word for."""
    if isinstance(value, enum.Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} cannot be written down")


def _load(kind: Any, data: Any) -> Any:  # noqa: ANN401 - a type, and what JSON made of a value
    """The value of a type that `_plain` and JSON wrote."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _load(arguments[0], data)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_load(one, item) for one, item in zip(arguments, data, strict=True))
    if origin in (tuple, list):
        return origin(_load(arguments[0], item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _load(arguments[1], item) for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _load(hints[name], item) for name, item in data.items()})
    if not isinstance(data, kind):
        raise TypeError(f"expected {kind.__name__}, found {data!r}")
    return data


def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


_HINTS: dict[Any, dict[str, Any]] = {}
