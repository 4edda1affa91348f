"""The verdict on every patch of a series for one tree: text, context and reason, in one place.

Build, audit and the finished image all call `evaluate`; it reads and computes, and writes nothing.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from imagebuild.errors import BuildError
from imagebuild.patching import text as source
from imagebuild.patching.callers import ARROW, lost_edges
from imagebuild.patching.patch import (
    Answer,
    Drop,
    GpuArch,
    Outcome,
    Patch,
    Probe,
    Symbol,
    Variant,
)
from imagebuild.patching.selection import Selection, select
from imagebuild.patching.series import Series
from imagebuild.patching.structure import NotThere
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.patching.workspace import EditReport, State, Workspace, overall

# Fingerprints by symbol (`path::scope`) of one patch on one locked base, and its recorded callers
# (`imagebuild.patching.callers`).
Fingerprints = Mapping[str, str]


class Verdict(enum.Enum):
    """What a release means for a patch."""

    OK = "ok"
    NOT_APPLICABLE = "not_applicable"
    ABSORBED = "absorbed"
    REASON_GONE = "reason_gone"
    REVIEW = "review"
    DRIFTED = "drifted"
    MOVED = "moved"
    MISSING = "missing"
    COLLISION = "collision"
    PARTIAL = "partial"
    DEFEATED = "defeated"


_GREEN = frozenset([Verdict.OK, Verdict.NOT_APPLICABLE])
_YELLOW = frozenset([Verdict.REVIEW, Verdict.ABSORBED, Verdict.REASON_GONE])
_BY_STATE = {
    State.COLLISION: Verdict.COLLISION,
    State.DRIFTED: Verdict.DRIFTED,
    State.MOVED: Verdict.MOVED,
    State.MISSING: Verdict.MISSING,
    State.PARTIAL: Verdict.PARTIAL,
}


@dataclass(frozen=True)
class Finding:
    """One thing to know about a verdict.

    Attributes:
        level: "error", "warning" or "info"; an info never changes a verdict.
        code: stable word for machines, such as "context-changed".
        message: a sentence.
        file, line: place in the tree, "" and 0 when there is none.
        fix: the next step, "" when there is none.
    """

    level: str
    code: str
    message: str
    file: str = ""
    line: int = 0
    fix: str = ""


@dataclass(frozen=True)
class Context:
    """A locked symbol and what its fingerprint is now; None when the symbol is not there."""

    symbol: Symbol
    locked: str | None
    found: str | None


@dataclass
class PatchReport:
    """The verdict on one patch, with its evidence."""

    patch: Patch
    selection: Selection
    verdict: Verdict = Verdict.OK
    declared: bool = False
    edits: list[EditReport] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    # Whether its edits are part of `Evaluation.files`.
    is_applied: bool = False

    @property
    def exit_code(self) -> int:
        """0 green or declared and proven, 1 a person must look, 3 broken."""
        if self.verdict in _GREEN or (self.declared and self.verdict is Verdict.ABSORBED):
            return 0
        return 1 if self.verdict in _YELLOW else 3

    def add(self, level: str, code: str, message: str, *, file: str = "", line: int = 0,
            fix: str = "") -> None:  # fmt: skip
        """Appends a finding."""
        self.findings.append(Finding(level, code, message, file, line, fix))


@dataclass(frozen=True)
class Evaluation:
    """What a whole series means for one tree.

    Attributes:
        reports: one a patch, in series order.
        files: content after all patches that can be applied, by path.
    """

    reports: tuple[PatchReport, ...]
    files: Mapping[str, bytes]

    @property
    def exit_code(self) -> int:
        """The gravest of the patches' codes."""
        return max((report.exit_code for report in self.reports), default=0)


def evaluate(
    series: Series,
    tree: Tree,
    gpu_arch: GpuArch | None,
    fingerprints: Callable[[str, str], Fingerprints | None],
) -> Evaluation:
    """Judges every patch of a series against a pristine tree.

    Args:
        series: the ordered claims.
        tree: pristine upstream files.
        gpu_arch: leave out patches that do not matter for it; None keeps all.
        fingerprints: (patch name, version range of its variant) -> what the lock holds for the
            base of that range which is nearest to the tree, or None.
    """
    tree.prefetch(wanted_files(series, tree, gpu_arch))
    workspace = Workspace(tree)
    reports = [_judge_text(patch, series, tree, gpu_arch, workspace) for patch in series.patches]
    for report in reports:
        if report.selection.variant and report.verdict in (Verdict.OK, Verdict.REASON_GONE):
            _judge_context(report, report.selection.variant, tree, fingerprints)
    files = workspace.changed()
    _judge_effects(reports, OverlayTree(tree, files))
    for report in reports:
        _judge_notes(report, tree)
    return Evaluation(tuple(reports), files)


