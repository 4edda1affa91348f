"""`lock show|update|check`."""

from __future__ import annotations

import datetime

from imagebuild import lock_check, lock_debs, lock_entries, lock_remote, lock_update
from imagebuild.commands import deep
from imagebuild.commands.context import Context
from imagebuild.engines.docker import Docker
from imagebuild.errors import BrokenError, UsageError
from imagebuild.lock import Lock, read_lock
from imagebuild.lock_remote import Remotes
from imagebuild.lock_update import Changed
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.git import Git
from imagebuild.sources.registry import Registry
from imagebuild.upstream import Upstream


def show(context: Context) -> int:
    """What is locked."""
    listed = lock_entries.entries(context.recipe, context.lock)
    rows = [(one.base or "all", one.name, one.state, one.value, one.source or "-")
            for one in listed]  # fmt: skip
    context.console.table("entries", ("base", "entry", "state", "locked", "says"), rows)
    files = []
    for version, base in context.lock.bases.items():
        for project, pins in base.wheels.items():
            for platform, pin in pins.items():
                size = f"{pin.size / 1e6:.0f} MB"
                files.append((version, project, platform, size, pin.sha256[:16], pin.filename))
    columns = ("base", "project", "platform", "size", "sha256", "file")
    context.console.table(str(context.lock.path), columns, files)
    for version, base in context.lock.bases.items():
        count = sum(len(symbols) for symbols in base.fingerprints.values())
        deeply = [f"{len(base.deep.results)} deep results"] if base.deep else []
        required = [f"{project} {pin}" for project, pin in base.pins.items()]
        facts = [f"commit {base.commit or 'unknown'}", f"{count} fingerprints", *deeply, *required]
        context.console.result(f"  {version}: {', '.join(facts)}")
    context.console.document({
        "path": str(context.lock.path),
        "entries": [vars(one) for one in listed],
        "bases": {
            version: {
                "commit": base.commit,
                "epoch": base.epoch,
                "pins": dict(base.pins),
                "wheels": {
                    project: {platform: vars(pin) for platform, pin in pins.items()}
                    for project, pins in base.wheels.items()
                },
                "fingerprints": {name: dict(f) for name, f in base.fingerprints.items()},
                "deep": base.deep and base.deep.to_toml(),
            }
            for version, base in context.lock.bases.items()
        },
    })  # fmt: skip
    return 0


def update(context: Context) -> int:
    """Resolves entries anew; writes the lock when every changed fingerprint was accepted."""
    arguments = context.arguments
    if arguments.deep:
        return _update_deep(context)
    if arguments.tree:
        raise UsageError("lock update: --tree goes with --deep")
    named = arguments.entry
    if arguments.base and lock_entries.DEBS not in named:
        raise UsageError(f"lock update: --base goes with the entry {lock_entries.DEBS}")
    wanted = arguments.base_version or list(context.lock.bases)
    wanted = wanted or [context.recipe.base_version]
    accepted = arguments.accept
    lock = context.lock
    lock_update.require_names(accepted, context.series)
    lock_remote.require_words(context.recipe, named)
    lock_update.require_generated(lock.path)
    changed: list[Changed] = []
    moved: list[str] = []
    with context.upstream() as upstream:
        for version in wanted if not named or lock_remote.WHEELS in named else ():
            context.console.step(f"resolve {context.recipe.title} {version}")
            found = lock_update.resolve(context.recipe, lock, context.series, version, upstream)
            lock = found.lock
            changed += found.changed
            moved += found.moved
        lock_update.require_accepted(changed, accepted, context.recipe.title)
        versions = [lock.base(version).version for version in wanted]
        resolved = lock_remote.resolve(
            context.recipe,
            lock_remote.as_recipe(context.recipe, lock),
            remotes_of(context, upstream),
            named,
            versions,
        )
    lock, kept = resolved.lock, list(resolved.kept)
    moved += resolved.moved
    if lock_entries.DEBS in named:
        lock, sentences = _update_debs(context, lock)
        kept += sentences
    for item in changed:
        base = f"{context.recipe.title} {item.version}"
        context.console.result(f"  accepted {base}, {item.patch}: {item.symbol}")
    for sentence in moved:
        context.console.result(f"  {sentence}")
    for sentence in kept:
        context.console.result(f"  ! {sentence}")
    is_new = lock_update.write(lock)
    state = "written" if is_new else "nothing changed"
    context.console.verdict(f"{lock.path}: {state}", 0)
    context.console.document({
        "path": str(lock.path),
        "written": is_new,
        "bases": wanted,
        "accepted": [vars(item) for item in changed],
        "moved": moved,
        "kept": kept,
    })  # fmt: skip
    return 0


