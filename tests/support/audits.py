"""Results of audits for the tests of reports: every verdict, every field, and hostile text."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from imagebuild.audit.report import About
from imagebuild.audit.results import (
    Audit,
    Bisection,
    EditCandidates,
    Evidence,
    Failure,
    LockNote,
    Near,
    PinChange,
    Release,
    ScopeDiff,
    Step,
    TokenChange,
    Watch,
    cell_of,
)
from imagebuild.patching.evaluate import Evaluation, Finding, PatchReport, Verdict
from imagebuild.patching.patch import Answer, Outcome, Patch, Probe, Variant
from imagebuild.patching.selection import Selection
from imagebuild.patching.tree import Identity
from imagebuild.patching.workspace import EditReport, State

PROBE = Probe("it holds", lambda _tree: Answer(Outcome.HOLDS, "seen"))
# Markup, workflow commands, colours and fences: none of it may act in any report.
HOSTILE = (
    "<script>alert(1)</script> </details> <img src=x onerror=alert(2)> &lt; \x1b[31mred\x1b[0m "
    "`a``b``` | c [x](javascript:alert(3)) **b** @someone #12 org/repo#34 GH-5 100%0A a\u202eb "
    "{{ 7*7 }} {% raw %} ::error::owned, file=/etc/passwd ]]> '\""
)
# What stands at the start of a line, and a path that is no text.
LINES = "first\n::add-mask::hidden\n::stop-commands::x\n```\n</pre></script>\r\n<b>last"
PATH = os.fsdecode(b"vllm/caf\xe9 <i>&'\".py")
# It ends in a removed line that looks like a head, and in one that is wider than any window.
DIFF = (
    "--- a\n+++ b\n@@ -1,3 +1,3 @@\n def f(self):\n-    return old\n+    return new\n \n"
    "--- removed\n # " + "wide " * 80
)


def report(
    verdict: Verdict, name: str = "vllm_a_b", *, declared: bool = False, why: str = "chosen"
) -> PatchReport:
    variant = Variant(versions=">=0.31,<0.32")
    patch = Patch(name=name, status="pending", upstream="", origin="", variants=(variant,),
                  reason=PROBE, effect=PROBE)  # fmt: skip
    return PatchReport(patch, Selection(variant, None, why), verdict, declared)


def release(*reports: PatchReport, version: str = "0.31.0", **more: Any) -> Release:
    fields: dict[str, Any] = {"name": version, "pins": {}, "changed_pins": {}} | more
    return Release(
        identity=Identity(version, "abc1234"), evaluation=Evaluation(reports, {}), **fields
    )


def audit(*releases: Release, **more: Any) -> Audit:
    fields: dict[str, Any] = {"recipe": "tiny", "base_version": "0.31.0", "gpu_arch": ""} | more
    return Audit(releases=releases, **fields)


def about(*names: str, **more: Any) -> About:
    files = {name: f"patches/tiny/{name}.py" for name in names}
    titles = {name: f"Make {name} true." for name in names}
    return About(**{"patch_files": files, "titles": titles, "lock_file": "image/tiny/lock.toml",
                    "made": "2026-11-29 12:00 UTC"} | more)  # fmt: skip


def evidence(text: str = "", path: str = "vllm/a.py") -> Evidence:
    """One changed scope with its tokens, and two places where an edit's text may be now."""
    scope = ScopeDiff(f"{path}::f", path, "f", "0.31.0", 12, DIFF + ("\n+" + text if text else ""),
                      (TokenChange(("return", "old"), ("return", "new"), 13, 14),
                       TokenChange((), (text or "added",), 0, 15)))  # fmt: skip
    near = [Near(path, 40 + n, 0.9 - n / 10, f"    return other{n}\n{text}", "g", "the same call")
            for n in range(2)]  # fmt: skip
    return Evidence((scope,), (EditCandidates(text or "words", path, "f", tuple(near)),))