def wanted_files(series: Series, tree: Tree, gpu_arch: GpuArch | None) -> list[str]:
    """The files that judging the series will read, as far as can be told before."""
    paths: set[str] = set()
    for patch in series.patches:
        selection = select(patch, tree.identity, gpu_arch)
        probes = [selection.drop.proof] if selection.drop else []
        if selection.variant:
            probes += [patch.reason, patch.effect, *([patch.absorbed] if patch.absorbed else [])]
            probes += patch.notes
            paths |= {symbol.path for symbol in contexts_of(selection.variant)}
        paths |= {path for probe in probes for path in probe.paths}
    return sorted(path for path in paths if tree.exists(path))


def contexts_of(variant: Variant) -> tuple[Symbol, ...]:
    """The scopes whose fingerprints are locked for a variant, sorted."""
    edited = {Symbol(edit.path, edit.scope) for edit in variant.edits}
    return tuple(sorted(edited | set(variant.relies_on)))


def ask(probe: Probe, tree: Tree) -> Answer:
    """Runs a probe; what keeps it from an answer is an UNKNOWN with the cause."""
    try:
        return probe.check(tree)
    except FileNotFoundError as error:
        return Answer(Outcome.UNKNOWN, f"{error} is not in the tree")
    except (NotThere, source.TextError, SyntaxError, UnicodeDecodeError) as error:
        return Answer(Outcome.UNKNOWN, str(error))
    except BuildError:
        raise
    except Exception as error:  # on a release that its author never saw, a probe may fail anyhow
        return Answer(Outcome.UNKNOWN, f"the probe itself failed: {error!r}")


def _judge_text(
    patch: Patch,
    series: Series,
    tree: Tree,
    gpu_arch: GpuArch | None,
    workspace: Workspace,
) -> PatchReport:
    """Everything that is asked before effects: range, absorption, anchors and the reason."""
    selection = select(patch, tree.identity, gpu_arch)
    report = PatchReport(patch, selection)
    if selection.drop:
        _judge_drop(report, selection.drop, tree)
        return report
    if selection.variant is None:
        report.verdict = Verdict.REVIEW if selection.is_beyond else Verdict.NOT_APPLICABLE
        level, code = ("warning", "beyond-range") if selection.is_beyond else (
            "info", "not-applicable")  # fmt: skip
        report.add(level, code, selection.why)
        return report
    if patch.absorbed:
        answer = ask(patch.absorbed, tree)
        if answer.outcome is Outcome.HOLDS:
            report.verdict = Verdict.ABSORBED
            report.add("warning", "absorbed", f"{patch.absorbed.claim}: {answer.evidence}",
                       fix="declare a drop for this range, or drop the patch")  # fmt: skip
            return report
    report.edits = workspace.run(patch, selection.variant, series.new_files(selection.variant))
    _judge_edits(report, tree)
    _judge_reason(report, tree)
    if selection.is_beyond and report.verdict is Verdict.OK:
        report.verdict = Verdict.REVIEW
        report.add("warning", "beyond-range", selection.why,
                   fix="check the release, then widen a variant or add one")  # fmt: skip
    return report


def _judge_drop(report: PatchReport, drop: Drop, tree: Tree) -> None:
    report.declared = True
    answer = ask(drop.proof, tree)
    if answer.outcome is Outcome.HOLDS:
        report.verdict = Verdict.ABSORBED
        report.add("info", "dropped", f"{drop.sentence} Proof: {answer.evidence}.")
        return
    report.verdict = Verdict.DEFEATED
    report.add("error", "drop-not-proven",
               f"declared as dropped for {drop.versions}, but the proof "
               f"{answer.outcome.value}: {answer.evidence}",
               fix="add a variant for this release, or correct the proof")  # fmt: skip


def _judge_edits(report: PatchReport, tree: Tree) -> None:
    state = overall(report.edits)
    for said, edit in _offsets(report):
        far = abs(edit.line - said)
        report.add("info", "offset", f"{edit.label!r} fits {far} lines "
                   f"{'below' if edit.line > said else 'above'} where the diff has it",
                   file=edit.path, line=edit.line)  # fmt: skip
    for edit in report.edits:
        if edit.state not in (State.PENDING, State.APPLIED):
            file = edit.candidate.path if edit.candidate else edit.path
            report.add("error", edit.state.value, f"{edit.label!r}: {edit.message}",
                       file=file, line=edit.line)  # fmt: skip
    if state is State.PENDING:
        report.is_applied = True
    elif state is State.APPLIED:
        report.verdict = Verdict.ABSORBED
        report.add("warning", "already-there",
                   "every edit's new text is already in this tree, which we did not patch",
                   fix="if upstream took the change, declare a drop; "
                   "if somebody patched the tree, start from a pristine one")  # fmt: skip
    else:
        report.verdict = _BY_STATE[state]
    if state is State.PARTIAL:
        there = ", ".join(repr(e.label) for e in report.edits if e.state is State.APPLIED)
        report.add("error", "partial", f"only a part is already in this tree: {there}",
                   fix="start from a pristine tree, or write a variant for this one")  # fmt: skip


