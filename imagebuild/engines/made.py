"""What was built, as the documents beside a result need it: one description for every engine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.files import write_atomically
from imagebuild.lock import BaseLock
from imagebuild.patching.patch import Edit, GpuArch, Patch, Variant
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series
from imagebuild.patching.tree import Identity
from imagebuild.pins import DebPin

SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"
DOCUMENTS = (SBOM, PROVENANCE)


@dataclass(frozen=True, kw_only=True)
class Made:
    """One result. Nothing in it depends on when, where or by whom it was built.

    Attributes:
        engine: "tree" or "docker".
        gpu_arches: that it is for.
        subjects: hex SHA-256 of each thing that was made, by name; the first is the whole.
        base_image: reference and digest of the image below; "" for one that nobody has named.
        inputs: what else decided the result, by name: digests and choices.
        sources: commits that were compiled, as "URL#COMMIT", by name.
        debs: .deb files that were installed from the lock.
        revision: commit of this project; "" where it is unknown or does not decide.
    """

    recipe: Recipe
    base: BaseLock
    series: Series
    engine: str
    gpu_arches: tuple[GpuArch, ...]
    subjects: Mapping[str, str]
    base_image: tuple[str, str] = ("", "")
    inputs: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    debs: tuple[DebPin, ...] = ()
    revision: str = ""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the whole."""
        return next(iter(self.subjects.values()))

    @property
    def platforms(self) -> tuple[str, ...]:
        """Docker's words for the targets."""
        return tuple(self.recipe.platform(arch) for arch in self.gpu_arches)

    def applied(self) -> Iterator[tuple[Patch, Variant]]:
        """The patches that are in it, each in the shape that this base gets."""
        identity = Identity(self.base.version, self.base.commit, "lock")
        for patch in self.series.patches:
            chosen = (select(patch, identity, arch).variant for arch in self.gpu_arches)
            variant = next((one for one in chosen if one is not None), None)
            if variant is not None:
                yield patch, variant

    def wheels(self) -> Iterator[tuple[str, str, str]]:
        """Project, file name and hex SHA-256 of each wheel, every one once."""
        known = set()
        for project in self.recipe.site:
            for platform in self.platforms:
                pin = self.base.wheel(project, platform)
                if pin.sha256 not in known:
                    known.add(pin.sha256)
                    yield project, pin.filename, pin.sha256


def commit_of(source: str) -> tuple[str, str]:
    """URL and commit of "URL#COMMIT"; an empty commit where there is none."""
    url, _, commit = source.partition("#")
    return url, commit if re.fullmatch(r"[0-9a-f]{40}", commit) else ""


def packages_of(variant: Variant) -> set[str]:
    """Top-level packages that a variant writes to."""
    paths = [edit.path for edit in variant.edits] + [file.path for file in variant.files]
    return {path.partition("/")[0] for path in paths}


def diff(series: Series, variant: Variant) -> str:
    """A variant as a unified diff.

    Line numbers count from the start of each edit's anchor, since an anchor may stand anywhere in
    its scope; the scope is named after the second "@@".
    """
    lines: list[str] = []
    for edit in variant.edits:
        lines += _hunks(edit)
    for path, data in sorted(series.new_files(variant).items()):
        text = data.decode("utf-8", "backslashreplace")
        lines += difflib.unified_diff([], text.splitlines(), "/dev/null", f"b/{path}", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _hunks(edit: Edit) -> Iterator[str]:
    found = difflib.unified_diff(edit.anchor.splitlines(), edit.result.splitlines(),
                                 f"a/{edit.path}", f"b/{edit.path}", lineterm="")  # fmt: skip
    for line in found:
        is_head = line.startswith("@@ ") and line.endswith(" @@") and edit.scope
        yield f"{line} {edit.scope}" if is_head else line


def write_documents(folder: Path, made: Made) -> None:
    """Writes the bill of materials and the provenance into a folder."""
    # Imported here: the library costs half a second, and most calls write nothing.
    from imagebuild.engines.provenance import provenance
    from imagebuild.engines.sbom import sbom

    write_atomically(folder / SBOM, sbom(made))
    write_atomically(folder / PROVENANCE, provenance(made))
