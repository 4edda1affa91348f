"""Which releases are newer than the lock, and which of them somebody was told of already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from imagebuild.audit.results import Audit
from imagebuild.audit.targets import releases
from imagebuild.errors import UsageError
from imagebuild.files import write_atomically
from imagebuild.lock import Lock
from imagebuild.upstream import Upstream

SCHEMA = 1


def newest_locked(lock: Lock) -> str:
    """The last release that the lock knows, "" when it knows none."""
    return list(lock.bases)[-1] if lock.bases else ""


def newer(lock: Lock, upstream: Upstream) -> list[str]:
    """Releases after the newest locked one, oldest first.

    Raises:
        EngineError: the index cannot be read.
    """
    from packaging.version import Version

    known = newest_locked(lock)
    offered = releases(upstream)
    return [
        v for v in offered if v not in lock.bases and (not known or Version(v) > Version(known))
    ]


def read_reported(path: Path, recipe: str) -> list[str]:
    """The releases in a state file; none where there is no file yet.

    Raises:
        UsageError: it is malformed, or of another recipe.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] != SCHEMA or content["recipe"] != recipe:
            raise ValueError(f"schema {content['schema']!r} of {content['recipe']!r}")
        found = content["reported"]
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError(f"reported is {found!r}")
        return found
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: expected the state of a watch of {recipe!r}, found: {error}",
            hint="delete it; then every newer release is reported again",
        ) from error


def write_reported(path: Path, recipe: str, reported: Iterable[str]) -> None:
    """Replaces a state file in one step. Raises EngineError."""
    content = {"schema": SCHEMA, "recipe": recipe, "reported": list(dict.fromkeys(reported))}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def told_of(audit: Audit, before: Sequence[str]) -> list[str]:
    """What is reported after a call: as before, and each release that could be read."""
    return [*before, *(release.version for release in audit.releases)]