def every_verdict(version: str = "0.33.0") -> Release:
    """One patch a verdict, each with a finding, and `declared_one`."""
    reports = []
    for verdict in Verdict:
        one = report(verdict, f"vllm_is_{verdict.value}", why=f"{version} was chosen")
        level = {0: "info", 1: "warning"}.get(one.exit_code, "error")
        if verdict is not Verdict.OK:
            fix = "" if level == "info" else "look at it"
            one.add(level, verdict.value.replace("_", "-"), f"it is {verdict.value} here",
                    file="vllm/a.py", line=7, fix=fix)  # fmt: skip
        reports.append(one)
    reports.append(report(Verdict.ABSORBED, "declared_one", declared=True))
    reports[-1].add("info", "dropped", "vLLM has it. Proof: seen.")
    drifted = next(one for one in reports if one.verdict is Verdict.DRIFTED)
    drifted.edits.append(EditReport("words", "vllm/a.py", "f", State.DRIFTED, 40, "gone"))
    found = {one.patch.name: evidence() for one in reports if one.exit_code}
    pins = {"torch": "2.14.0", "flashinfer-python": "0.7.2"}
    change = PinChange("flashinfer-python", "0.7.0", "0.7.2", ("vllm_is_ok",))
    return release(
        *reports, version=version, evidence=found, pins=pins, pin_changes=(change,),
        changed_pins={"flashinfer-python": ("0.7.0", "0.7.2")}, requests=3, bytes_fetched=1_500_000,
        seconds=1.25,
    )  # fmt: skip


def all_green(version: str = "0.31.0") -> Release:
    """The same patches, all well."""
    reports = [report(Verdict.OK, one.patch.name) for one in every_verdict().reports]
    reports[0].add("info", "note", "a stock route exists")
    pins = {"torch": "2.14.0", "flashinfer-python": "0.7.0"}
    return release(*reports, version=version, pins=pins)


def full() -> Audit:
    """Several releases with everything that a result may hold."""
    bad = every_verdict()
    told = replace(bad, findings=(
        Finding("warning", "executor-names", "its executor uses 2 new names", "vllm/x.py", 3,
                "read"),
        Finding("info", "note", "all else is as it was"),
    ))  # fmt: skip
    step = Step("0.33.0", cell_of(bad.reports[5]))
    return audit(
        all_green(), replace(all_green("0.32.0"), pin_changes=()), told,
        failures=(Failure("0.34.0", "0.34.0: expected a wheel, found none", "try again", 5),),
        bisection=Bisection("vllm_is_drifted", (step,), "0.33.0", "0.32.0", 4),
        watch=Watch("0.33.0", ("0.34.0",), ("0.33.1",), (
            LockNote("error", "image", "its digest moved"), LockNote("info", "wheels", "resolves"),
        ), 4),
        requests=9, bytes_fetched=2_000_000, seconds=4.5,
    )  # fmt: skip


def hostile() -> tuple[Audit, About]:
    """Hostile text in every place that takes text."""
    name = HOSTILE + "\n" + LINES
    bad = report(Verdict.DRIFTED, name, why=name)
    bad.add("error", name, name, file=PATH, line=3, fix=name)
    bad.add("info", "note", name)
    bad.edits.append(EditReport(name, PATH, name, State.DRIFTED, 3, name))
    bad = replace(bad, patch=replace(bad.patch, upstream="javascript:alert(1)//" + name))
    one = release(
        bad, name=name, version="0.33.0", evidence={name: evidence(name, PATH)},
        pins={name: name}, changed_pins={name: (name, name)},
        pin_changes=(PinChange(name, name, name, (name,)),),
        findings=(Finding("warning", name, name, PATH, 1, name),),
    )  # fmt: skip
    one = replace(one, identity=Identity(name, name))
    found = audit(
        one, recipe=name, base_version=name, gpu_arch=name,
        failures=(Failure(name, name, name, 5),),
        bisection=Bisection(name, (Step(name, cell_of(bad)),), name, name, 1),
        watch=Watch(name, (name,), (name,), (LockNote("error", name, name),), 4),
    )  # fmt: skip
    return found, About({name: PATH}, {name: name}, PATH, name)
