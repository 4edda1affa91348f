"""Writes a ported variant into the source text of a patch's module.

The text is changed in place, so that all that a person wrote around it stays as it is.
"""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.errors import BrokenError, UsageError
from imagebuild.patching import unified
from imagebuild.patching.patch import Edit, NewFile, Patch, Symbol, Variant
from imagebuild.patching.series import load_series
from imagebuild.porting.port import Ported

_WIDTH = 100
_STEP = 4


@dataclass(frozen=True)
class _Source:
    """A module's text with its syntax tree."""

    text: str
    module: ast.Module

    def offset(self, line: int, column: int) -> int:
        """Character offset of a place in `ast`'s lines and UTF-8 columns."""
        lines = self.text.split("\n")
        return sum(len(one) + 1 for one in lines[: line - 1]) + len(
            lines[line - 1].encode()[:column].decode()
        )

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Where an expression stands."""
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def code(self, node: ast.expr) -> str:
        """The text of an expression."""
        start, stop = self.span(node)
        return self.text[start:stop]


def rewritten(text: str, ported: Ported) -> str:
    """The module's text with the new variant of a patch in it.

    Args:
        text: the module as it is.
        ported: has the new variant.

    Raises:
        UsageError: the module does not write its variants out one by one.
    """
    patch, old, new = ported.patch, ported.source, ported.variant
    if old is None or new is None:
        return text
    writer = _Writer(text, patch, old, new)
    if ported.left == old.versions:
        return writer.added()
    if ported.left is None and (new.edits, new.relies_on) != (old.edits, old.relies_on):
        return writer.replaced()
    shortened = writer.with_range(ported.left or new.versions)
    return shortened if ported.left is None else _Writer(shortened, patch, old, new).added()


def rewritten_diff(text: str, ported: Ported) -> str:
    """A unified diff's text for the new release, its fields kept but for Versions and Strip.

    A diff holds one variant, so the new one takes the place of the old one.
    """
    old, new = ported.source, ported.variant
    if old is None or new is None:
        return text
    if ported.is_as_it_was and ported.left is None:
        return _with_field(text, "Versions", new.versions)
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if unified.is_start(line))
    head = "\n".join(lines[:start]) + "\n"
    head = _with_field(_with_field(head, "Versions", new.versions), "Strip", "1")
    parts: list[str] = []
    for path, (before, after) in sorted(ported.texts.items()):
        sides = (before.splitlines(keepends=True), after.splitlines(keepends=True))
        parts += difflib.unified_diff(*sides, f"a/{path}", f"b/{path}")
    return head + "".join(parts)


def _with_field(text: str, name: str, value: str) -> str:
    """The text with another value for a field above a diff, where it has that field."""
    return re.sub(rf"^{name}:.*$", f"{name}: {value}", text, count=1, flags=re.MULTILINE)


class _Writer:
    """Writes one variant into a module, behind or instead of the one that it was made from."""

    def __init__(self, text: str, patch: Patch, old: Variant, new: Variant) -> None:
        self.source, self.patch, self.old, self.new = (
            _Source(text, ast.parse(text)),
            patch,
            old,
            new,
        )
        self.call = _calls(self.source, patch)[patch.variants.index(old)]
        self.names = _constants(self.source)

    def added(self) -> str:
        """The module with the new variant behind the old one."""
        text, (_start, stop) = self.source.text, self.source.span(self.call)
        return text[:stop] + ",\n" + self._code() + text[stop:]

    def replaced(self) -> str:
        """The module with the new variant in the place of the old one."""
        text, (start, stop) = self.source.text, self.source.span(self.call)
        return text[:start] + self._code().lstrip() + text[stop:]

    def with_range(self, versions: str) -> str:
        """The module with another range for the old variant."""
        value = _keyword(self.call, "versions")
        if not isinstance(value, ast.Constant):
            raise _by_hand(self.patch, "`versions` is no plain string")
        text, (start, stop) = self.source.text, self.source.span(value)
        return text[:start] + _flat(versions) + text[stop:]

    def _code(self) -> str:
        """The new variant as source; what is as in the old one is written as it is there."""
        start = self.source.span(self.call)[0]
        line = self.source.text[self.source.text.rfind("\n", 0, start) + 1 : start]
        margin = len(line) - len(line.lstrip(" "))
        pad, inner, new, old = " " * margin, margin + _STEP, self.new, self.old
        lines = [f"{pad}Variant(", f"{' ' * inner}versions={_flat(new.versions)},"]
        if new.edits:
            lines += self._edits(inner)
        if new.files:
            shown = [_file(one, self.names) for one in new.files]
            lines += self._kept("files", new.files == old.files) or _listed("files", shown, inner)
        if new.relies_on:
            shown = [_symbol(one, self.names) for one in new.relies_on]
            kept = self._kept("relies_on", new.relies_on == old.relies_on)
            lines += kept or _listed("relies_on", shown, inner)
        return "\n".join([*lines, f"{pad})"])

    def _kept(self, name: str, is_same: bool) -> list[str]:
        """A keyword as the old variant has it; nothing when it does not stand on a line's start."""
        value = _keyword(self.call, name)
        if not is_same or value is None:
            return []
        start = self.source.span(value)[0] - len(name) - 1
        pad = self.source.text[self.source.text.rfind("\n", 0, start) + 1 : start]
        return [] if pad.strip() else [f"{pad}{name}={self.source.code(value)},"]

    def _edits(self, margin: int) -> list[str]:
        if self.new.edits == self.old.edits and (kept := self._kept("edits", True)):
            return kept
        named = dict(zip(self.old.edits, self._spelled(len(self.old.edits)), strict=True))
        inner = margin + _STEP
        entries = [named.get(e) or edit_code(e, inner, self.names) for e in self.new.edits]
        return _listed("edits", entries, margin)

    def _spelled(self, count: int) -> list[str]:
        """How each edit of the old variant is named in the module; "" where it has no name."""
        value = _keyword(self.call, "edits")
        if isinstance(value, ast.Name):
            return [f"{value.id}[{index}]" for index in range(count)]
        items = value.elts if isinstance(value, ast.Tuple) else []
        if len(items) != count or any(isinstance(item, ast.Starred) for item in items):
            return [""] * count
        return [item.id if isinstance(item, ast.Name) else "" for item in items]


