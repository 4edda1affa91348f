"""`verify`: whether a patched tree is what its manifest, the series and the lock say."""

from __future__ import annotations

from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.errors import UsageError
from imagebuild.verify import verify


def run(context: Context) -> int:
    """Verifies `--tree`, by default the site that `build` wrote for this arch."""
    arguments = context.arguments
    if arguments.tree:
        root = Path(arguments.tree)
    else:
        root = context.dist / f"{context.recipe.name}-{context.gpu_arch}" / "site"
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none",
                         hint="build.py build, or --tree DIR")  # fmt: skip
    report = verify(root, context.recipe, context.lock, gpu_arch=arguments.arch, in_base=False)
    for line in report.lines():
        context.console.result(line)
    context.console.document(report.to_json())
    return report.exit_code
