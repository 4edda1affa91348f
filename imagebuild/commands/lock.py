"""`lock show|update|check`."""

from __future__ import annotations

from imagebuild import lock_update
from imagebuild.commands import deep
from imagebuild.commands.context import Context
from imagebuild.errors import BrokenError, UsageError
from imagebuild.lock_update import Changed


def show(context: Context) -> int:
    """What is locked."""
    rows = []
    for version, base in context.lock.bases.items():
        for project, pins in base.wheels.items():
            for platform, pin in pins.items():
                size = f"{pin.size / 1e6:.0f} MB"
                rows.append((version, project, platform, size, pin.sha256[:16], pin.filename))
    columns = ("base", "project", "platform", "size", "sha256", "file")
    context.console.table(str(context.lock.path), columns, rows)
    for version, base in context.lock.bases.items():
        count = sum(len(symbols) for symbols in base.fingerprints.values())
        required = ", ".join(f"{project} {pin}" for project, pin in base.pins.items())
        deeply = f"{len(base.deep.results)} deep results, " if base.deep else ""
        context.console.result(f"  {version}: commit {base.commit or 'unknown'}, "
                               f"{count} fingerprints, {deeply}{required}")  # fmt: skip
    context.console.document({
        "path": str(context.lock.path),
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
    """Resolves bases anew; writes the lock when every changed fingerprint was accepted."""
    if context.arguments.deep:
        return _update_deep(context)
    if context.arguments.tree:
        raise UsageError("lock update: --tree goes with --deep")
    wanted = context.arguments.base_version or list(context.lock.bases)
    wanted = wanted or [context.recipe.base_version]
    accepted = context.arguments.accept
    lock = context.lock
    lock_update.require_names(accepted, context.series)
    lock_update.require_generated(lock.path)
    changed: list[Changed] = []
    moved: list[str] = []
    with context.upstream() as upstream:
        for version in wanted:
            context.console.step(f"resolve vLLM {version}")
            found = lock_update.resolve(context.recipe, lock, context.series, version, upstream)
            lock = found.lock
            changed += found.changed
            moved += found.moved
    lock_update.require_accepted(changed, accepted)
    for item in changed:
        context.console.result(f"  accepted vLLM {item.version}, {item.patch}: {item.symbol}")
    for sentence in moved:
        context.console.result(f"  {sentence}")
    is_new = lock_update.write(lock)
    state = "written" if is_new else "nothing changed"
    context.console.verdict(f"{lock.path}: {state}", 0)
    context.console.document({
        "path": str(lock.path),
        "written": is_new,
        "bases": wanted,
        "accepted": [vars(item) for item in changed],
        "moved": moved,
    })  # fmt: skip
    return 0


def _update_deep(context: Context) -> int:
    """Runs the deep probes on patched trees and records what they found."""
    arguments = context.arguments
    if arguments.base_version or arguments.accept:
        raise UsageError("lock update: --deep takes its releases from the trees; leave "
                         "--base-version and --accept out")  # fmt: skip
    lock_update.require_generated(context.lock.path)
    lock, runs = context.lock, []
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
        lock = lock_update.with_deep(lock, version, deep.record_of(done, context.series.digest))
        runs.append({"tree": str(root), "base": version, **done.to_json()})
    is_new = lock_update.write(lock)
    state = "written" if is_new else "nothing changed"
    context.console.verdict(f"{lock.path}: {state}", 0)
    context.console.document({"path": str(lock.path), "written": is_new, "deep": runs})
    return 0


def check(context: Context) -> int:
    """Asks the index whether what is locked is still there as locked."""
    with context.upstream() as upstream:
        problems, warnings = lock_update.check(context.recipe, context.lock, upstream)
        newer = lock_update.newer_releases(context.lock, upstream)
    for sentence in problems:
        context.console.verdict(f"  x {sentence}", 3)
    for sentence in warnings:
        context.console.verdict(f"  ! {sentence}", 1)
    if newer:
        context.console.result(f"  i newer releases, not locked: {', '.join(newer)}")
    code = 4 if problems else (1 if warnings else 0)
    words = {0: "as locked", 1: "a person must look", 4: "the lock does not hold"}
    context.console.verdict(f"{context.lock.path}: {words[code]}", code)
    context.console.document({
        "path": str(context.lock.path),
        "exit_code": code,
        "problems": problems,
        "warnings": warnings,
        "newer": newer,
    })  # fmt: skip
    return code
