"""Unified diffs as patches: fuzz is 0, an offset is reported. Standard library only.

A hunk becomes one edit whose anchor is all of its old lines. The fields above the diff, as in
Debian's DEP-3, say what a module's docstring would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from imagebuild.errors import UsageError
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Status, Variant
from imagebuild.patching.tree import Tree

SUFFIX = ".patch"
_FIELD = re.compile(r"(?P<name>[A-Z][A-Za-z-]*):\s*(?P<value>.*)")
_HUNK = re.compile(r"@@ -\d+(?:,(?P<old>\d+))? \+(?P<line>\d+)(?:,(?P<new>\d+))? @@.*")
_NEEDED = ("Subject", "Symptom", "Versions", "Drop-When")
# Other names of the same fields; source: DEP-3.
_ALIASES = {"Description": "Subject", "Bug": "Upstream", "Forwarded": "Upstream", "From": "Origin",
            "Author": "Origin", "Status": "Upstream-Status"}  # fmt: skip
# What git says of a file that is more than an edit.
_NO_EDIT = {
    "new file mode": "adds a file: name it in a module's `files`",
    "deleted file mode": "deletes a file",
    "rename from": "renames a file",
    "copy from": "copies a file",
    "GIT binary patch": "is binary",
    "Binary files": "is binary",
    "new mode": "changes permissions",
}
_DOC = """{subject}

Symptom: {symptom}
Cause: {cause}
Change: that of the diff.
Upstream: {upstream}
Drop when: {drop}
Cost: {cost}
"""


@dataclass(frozen=True)
class Diff:
    """A diff as it stands in its file.

    Attributes:
        path: the file.
        name: without the suffix.
        fields: above the diff, by DEP-3's name.
        edits: one a hunk, in order.
    """

    path: Path
    name: str
    fields: Mapping[str, str]
    edits: tuple[Edit, ...]

    @property
    def targets(self) -> frozenset[str]:
        """The files that it changes."""
        return frozenset(edit.path for edit in self.edits)

    @property
    def needs(self) -> tuple[str, ...]:
        """What the field Needs names."""
        return tuple(self.fields.get("Needs", "").replace(",", " ").split())


def read_diff(path: Path) -> Diff:
    """Reads a diff with its fields.

    Raises:
        UsageError: it is no such file, lacks a field, or holds more than edits of text.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: expected a diff, found: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected UTF-8, found byte {error.start}") from error
    if "\r" in text:
        raise UsageError(f"{path}: expected lines that end with \\n; a target's own are kept")
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if is_start(line)), len(lines))
    fields = _fields(lines[:start])
    lacking = [name for name in _NEEDED if not fields.get(name)]
    if lacking:
        raise UsageError(f"{path}: expected the fields {', '.join(_NEEDED)} above the diff, found "
                         f"no {', '.join(lacking)}", hint="docs/bring-your-own.md")  # fmt: skip
    if fields.get("Upstream-Status", "pending") not in get_args(Status):
        raise UsageError(f"{path}: Upstream-Status: expected one of {', '.join(get_args(Status))}, "
                         f"found {fields['Upstream-Status']!r}")  # fmt: skip
    strip = fields.get("Strip", "1")
    if not strip.isdigit():
        raise UsageError(f"{path}: Strip: expected how many leading folders go, found {strip!r}")
    edits = tuple(_edits(path, lines, start, int(strip)))
    if not edits:
        raise UsageError(f"{path}: expected a unified diff, found no hunk")
    return Diff(path, path.name.removesuffix(SUFFIX), fields, edits)


def is_start(line: str) -> bool:
    """Whether the diff begins with this line, and the fields end above it."""
    return line.startswith(("--- ", "diff ", "Index: "))


