"""`patches list|show|check|apply|revert`."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path

from imagebuild.audit import run as audit
from imagebuild.audit.report import json_report, text_report
from imagebuild.audit.run import Job
from imagebuild.catalogue import markdown, versions_of
from imagebuild.commands.context import Context
from imagebuild.console import counted
from imagebuild.errors import UsageError
from imagebuild.patching.apply import Result, apply, pristine, revert
from imagebuild.patching.manifest import MANIFEST, read_manifest
from imagebuild.patching.patch import GPU_ARCHES, GpuArch, Patch, Variant
from imagebuild.patching.series import Series
from imagebuild.show import offsets, report_json, report_rows


def list_patches(context: Context) -> int:
    """One row a patch; as markdown, the page patches/README.md."""
    patches = context.series.patches
    if context.arguments.format == "markdown":
        context.console.result(markdown(context.recipe.name, context.series).removesuffix("\n"))
        return 0
    rows = [(p.name, versions_of(p), p.status, p.knob or "-", _first_line(context.series, p))
            for p in patches]  # fmt: skip
    columns = ("patch", "versions", "upstream status", "knob", "what it does")
    head = f"{context.recipe.name}: {counted(len(rows), 'patch', 'patches')}"
    context.console.table(head, columns, rows)
    context.console.document({
        "recipe": context.recipe.name,
        "series": context.series.digest,
        "patches": [_patch_json(context.series, patch) for patch in patches],
    })  # fmt: skip
    return 0


def show(context: Context) -> int:
    """Everything about one patch: its reason, its edits as a diff, what the lock says."""
    patch = context.series.patch(context.arguments.name)
    say = context.console.result
    say(f"{patch.name}\n")
    say(context.series.docs[patch.name].strip() + "\n")
    for name, value in (("status", patch.status), ("upstream", patch.upstream or "-"),
                        ("origin", patch.origin or "-"), ("knob", patch.knob or "-"),
                        ("needs", ", ".join(patch.needs) or "-"),
                        ("arches", ", ".join(patch.gpu_arches))):  # fmt: skip
        say(f"{name + ':':<10}{value}")
    for name, probe in (("reason", patch.reason), ("effect", patch.effect),
                        ("absorbed", patch.absorbed)):  # fmt: skip
        say(f"{name + ':':<10}{probe.claim if probe else 'nothing can show it'}")
    for variant in patch.variants:
        say(f"\nvariant {variant.versions}")
        say(textwrap.indent(_variant_text(variant), "  "))
    for drop in patch.drops:
        say(f"\ndropped {drop.versions}: {drop.sentence}\n  proof: {drop.proof.claim}")
    say(
        "\nlocked for: "
        + (
            ", ".join(
                v for v, base in context.lock.bases.items() if patch.name in base.fingerprints
            )
            or "nothing"
        )
    )
    context.console.document({"patch": _patch_json(context.series, patch)})
    return 0


def check(context: Context) -> int:
    """Judges patches on one tree; says what it found for each edit of those asked for by name."""
    arguments = context.arguments
    names = arguments.name or [patch.name for patch in context.series.patches]
    for name in names:
        context.series.patch(name)
    with context.upstream() as upstream:
        job = Job(context.recipe, context.lock, context.series, arguments.arch, upstream)
        if arguments.tree:
            release = audit.audit_tree(job, Path(arguments.tree))
            if (Path(arguments.tree) / MANIFEST).exists():
                context.console.note(f"{arguments.tree}: is patched; it is judged as it was before")
        elif arguments.wheel:
            release = audit.audit_wheel(job, Path(arguments.wheel))
        else:
            version = arguments.against or context.recipe.base_version
            release = audit.audit_version(job, version)
    release = audit.only(release, names)
    found = audit.audit_of(job, [release])
    text_report(context.console, found)
    for report in release.evaluation.reports if arguments.name else ():
        for edit in report.edits:
            place = f"{edit.path}:{edit.line}" if edit.line else edit.path
            context.console.result(f"  {report.patch.name} / {edit.label!r}: {edit.state.value}, "
                                   f"{place}")  # fmt: skip
    context.console.document(json_report(found))
    return found.exit_code


def apply_patches(context: Context) -> int:
    """Patches a site-packages folder in place, all or nothing."""
    root = _root(context)
    result = apply(
        root,
        context.series,
        _arch_of(context, root),
        context.lock.fingerprints_for,
        recipe=context.recipe.name,
        known_as=context.lock.identify,
        project=context.recipe.project,
    )
    _show_written(context, root, result, "patched")
    return 0


def revert_patches(context: Context) -> int:
    """Restores the base's bytes in a folder that we patched."""
    root = _root(context)
    _show_written(context, root, revert(root), "restored")
    return 0


def _root(context: Context) -> Path:
    root = Path(context.arguments.tree)
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none")
    return root


def _arch_of(context: Context, root: Path) -> GpuArch:
    """`--arch`, else what a patched tree was built for, else that of this machine."""
    manifest = None if context.arguments.arch else read_manifest(root)
    built_for = manifest.gpu_arch if manifest else ""
    return next((arch for arch in GPU_ARCHES if arch == built_for), context.gpu_arch)


def _show_written(context: Context, root: Path, result: Result, word: str) -> None:
    reports = result.evaluation.reports if result.evaluation else ()
    if reports:
        context.console.table(str(root), ("patch", "verdict", "what"), report_rows(reports))
        for sentence in offsets(reports):
            context.console.result(f"  i {sentence}")
    done = f"{len(result.written)} files {word}" if result.written else "nothing to do"
    context.console.verdict(f"{root}: {done}", 0)
    context.console.document({
        "tree": str(root),
        "written": list(result.written),
        "patches": [report_json(report) for report in reports],
        "is_patched": pristine(root)[1] is not None,
    })  # fmt: skip


def _first_line(series: Series, patch: Patch) -> str:
    return series.docs[patch.name].strip().split("\n", 1)[0]


def _variant_text(variant: Variant) -> str:
    lines = []
    for edit in variant.edits:
        where = f" in {edit.scope}" if edit.scope else ""
        lines.append(
            f"{edit.label}: {edit.path}{where}" + (f" (x{edit.count})" if edit.count > 1 else "")
        )
        diff = difflib.ndiff(edit.anchor.splitlines(), edit.result.splitlines())
        lines += [f"  {line.rstrip()}" for line in diff if not line.startswith("?")]
    lines += [
        f"whole file: {file.path}"
        if Path(file.source).is_absolute()
        else f"new file: {file.path} from image/runtime/{file.source}"
        for file in variant.files
    ]
    lines += [f"relies on: {symbol}" for symbol in variant.relies_on]
    return "\n".join(lines)


def _patch_json(series: Series, patch: Patch) -> dict[str, object]:
    return {
        "name": patch.name,
        "summary": _first_line(series, patch),
        "status": patch.status,
        "upstream": patch.upstream,
        "knob": patch.knob,
        "needs": list(patch.needs),
        "gpu_arches": list(patch.gpu_arches),
        "variants": [variant.versions for variant in patch.variants],
        "drops": [drop.versions for drop in patch.drops],
        "reason": patch.reason.claim,
        "effect": patch.effect.claim,
    }
