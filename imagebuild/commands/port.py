"""`patches port`: carries patches over to another release, and shows what the change would be."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.console import counted
from imagebuild.errors import IntegrityError, UsageError
from imagebuild.files import write_atomically
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.patching.unified import SUFFIX
from imagebuild.porting import module
from imagebuild.porting.edits import How, PortedEdit
from imagebuild.porting.port import Ported, Releases, Result, port
from imagebuild.upstream import Upstream

_SAID = {
    Result.FITS: "as it is; nothing to carry over",
    Result.DROPPED: "is declared as dropped there, and the proof holds",
    Result.ABSORBED: "upstream has the fix: declare a drop",
    Result.CLEAN: "carried over; the probes hold",
    Result.REVIEW: "carried over; a person must look",
    Result.BROKEN: "carried over, and BROKEN: a probe says that it does not work there",
    Result.CONFLICT: "not carried over: both sides are shown, and a person must decide",
}


def run(context: Context) -> int:
    """Ports patches, prints each change and, with --write, makes those that are clean."""
    arguments = context.arguments
    names = _names(context)
    with context.upstream() as upstream:
        releases = _releases(context, upstream, arguments.to)
        what = counted(len(names), "patch", "patches")
        context.console.step(f"carry {what} over to {releases.version}")
        found = port(context.series, names, releases)
    asked = [one for one in found if one.patch.name in names]
    texts, changes = _changes(context, asked)
    for one in asked:
        _show(context, one, changes.get(one.patch.name, ""))
    written = _write(context, asked, texts) if arguments.write else []
    if arguments.keep:
        _keep(Path(arguments.keep), asked, changes)
    code = max((one.exit_code for one in asked), default=0)
    done = (Result.FITS, Result.DROPPED)
    needed = [one.patch.name for one in found if one not in asked and one.result not in done]
    _conclude(context, asked, needed, written, code)
    return code


def _names(context: Context) -> list[str]:
    arguments = context.arguments
    if bool(arguments.name) == arguments.all:
        raise UsageError("patches port: expected names of patches or --all, found "
                         + ("both" if arguments.all else "neither"))  # fmt: skip
    known = [patch.name for patch in context.series.patches]
    for name in arguments.name:
        context.series.patch(name)
    return list(arguments.name) if arguments.name else known


def _releases(context: Context, upstream: Upstream, to: str) -> Releases:
    platform = next(iter(context.recipe.platforms.values()))
    opened = upstream.open(to, platform)
    identity = context.lock.identify(opened.tree.identity)

    def base(versions: str) -> tuple[str, Tree]:
        version = context.lock.nearest(identity, versions)
        if version is None:
            raise IntegrityError(f"lock: no release in {versions} is locked, so that nothing can "
                                 "be carried over from it",
                                 hint="build.py lock update --base-version V")  # fmt: skip
        return version, upstream.open(version, platform).tree

    return Releases(to, OverlayTree(opened.tree, {}, replace(identity, version=to)), base)


def _changes(context: Context, found: list[Ported]) -> tuple[dict[str, str], dict[str, str]]:
    """New text of each module that would change, and the change as a diff, by patch."""
    texts: dict[str, str] = {}
    diffs: dict[str, str] = {}
    for one in found:
        if one.variant is None:
            continue
        path = context.recipe.patch_file(one.patch.name)
        before = path.read_text("utf-8")
        rewrite = module.rewritten_diff if path.suffix == SUFFIX else module.rewritten
        try:
            after = rewrite(before, one)
        except UsageError as error:
            one.notes.append(str(error))
            continue
        name = path.relative_to(context.recipe.root).as_posix()
        sides = (before.splitlines(keepends=True), after.splitlines(keepends=True))
        lines = difflib.unified_diff(*sides, f"a/{name}", f"b/{name}")
        texts[one.patch.name], diffs[one.patch.name] = after, "".join(lines)
    return texts, diffs


def _show(context: Context, one: Ported, diff: str) -> None:
    console, name = context.console, one.patch.name
    origin = f" from {one.base}" if one.base else ""
    said = _SAID[one.result]
    if one.result is Result.CONFLICT and not one.base:
        said = "not carried over: there is nothing to start from"
    console.verdict(f"{name}: {one.result.value}{origin}: {said}", one.exit_code)
    for edit in one.edits:
        _show_edit(context, edit)
    for note in one.notes:
        console.result(f"  {note}")
    for finding in one.judged.findings if one.judged and one.edits else ():
        if finding.level != "info":
            console.result(f"  {finding.level}: {finding.message}")
    for symbol in one.contexts:
        console.result(f"  read what changed in {symbol}")
    if diff:
        console.result("\n" + diff)


def _show_edit(context: Context, one: PortedEdit) -> None:
    where = f", {one.path or one.edit.path}:{one.line}" if one.line else ""
    note = f" ({one.note})" if one.note else ""
    context.console.result(f"  {one.edit.label!r}: {one.how.value}{where}{note}")
    for conflict in one.conflicts:
        context.console.result(conflict.rstrip("\n"))
    if one.nearest and one.how in (How.LOST, How.CONFLICT):
        likeness = f"{one.nearest.similarity:.2f}"
        place = f"{one.nearest.path}:{one.nearest.line}"
        context.console.result(f"  closest text at {place} (likeness {likeness}):")
        context.console.result(one.nearest.text)


def _write(context: Context, found: list[Ported], texts: dict[str, str]) -> list[str]:
    """Writes the modules of clean patches, all checked before the first is written."""
    clean = {one.patch.name: one for one in found
             if one.result is Result.CLEAN and one.patch.name in texts}  # fmt: skip
    recipe = context.recipe
    module.require_same(recipe.series_file, recipe.patches_dir, context.series.runtime,
                        {recipe.patch_file(name).name: texts[name] for name in clean},
                        {name: one.new_patch() for name, one in clean.items()})  # fmt: skip
    paths = []
    for name in clean:
        path = recipe.patch_file(name)
        write_atomically(path, texts[name].encode("utf-8"))
        paths.append(path.relative_to(recipe.root).as_posix())
    return paths


def _keep(folder: Path, found: list[Ported], changes: dict[str, str]) -> None:
    """Keeps every change and every conflict as a file of its own."""
    for one in found:
        name = one.patch.name
        if changes.get(name):
            write_atomically(folder / f"{name}.diff", changes[name].encode("utf-8"))
        for number, edit in enumerate(one.edits, 1):
            if edit.conflicts:
                text = "".join(edit.conflicts)
                write_atomically(folder / f"{name}.{number}.conflict", text.encode("utf-8"))


def _conclude(
    context: Context, found: list[Ported], needed: list[str], written: list[str], code: int
) -> None:
    """Says what was written, what is next, and what else is needed."""
    console, to = context.console, context.arguments.to
    for name in needed:
        console.result(f"! {name} is needed by what you named, and must be ported as well")
    for path in written:
        console.result(f"written: {path}")
    counts = {result: sum(one.result is result for one in found) for result in Result}
    said = ", ".join(f"{count} {result.value}" for result, count in counts.items() if count)
    console.verdict(f"to {to}: {said}", code)
    if written:
        accepted = " ".join(f"--accept {Path(path).stem}" for path in written)
        console.result(f"next, once what changed is read: build.py lock update wheels "
                       f"--base-version {to} {accepted}")  # fmt: skip
    console.document({
        "to": to,
        "exit_code": code,
        "written": written,
        "needed": needed,
        "patches": [_json(one) for one in found],
    })  # fmt: skip


def _json(one: Ported) -> dict[str, object]:
    return {
        "name": one.patch.name,
        "result": one.result.value,
        "base": one.base,
        "versions": one.variant.versions if one.variant else "",
        "edits": [
            {
                "label": edit.edit.label,
                "how": edit.how.value,
                "file": edit.path or edit.edit.path,
                "line": edit.line,
                "note": edit.note,
                "conflicts": list(edit.conflicts),
            }
            for edit in one.edits
        ],
        "changed": [str(symbol) for symbol in one.contexts],
        "fingerprints": one.fingerprints,
        "verdict": one.judged.verdict.value if one.judged else "",
        "findings": [vars(finding) for finding in one.judged.findings] if one.judged else [],
        "notes": one.notes,
    }
