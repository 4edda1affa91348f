"""`doctor DEPLOYMENT`: whether this host can run a deployment, before anything is started on it."""

from __future__ import annotations

from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.commands.render import pairs
from imagebuild.console import counted
from imagebuild.doctor import host

_CODES = {"ok": 0, "warn": 1, "fail": 3}


def run(context: Context) -> int:
    """Looks, and says what it found."""
    arguments = context.arguments
    model = Path(arguments.model_dir) if arguments.model_dir else None
    asked = host.Asked(arguments.deployment, model, pairs("--set", arguments.set))
    plan = host.plan_of(asked, context.root / "image" / "runtime")
    from serving.machine import Machine

    findings = host.examine(plan, asked, Machine(), host.Tools())
    code = host.exit_code(findings, is_strict=arguments.strict)
    context.console.table(
        f"{plan.profile.name}: {plan.profile.text}",
        ("level", "check", "found", "next"),
        [(one.level, one.code, one.message, one.fix) for one in findings],
        [(_CODES[one.level], None, None, None) for one in findings],
    )
    failed = sum(one.level == "fail" for one in findings)
    warned = sum(one.level == "warn" for one in findings)
    said = f"{counted(failed, 'failure')}, {counted(warned, 'warning')}"
    context.console.verdict(f"doctor: {said}", code)
    context.console.document({
        "deployment": plan.profile.name,
        "ok": failed == 0,
        "exit_code": code,
        "findings": [one.document() for one in findings],
    })  # fmt: skip
    return code
