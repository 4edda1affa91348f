"""Ports one edit, or one symbol, from the release it was written for to another one."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from imagebuild.patching import text as source
from imagebuild.patching.patch import Edit, Symbol
from imagebuild.patching.text import Candidate, Span
from imagebuild.patching.tree import Tree
from imagebuild.porting import place, recut
from imagebuild.porting.merge import Labels, merge3


class How(enum.Enum):
    """What became of an edit."""

    SAME = "same"  # it fits as it is
    MERGED = "merged"  # the three-way merge is free of conflicts, and was cut into anchors again
    NARROWED = "narrowed"  # the lines that it changes are untouched and alone; those beside are not
    LAID_OUT = "laid out"  # the same tokens stand there in another layout
    THERE = "there"  # upstream has the same text
    CONFLICT = "conflict"  # both sides changed the same lines
    LOST = "lost"  # nothing is surely the scope


@dataclass(frozen=True)
class PortedEdit:
    """One edit and what became of it.

    Attributes:
        edit: as it is for the release that it was written for.
        how: what became of it.
        new: the edits that take its place, in order; empty for THERE, CONFLICT and LOST.
        note: a clause on what a person should know, such as a move; "" when there is nothing.
        path, line: where it is now; "" and 0 when it is nowhere.
        conflicts: what does not merge, with markers and all three sides.
        nearest: the text most like its anchor, where nothing fits.
    """

    edit: Edit
    how: How
    new: tuple[Edit, ...] = ()
    note: str = ""
    path: str = ""
    line: int = 0
    conflicts: tuple[str, ...] = ()
    nearest: Candidate | None = None


@dataclass(frozen=True)
class Sides:
    """The two releases, each with the patches that the edit needs already in.

    Attributes:
        base: the one that the edit was written for.
        theirs: the other one.
        labels: what the sides are called in a conflict.
    """

    base: Tree
    theirs: Tree
    labels: Labels


def port_edit(edit: Edit, sides: Sides) -> PortedEdit:
    """Carries an edit over. Raises EngineError when git cannot be run."""
    try:
        before = source.decode(sides.base.read(edit.path)).text
        spans = source.scope_spans(before, edit.path, edit.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError) as error:
        return PortedEdit(edit, How.LOST, note=f"it does not fit {sides.labels.base}: {error}")
    found = source.find_all(before, edit.anchor, spans)
    if len(found) != edit.count:
        what = f"it does not fit {sides.labels.base}: its anchor is there {len(found)} times"
        return PortedEdit(edit, How.LOST, note=what)
    old = "".join(before[span.start : span.stop] for span in spans)
    now = place.find(sides.theirs, edit.path, edit.scope, old)
    if now is None:
        return _lost(edit, sides)
    moved = dataclasses.replace(edit, path=now.path, scope=now.scope)
    report = PortedEdit(edit, How.SAME, (moved,), now.note, now.path)
    matches = source.find_all(now.text, moved.anchor, (now.span,))
    done = source.find_all(now.text, moved.result, (now.span,))
    if len(matches) == edit.count and not done:
        return _at(report, now.text, matches[0])
    if len(done) == edit.count and not [at for at in matches if not _inside(at, done, moved)]:
        return _at(dataclasses.replace(report, how=How.THERE, new=()), now.text, done[0])
    return _merged(report, moved, (before, spans), now, sides)


def _inside(at: int, done: list[int], edit: Edit) -> bool:
    stop = at + len(edit.anchor)
    return any(one <= at and stop <= one + len(edit.result) for one in done)


def _merged(
    report: PortedEdit,
    edit: Edit,
    base: tuple[str, tuple[Span, ...]],
    now: place.Place,
    sides: Sides,
) -> PortedEdit:
    before, spans = base
    if len(spans) != 1:
        what = f"{edit.scope} is defined {len(spans)} times in {sides.labels.base}"
        return dataclasses.replace(report, how=How.CONFLICT, new=(), note=what)
    old = before[spans[0].start : spans[0].stop]
    ours = old
    for at in reversed(source.find_all(old, edit.anchor, (Span(0, len(old)),))):
        ours = ours[:at] + edit.result + ours[at + len(edit.anchor) :]
    theirs = now.text[now.span.start : now.span.stop]
    result = merge3(old, ours, theirs, sides.labels)
    if not result.conflicts and result.text == theirs:
        line = source.line_of(now.text, now.span.start)
        return dataclasses.replace(report, how=How.THERE, new=(), line=line)
    new = None if result.conflicts else recut.cut(now.text, now.span, result.text, edit)
    how = How.MERGED
    if new is None:
        shortest = recut.cut(before, spans[0], ours, report.edit)
        new, how = recut.carried(shortest, report.edit, now.text, edit), How.NARROWED
    if new is None:
        relaid = recut.relaid(now.text, now.span, edit)
        new, how = ((relaid,) if relaid else None), How.LAID_OUT
    if new is None:
        near = source.nearest(now.text, now.path, edit.anchor, (now.span,))
        line = near.line if near else source.line_of(now.text, now.span.start)
        note = report.note if result.conflicts else "no anchor of whole lines tells the place apart"
        return dataclasses.replace(report, how=How.CONFLICT, new=(), line=line, nearest=near,
                                   conflicts=result.conflicts, note=note)  # fmt: skip
    first = source.find_all(now.text, new[0].anchor, _spans(now.text, new[0]))
    return _at(dataclasses.replace(report, how=how, new=new), now.text, first[0])


def _spans(text: str, edit: Edit) -> tuple[Span, ...]:
    return source.scope_spans(text, edit.path, edit.scope)


def _at(report: PortedEdit, text: str, offset: int) -> PortedEdit:
    return dataclasses.replace(report, line=source.line_of(text, offset))


def _lost(edit: Edit, sides: Sides) -> PortedEdit:
    where = f"{edit.path}::{edit.scope}" if edit.scope else edit.path
    note = f"nothing in {sides.labels.theirs} is surely {where}"
    likely = []
    for path in [edit.path, *place.neighbours(sides.theirs, edit.path)]:
        try:
            text = source.decode(sides.theirs.read(path)).text
        except (FileNotFoundError, source.TextError):
            continue
        likely.append(source.nearest(text, path, edit.anchor, (Span(0, len(text)),)))
    near = max(filter(None, likely), key=lambda one: one.similarity, default=None)
    return PortedEdit(edit, How.LOST, note=note, nearest=near, line=near.line if near else 0)


@dataclass(frozen=True)
class PortedSymbol:
    """A symbol that the patch relies on; `new` is None when nothing is surely it."""

    symbol: Symbol
    new: Symbol | None
    note: str = ""


def port_symbol(symbol: Symbol, sides: Sides) -> PortedSymbol:
    """Finds what a patch relies on in the other release."""
    try:
        old = place.scope_text(sides.base, symbol.path, symbol.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        old = ""
    now = place.find(sides.theirs, symbol.path, symbol.scope, old)
    if now is None:
        if not place.is_defined(sides.theirs, symbol.path, symbol.scope):
            return PortedSymbol(symbol, None, f"{symbol} is not in {sides.labels.theirs}")
        return PortedSymbol(symbol, symbol)
    return PortedSymbol(symbol, Symbol(now.path, now.scope), now.note)