def _offsets(report: PatchReport) -> list[tuple[int, EditReport]]:
    """Hunks that fit elsewhere than their diff says, each with the line that it says."""
    said = {
        edit.label: edit.line for one in [report.selection.variant] if one for edit in one.edits
    }
    return [
        (said[edit.label], edit)
        for edit in report.edits
        if edit.state is State.PENDING and said.get(edit.label, 0) not in (0, edit.line)
    ]


def _judge_reason(report: PatchReport, tree: Tree) -> None:
    probe = report.patch.reason
    answer = ask(probe, tree)
    if answer.outcome is Outcome.HOLDS:
        return
    if answer.outcome is Outcome.UNKNOWN:
        report.add("warning", "reason-unknown", f"cannot tell whether {probe.claim}: "
                   f"{answer.evidence}")  # fmt: skip
        if report.verdict is Verdict.OK:
            report.verdict = Verdict.REVIEW
        return
    report.add("warning", "reason-gone", f"no longer true that {probe.claim}: {answer.evidence}",
               fix="declare a drop for this range, or drop the patch")  # fmt: skip
    if report.verdict is Verdict.OK:
        report.verdict = Verdict.REASON_GONE


def _judge_context(
    report: PatchReport,
    variant: Variant,
    tree: Tree,
    fingerprints: Callable[[str, str], Fingerprints | None],
) -> None:
    locked = fingerprints(report.patch.name, variant.versions)
    report.contexts = [
        Context(symbol, (locked or {}).get(str(symbol)), fingerprint_of(tree, symbol))
        for symbol in contexts_of(variant)
    ]
    if locked is None:
        report.add("warning", "not-locked", "the lock holds no fingerprints for this patch",
                   fix="read it, then build.py lock update --base-version "
                       + tree.identity.version.partition("+")[0])  # fmt: skip
    for context in report.contexts if locked is not None else ():
        if context.found == context.locked:
            continue
        what = "is not in the tree" if context.found is None else "changed"
        what = "is not in the lock" if context.locked is None else what
        report.add("warning", "context-changed", f"{context.symbol} {what}",
                   file=context.symbol.path)  # fmt: skip
    edges = [entry for entry in locked or () if ARROW in entry]
    lost = lost_edges(tree, variant, edges)
    for symbol, caller in lost:
        report.add("warning", "caller-lost", f"{caller} no longer reaches {symbol}",
                   file=caller.partition("::")[0],
                   fix="see whether what is edited is still reached")  # fmt: skip
    changed = locked is None or bool(lost) or any(c.found != c.locked for c in report.contexts)
    if changed and report.verdict is Verdict.OK:
        report.verdict = Verdict.REVIEW


def fingerprint_of(tree: Tree, symbol: Symbol) -> str | None:
    """A symbol's fingerprint, or None when the tree has no such scope."""
    try:
        text = source.decode(tree.read(symbol.path)).text
        return source.fingerprint(text, symbol.path, symbol.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return None


def _judge_effects(reports: list[PatchReport], patched: OverlayTree) -> None:
    broken = {}
    for path, data in patched.files.items():
        if path.endswith(".py") and data is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # upstream's own, such as invalid escapes
                    compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                broken[path] = str(error)
    for report in reports:
        if not report.is_applied or report.selection.variant is None:
            continue
        mine = {edit.path for edit in report.selection.variant.edits}
        mine |= {file.path for file in report.selection.variant.files}
        for path in sorted(mine & broken.keys()):
            report.verdict = Verdict.DEFEATED
            report.add("error", "syntax", f"the patched file does not compile: {broken[path]}",
                       file=path)  # fmt: skip
        answer = ask(report.patch.effect, patched)
        if answer.outcome is not Outcome.HOLDS and not mine & broken.keys():
            report.verdict = Verdict.DEFEATED
            report.add("error", "no-effect", f"after the edits it {answer.outcome.value} that "
                       f"{report.patch.effect.claim}: {answer.evidence}")  # fmt: skip


def _judge_notes(report: PatchReport, tree: Tree) -> None:
    if report.selection.variant is None:
        return
    for note in report.patch.notes:
        answer = ask(note, tree)
        if answer.outcome is Outcome.HOLDS:
            report.add("info", "note", f"{note.claim}: {answer.evidence}")
