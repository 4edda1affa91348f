"""Edits applied in memory, one patch after the other, with who wrote which characters.

It turns each edit into a state (pending, applied, drifted, moved, missing, collision) and says
where the nearest text is. It writes nothing and knows nothing of versions, locks or probes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from imagebuild.patching import text as source
from imagebuild.patching.patch import Edit, Patch, Variant
from imagebuild.patching.text import Candidate, Span
from imagebuild.patching.tree import Tree


class State(enum.Enum):
    """What one edit, or a whole patch, is on one tree. The order is that of gravity."""

    PENDING = "pending"
    APPLIED = "applied"
    PARTIAL = "partial"
    COLLISION = "collision"
    DRIFTED = "drifted"
    MOVED = "moved"
    MISSING = "missing"


_GRAVITY = {state: rank for rank, state in enumerate(State)}


@dataclass(frozen=True)
class EditReport:
    """What one edit found.

    Attributes:
        label, path, scope: of the edit.
        state: see `State`; never PARTIAL.
        line: 1-based line of the first match or the nearest text; 0 when there is neither.
        message: a sentence for every state but PENDING.
        candidate: the nearest text, for DRIFTED, MOVED and MISSING.
    """

    label: str
    path: str
    scope: str
    state: State
    line: int = 0
    message: str = ""
    candidate: Candidate | None = None


@dataclass(frozen=True)
class _Output:
    """Characters of the current text that a patch wrote."""

    span: Span
    patch: str


@dataclass
class _File:
    pristine: source.SourceText
    current: str
    outputs: list[_Output] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """Where an edit of an earlier patch matched in the pristine text."""

    path: str
    span: Span
    patch: str


@dataclass(frozen=True)
class _Seen:
    """What an edit found in its scope."""

    spans: tuple[Span, ...]
    found: list[Span]
    done: list[Span]


class Workspace:
    """The files of one pristine tree, while a series is applied to them."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._files: dict[str, _File] = {}
        self._places: list[_Place] = []
        self._new_files: dict[str, tuple[bytes, str]] = {}

    def changed(self) -> dict[str, bytes]:
        """Content of every file that an edit changed or a patch added."""
        files = {
            path: file.pristine.encode(file.current)
            for path, file in self._files.items()
            if file.outputs
        }
        return files | {path: data for path, (data, _patch) in self._new_files.items()}

    def run(self, patch: Patch, variant: Variant, new_files: dict[str, bytes]) -> list[EditReport]:
        """Tries every edit of one patch; keeps the result only when all of them are pending.

        Args:
            patch: the claim whose edits these are.
            variant: the shape to try.
            new_files: content for each of `variant.files`, by destination.
        """
        before = {edit.path: self._snapshot(edit.path) for edit in variant.edits}
        places = len(self._places)
        reports = [self._try(edit, patch) for edit in variant.edits]
        replaced = {file.path: file.replaces for file in variant.files}
        reports += [
            self._try_file(path, data, patch, replaced.get(path, ""))
            for path, data in new_files.items()
        ]
        if any(report.state is not State.PENDING for report in reports):
            for path, snapshot in before.items():
                self._restore(path, snapshot)
            del self._places[places:]
            for path in new_files:
                if self._new_files.get(path, (b"", ""))[1] == patch.name:
                    del self._new_files[path]
        return reports

    def _snapshot(self, path: str) -> tuple[str, list[_Output]] | None:
        file = self._load(path)
        return (file.current, list(file.outputs)) if file else None

    def _restore(self, path: str, snapshot: tuple[str, list[_Output]] | None) -> None:
        if snapshot:
            self._files[path].current, self._files[path].outputs = snapshot

    def _load(self, path: str) -> _File | None:
        """The file as edited so far; None when it is absent or no text."""
        if path not in self._files:
            try:
                text = source.decode(self.tree.read(path))
            except (FileNotFoundError, source.TextError):
                return None
            self._files[path] = _File(text, text.text)
        return self._files[path]

    def _try_file(self, path: str, data: bytes, patch: Patch, replaces: str) -> EditReport:
        report = EditReport("new file", path, "", State.PENDING)
        if path in self._new_files:
            other = self._new_files[path][1]
            return _but(report, State.COLLISION, f"{path} is also added by {other}")
        if self.tree.exists(path):
            known = self.tree.read(path)
            if known == data:
                return _but(report, State.APPLIED, f"{path} is there with the same content")
            what = f"{path} exists upstream with other content"
            if hashlib.sha256(known).hexdigest() != replaces:
                more = " than what was forked" if replaces else ""
                return _but(report, State.DRIFTED, what + more)
            file = self._files.get(path)
            if file and file.outputs:
                return _but(report, State.COLLISION, f"{path} is edited by {file.outputs[0].patch}")
        self._new_files[path] = (data, patch.name)
        return report

    def _try(self, edit: Edit, patch: Patch) -> EditReport:
        report = EditReport(edit.label, edit.path, edit.scope, State.PENDING)
        if edit.path in self._new_files:
            other = self._new_files[edit.path][1]
            return _but(report, State.COLLISION, f"{edit.path} is a whole file of {other}")
        file = self._load(edit.path)
        if file is None:
            return self._unreadable(edit, report)
        try:
            seen = _look(edit, file.current)
        except (source.TextError, source.ScopeMissingError) as error:
            return self._scopeless(edit, patch, file, error, report)
        if len(seen.found) == edit.count and not seen.done:
            return self._write(edit, patch, file, seen.found, report)
        culprit = self._culprit(edit, patch, file)
        if culprit:
            return _but(report, State.COLLISION, _changed_by(culprit))
        if len(seen.done) == edit.count and not seen.found:
            line = source.line_of(file.current, seen.done[0].start)
            return _but(report, State.APPLIED, "the new text is already there", line)
        return _mismatch(edit, file, seen, report)

    def _scopeless(
        self, edit: Edit, patch: Patch, file: _File, error: Exception, report: EditReport
    ) -> EditReport:
        """Reports an edit whose scope cannot be told from the current text."""
        culprit = self._culprit(edit, patch, file)
        if culprit:
            return _but(report, State.COLLISION, _changed_by(culprit))
        if isinstance(error, source.ScopeMissingError):
            return self._elsewhere(edit, report, f"{edit.path} has no {edit.scope}")
        near = source.nearest(file.current, edit.path, edit.anchor, _whole(file.current))
        what = f"{edit.path} {error}{_closest(near)}"
        return _but(report, State.DRIFTED, what, near.line if near else 0, near)

    def _write(
        self, edit: Edit, patch: Patch, file: _File, found: list[Span], report: EditReport
    ) -> EditReport:
        line = source.line_of(file.current, found[0].start)
        mine = self._pristine_spans(edit, file)
        for place in self._places:
            clash = place.path == edit.path and any(place.span.overlaps(span) for span in mine)
            if clash and place.patch not in patch.needs:
                what = "another edit of this patch has the same text"
                if place.patch != patch.name:
                    what = f"{place.patch} edits the same text, and is not in `needs`"
                return _but(report, State.COLLISION, what, line)
        for output in file.outputs:
            clash = any(output.span.overlaps(span) for span in found)
            if clash and output.patch not in patch.needs:
                what = "the anchor lies in text that another edit of this patch wrote"
                if output.patch != patch.name:
                    what = f"the anchor lies in text of {output.patch}, which is not in `needs`"
                return _but(report, State.COLLISION, what, line)
        self._places += [_Place(edit.path, span, patch.name) for span in mine]
        for span in reversed(found):
            file.current = file.current[: span.start] + edit.result + file.current[span.stop :]
            file.outputs = [
                *_moved(file.outputs, span, edit),
                _Output(_written(span, edit), patch.name),
            ]
        return EditReport(edit.label, edit.path, edit.scope, State.PENDING, line)

    def _culprit(self, edit: Edit, patch: Patch, file: _File) -> str:
        """An earlier patch that keeps the edit from matching; "" when upstream's text does."""
        others = {output.patch for output in file.outputs} - {*patch.needs, patch.name}
        wanted = self._pristine_spans(edit, file)
        if not others or len(wanted) != edit.count:
            return ""
        for place in self._places:
            same = place.path == edit.path and place.patch in others
            if same and any(place.span.overlaps(span) for span in wanted):
                return place.patch
        return min(others)

    def _pristine_spans(self, edit: Edit, file: _File) -> list[Span]:
        """Where the edit matches in the untouched file; nowhere unless it is pending there."""
        try:
            seen = _look(edit, file.pristine.text)
        except (source.ScopeMissingError, source.TextError):
            return []
        return [] if seen.done else seen.found

    def _unreadable(self, edit: Edit, report: EditReport) -> EditReport:
        if not self.tree.exists(edit.path):
            return self._elsewhere(edit, report, f"{edit.path} does not exist")
        try:
            source.decode(self.tree.read(edit.path))
        except source.TextError as error:
            return _but(report, State.DRIFTED, f"{edit.path} {error}")
        return _but(report, State.DRIFTED, f"{edit.path} cannot be read")

    def _elsewhere(self, edit: Edit, report: EditReport, why: str) -> EditReport:
        """Looks for a scope that is not where it should be: MOVED when found, else MISSING."""
        files = [(path, text) for path, text in self._neighbours(edit.path) if _parses(path, text)]
        # The scope's own name says more than its text, which may stand in another function too.
        for path, text in files if edit.scope else ():
            spans = source.scopes(text, source.language(path)).get(edit.scope, ())
            if path != edit.path and spans:
                found = _occurrences(text, edit.anchor, spans)
                near = source.nearest(text, path, edit.anchor, spans)
                line = source.line_of(text, found[0].start if found else spans[0].start)
                named = "its anchor" if found else edit.scope
                what = f"{why}; {named} stands at {path}:{line}"
                return _but(report, State.MOVED, what, line, near)
        for path, text in files:
            whole = _occurrences(text, edit.anchor, _whole(text))
            if len(whole) == edit.count:
                line = source.line_of(text, whole[0].start)
                moved = Candidate(path, line, 1.0, edit.anchor)
                what = f"{why}; its anchor stands at {path}:{line}"
                return _but(report, State.MOVED, what, line, moved)
        likely = (source.nearest(text, path, edit.anchor, _whole(text)) for path, text in files)
        best = max(filter(None, likely), key=lambda near: near.similarity, default=None)
        at = f"; closest text is at {best.path}:{best.line}" if best else ""
        return _but(report, State.MISSING, f"{why}{at}", best.line if best else 0, best)

    def _neighbours(self, path: str) -> Iterator[tuple[str, str]]:
        """Files where a scope that left `path` may be: itself, its folder, its namesakes."""
        folder, _, name = path.rpartition("/")
        suffix = name[name.rfind(".") :]
        top = path.partition("/")[0] + "/"
        beside = [p for p in self.tree.iter(folder + "/") if p.endswith(suffix)]
        beside = [p for p in beside if "/" not in p[len(folder) + 1 :]]
        namesakes = [p for p in self.tree.iter(top) if p.endswith("/" + name)]
        paths = list(dict.fromkeys([path, *namesakes, *beside]))
        self.tree.prefetch(p for p in paths if self.tree.exists(p))
        for candidate in paths:
            file = self._load(candidate)
            if file:
                yield candidate, file.current


