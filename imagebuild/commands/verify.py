"""`verify`: whether a patched tree is what its manifest, the series and the lock say."""

from __future__ import annotations

from imagebuild.commands import deep
from imagebuild.commands.context import Context
from imagebuild.verify import verify


def run(context: Context) -> int:
    """Verifies `--tree`, by default the site that `build` wrote for this arch."""
    root = deep.tree_of(context, context.arguments.tree)
    if context.arguments.deep:
        return _deep(context, deep.run(context, root))
    report = verify(root, context.recipe, context.lock, gpu_arch=context.arguments.arch,
                    in_base=False)  # fmt: skip
    for line in report.lines():
        context.console.result(line)
    context.console.document(report.to_json())
    return report.exit_code


def _deep(context: Context, done: deep.DeepRun) -> int:
    """Shows verify's report and, before it, the table of the probes."""
    deep.show(context, done)
    for line in done.report.lines():
        context.console.result(line)
    context.console.document({**done.report.to_json(), "deep": done.to_json()})
    return done.report.exit_code
