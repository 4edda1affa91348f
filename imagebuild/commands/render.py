"""`render dockerfile|kubernetes`: files that are made from recipe, lock and profiles."""

from __future__ import annotations

from pathlib import Path

from imagebuild.commands import image
from imagebuild.commands.context import Context
from imagebuild.errors import UsageError
from imagebuild.files import write_atomically
from imagebuild.kubernetes.manifests import Wanted, render


def run(context: Context) -> int:
    """Renders what is asked for."""
    arguments = context.arguments
    if arguments.what == "dockerfile":
        return image.render_files(context)
    missing = [f"--{name.replace('_', '-')}" for name in ("deployment", "image", "model_path")
               if not getattr(arguments, name)]  # fmt: skip
    if missing:
        raise UsageError(f"render kubernetes: expected {', '.join(missing)}, found none")
    text = render(
        Wanted(
            deployment=arguments.deployment,
            image=arguments.image,
            model_path=arguments.model_path,
            cache_path=arguments.cache_path,
            drafter_path=arguments.drafter_path,
            name=arguments.name,
            namespace=arguments.namespace,
            replicas=arguments.replicas,
            cluster=arguments.cluster,
            knobs=pairs("--set", arguments.set),
            selector=pairs("--node-label", arguments.node_label),
            rdma=arguments.rdma,
            api_key_secret=arguments.api_key_secret,
        ),
        context.root / "image" / "runtime",
    )
    if arguments.output:
        write_atomically(Path(arguments.output), text.encode())
        context.console.note(f"written: {arguments.output}")
    else:
        context.console.result(text.rstrip())
    context.console.document({"manifests": text, "output": arguments.output})
    return 0


def pairs(option: str, words: list[str]) -> dict[str, str]:
    """NAME=VALUE words of an option that may stand several times. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise UsageError(f"{option}: expected NAME=VALUE, found {word!r}")
        if name in found:
            raise UsageError(f"{option}: expected {name} once, found it twice")
        found[name] = value
    return found
