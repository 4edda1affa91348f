"""What verify found: groups of findings, as text for people and as data. It checks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.patching.evaluate import Finding

SCHEMA = 1
# A lock or manifest that cannot be trusted: exit code 4. Every other error is 3.
_INTEGRITY = frozenset(
    ["manifest-unreadable", "manifest-inconsistent", "original-lost", "base-not-locked"]
)
# How many files of one kind are named; the rest is counted.
_NAMED = 10


@dataclass
class Group:
    """The outcome of one kind of check.

    Attributes:
        title: what was checked.
        summary: how much of it, such as "9 files".
        is_skipped: nothing could be checked; `summary` says why.
    """

    title: str
    summary: str = ""
    is_skipped: bool = False
    findings: list[Finding] = field(default_factory=list)

    def error(
        self, code: str, message: str, *, file: str = "", line: int = 0, fix: str = ""
    ) -> None:
        """Appends what must not be."""
        self.findings.append(Finding("error", code, message, file, line, fix))

    def warning(
        self, code: str, message: str, *, file: str = "", line: int = 0, fix: str = ""
    ) -> None:
        """Appends what a person should look at."""
        self.findings.append(Finding("warning", code, message, file, line, fix))

    def info(self, code: str, message: str, *, file: str = "") -> None:
        """Appends what is good to know."""
        self.findings.append(Finding("info", code, message, file))

    def skip(self, why: str) -> None:
        """Says that nothing here could be checked."""
        self.summary, self.is_skipped = f"not checked: {why}", True

    def files(
        self, level: str, code: str, problems: list[tuple[str, str]], *, fix: str = ""
    ) -> None:
        """Appends one finding a (file, sentence), the first ten; the rest is one that counts."""
        for file, message in problems[:_NAMED]:
            self.findings.append(Finding(level, code, message, file, 0, fix))
        rest = len(problems) - _NAMED
        if rest > 0:
            self.findings.append(Finding(level, code, f"and {rest} more files like these"))

    def count(self, level: str) -> int:
        """Number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def line(self) -> str:
        """One line, such as "manifest: 9 files ok"."""
        errors, warnings = self.count("error"), self.count("warning")
        counts = [_plural(errors, "error")] * bool(errors)
        counts += [_plural(warnings, "warning")] * bool(warnings)
        if not counts:
            return f"{self.title}: {self.summary}" + ("" if self.is_skipped else " ok")
        return f"{self.title}: {', '.join([*([self.summary] * bool(self.summary)), *counts])}"


@dataclass
class VerifyReport:
    """Everything that verify found on one tree.

    Attributes:
        root: the tree.
        recipe: its name.
        version, commit: of the project in the tree; "" when it does not say.
        gpu_arch: what was checked for; "" when nobody said.
        groups: in the order of the checks.
        title: of that project, in messages.
    """

    root: Path
    recipe: str
    version: str = ""
    commit: str = ""
    gpu_arch: str = ""
    groups: list[Group] = field(default_factory=list)
    title: str = "vLLM"

    def group(self, title: str) -> Group:
        """Starts a group."""
        self.groups.append(Group(title))
        return self.groups[-1]

    @property
    def findings(self) -> list[Finding]:
        """Those of all groups."""
        return [finding for group in self.groups for finding in group.findings]

    @property
    def is_ok(self) -> bool:
        """Whether there is no error."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 without an error, 4 when lock or manifest cannot be trusted, else 3."""
        codes = {finding.code for finding in self.findings if finding.level == "error"}
        if codes & _INTEGRITY:
            return 4
        return 3 if codes else 0

    def lines(self) -> Iterator[str]:
        """The report for people: one line a group, then each problem with its next step."""
        of = f"{self.title} {self.version or 'unknown'}"
        yield f"{self.root}: {of}, recipe {self.recipe}" + (
            f", {self.gpu_arch}" if self.gpu_arch else ""
        )
        for group in self.groups:
            yield f"  {group.line()}"
        for finding in self.findings:
            if finding.level == "info":
                continue
            yield f"{finding.level}: {place(finding)}{finding.message} [{finding.code}]"
            if finding.fix:
                yield f"  hint: {finding.fix}"
        errors = sum(group.count("error") for group in self.groups)
        yield f"verify failed: {_plural(errors, 'error')}" if errors else "verify ok"

    def to_json(self) -> dict[str, object]:
        """The report as data, `schema` 1."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "recipe": self.recipe,
            "base": {"version": self.version, "commit": self.commit},
            "gpu_arch": self.gpu_arch,
            "ok": self.is_ok,
            "exit_code": self.exit_code,
            "groups": [
                {"title": group.title, "summary": group.summary, "skipped": group.is_skipped}
                for group in self.groups
            ],
            "findings": [
                {
                    "level": finding.level,
                    "code": finding.code,
                    "file": finding.file,
                    "line": finding.line,
                    "message": finding.message,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
        }


def place(finding: Finding) -> str:
    """File and line as a prefix, as far as known; "" where the message starts with the file."""
    if not finding.file or finding.message.startswith(finding.file):
        return ""
    return f"{finding.file}:{finding.line}: " if finding.line else f"{finding.file}: "


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
