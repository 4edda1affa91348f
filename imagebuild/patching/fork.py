"""A folder of whole upstream files as one patch: it is put in only on the base it was made from.

`patches rebase-overlay` writes the record `fork.toml` in it. Standard library only.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from imagebuild.errors import UsageError
from imagebuild.patching.patch import Answer, NewFile, Patch, Probe, Variant
from imagebuild.patching.tree import Tree

FORK = "fork.toml"
_DOC = """{title}

Symptom: {why}
Cause: the files are forks: whole files of {base}, changed.
Change: they take the place of upstream's.
Upstream: none stated.
Drop when: the files of the base do what these do.
Cost: every upstream change to these files is a merge: `patches rebase-overlay`.
"""


def load_fork(folder: Path) -> tuple[Patch, str]:
    """The patch that a folder of forks is, with its documentation.

    Raises:
        UsageError: no record, a malformed one, or one that the files do not agree with.
    """
    version, commit, why, files = _record(folder)
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != FORK and "__pycache__" not in path.parts
    }
    if odd := sorted(found ^ files.keys()):
        where = "beside" if odd[0] in found else "of"
        raise UsageError(f"{folder}: expected the files that {FORK} lists, found {odd[0]} "
                         f"{'that it does not list' if where == 'beside' else 'missing'}",
                         hint="build.py patches rebase-overlay writes the record")  # fmt: skip
    name = folder.name
    base = f"commit {commit}" if commit else f"version {version}"
    entries = tuple(
        NewFile(source=str((folder / path).absolute()), path=path, replaces=before)
        for path, before in sorted(files.items())
    )
    digests = {path: _sha256((folder / path).read_bytes()) for path in files}
    paths = tuple(sorted(files))

    def is_base(tree: Tree) -> bool:
        identity = tree.identity
        if not commit:
            return identity.version == version
        length = min(len(commit), len(identity.commit))
        return length >= 7 and commit[:length] == identity.commit[:length]

    def forked_here(tree: Tree) -> Answer:
        own = f"{tree.identity.version}, commit {tree.identity.commit or 'unknown'}"
        return Answer.of(is_base(tree), f"the base is {own}; {FORK} says {version}, {base}")

    def in_place(tree: Tree) -> Answer:
        other = [p for p in paths if not tree.exists(p) or _sha256(tree.read(p)) != digests[p]]
        if other:
            return Answer.of(False, f"{other[0]} is not the fork")
        return forked_here(tree)

    patch = Patch(
        name=name,
        status="inappropriate",
        upstream="",
        origin=f"whole files of {version}, {base}, changed",
        # Of every release, so that another one is an error and never left out in silence.
        variants=(Variant(versions=">=0,<1000000", files=entries),),
        reason=Probe(f"the base is {base}, which the files were forked from", forked_here),
        effect=Probe(f"the forks are in place, on {base}", in_place, paths),
    )
    title = f"Replace {len(files)} upstream file{'' if len(files) == 1 else 's'}."
    return patch, _DOC.format(title=title, why=why, base=f"{version}, {base}")


def _record(folder: Path) -> tuple[str, str, str, dict[str, str]]:
    """Version, commit, why, and the hash of the file that each fork replaces ("" for none)."""
    path = folder / FORK
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: expected the record of a fork, found: {error.strerror}",
                         hint="build.py patches rebase-overlay writes it") from error  # fmt: skip
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected TOML, found: {error}") from error
    if content.get("schema") != 1:
        raise UsageError(f"{path}: expected schema = 1, found {content.get('schema')!r}")
    words = {key: content.get(key, "") for key in ("version", "commit", "why")}
    files = content.get("files")
    if not all(isinstance(word, str) for word in words.values()) or not words["version"]:
        raise UsageError(f"{path}: expected strings version, commit and why, found {words!r}")
    if not isinstance(files, dict) or not files or not all(_is_entry(*f) for f in files.items()):
        raise UsageError(f"{path}: expected [files] with a SHA-256 by path, found {files!r}")
    return words["version"], words["commit"], words["why"] or "not stated.", dict(files)


def _is_entry(path: str, digest: object) -> bool:
    pure = PurePosixPath(path)
    is_inside = not pure.is_absolute() and ".." not in pure.parts and str(pure) == path
    is_digest = isinstance(digest, str) and (not digest or len(digest) == 64)
    return is_inside and is_digest


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
