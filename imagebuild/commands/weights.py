"""`weights fetch|verify`: the checkpoint on local disk, complete and hashed."""

from __future__ import annotations

import os
from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.errors import BrokenError, UsageError
from imagebuild.sources.http import Http
from imagebuild.sources.pipconf import read_settings, scrub
from imagebuild.weights import fetch as fetching
from imagebuild.weights import verify as verifying
from imagebuild.weights.listing import Listing, read_listing

# Words in a licence's name by which a company must not, or may not freely, use the weights.
_RESTRICTIVE = ("-nc", "noncommercial", "non-commercial", "research")


def fetch(context: Context) -> int:
    """Fetches a checkpoint into a folder; a second call continues or checks the first."""
    arguments, console = context.arguments, context.console
    hub = os.environ.get("HF_ENDPOINT") or context.recipe.weights_hub
    token = _token(os.environ.get("HF_TOKEN", ""))
    folder = Path(arguments.to)
    with Http(read_settings(), offline=arguments.offline) as http:
        listing = read_listing(arguments.source, http, hub=hub, token=token,
                               revision=arguments.revision)  # fmt: skip
        _licence(context, listing)
        console.step(f"{listing.source}: {len(listing.files)} files, {listing.size / 1e9:.1f} GB, "
                     f"into {folder}")  # fmt: skip
        with console.progress() as progress:
            done = fetching.fetch(
                listing,
                folder,
                http,
                jobs=arguments.jobs,
                token=token if listing.revision else None,
                progress=progress,
            )
    console.result(f"{folder}: {len(listing.files)} files, all as {scrub(listing.source)} has them "
                   f"({done.kept} were there)", "green")  # fmt: skip
    console.document({
        "folder": str(folder),
        "source": listing.source,
        "revision": listing.revision,
        "licence": listing.licence,
        "files": len(listing.files),
        "kept": done.kept,
        "bytes": listing.size,
        "bytes_fetched": done.bytes_fetched,
    })  # fmt: skip
    return 0


def _token(text: str) -> str | None:
    """HF_TOKEN as it can stand in a header; it is never shown."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("HF_TOKEN: expected letters, digits and underscores, found others")
    return token or None


def verify(context: Context) -> int:
    """Checks a folder that `weights fetch` wrote."""
    arguments, console = context.arguments, context.console
    folder = Path(arguments.folder)
    with console.progress() as progress:
        problems = verifying.check(folder, quick=arguments.quick, jobs=arguments.jobs,
                                   progress=progress)  # fmt: skip
    for problem in problems:
        console.result(f"x {problem}", "red")
    console.document({
        "folder": str(folder),
        "quick": arguments.quick,
        "findings": [{"level": "error", "file": problem.path, "message": str(problem)}
                     for problem in problems],
    })  # fmt: skip
    if problems:
        console.note("hint: fetch into the same folder again; only what is wrong is fetched")
        return BrokenError.exit_code
    how = "sizes and headers" if arguments.quick else "every byte"
    console.result(f"{folder}: as fetched ({how} checked)", "green")
    return 0


def _licence(context: Context, listing: Listing) -> None:
    """Shows the licence; one that restricts use must be accepted by its name."""
    context.console.note(f"licence of {listing.source}: {listing.licence}")
    is_restrictive = any(word in listing.licence.lower() for word in _RESTRICTIVE)
    accepted = context.arguments.accept_licence
    if is_restrictive and accepted != listing.licence:
        raise UsageError(f"{listing.source}: its licence {listing.licence} restricts how it may be "
                         "used; expected that you accept it, found that you did not",
                         hint=f"--accept-licence {listing.licence}, once you have read it; "
                         "speculation by mtp needs no such drafter")  # fmt: skip
