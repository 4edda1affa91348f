"""What a tag of an image promises: releases stay, nightlies go, all others are rebuilt in place."""

from __future__ import annotations

import datetime
import re

from imagebuild.lock import Lock, same_commit

# A number with dots, and after it at most a build of the same release, such as -cu130 or -aarch64.
_RELEASE = re.compile(r"v?\d+(\.\d+)+(\.?(post|rc|a|b)\d+)?(-[a-z0-9]+)*", re.IGNORECASE)
_NIGHTLY_COMMIT = re.compile(r"nightly[-_.]([0-9a-f]{7,40})(?![0-9a-f])")


def fault_of(tag: str) -> str | None:
    """Why nobody can rely on a tag; None for that of a release."""
    if "nightly" in tag.lower():
        return "is a nightly, of which only the newest are kept"
    if _RELEASE.fullmatch(tag) and not re.search(r"-dev", tag):
        return None
    if tag in ("latest", "main", "master", "edge", "dev", "stable"):
        return "moves with every build"
    return "names no release, and such tags are rebuilt in place"


def commit_of(tag: str) -> str:
    """The commit that a nightly's tag names, or ""."""
    match = _NIGHTLY_COMMIT.search(tag)
    return match[1] if match else ""


def first_release(lock: Lock, commit: str, created: str) -> str | None:
    """A clause on the first locked release that has a commit, as far as the lock can know.

    Args:
        lock: knows commit and day of each release.
        commit: of the image, or "".
        created: when it was made, ISO 8601, or "".
    """
    for base in lock.bases.values():
        if same_commit(base.commit, commit):
            return f"vLLM {base.version} is built from that very commit"
    moment = seconds_of(created)
    later = [base for base in lock.bases.values() if moment is not None and base.epoch >= moment]
    if later:
        return (f"vLLM {later[0].version} is the first locked release published after it; "
                "that it contains the commit is for git to say")  # fmt: skip
    return None


def seconds_of(text: str) -> int | None:
    """Seconds since 1970 of an ISO 8601 time or day; None when it is none."""
    try:
        moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return int(moment.timestamp())
