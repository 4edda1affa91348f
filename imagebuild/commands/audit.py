"""`audit`: what releases mean for every patch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from imagebuild.audit import run as audit
from imagebuild.audit import targets
from imagebuild.audit.bisect import first_bad
from imagebuild.audit.report.outputs import about_of, deliver, outputs_of
from imagebuild.audit.results import Audit, Failure, Release, Step
from imagebuild.audit.run import Job
from imagebuild.audit.targets import Asked
from imagebuild.commands import watch
from imagebuild.commands.context import Context
from imagebuild.errors import UsageError
from imagebuild.patching.versions import VersionRange, release
from imagebuild.sources.http import account
from imagebuild.upstream import Upstream


def run(context: Context) -> int:
    """Audits everything that was named, and returns the gravest code."""
    arguments = context.arguments
    files = outputs_of(arguments.report)
    name = arguments.format
    with context.upstream() as upstream:
        if arguments.watch:
            found = watch.look(context, job_of(context, upstream), upstream, shower(context))
            name = "markdown" if name == "text" else name  # an issue's body
        elif arguments.first_bad:
            found = _first_bad(context, upstream)
        else:
            found = audit.audit(job_of(context, upstream), asked_of(context), shower(context))
    about = about_of(context.recipe, context.series)
    deliver(context.console, found, about, name, files)
    if arguments.watch:
        watch.keep(context, found)
    return found.exit_code


def job_of(context: Context, upstream: Upstream) -> Job:
    """What every release is audited with."""
    return Job(context.recipe, context.lock, context.series, context.arguments.arch, upstream)


def asked_of(context: Context) -> Asked:
    """What the call names; the recipe's own base when it names nothing."""
    arguments = context.arguments
    asked = Asked(
        against=arguments.against,
        since=arguments.since or "",
        latest=arguments.latest or 0,
        wheels=arguments.wheel,
        trees=arguments.tree,
        nightlies=arguments.nightly,
    )
    return Asked(against=[context.recipe.base_version]) if asked.is_empty else asked


def shower(context: Context) -> Callable[[Release | Failure, int, int], None]:
    """Says of each release, as it comes, what was found."""

    def told(one: Release | Failure, count: int, total: int) -> None:
        words = {0: "every patch fits", 1: "a person must look"}
        if isinstance(one, Failure):
            name, word = one.name, "could not be read"
        else:
            name = one.version if one.origin == "index" else f"{one.version} ({one.name})"
            idle = one.is_for_nobody and not one.exit_code
            word = "no patch is for it" if idle else words.get(one.exit_code, "broken")
        of = f" ({count} of {total})" if total > 1 else ""
        context.console.step(f"audited {context.recipe.title} {name}{of}: {word}")

    return told


def _first_bad(context: Context, upstream: Upstream) -> Audit:
    """`--first-bad NAME`: a search over releases of the index instead of all of them."""
    console, name = context.console, context.arguments.first_bad
    patch = context.series.patch(name)
    asked = asked_of(context)
    if asked.wheels or asked.trees or asked.nightlies:
        raise UsageError("--first-bad: searches releases of the index; leave --wheel, --tree and "
                         "--nightly out")  # fmt: skip
    job, start = job_of(context, upstream), time.monotonic()

    def told(step: Step) -> None:
        console.step(f"vLLM {step.version}: {name} is {step.cell.word}: {step.cell.why}")

    with account() as used:
        if context.arguments.against or asked.since or asked.latest:
            versions = [target.name for target in targets.targets_of(asked, upstream)]
        else:
            ranges = [*(one.versions for one in patch.variants), *(d.versions for d in patch.drops)]
            low = min(VersionRange.parse(text).low for text in ranges)
            versions = [v for v in targets.releases(upstream) if release(v) >= low]
        if not versions:
            raise UsageError(f"--first-bad {name}: the index has no release in its ranges")
        console.step(f"search {len(versions)} releases, {versions[0]} to {versions[-1]}, for the "
                     f"first on which {name} is not green")  # fmt: skip
        look = lambda version: audit.audit_version(job, version)  # noqa: E731
        search, seen = first_bad(name, versions, look, told)
    found = audit.audit_of(job, [audit.only(one, [name]) for one in seen])
    return replace(
        found,
        bisection=search,
        requests=used.requests,
        bytes_fetched=used.bytes_fetched,
        seconds=time.monotonic() - start,
    )
