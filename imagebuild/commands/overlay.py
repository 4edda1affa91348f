"""`patches rebase-overlay`: brings a folder of whole upstream files to another release."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from pathlib import Path

import tomli_w

from imagebuild.commands.context import Context
from imagebuild.errors import UsageError
from imagebuild.files import only_one, replaced_folder, write_atomically
from imagebuild.patching.fork import FORK
from imagebuild.patching.tree import Identity, Tree
from imagebuild.porting.forks import OPEN, Fate, Rebased, files_of, rebase
from imagebuild.porting.merge import Labels

_CODES = dict.fromkeys(OPEN, 3)


def run(context: Context) -> int:
    """Shows what becomes of each file; with --out writes the result and its record."""
    arguments = context.arguments
    folder = Path(arguments.folder)
    forks = files_of(folder)
    recorded = _recorded(folder)
    start = arguments.start or recorded.get("version")
    if start is None:
        raise UsageError(f"{folder}: expected --from V or a {FORK} that says what the files were "
                         "forked from, found neither")  # fmt: skip
    if arguments.start and recorded.get("version", start) != start:
        raise UsageError(f"{folder}: {FORK} says that the files are of {recorded['version']}, "
                         f"--from says {start}")  # fmt: skip
    platform = next(iter(context.recipe.platforms.values()))
    with context.upstream() as upstream:
        context.console.step(f"rebase {len(forks)} files from {start} to {arguments.to}")
        base = upstream.open(start, platform).tree
        target = upstream.open(arguments.to, platform).tree
        _require_commit(folder, recorded, base.identity)
        found = rebase(forks, base, target, Labels(start, folder.name, arguments.to))
        for one in found:
            _show(context, one)
        if arguments.out:
            _write(Path(arguments.out), found, target, recorded.get("why", ""))
    return _conclude(context, found)


def _recorded(folder: Path) -> dict[str, str]:
    """What the folder's own record says, as far as it can be read."""
    try:
        content = tomllib.loads((folder / FORK).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / FORK}: expected TOML, found: {error}") from error
    return {key: str(content[key]) for key in ("version", "commit", "why") if key in content}


def _require_commit(folder: Path, recorded: dict[str, str], base: Identity) -> None:
    known = recorded.get("commit", "")
    length = min(len(known), len(base.commit))
    if length >= 7 and known[:length] != base.commit[:length]:
        raise UsageError(f"{folder / FORK}: the files were forked from commit {known}, "
                         f"{base.version} is {base.commit}")  # fmt: skip


def _show(context: Context, one: Rebased) -> None:
    console = context.console
    many = f" ({one.conflicts} conflicts)" if one.conflicts > 1 else ""
    note = f": {one.note}" if one.note else ""
    console.verdict(f"{one.path}: {one.fate.value}{many}{note}", _CODES.get(one.fate, 0))
    for name, line in one.lost:
        console.result(f"  line {line} imports {name}, which is not there")


def _write(out: Path, found: list[Rebased], target: Tree, why: str) -> None:
    """Writes a new folder in one step; what is open lies beside its place, with markers."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out}: expected a folder that is empty or not there, found files",
                         hint="name another --out")  # fmt: skip
    files = {}
    with only_one(out.with_name(f".{out.name}.lock"), f"a rebase to {out}"):
        with replaced_folder(out) as partial:
            for one in found:
                if one.data is not None:
                    write_atomically(partial / one.path, one.data)
                    known = target.read(one.path) if target.exists(one.path) else None
                    files[one.path] = hashlib.sha256(known).hexdigest() if known else ""
                elif one.fate in OPEN:
                    text = one.conflict or f"{one.fate.value}: {one.note}\n"
                    write_atomically(partial / f"{one.path}.conflict", text.encode("utf-8"))
            identity = target.identity
            record = {"schema": 1, "version": identity.version, "commit": identity.commit,
                      "why": why, "files": files}  # fmt: skip
            write_atomically(partial / FORK, tomli_w.dumps(record).encode("utf-8"))
        out.with_name(f".{out.name}.lock").unlink(missing_ok=True)


def _conclude(context: Context, found: list[Rebased]) -> int:
    arguments, console = context.arguments, context.console
    counts = Counter(one.fate for one in found)
    said = ", ".join(f"{counts[fate]} {fate.value}" for fate in Fate if counts[fate])
    lost = sum(bool(one.lost) for one in found)
    said += f"; {lost} import what is not there" if lost else ""
    code = 3 if any(one.is_open for one in found) else 0
    console.verdict(f"to {arguments.to}: {said}", code)
    if arguments.out:
        console.result(f"written: {arguments.out}")
    console.document({
        "to": arguments.to,
        "exit_code": code,
        "out": arguments.out or "",
        "files": [
            {
                "path": one.path,
                "fate": one.fate.value,
                "conflicts": one.conflicts,
                "note": one.note,
                "lost": [{"name": name, "line": line} for name, line in one.lost],
            }
            for one in found
        ],
    })  # fmt: skip
    return code