def _fields(lines: list[str]) -> dict[str, str]:
    """The fields of a header; a line that starts with white space goes on with the last one."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match:
            name = _ALIASES.get(match["name"], match["name"])
            found.setdefault(name, match["value"].strip())
        elif line[:1].isspace() and name:
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def _edits(path: Path, lines: list[str], start: int, strip: int) -> Iterator[Edit]:
    at, target, number = start, "", 0
    while at < len(lines):
        line = lines[at]
        why = next((why for sign, why in _NO_EDIT.items() if line.startswith(sign)), "")
        if why:
            raise UsageError(f"{path}:{at + 1}: expected edits of text, found a part that {why}")
        if line.startswith("--- ") and lines[at + 1 : at + 2] and lines[at + 1].startswith("+++ "):
            target, number, at = _target(path, at, lines, strip), 0, at + 2
        elif match := _HUNK.fullmatch(line):
            number += 1
            if not target:
                raise UsageError(f"{path}:{at + 1}: expected ---/+++ lines before a hunk")
            old, new, at = _body(path, lines, at, match)
            anchor, put = "".join(old), "".join(new)
            yield Edit(label=f"{target} hunk {number}", path=target, anchor=anchor, text=put,
                       line=int(match["line"]))  # fmt: skip
        else:
            at += 1


def _target(path: Path, at: int, lines: list[str], strip: int) -> str:
    """The changed file, without the leading folders. Raises UsageError."""
    old, new = (line[4:].split("\t")[0].strip() for line in lines[at : at + 2])
    if "/dev/null" in (old, new):
        raise UsageError(f"{path}:{at + 1}: expected edits of text, found a part that "
                         "adds or deletes a file: name new ones in a module's `files`")  # fmt: skip
    parts = new.split("/")[strip:]
    if not parts:
        raise UsageError(f"{path}:{at + 2}: nothing is left of {new!r} without its first {strip} "
                         "folders", hint="set the field Strip")  # fmt: skip
    return "/".join(parts)


def _body(
    path: Path, lines: list[str], at: int, hunk: re.Match[str]
) -> tuple[list[str], list[str], int]:
    """Old and new lines of the hunk at `at`, and where it ends. Raises UsageError."""
    wanted = [int(hunk[side]) if hunk[side] is not None else 1 for side in ("old", "new")]
    old: list[str] = []
    new: list[str] = []
    first = at
    while [len(old), len(new)] != wanted:
        at += 1
        line = lines[at] if at < len(lines) else None
        # An editor may have taken the space of an empty context line away.
        sign = " " if line == "" and at < len(lines) - 1 else (line or "?")[0]
        if sign not in " +-" or len(old) > wanted[0] or len(new) > wanted[1]:
            raise UsageError(f"{path}:{at + 1}: expected {wanted[0]} old and {wanted[1]} new lines "
                             f"in the hunk of line {first + 1}, found {len(old)} and {len(new)}",
                             hint="the diff was cut or edited; make it anew")  # fmt: skip
        body = (line or "")[1:] + "\n"
        if sign in " -":
            old.append(body)
        if sign in " +":
            new.append(body)
    if lines[at + 1 : at + 2] and lines[at + 1].startswith("\\"):
        raise UsageError(f"{path}:{at + 2}: a hunk at a file's end without a final line break "
                         "looks like one in its middle", hint="write a module")  # fmt: skip
    if not "".join(old).strip():
        raise UsageError(f"{path}:{first + 1}: expected context around the change, found none",
                         hint="make the diff with -U3 or more")  # fmt: skip
    return old, new, at + 1


def as_patch(
    diff: Diff,
    earlier: list[Diff],
    later: list[Diff],
    load: Callable[[str], Any],
) -> tuple[Patch, str]:
    """The patch that a diff is in its series, and its documentation.

    Args:
        diff: the diff.
        earlier: those before it: it is made on top of those that change the same files.
        later: those behind it, which may change what it wrote.
        load: gives the module that the field Probes names.
    """
    below = [one.name for one in earlier if one.targets & diff.targets]
    claims: dict[str, Any] = {}
    if "Probes" in diff.fields:
        module = load(diff.fields["Probes"])
        claims = {name: getattr(module, name, None) for name in ("REASON", "EFFECT", "ABSORBED")}
    wrong = [name for name, one in claims.items() if one is not None and not isinstance(one, Probe)]
    if wrong or (claims and not (claims["REASON"] and claims["EFFECT"])):
        raise UsageError(f"{diff.path}: expected Probes to name a module with REASON and EFFECT, "
                         "and ABSORBED where there is one, each a Probe")  # fmt: skip
    fields = diff.fields
    covered = frozenset(path for one in later for path in one.targets)
    status: Status = next(s for s in get_args(Status)
                          if s == fields.get("Upstream-Status", "pending"))  # fmt: skip
    patch = Patch(
        name=diff.name,
        status=status,
        upstream=fields.get("Upstream", ""),
        origin=fields.get("Origin", ""),
        variants=(Variant(versions=fields["Versions"], edits=diff.edits),),
        reason=claims.get("REASON") or _UNKNOWN,
        effect=claims.get("EFFECT") or written(diff.edits, covered),
        absorbed=claims.get("ABSORBED"),
        needs=tuple(dict.fromkeys([*below, *diff.needs])),
        knob=fields.get("Knob", ""),
        notes=() if claims else (_TEXT_ALONE,),
    )
    return patch, _DOC.format(
        subject=fields["Subject"][:72],
        symptom=fields["Symptom"],
        cause=fields.get("Cause", "not stated."),
        upstream=fields.get("Upstream", "none stated."),
        drop=fields["Drop-When"],
        cost=fields.get("Cost", "not stated."),
    )


_WRITTEN = "the new lines of the diff are in its files"
_UNKNOWN = Probe(
    claim="upstream still has the fault (taken for granted: the diff names no probe)",
    check=lambda _tree: Answer.of(True, "the diff names no probe"),
)
_TEXT_ALONE = Probe(
    claim="text and files are checked, and nothing shows whether upstream still needs it",
    check=lambda _tree: Answer.of(True, "a field Probes above the diff would name what does"),
)


def is_written_alone(patch: Patch) -> bool:
    """Whether the effect of a patch is that its hunks are there: those of `written`."""
    return patch.effect.claim == _WRITTEN


def written(edits: tuple[Edit, ...], covered: frozenset[str] = frozenset()) -> Probe:
    """Holds where each hunk's new lines stand, but for the files in `covered`."""
    asked = [edit for edit in edits if edit.path not in covered]

    def check(tree: Tree) -> Answer:
        for edit in asked:
            text = tree.read(edit.path).decode("utf-8").replace("\r\n", "\n")
            if edit.text not in text:
                return Answer.of(False, f"{edit.label} is not in {edit.path}")
        return Answer.of(True, f"{len(asked)} of {len(edits)} hunks looked for")

    paths = tuple(sorted({edit.path for edit in asked}))
    return Probe(_WRITTEN, check, paths)