def overall(reports: list[EditReport]) -> State:
    """The state of a patch whose edits have these."""
    states = {report.state for report in reports}
    if states == {State.PENDING, State.APPLIED}:
        return State.PARTIAL
    return max(states, key=lambda state: _GRAVITY[state], default=State.PENDING)


def _but(
    report: EditReport,
    state: State,
    message: str,
    line: int = 0,
    candidate: Candidate | None = None,
) -> EditReport:
    return EditReport(report.label, report.path, report.scope, state, line, message, candidate)


def _look(edit: Edit, text: str) -> _Seen:
    """Finds an edit's anchor and result. Raises TextError and ScopeMissingError."""
    spans = source.scope_spans(text, edit.path, edit.scope)
    done = _occurrences(text, edit.result, spans)
    found = [
        span
        for span in _occurrences(text, edit.anchor, spans)
        if not any(span.start >= one.start and span.stop <= one.stop for one in done)
    ]
    return _Seen(spans, found, done)


def _mismatch(edit: Edit, file: _File, seen: _Seen, report: EditReport) -> EditReport:
    """Names the kind of an edit that is neither pending nor applied."""
    spans, found, done = seen.spans, seen.found, seen.done
    counted = f"expected the anchor {_times(edit.count)}, found it {_times(len(found))}"
    if done:
        counted += f" and the new text {_times(len(done))}"
    where = edit.scope or edit.path
    near = source.nearest(file.current, edit.path, edit.anchor, spans)
    if found:
        lines = ", ".join(str(source.line_of(file.current, span.start)) for span in found)
        return _but(report, State.DRIFTED, f"{counted} in {where} (lines {lines})",
                    source.line_of(file.current, found[0].start), near)  # fmt: skip
    outside = _occurrences(file.current, edit.anchor, _whole(file.current))
    if len(outside) == edit.count and not done:
        line = source.line_of(file.current, outside[0].start)
        moved = Candidate(edit.path, line, 1.0, edit.anchor)
        what = f"{counted} in {where}; it stands outside of it, at line {line}"
        return _but(report, State.MOVED, what, line, moved)
    return _but(report, State.DRIFTED, f"{counted} in {where}{_closest(near)}",
                near.line if near else 0, near)  # fmt: skip