def _listed(name: str, entries: list[str], margin: int) -> list[str]:
    """A keyword whose value is a tuple, on one line where it fits."""
    comma = "," if len(entries) == 1 else ""
    flat = f"{' ' * margin}{name}=({', '.join(entries)}{comma}),"
    if len(flat) <= _WIDTH and "\n" not in flat:
        return [flat]
    pad = " " * margin
    inner = " " * (margin + _STEP)
    return [f"{pad}{name}=(", *(f"{inner}{entry}," for entry in entries), f"{pad}),"]


def edit_code(edit: Edit, margin: int, names: Mapping[str, str]) -> str:
    """An edit as source, without the first line's indent."""
    pad, inner = " " * margin, " " * (margin + _STEP)
    lines = ["Edit(", f"{inner}label={_flat(edit.label)},"]
    lines += [f"{inner}path={names.get(edit.path) or _flat(edit.path)},"]
    if edit.scope:
        lines += [f"{inner}scope={names.get(edit.scope) or _flat(edit.scope)},"]
    if edit.kind != "replace":
        lines += [f"{inner}kind={_flat(edit.kind)},"]
    lines += [_text("anchor", edit.anchor, inner), _text("text", edit.text, inner)]
    if edit.count != 1:
        lines += [f"{inner}count={edit.count},"]
    return "\n".join([*lines, f"{pad})"])


