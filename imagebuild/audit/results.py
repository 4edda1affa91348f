"""What an audit found, as frozen data: releases, verdicts, evidence and grid. It computes little.

Reports render these and nothing else. A patch's own verdict, edits and findings are a `PatchReport`
of `imagebuild.patching.evaluate`; what is here comes on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from imagebuild.lock_check import NOT_VERIFIED
from imagebuild.patching.evaluate import Evaluation, Finding, PatchReport, Verdict
from imagebuild.patching.text import Candidate
from imagebuild.patching.tree import Identity

# Where a release was read: the package index, a wheel or folder on disk, a page of nightlies.
Origin = Literal["index", "wheel", "tree", "nightly"]


_LEVELS = ("error", "warning", "info")
_FEW = 4  # releases that a sentence names


@dataclass(frozen=True)
class TokenChange:
    """One run of tokens that changed inside a scope; comments and layout are no tokens.

    Attributes:
        old, new: the tokens before and after; one of them is empty where tokens came or went.
        old_line, new_line: 1-based line in the file of each side; 0 where that side has none.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    old_line: int
    new_line: int


@dataclass(frozen=True)
class ScopeDiff:
    """What changed in one locked scope, or in what it stands on.

    Attributes:
        symbol: `path::scope`, or the path alone.
        path, scope: its two parts.
        reference: the locked vLLM release that it is compared with.
        line: where the scope starts in this release; 0 when it is not there.
        unified: a unified diff of the text; "" when only tokens outside of it changed.
        tokens: the same by tokens: what the fingerprint counts and nothing else.
    """

    symbol: str
    path: str
    scope: str
    reference: str
    line: int
    unified: str
    tokens: tuple[TokenChange, ...] = ()


@dataclass(frozen=True)
class Near(Candidate):
    """A place that may be the one: path, line, similarity (0 to 1) and its lines, and

    Attributes:
        scope: the innermost function or class around it; "" at the top level.
        why: a clause on what is alike.
    """

    scope: str = ""
    why: str = ""


@dataclass(frozen=True)
class EditCandidates:
    """Where the text of an edit that found no anchor may be now, most alike first.

    Attributes:
        label, path, scope: of the edit.
        candidates: the places.
    """

    label: str
    path: str
    scope: str
    candidates: tuple[Near, ...]


@dataclass(frozen=True)
class Evidence:
    """What a person needs to judge one patch on one release, beside its findings."""

    scopes: tuple[ScopeDiff, ...] = ()
    candidates: tuple[EditCandidates, ...] = ()


@dataclass(frozen=True)
class PinChange:
    """A watched project of which a release requires another version than the recipe's base.

    Attributes:
        project: its name.
        locked, found: version or range; "" where there is none.
        patches: those of the series that edit this project.
    """

    project: str
    locked: str
    found: str
    patches: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Such as "flashinfer-python 0.7.0 -> 0.7.2: 1 patch edits it"."""
        text = f"{self.project} {self.locked or 'none'} -> {self.found or 'none'}"
        if not self.patches:
            return text
        count = len(self.patches)
        return f"{text}: {count} {'patch edits' if count == 1 else 'patches edit'} it"


@dataclass(frozen=True)
class Release:
    """The audit of one release.

    Attributes:
        name: what was asked for: a version, a path or a page.
        identity: what the tree says it is, or what its commit is known to be.
        pins: what it requires of the watched projects.
        changed_pins: project -> (locked, found), against the recipe's base.
        evaluation: the verdicts, one `PatchReport` a patch in series order.
        diffs: by patch and symbol, a unified diff of each changed scope.
        requests, bytes_fetched, seconds: what reading it took.
        origin: where it was read.
        pin_changes: `changed_pins` with what they touch.
        evidence: by patch, for those that are not green.
        findings: what is to be said of the release as a whole. An "error" or "warning" among them
            counts as code 1, an "info" as nothing.
    """

    name: str
    identity: Identity
    pins: Mapping[str, str]
    changed_pins: Mapping[str, tuple[str, str]]
    evaluation: Evaluation
    diffs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    requests: int = 0
    bytes_fetched: int = 0
    seconds: float = 0.0
    origin: Origin = "index"
    pin_changes: tuple[PinChange, ...] = ()
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def version(self) -> str:
        """Of the identity."""
        return self.identity.version

    @property
    def reports(self) -> tuple[PatchReport, ...]:
        """One a patch, in series order."""
        return self.evaluation.reports

    @property
    def is_for_nobody(self) -> bool:
        """Whether no patch is for this release, so that its green says nothing."""
        return all(report.verdict is Verdict.NOT_APPLICABLE for report in self.reports)

    @property
    def exit_code(self) -> int:
        """The gravest of its patches' codes and of its own findings."""
        own = any(finding.level in ("warning", "error") for finding in self.findings)
        return max(self.evaluation.exit_code, int(own))


@dataclass(frozen=True)
class Failure:
    """A release of several that could not be audited; a lone one ends the call instead."""

    name: str
    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True)
class Cell:
    """One patch on one release. `word` is the verdict, `code` its exit code, `why` one sentence."""

    verdict: Verdict
    declared: bool
    code: int
    why: str

    @property
    def word(self) -> str:
        """The verdict, marked when the recipe declares it."""
        return self.verdict.value + (" (declared)" if self.declared else "")


@dataclass(frozen=True)
class Grid:
    """Patches by releases.

    Attributes:
        columns: what names each release: its version, or its name where two share one.
        rows: per patch, in series order, one cell a column.
    """

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]


