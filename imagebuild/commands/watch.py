"""`audit --watch`: releases newer than the lock, and whether the lock still resolves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from imagebuild import lock_check
from imagebuild.audit import run as audit
from imagebuild.audit import watch
from imagebuild.audit.results import Audit, LockNote, Watch
from imagebuild.audit.run import Job, Told
from imagebuild.audit.targets import Asked
from imagebuild.commands.context import Context
from imagebuild.commands.lock import remotes_of
from imagebuild.errors import UsageError
from imagebuild.upstream import Upstream

STATE = "audit-watch.json"


def state_file(context: Context) -> Path:
    """`--state`, else a file of the recipe's below `dist`."""
    given = context.arguments.state
    return Path(given) if given else context.root / "dist" / context.recipe.name / STATE


def look(context: Context, job: Job, upstream: Upstream, told: Told) -> Audit:
    """Audits every newer release that nobody was told of, and checks the lock.

    Raises:
        UsageError: releases are named as well, or the state file is malformed.
        EngineError: the index cannot be read.
    """
    require_alone(context)
    console, recipe, lock = context.console, context.recipe, context.lock
    before = watch.read_reported(state_file(context), recipe.name)
    newer = watch.newer(lock, upstream)
    fresh = [version for version in newer if version not in before]
    known = watch.newest_locked(lock) or "none"
    console.step(f"newest locked vLLM {known}; newer: {', '.join(newer) or 'none'}; "
                 f"not reported yet: {', '.join(fresh) or 'none'}")  # fmt: skip
    found = audit.audit_of(job, [])
    if fresh:
        found = audit.audit(job, Asked(against=fresh), told, keep_going=True)
    console.step("check the lock")
    notes = lock_check.check(recipe, lock, upstream, remotes_of(context, upstream), [])
    seen = Watch(
        newest_locked=watch.newest_locked(lock),
        newer=tuple(newer),
        reported=tuple(version for version in newer if version in before),
        lock=tuple(LockNote(note.level, note.entry, note.message) for note in notes),
        lock_code=max((lock_check.LEVELS[note.level] for note in notes), default=0),
    )
    return replace(found, watch=seen)


def keep(context: Context, found: Audit) -> None:
    """Writes down what was reported, once it has been."""
    path = state_file(context)
    before = watch.read_reported(path, context.recipe.name)
    after = watch.told_of(found, before)
    if after != before:
        watch.write_reported(path, context.recipe.name, after)


def require_alone(context: Context) -> None:
    """Raises UsageError when releases are named beside `--watch`."""
    arguments = context.arguments
    named = (arguments.against, arguments.since, arguments.latest, arguments.wheel, arguments.tree,
             arguments.nightly, arguments.first_bad)  # fmt: skip
    if any(named):
        raise UsageError("--watch: finds the releases itself; leave --against, --since, --latest, "
                         "--wheel, --tree, --nightly and --first-bad out")  # fmt: skip