def _text(name: str, value: str, pad: str) -> str:
    """A keyword with a text, a literal a line."""
    flat = f"{pad}{name}={_flat(value)},"
    if len(flat) <= _WIDTH:
        return flat
    pieces = [p for line in value.splitlines(keepends=True) for p in _pieces(line, len(pad))]
    shown = "\n".join(f"{pad}    {piece}" for piece in pieces)
    return f"{pad}{name}=(\n{shown}\n{pad}),"


def _pieces(line: str, margin: int) -> Iterator[str]:
    """Literals of one line of text that fit the width, cut at spaces where there are some."""
    room = _WIDTH - margin - _STEP
    while len(_flat(line)) > room:
        cut = room - 2
        while len(_flat(line[:cut])) > room:
            cut -= 1
        space = line.rfind(" ", 1, cut)
        cut = space + 1 if space > 0 and line[:space].strip() else cut
        yield _flat(line[:cut])
        line = line[cut:]
    yield _flat(line)


def _flat(value: str) -> str:
    """A literal with the quotes that need fewer escapes, as formatters write it."""
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in escaped)
    quote = "'" if value.count('"') > value.count("'") else '"'
    return quote + escaped.replace(quote, "\\" + quote) + quote


def _symbol(symbol: Symbol, names: Mapping[str, str]) -> str:
    path = names.get(symbol.path) or _flat(symbol.path)
    if not symbol.scope:
        return f"Symbol({path})"
    return f"Symbol({path}, {names.get(symbol.scope) or _flat(symbol.scope)})"


def _file(file: NewFile, names: Mapping[str, str]) -> str:
    source, path = (names.get(one) or _flat(one) for one in (file.source, file.path))
    return f"NewFile(source={source}, path={path})"


def _constants(source: _Source) -> dict[str, str]:
    """The module's own names for strings, by string."""
    found: dict[str, str] = {}
    for node in source.module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.targets[0]
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                found.setdefault(node.value.value, target.id)
    return found


def _calls(source: _Source, patch: Patch) -> list[ast.Call]:
    """The call that makes each variant. Raises UsageError."""
    for node in source.module.body:
        is_patch = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "PATCH" for target in node.targets
        )
        if is_patch and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            value = _keyword(node.value, "variants")
            items = value.elts if isinstance(value, ast.Tuple) else []
            calls = [item for item in items if isinstance(item, ast.Call)]
            if len(calls) == len(items) == len(patch.variants):
                return calls
    raise _by_hand(patch, "`variants` is no tuple of Variant(...)")


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


def _by_hand(patch: Patch, why: str) -> UsageError:
    return UsageError(f"{patch.name}: the module cannot be changed in place: {why}",
                      hint="call it without --write and put the variant in by hand")  # fmt: skip


def require_same(series_file: Path, patches: Path, runtime: Path, new: Mapping[str, str],
                 wanted: Mapping[str, Patch]) -> None:  # fmt: skip
    """Loads the series with changed files, and compares what they say with what is wanted.

    Args:
        series_file: of the recipe.
        patches: its folder of them.
        runtime: where new files come from.
        new: the text of each changed file of `patches`, by its name.
        wanted: the patches whose variants they must hold, by name.

    Raises:
        BrokenError: they say something else: nothing may be written.
        UsageError: the series is malformed with them.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / patches.name
        shutil.copytree(patches, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in new.items():
            (copy / name).write_text(text, "utf-8")
        loaded = load_series(series_file, copy, runtime)
        wrong = [n for n, patch in wanted.items() if _said(loaded.patch(n)) != _said(patch)]
    if wrong:
        raise BrokenError(f"{wrong[0]}: expected its module to say the ported variant after the "
                          "change, found another; nothing was written")  # fmt: skip


def _said(patch: Patch) -> list[Variant] | list[tuple[str, list[str]]]:
    """What a patch's file says: its variants; of a diff the files, since hunks are cut by lines."""
    if not any(edit.line for variant in patch.variants for edit in variant.edits):
        return list(patch.variants)
    return [(v.versions, sorted({edit.path for edit in v.edits})) for v in patch.variants[-1:]]