@dataclass(frozen=True)
class Step:
    """One release that a search for the first bad one looked at."""

    version: str
    cell: Cell


@dataclass(frozen=True)
class Bisection:
    """Which release first has a verdict other than green for one patch.

    Attributes:
        patch: its name.
        steps: in the order of the search.
        first_bad: the release; "" when none of them is bad.
        last_good: the last release before it; "" when the first one is bad already.
        untested: how many releases were not opened.
    """

    patch: str
    steps: tuple[Step, ...]
    first_bad: str
    last_good: str
    untested: int


@dataclass(frozen=True)
class LockNote:
    """One sentence of `lock check` on one entry. `level` is "error", "warning" or "info"."""

    level: str
    entry: str
    message: str


@dataclass(frozen=True)
class Watch:
    """What `--watch` found beside the releases that it audited.

    Attributes:
        newest_locked: the last release that the lock knows; "" when it knows none.
        newer: releases after it, oldest first.
        reported: those of `newer` that an earlier call reported, which are not audited again.
        lock: whether the base and every other entry of the lock still resolve.
        lock_code: exit code of those sentences.
    """

    newest_locked: str
    newer: tuple[str, ...]
    reported: tuple[str, ...]
    lock: tuple[LockNote, ...]
    lock_code: int

    @property
    def sentence(self) -> str:
        """Whether the entries of the lock still resolve, in one line."""
        count = {level: len({n.entry for n in self.lock if n.level == level}) for level in _LEVELS}
        unasked = len({note.entry for note in self.lock if NOT_VERIFIED in note.message})
        parts = [f"{count['error']} broken"] * bool(count["error"])
        parts += [f"{count['warning']} to look at"] * bool(count["warning"])
        parts += [f"{unasked} not verified, since nobody answered"] * bool(unasked)
        return "the lock: " + (", ".join(parts) or "every entry is as locked")


@dataclass(frozen=True)
class Audit:
    """Everything that one call found.

    Attributes:
        recipe, base_version, gpu_arch: what was audited; `gpu_arch` is "" for all.
        releases: by version.
        failures: releases that could not be read.
        requests, bytes_fetched, seconds: of the whole call. Releases are read side by side, so
            that those of one may count what another asked for meanwhile; these do not.
        bisection: of `--first-bad`.
        watch: of `--watch`.
    """

    recipe: str
    base_version: str
    gpu_arch: str
    releases: tuple[Release, ...]
    failures: tuple[Failure, ...] = ()
    requests: int = 0
    bytes_fetched: int = 0
    seconds: float = 0.0
    bisection: Bisection | None = None
    watch: Watch | None = None

    @property
    def exit_code(self) -> int:
        """The gravest code of any release, and of the lock where it was asked about."""
        codes = [release.exit_code for release in self.releases]
        codes += [failure.exit_code for failure in self.failures]
        if self.watch is not None:
            codes.append(self.watch.lock_code)
        return max(codes, default=0)

    @property
    def grid(self) -> Grid:
        """Patches by releases."""
        return grid_of(self.releases)

    @property
    def conclusion(self) -> str:
        """The last line for people: no more than what was seen."""
        if self.watch is not None and not (self.releases or self.failures):
            known = "reported before" if self.watch.newer else "none newer than the lock"
            return f"no release to report ({known}); {self.watch.sentence}"
        if self.exit_code:
            gravest = max((release.exit_code for release in self.releases), default=0)
            words = {0: "every patch fits", 1: "a person must look", 3: "broken"}
            text = words.get(gravest, "broken")
            if self.failures:
                text += f"; {_count(len(self.failures), 'release')} could not be read"
            if self.watch is not None and self.watch.lock_code:
                does = "does not hold" if self.watch.lock_code > 1 else "needs a look"
                text += f"; the lock {does}"
            return text
        idle = [release for release in self.releases if release.is_for_nobody]
        tried = [release for release in self.releases if not release.is_for_nobody]
        if self.releases and not tried:
            return f"nothing was tried: no patch is for {_names(idle, len(self.releases))}"
        notes = [f"no patch is for {_names(idle, len(self.releases))}"] if idle else []
        moved = [release for release in tried if release.changed_pins]
        if moved:
            verb = "requires" if len(moved) == 1 else "require"
            notes.append(f"{_names(moved, len(self.releases))} {verb} other versions than the "
                         "recipe's base (see pin)")  # fmt: skip
        return "; ".join(["every patch fits", *notes]) if notes else "all well"


def grid_of(releases: tuple[Release, ...]) -> Grid:
    """Patches by releases, in the order given; all must be of one series."""
    versions = [release.version for release in releases]
    columns = tuple(
        release.version if versions.count(release.version) == 1 else release.name
        for release in releases
    )
    names = [report.patch.name for report in releases[0].reports] if releases else []
    by_release = [{r.patch.name: cell_of(r) for r in release.reports} for release in releases]
    return Grid(columns, {name: tuple(cells[name] for cells in by_release) for name in names})


def cell_of(report: PatchReport) -> Cell:
    """A report as a cell; the sentence is its telling finding, else why its variant was chosen."""
    order = {"error": 0, "warning": 1}
    telling = [finding for finding in report.findings if finding.level in order]
    why = min(telling, key=lambda f: order[f.level]).message if telling else report.selection.why
    return Cell(report.verdict, report.declared, report.exit_code, why)


def _names(releases: Sequence[Release], total: int) -> str:
    """A few by name, many by number."""
    if len(releases) > _FEW:
        return f"{len(releases)} of {total} releases"
    *first, last = [release.version for release in releases]
    return f"{', '.join(first)} and {last}" if first else last


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
