"""What a report is made of beside the audit itself: the words, and all that needs a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from imagebuild.audit.results import Audit, Release
from imagebuild.patching.evaluate import Finding, PatchReport, Verdict

# What each verdict says, and what to do about it.
MEANINGS: Mapping[Verdict, tuple[str, str]] = {
    Verdict.OK: ("it fits, and it is still needed", "nothing"),
    Verdict.NOT_APPLICABLE: ("it is not for this release or GPU", "nothing"),
    Verdict.REVIEW: (
        "the text fits, but the code around it changed",
        "read the diff, then accept or refresh",
    ),
    Verdict.ABSORBED: ("upstream has the fix", "declare the drop"),
    Verdict.REASON_GONE: (
        "it applies, but upstream no longer needs it",
        "drop it, or say why not",
    ),
    Verdict.DRIFTED: (
        "the text it changes is no longer there",
        "refresh it; the nearest lines are shown",
    ),
    Verdict.MOVED: ("the function went elsewhere", "find it, refresh or drop"),
    Verdict.MISSING: ("the function went away", "find it, refresh or drop"),
    Verdict.DEFEATED: ("it applies and has no effect", "find out what overrules it"),
    Verdict.COLLISION: ("two patches change the same lines", "order them or merge them"),
    Verdict.PARTIAL: (
        "some of its changes are there already, others not",
        "start from a pristine tree",
    ),
}
# Problems that are no patch's.
RELEASE, UNREADABLE, LOCK = "release", "unreadable", "lock"


@dataclass(frozen=True)
class About:
    """What reports say beside the result.

    Attributes:
        patch_files: by patch, its module, relative to the repository.
        titles: by patch, the first line of its description.
        lock_file: the recipe's lock, relative to the repository.
        made: when, for people; "" leaves it out.
    """

    patch_files: Mapping[str, str] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    lock_file: str = ""
    made: str = ""


@dataclass(frozen=True)
class Place:
    """Where upstream: a file relative to site-packages, a 1-based line or 0, and what is there."""

    path: str
    line: int
    note: str


@dataclass(frozen=True)
class Problem:
    """One thing that needs a person.

    Attributes:
        code: the exit code that it causes.
        rule: a verdict's word, `release`, `unreadable` or `lock`.
        release: which one; "" for the lock.
        subject: the patch, or the entry of the lock; "" for a release as a whole.
        file: what is to be changed, relative to the repository; "" when that is not known.
        lines: what was found, a sentence each.
        fixes: what to do next, a sentence each.
        places: where upstream.
    """

    code: int
    rule: str
    release: str
    subject: str
    file: str
    lines: tuple[str, ...]
    fixes: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def title(self) -> str:
        """Which, where and what, in a few words."""
        where = f" on vLLM {self.release}" if self.release else ""
        return f"{self.subject or 'vLLM'}{where}: {self.rule}"


def problems(audit: Audit, about: About) -> tuple[Problem, ...]:
    """Everything that is not green: the gravest first, then the newest release."""
    found = [*_failures(audit), *_lock(audit, about)]
    columns = audit.grid.columns
    for column, release in reversed(list(zip(columns, audit.releases, strict=True))):
        found += _release(column, release, about)
    return tuple(sorted(found, key=lambda problem: -problem.code))


def of_patch(column: str, release: Release, report: PatchReport, about: About) -> Problem:
    """One patch on one release, green or not."""
    name = report.patch.name
    verdict = report.verdict
    told = [f for level in ("error", "warning") for f in report.findings if f.level == level]
    meaning, step = MEANINGS[verdict]
    lines = [finding.message for finding in told] or [meaning]
    return Problem(
        code=report.exit_code,
        rule=verdict.value,
        release=column,
        subject=name,
        file=about.patch_files.get(name, ""),
        lines=tuple(dict.fromkeys(lines)),
        fixes=tuple(dict.fromkeys(f.fix for f in told if f.fix)) or (step,),
        places=tuple(dict.fromkeys(_places(release, report, told))),
    )


def _release(column: str, release: Release, about: About) -> Iterator[Problem]:
    told = [finding for finding in release.findings if finding.level != "info"]
    for finding in told:
        place = (Place(finding.file, finding.line, finding.message),) if finding.file else ()
        fixes = (finding.fix,) if finding.fix else ()
        yield Problem(1, RELEASE, column, "", about.lock_file, (finding.message,), fixes, place)
    for report in release.reports:
        if report.exit_code:
            yield of_patch(column, release, report, about)


def _places(release: Release, report: PatchReport, told: list[Finding]) -> Iterator[Place]:
    for finding in told:
        if finding.file:
            yield Place(finding.file, finding.line, finding.message)
    evidence = release.evidence.get(report.patch.name)
    for edit in evidence.candidates if evidence else ():
        for near in edit.candidates:
            note = f"{edit.label!r} is {near.similarity:.0%} like this"
            yield Place(near.path, near.line, note)


def _failures(audit: Audit) -> Iterator[Problem]:
    for failure in audit.failures:
        fixes = (failure.hint,) if failure.hint else ()
        yield Problem(
            failure.exit_code, UNREADABLE, failure.name, "", "", (failure.message,), fixes
        )


def _lock(audit: Audit, about: About) -> Iterator[Problem]:
    for note in audit.watch.lock if audit.watch else ():
        if note.level != "info":
            code = audit.watch.lock_code if audit.watch and note.level == "error" else 1
            yield Problem(code or 1, LOCK, "", note.entry, about.lock_file, (note.message,))
