"""`lint [FILE...]`: the Dockerfile, compose files and env files, for faults that show late."""

from __future__ import annotations

from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.console import counted
from imagebuild.errors import UsageError
from imagebuild.lint import dockerfile, serving


def run(context: Context) -> int:
    """Lints what is named, else what the repository has."""
    named = [Path(name) for name in context.arguments.file]
    findings = [one for path in named or _own(context.root) for one in _check(path)]
    errors = sum(one.level == "error" for one in findings)
    warnings = len(findings) - errors
    for one in findings:
        fix = f"; {one.fix}" if one.fix else ""
        code = 3 if one.level == "error" else 1
        text = f"{one.file}:{one.line}: {one.level} {one.code}: {one.message}{fix}"
        context.console.verdict(text, code)
    code = 3 if errors else 1 if warnings and context.arguments.strict else 0
    said = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    context.console.verdict(f"lint: {said}", code)
    context.console.document({
        "ok": not errors,
        "exit_code": code,
        "findings": [one.document() for one in findings],
    })  # fmt: skip
    return code


def _own(root: Path) -> list[Path]:
    compose = root / "compose"
    return [root / "Dockerfile", *sorted(compose.rglob("*.yaml")), *sorted(compose.glob(".env"))]


def _check(path: Path) -> list[serving.Finding]:
    try:
        if path.name.startswith("Dockerfile") or path.suffix == ".Dockerfile":
            return [
                serving.Finding("error", one.code, str(path), one.line, one.message, one.fix)
                for one in dockerfile.check_file(path)
            ]
        return serving.check_file(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(f"{path}: expected a file that can be read: {reason}") from error