def _changed_by(culprit: str) -> str:
    return f"{culprit} changes the same text, and is not in `needs`"


def _closest(near: Candidate | None) -> str:
    return f"; closest text is at line {near.line}" if near else ""


def _parses(path: str, text: str) -> bool:
    try:
        source.scopes(text, source.language(path))
    except source.TextError:
        return False
    return True


def _occurrences(text: str, needle: str, spans: tuple[Span, ...]) -> list[Span]:
    return [Span(at, at + len(needle)) for at in source.find_all(text, needle, spans)]


def _whole(text: str) -> tuple[Span, ...]:
    return (Span(0, len(text)),)


def _written(span: Span, edit: Edit) -> Span:
    """The characters that are ours after `span` became `edit.result`: not an insertion's anchor."""
    start = span.start + (len(edit.anchor) if edit.kind == "insert_after" else 0)
    return Span(start, start + len(edit.text))


def _moved(outputs: list[_Output], span: Span, edit: Edit) -> list[_Output]:
    """Earlier outputs after the text at `span` changed its length."""
    delta = len(edit.result) - (span.stop - span.start)

    def shift(output: _Output) -> _Output:
        start, stop = output.span.start, output.span.stop
        if stop <= span.start:
            return output
        if start >= span.stop:
            return _Output(Span(start + delta, stop + delta), output.patch)
        return _Output(Span(min(start, span.start), max(stop, span.stop) + delta), output.patch)

    return [shift(output) for output in outputs]


def _times(count: int) -> str:
    return {0: "0 times", 1: "once", 2: "twice"}.get(count, f"{count} times")
