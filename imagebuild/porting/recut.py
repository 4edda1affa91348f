"""Cuts a merged text into edits again: whole lines, smallest scope, anchors that match once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator

from imagebuild.patching import lexer
from imagebuild.patching import text as source
from imagebuild.patching.patch import Edit, EditKind
from imagebuild.patching.text import Span


def cut(text: str, span: Span, merged: str, model: Edit) -> tuple[Edit, ...] | None:
    """The edits that make `merged` of the text at `span`.

    Args:
        text: the whole file as it is.
        span: the part of it that was merged.
        merged: what shall stand there.
        model: gives label, path, scope and, where it can be kept, the kind.

    Returns:
        None when no anchor of whole lines tells the places apart.
    """
    old = text[span.start : span.stop].splitlines(keepends=True)
    new = merged.splitlines(keepends=True)
    changes = [
        op
        for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if op[0] != "equal"
    ]
    if model.count == 1 and changes:
        first, last = changes[0], changes[-1]
        changes = [("replace", first[1], last[2], first[3], last[4])]
    edits = []
    for number, (_tag, lo, hi, start, stop) in enumerate(changes, 1):
        label = model.label if len(changes) == 1 else f"{model.label} {number}"
        shape = dataclasses.replace(model, label=label, count=1)
        edit = _anchored(text, span, (lo, hi), "".join(new[start:stop]), shape)
        if edit is None:
            return None
        edits.append(edit)
    is_exact = applied(text, tuple(edits)) == text[: span.start] + merged + text[span.stop :]
    return tuple(edits) if is_exact else None


def _anchored(text: str, span: Span, lines: tuple[int, int], put: str, model: Edit) -> Edit | None:
    """The change of some lines of a part as an edit whose anchor is as short as can be."""
    lo, hi = lines
    old = text[span.start : span.stop].splitlines(keepends=True)
    offsets = [span.start]
    for line in old:
        offsets.append(offsets[-1] + len(line))
    for before, after in _widths(lo, len(old) - hi, is_insertion=lo == hi, kind=model.kind):
        begin, end = lo - before, hi + after
        anchor = "".join(old[begin:end])
        where = Span(offsets[begin], offsets[end])
        if lo == hi and not (before and after):
            kind: EditKind = "insert_after" if before else "insert_before"
            edit = dataclasses.replace(model, kind=kind, anchor=anchor, text=put)
        else:
            whole = "".join(old[begin:lo]) + put + "".join(old[hi:end])
            edit = dataclasses.replace(model, kind="replace", anchor=anchor, text=whole)
        edit = dataclasses.replace(edit, scope=_smallest(text, where, edit))
        if _is_sound(text, edit):
            return edit
    return None


def _widths(above: int, below: int, *, is_insertion: bool, kind: str) -> Iterator[tuple[int, int]]:
    """How many lines before and after a change to take into its anchor, shortest first."""
    if not is_insertion:
        yield 0, 0
    after_first = kind != "insert_before"
    for width in range(1, above + below + 1):
        one_sided = [(width, 0), (0, width)] if after_first else [(0, width), (width, 0)]
        mixed = [(part, width - part) for part in range(1, width)]
        for before, after in [*one_sided, *mixed]:
            if before <= above and after <= below:
                yield before, after


def _smallest(text: str, where: Span, edit: Edit) -> str:
    """The scope for an edit: its own while that holds the place, else the smallest that does."""
    found = source.scopes(text, source.language(edit.path))
    holding = [
        (spans[0].stop - spans[0].start, name)
        for name, spans in found.items()
        if len(spans) == 1 and spans[0].start <= where.start and where.stop <= spans[0].stop
    ]
    if not holding or any(name == edit.scope for _size, name in holding):
        return edit.scope
    return min(holding)[1]


def _is_sound(text: str, edit: Edit) -> bool:
    """Whether the edit matches once, and can be told apart from an applied one."""
    if not edit.anchor.strip() or not edit.text or edit.result in edit.anchor:
        return False
    if edit.result.count(edit.anchor) > 1:
        return False
    spans = source.scope_spans(text, edit.path, edit.scope)
    found = len(source.find_all(text, edit.anchor, spans))
    return found == 1 and not source.find_all(text, edit.result, spans)


def applied(text: str, edits: tuple[Edit, ...]) -> str:
    """The text after edits of one file, which must be pending in it and not overlap."""
    places = [
        (at, edit)
        for edit in edits
        for at in source.find_all(
            text, edit.anchor, source.scope_spans(text, edit.path, edit.scope)
        )
    ]
    for at, edit in sorted(places, key=lambda place: place[0], reverse=True):
        text = text[:at] + edit.result + text[at + len(edit.anchor) :]
    return text


def carried(
    edits: tuple[Edit, ...] | None, origin: Edit, text: str, model: Edit
) -> tuple[Edit, ...] | None:
    """The shortest edits of `origin` at the place of `model`, when each matches once there.

    An insertion is carried only where its author named the line that it goes by: of two neighbours
    one has changed, and nothing says which one it belongs to.
    """
    moved = [
        dataclasses.replace(
            edit, path=model.path, scope=model.scope if edit.scope == origin.scope else edit.scope
        )
        for edit in edits or ()
    ]
    try:
        is_sound = all(edit.kind in ("replace", origin.kind) and _is_sound(text, edit)
                       for edit in moved)  # fmt: skip
    except source.ScopeMissingError:
        return None
    return tuple(moved) if moved and is_sound else None


def relaid(text: str, span: Span, edit: Edit) -> Edit | None:
    """The edit for an anchor whose tokens stand there once, in other lines or another indent.

    Returns:
        None when they do not, or when the new text cannot be indented with them.
    """
    if source.language(edit.path) != "python" or edit.count != 1 or not edit.anchor.endswith("\n"):
        return None
    wanted = _tokens(edit.anchor)
    lines = text[span.start : span.stop].splitlines(keepends=True)
    found: list[tuple[int, int]] = []
    for start, line in enumerate(lines):
        if _tokens(line)[:1] != wanted[:1]:
            continue
        for stop in range(start + 1, min(len(lines), start + 4 * len(wanted)) + 1):
            tokens = _tokens("".join(lines[start:stop]))
            if tokens == wanted:
                found.append((start, stop))
            if len(tokens) >= len(wanted):
                break
    if len(found) != 1:
        return None
    anchor = "".join(lines[found[0][0] : found[0][1]])
    put = _indented(edit.text, _margin(anchor) - _margin(edit.anchor))
    if put is None or ("#" in anchor and "#" not in edit.anchor):  # a comment would be lost
        return None
    moved = dataclasses.replace(edit, anchor=anchor, text=put)
    return moved if _is_sound(text, moved) else None


def _tokens(text: str) -> list[str]:
    layout = (lexer.INDENT, lexer.DEDENT, lexer.NEWLINE)
    return [token for token in lexer.python_tokens(text) if token not in layout]


def _margin(text: str) -> int:
    line = next((line for line in text.split("\n") if line.strip()), "")
    return len(line) - len(line.lstrip(" "))


def _indented(text: str, delta: int) -> str | None:
    """The text with every line moved; None when it holds a string of several lines, or tabs."""
    if delta == 0:
        return text
    if "\t" in text or '"""' in text or "'''" in text or "\\\n" in text:
        return None
    lines = text.split("\n")
    if any(line.strip() and len(line) - len(line.lstrip(" ")) < -delta for line in lines):
        return None
    moved = (" " * delta + line if delta > 0 else line[-delta:] for line in lines)
    return "\n".join(line if line.strip() else "" for line in moved)
