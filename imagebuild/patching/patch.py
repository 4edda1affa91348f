"""What a patch is: plain frozen data with probes, no file access.

A patch is a claim with a reason. Its edits say which text changes, its fingerprints (kept in the
lock) say in which context, and its probes say why upstream still needs it and that it helps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from imagebuild.patching.tree import Tree

EditKind = Literal["replace", "insert_before", "insert_after"]
# The words of Yocto's Upstream-Status field.
Status = Literal["pending", "submitted", "backport", "denied", "inactive", "inappropriate"]
GpuArch = Literal["sm_120", "sm_121"]
GPU_ARCHES: tuple[GpuArch, ...] = ("sm_120", "sm_121")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of text inside one scope of one file.

    Attributes:
        label: names the edit inside its patch, for messages.
        path: file, relative to site-packages.
        scope: `Class.method`, a C++ function, or "" for the whole file. Anchors match only inside.
        kind: what `text` does to the anchor.
        anchor: exact upstream text, with "\\n" line ends, in whole lines wherever possible.
        text: replaces the anchor, or is put right before or right after it.
        count: how often the anchor must match inside the scope.
        line: where a unified diff says that the result begins, 0 for an edit that is none.
    """

    label: str
    path: str
    anchor: str
    text: str
    scope: str = ""
    kind: EditKind = "replace"
    count: int = 1
    line: int = 0

    @property
    def result(self) -> str:
        """What stands in the place of the anchor afterwards."""
        if self.kind == "insert_before":
            return self.text + self.anchor
        if self.kind == "insert_after":
            return self.anchor + self.text
        return self.text


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A file that the patch adds.

    Attributes:
        source: path under `image/runtime/`; absolute for a fork.
        path: destination, relative to site-packages; must not exist upstream with other content.
        replaces: SHA-256 of the upstream file whose place a fork takes; "" where there is none.
    """

    source: str
    path: str
    replaces: str = ""


@dataclass(frozen=True, order=True)
class Symbol:
    """A scope whose fingerprint is locked though it is not edited."""

    path: str
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.path}::{self.scope}" if self.scope else self.path


class Outcome(enum.Enum):
    """What a probe found: the claim holds, it does not, or the tree does not allow an answer."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """A probe's outcome with the evidence that a reader can check, as one sentence."""

    outcome: Outcome
    evidence: str

    @classmethod
    def of(cls, holds: bool, evidence: str) -> Answer:
        """HOLDS or FAILS."""
        return cls(Outcome.HOLDS if holds else Outcome.FAILS, evidence)


@dataclass(frozen=True)
class Probe:
    """A question to a tree that reads structure (AST, defaults, calls), never our own text.

    Attributes:
        claim: what is asserted, as a sentence.
        check: answers for one tree. A missing file (FileNotFoundError) or an
            `imagebuild.patching.structure.NotThere` that it raises counts as UNKNOWN.
        paths: the files that it reads, so that a remote tree can fetch them together.
    """

    claim: str
    check: Callable[[Tree], Answer] = field(repr=False)
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The shape of one patch for one range of base versions.

    Attributes:
        versions: such as ">=0.31,<0.34", closed above.
        edits: at least one edit or file.
        files: new files.
        relies_on: symbols locked beside the edited scopes, for this shape.
    """

    versions: str
    edits: tuple[Edit, ...] = ()
    files: tuple[NewFile, ...] = ()
    relies_on: tuple[Symbol, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A declared end: upstream has the fix in `versions`, and `proof` shows it there.

    Attributes:
        versions: range of base versions; open above is allowed.
        proof: an absorbed probe that must hold on the pristine tree.
        sentence: why, with the upstream reference.
    """

    versions: str
    proof: Probe
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One reason to change upstream, with as many variants as upstream has shapes.

    Attributes:
        name: `<project>_<area>_<effect>`, equal to the module's name.
        status: Upstream-Status word.
        upstream: URL of the issue or pull request, or "" when there is none.
        origin: who found the fault or wrote the first fix, and the licence of what was taken over
            (facts only: the text is ours).
        variants: ordered by version, without gaps.
        reason: holds on a pristine tree while upstream still needs the patch.
        effect: holds on the patched tree, fails on the pristine one.
        absorbed: holds on a pristine tree that has the fix; None when nothing can show it.
        drops: declared ends, by version.
        needs: patches whose output this one edits or relies on; they come first in the series.
        gpu_arches: where it matters.
        knob: runtime variable that switches it, or "" for none.
        notes: facts to report when their probe holds; they never change a verdict.
    """

    name: str
    status: Status
    upstream: str
    origin: str
    variants: tuple[Variant, ...]
    reason: Probe
    effect: Probe
    absorbed: Probe | None = None
    drops: tuple[Drop, ...] = ()
    needs: tuple[str, ...] = ()
    gpu_arches: tuple[GpuArch, ...] = GPU_ARCHES
    knob: str = ""
    notes: tuple[Probe, ...] = ()
