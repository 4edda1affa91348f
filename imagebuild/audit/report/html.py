"""The audit as one HTML page that needs nothing else: no network, no other file, no server.

Every value is escaped by the template engine; the page's own style and script are the only ones
that its Content-Security-Policy lets run. Without a script all of it can still be read.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from imagebuild.audit.report.problems import MEANINGS, About, problems
from imagebuild.audit.results import Audit, Cell, Evidence, Release, ScopeDiff, cell_of
from imagebuild.escape import visible
from imagebuild.patching.evaluate import Finding, PatchReport, Verdict

_HERE = Path(__file__).resolve().parent
# Lines of one diff and token changes of one scope; the json report has all of them.
_DIFF_LINES, _TOKENS = 2000, 60
# So many that need a person are open at once; more are a list to choose from.
_OPENED = 3
_KINDS = {"+++": "file", "---": "file", "@@ ": "hunk"}


@dataclass(frozen=True)
class Entry:
    """One cell's evidence.

    Attributes:
        index: of its release among all, the oldest is 0.
        id, cell_id: of the two elements that point to each other.
        tone: `good`, `look`, `broken` or `idle`: what colour and icon say beside the word.
        is_quiet: nothing to be seen unless somebody asks.
    """

    index: int
    id: str
    cell_id: str
    column: str
    cell: Cell
    report: PatchReport
    evidence: Evidence
    findings: tuple[Finding, ...]
    tone: str
    is_quiet: bool


@dataclass(frozen=True)
class Pin:
    """A watched project: its version in the base, and by release, the newest first, what it is.

    `found` has a release's index, the version that it requires, and whether that is the base's.
    """

    project: str
    locked: str
    found: tuple[tuple[int, str, bool], ...]
    patches: tuple[str, ...]


def html_report(audit: Audit, about: About) -> str:
    """The page, with a final newline. Releases come the newest first: that is what is asked for."""
    style, script = (_own(name) for name in ("page.css", "page.js"))
    columns = audit.grid.columns
    releases = list(zip(columns, audit.releases, strict=True))
    needy = len(problems(audit, about))
    entries = [tuple(_entries(index, *pair)) for index, pair in enumerate(releases)]
    return _template().render(
        audit=audit,
        about=about,
        columns=columns,
        entries=entries,
        releases=list(enumerate(releases))[::-1],
        rows=list(zip(*entries[::-1], strict=True)),
        counts=_counts([entry for column in entries for entry in column]),
        needy=needy,
        opened=needy <= _OPENED,
        pins=_pins(audit),
        legend=[(verdict.value, _verdict_tone(verdict), *MEANINGS[verdict]) for verdict in Verdict],
        tone=_tone(audit.exit_code),
        style=Markup(style),  # noqa: S704 - a file of ours
        script=Markup(script),  # noqa: S704
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
    )  # fmt: skip


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.globals.update(diff_lines=diff_lines, token_limit=_TOKENS, link=link)
    return environment.get_template("page.html.j2")


def _own(name: str) -> str:
    return (_HERE / name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def link(text: str) -> bool:
    """Whether a text may be a link's target."""
    return text.startswith(("https://", "http://"))


def diff_lines(scope: ScopeDiff) -> list[tuple[str, str]]:
    """Kind (`add`, `del`, `hunk`, `file`, `more` or "") and text of each line of a unified diff."""
    lines = scope.unified.rstrip("\n").split("\n")
    found = []
    for number, line in enumerate(lines[:_DIFF_LINES]):
        kind = {"+": "add", "-": "del"}.get(line[:1], "")
        # Three dashes further down are a removed line that began with two.
        if number < 2 or line.startswith("@@ "):
            kind = _KINDS.get(line[:3], kind)
        found.append((kind, line))
    if len(lines) > _DIFF_LINES:
        found.append(("more", f"... {len(lines) - _DIFF_LINES} more lines; see the json report"))
    return found


def _entries(index: int, column: str, release: Release) -> Iterator[Entry]:
    for row, report in enumerate(release.reports):
        findings = tuple(f for f in report.findings if f.code != "not-applicable")
        told = [finding for finding in findings if finding.code != "dropped"]
        yield Entry(
            index=index,
            id=f"e{index}-{row}",
            cell_id=f"c{index}-{row}",
            column=column,
            cell=cell_of(report),
            report=report,
            evidence=release.evidence.get(report.patch.name, Evidence()),
            findings=findings,
            tone=_tone(report.exit_code, report.verdict),
            is_quiet=not told,
        )


def _tone(code: int, verdict: Verdict | None = None) -> str:
    if verdict is Verdict.NOT_APPLICABLE:
        return "idle"
    return {0: "good", 1: "look"}.get(code, "broken")


def _verdict_tone(verdict: Verdict) -> str:
    """Of an undeclared one."""
    green = (Verdict.OK, Verdict.NOT_APPLICABLE)
    yellow = (Verdict.REVIEW, Verdict.ABSORBED, Verdict.REASON_GONE)
    return _tone(0 if verdict in green else 1 if verdict in yellow else 3, verdict)


def _counts(entries: list[Entry]) -> list[tuple[str, str, int]]:
    """Word, tone and number, the gravest first."""
    order = ["broken", "look", "good", "idle"]
    found = Counter((entry.cell.word, entry.tone) for entry in entries)
    pairs = sorted(found, key=lambda pair: (order.index(pair[1]), pair[0]))
    return [(word, tone, found[word, tone]) for word, tone in pairs]


def _pins(audit: Audit) -> list[Pin]:
    """One row a watched project, in the order in which the releases name them."""
    changes = [{c.project: c for c in release.pin_changes} for release in audit.releases]
    projects = dict.fromkeys(
        name
        for release, changed in zip(audit.releases, changes, strict=True)
        for name in (*release.pins, *changed)
    )
    rows = []
    for project in projects:
        found = [
            (index, changed[project].found, False) if project in changed
            else (index, release.pins.get(project, ""), True)
            for index, (release, changed) in enumerate(zip(audit.releases, changes, strict=True))
        ]  # fmt: skip
        moved = [changed[project] for changed in changes if project in changed]
        locked = moved[0].locked if moved else next((v for _i, v, _same in found if v), "")
        patches = tuple(dict.fromkeys(name for change in moved for name in change.patches))
        rows.append(Pin(project, locked, tuple(found[::-1]), patches))
    return rows