def _update_debs(context: Context, lock: Lock) -> tuple[Lock, list[str]]:
    """Has the bases' own apt resolve the packages; of no release named, the recipe's alone."""
    arguments, kept = context.arguments, []
    versions = arguments.base_version or [context.recipe.base_version]
    if arguments.base and len(versions) > 1:
        raise UsageError(f"--base: expected one release with it, found {', '.join(versions)}")
    docker = Docker(context.console.command)
    for version in versions:
        base = lock.base(version)
        context.console.step(f"ask apt in the image of vLLM {base.version}")
        today = datetime.datetime.fromtimestamp(lock_check.now(), datetime.UTC).date().isoformat()
        pin, sentences = lock_debs.resolve(context.recipe, base, docker, today, arguments.base)
        lock = lock_debs.with_debs(lock, base.version, pin)
        kept += sentences
    return lock, kept


def remotes_of(context: Context, upstream: Upstream) -> Remotes:
    """Registries and git hosts, asked as this user."""
    logins = Logins(context.console.command)
    registry = Registry(upstream.http, logins, context.recipe.image.registry)
    git = Git(context.console.command, offline=context.arguments.offline)
    today = datetime.datetime.fromtimestamp(lock_check.now(), datetime.UTC).date().isoformat()
    return Remotes(registry, git, today)


def _update_deep(context: Context) -> int:
    """Runs the deep probes on patched trees and records what they found."""
    arguments = context.arguments
    if arguments.base_version or arguments.accept or arguments.entry:
        raise UsageError("lock update: --deep takes its releases from the trees; leave "
                         "entries, --base-version and --accept out")  # fmt: skip
    lock_update.require_generated(context.lock.path)
    records, runs = [], []
    for given in arguments.tree or [None]:
        root = deep.tree_of(context, given)
        done = deep.run(context, root)
        deep.show(context, done)
        if not done.report.is_ok:
            for line in done.report.lines():
                context.console.result(line)
            raise BrokenError(f"{root}: expected a tree that verify and every deep probe call "
                              "good, found another; nothing was written")  # fmt: skip
        version = done.report.version.partition("+")[0]
        records.append((version, deep.record_of(done, context.series.digest)))
        runs.append({"tree": str(root), "base": version, **done.to_json()})
    # Read again: the probes took minutes, in which another call may have written.
    lock = read_lock(context.lock.path)
    for version, record in records:
        lock = lock_update.with_deep(lock, version, record)
    is_new = lock_update.write(lock)
    state = "written" if is_new else "nothing changed"
    context.console.verdict(f"{lock.path}: {state}", 0)
    context.console.document({"path": str(lock.path), "written": is_new, "deep": runs})
    return 0


def check(context: Context) -> int:
    """Asks index, registries and git hosts whether what is locked is still there as locked."""
    console, named = context.console, context.arguments.entry
    lock_remote.require_words(context.recipe, named)
    lock = context.lock
    newer: list[str] = []
    with context.upstream() as upstream:
        remotes = remotes_of(context, upstream)
        found = lock_check.check(context.recipe, lock, upstream, remotes, named)
        if not named or lock_remote.WHEELS in named:
            newer = lock_check.newer_releases(lock, upstream)
    marks = {"error": ("x", 3), "warning": ("!", 1), "info": ("i", 0)}
    for level, (mark, colour) in marks.items():
        for one in found:
            if one.level == level:
                console.verdict(f"  {mark} {one.entry}: {one.message}", colour)
    if newer:
        console.result(f"  i newer releases, not locked: {', '.join(newer)}")
    code = max((lock_check.LEVELS[one.level] for one in found), default=0)
    words = {0: "as locked", 1: "a person must look", 4: "the lock does not hold"}
    unverified = sum(lock_check.NOT_VERIFIED in one.message for one in found if one.level == "info")
    rest = f"; not verified: {unverified} entries" if unverified else ""
    console.verdict(f"{lock.path}: {words[code]}{rest}", code)
    console.document({
        "path": str(lock.path),
        "exit_code": code,
        "problems": [f"{one.entry}: {one.message}" for one in found if one.level == "error"],
        "warnings": [f"{one.entry}: {one.message}" for one in found if one.level == "warning"],
        "findings": [vars(one) for one in found],
        "newer": newer,
    })  # fmt: skip
    return code
