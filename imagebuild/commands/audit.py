"""`audit`: what releases mean for every patch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from imagebuild.audit import run as audit
from imagebuild.audit.report.outputs import about_of, deliver, outputs_of
from imagebuild.audit.results import Release
from imagebuild.audit.run import Job
from imagebuild.commands.context import Context


def run(context: Context) -> int:
    """Audits everything that was named, and returns the gravest code."""
    files = outputs_of(context.arguments.report)
    with context.upstream() as upstream:
        job = Job(context.recipe, context.lock, context.series, context.arguments.arch, upstream)
        releases = [step() for step in _steps(context, job)]
    found = audit.audit_of(job, releases)
    about = about_of(context.recipe, context.series)
    deliver(context.console, found, about, context.arguments.format, files)
    return found.exit_code


def _steps(context: Context, job: Job) -> Iterator[Callable[[], Release]]:
    """One call a release; the recipe's own base when nothing was named."""
    arguments = context.arguments
    named = arguments.against or arguments.wheel or arguments.tree
    specs = arguments.against if named else [context.recipe.base_version]
    versions = [version for spec in specs for version in audit.versions_of(spec, job.upstream)]
    for version in dict.fromkeys(versions):
        context.console.step(f"audit vLLM {version}")
        yield lambda version=version: audit.audit_version(job, version)  # type: ignore[misc]
    for path in arguments.wheel:
        yield lambda path=path: audit.audit_wheel(job, Path(path))  # type: ignore[misc]
    for path in arguments.tree:
        yield lambda path=path: audit.audit_tree(job, Path(path))  # type: ignore[misc]
