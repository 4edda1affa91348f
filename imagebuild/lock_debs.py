"""The .deb packages of a base, as the base's own apt resolves them for each platform.

Which archives are asked, and whose signatures count, is the base's configuration; no archive is
named here. It writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import unquote

from imagebuild.config import Recipe
from imagebuild.engines.docker import Docker
from imagebuild.errors import EngineError, IntegrityError, UsageError, raise_collected
from imagebuild.lock import BaseLock, Lock
from imagebuild.lock_entries import DEBS
from imagebuild.pins import DebPin, DebsPin
from imagebuild.sources.http import Http

# apt checks its indexes by the base's keys; without the last option it prints MD5 alone.
_SCRIPT = (
    "apt-get update >&2 && apt-get install --print-uris --quiet=2 --yes "
    "--no-install-recommends --option Acquire::ForceHash=SHA256 {packages}"
)
_LINE = re.compile(
    r"'(?P<url>https?://[^'\s]+)' (?P<name>[^/\s]+\.deb) (?P<size>\d+) "
    r"SHA256:(?P<sha256>[0-9a-f]{64})"
)


def resolve(
    recipe: Recipe, base: BaseLock, docker: Docker, today: str, reference: str | None = None
) -> tuple[DebsPin, list[str]]:
    """Asks the base of one release for its packages.

    Args:
        recipe: names packages and platforms.
        base: the release.
        docker: an engine that can run the base.
        today: "2026-11-29".
        reference: another name of the base, such as a mirror's; by default the locked one.

    Returns:
        The new entry, and a sentence for each platform that could not be asked.

    Raises:
        IntegrityError: the base is unresolved, or apt gives no SHA-256.
        EngineError: no engine, or no platform of the base could be asked.
    """
    packages = recipe.image.debs
    if not packages:
        raise UsageError(f"lock update {DEBS}: expected packages in recipe.toml, image.debs, "
                         "found none")  # fmt: skip
    name = reference or (base.image.reference if base.image and base.image.digest else "")
    if not name:
        raise IntegrityError(f"{DEBS} of vLLM {base.version}: its image is unresolved",
                             hint="build.py lock update image, or --base NAME@sha256:..."
                             )  # fmt: skip
    docker.engine_version()
    digest = docker.base(name, ()).digest
    same = base.debs is not None and (base.debs.base, base.debs.packages) == (digest, packages)
    files = dict(base.debs.files) if same and base.debs else {}
    failed: list[EngineError] = []
    kept: list[str] = []
    platforms = sorted(set(recipe.platforms.values()))
    for platform in platforms:
        try:
            printed = docker.run(name, platform, _SCRIPT.format(packages=" ".join(packages)))
        except EngineError as error:
            failed.append(error)
            kept.append(f"{DEBS} of vLLM {base.version} for {platform} keep their state: {error}")
            continue
        files[platform] = tuple(parse(printed, f"{name}, {platform}"))
    if len(failed) == len(platforms):
        raise failed[0]
    return DebsPin(packages, "resolved", digest, today, files), kept


def parse(printed: str, where: str) -> Iterator[DebPin]:
    """Reads what `apt-get --print-uris` prints, in apt's order.

    Raises:
        IntegrityError: a line is of another form, such as a file that no SHA-256 names.
    """
    problems = []
    for line in filter(None, map(str.strip, printed.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            problems.append(line)
            continue
        yield DebPin(match["name"], match["url"], match["sha256"], int(match["size"]))
    raise_collected(IntegrityError, f"{where}: expected 'URL' NAME SIZE SHA256:... of each package,"
                    " found", problems,
                    hint="give the packages instead: --build-context debs=DIR")  # fmt: skip


def gone(pin: DebsPin, http: Http) -> list[str]:
    """Names of locked files that their archive no longer has. Raises EngineError: no answer."""
    once = {one.url: one.filename for found in pin.files.values() for one in found}
    first = {"Range": "bytes=0-0"}
    return [
        unquote(name)
        for url, name in once.items()
        if http.get(url, what=name, headers=first, accept=(206,), unread=(200, 404, 410)).status
        in (404, 410)
    ]


def with_debs(lock: Lock, version: str, pin: DebsPin) -> Lock:
    """The lock with another entry; the day stays where nothing else differs."""
    base = lock.bases[version]
    if base.debs is not None and replace(pin, seen=base.debs.seen) == base.debs:
        return lock
    return replace(lock, bases={**lock.bases, version: replace(base, debs=pin)})
