"""`cache show|prune|remove-smoke`: what downloads and environments take up."""

from __future__ import annotations

from imagebuild.commands.context import Context
from imagebuild.smoke import environment
from imagebuild.sources.cache import Cache, parse_size


def show(context: Context) -> int:
    """Where the cache is and how large."""
    stats = Cache().stats()
    console = context.console
    console.result(f"{stats.root}: {stats.files} files, {_gib(stats.bytes)} "
                   f"of at most {_gib(stats.limit_bytes)}")  # fmt: skip
    count, size = environment.usage()
    if count:
        console.result(f"{environment.root()}: {count} for deep probes, {_gib(size)} "
                       "(build.py cache remove-smoke)")  # fmt: skip
    console.document({
        "root": str(stats.root),
        "files": stats.files,
        "bytes": stats.bytes,
        "limit_bytes": stats.limit_bytes,
        "smoke_environments": count,
        "smoke_bytes": size,
    })  # fmt: skip
    return 0


def prune(context: Context) -> int:
    """Removes the least recently used files until the cache fits."""
    limit = context.arguments.to
    wanted = parse_size(limit, where="--to") if limit is not None else None
    pruned = Cache(notice=context.console.note).prune(wanted)
    kept = f"; {pruned.kept_in_use} are in use and stay" if pruned.kept_in_use else ""
    context.console.result(f"removed {pruned.files} files, {_gib(pruned.bytes)}{kept}")
    context.console.document({
        "removed_files": pruned.files,
        "removed_bytes": pruned.bytes,
        "kept_in_use": pruned.kept_in_use,
    })  # fmt: skip
    return 0


def remove_smoke(context: Context) -> int:
    """Removes the environments that deep probes run in; the next --deep makes one again."""
    removed = environment.remove()
    kept = f"; {removed.in_use} in use and left" if removed.in_use else ""
    context.console.result(f"removed {removed.environments} smoke environments, "
                           f"{_gib(removed.bytes)}{kept}")  # fmt: skip
    context.console.document({
        "removed_environments": removed.environments,
        "removed_bytes": removed.bytes,
        "kept_in_use": removed.in_use,
    })  # fmt: skip
    return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
