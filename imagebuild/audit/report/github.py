"""The audit as annotations of a GitHub Actions step: one workflow command a problem.

GitHub shows ten errors and ten warnings a step, so the gravest come first. Nothing else may stand
in this output: a runner obeys any line that starts with `::`.
"""

from __future__ import annotations

from imagebuild.audit.report.problems import About, Problem, problems
from imagebuild.audit.results import Audit
from imagebuild.escape import one_line, visible

# More would be cut by GitHub without a word.
_SHOWN = 10


def github_report(audit: Audit, about: About) -> str:
    """The lines, each with a newline; a notice with the conclusion ends them."""
    found = problems(audit, about)
    lines = [_annotation(problem) for problem in found]
    words = one_line(audit.conclusion)
    errors = sum(_level(problem) == "error" for problem in found)
    hidden = max(errors - _SHOWN, 0) + max(len(found) - errors - _SHOWN, 0)
    if hidden:
        words += f"; {hidden} more than GitHub shows here, see the reports"
    lines.append(_command("notice", {"title": f"Drift audit of {audit.recipe}"}, words))
    return "".join(line + "\n" for line in lines)


def _annotation(problem: Problem) -> str:
    where = [f"{one_line(p.path)}:{p.line}" for p in problem.places if p.line]
    found = list(problem.lines)
    if where:
        found.append("upstream: " + ", ".join(dict.fromkeys(where)))
    found += [f"next: {fix}" for fix in problem.fixes]
    properties = {"title": problem.title}
    if problem.file:
        properties = {"file": problem.file, "line": "1", **properties}
    return _command(_level(problem), properties, visible("\n".join(found)))


def _level(problem: Problem) -> str:
    return "error" if problem.code > 1 else "warning"


def _command(name: str, properties: dict[str, str], message: str) -> str:
    """Source: actions/toolkit, packages/core/src/command.ts: which characters are escaped where."""
    pairs = ",".join(f"{key}={_property(one_line(value))}" for key, value in properties.items())
    return f"::{name} {pairs}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
