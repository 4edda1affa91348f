"""`ship`: one image on every box, by its id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from imagebuild.commands.context import Context
from imagebuild.engines import ship as shipping
from imagebuild.errors import BuildError, EngineError


def run(context: Context) -> int:
    """Sends an image to each host; one that fails does not keep it from the others."""
    arguments, console = context.arguments, context.console
    image = arguments.image or f"{context.recipe.name}:{context.recipe.base_version}-sm_121"
    hosts = list(dict.fromkeys(arguments.host))
    for host in hosts:
        shipping.address(host)  # a malformed one stops before anything is sent
    running = shipping.Running()
    results: dict[str, shipping.Shipped | BuildError] = {}
    with console.progress() as progress:

        def one(host: str) -> None:
            try:
                results[host] = shipping.ship(
                    image,
                    host,
                    console.command,
                    progress,
                    compress=arguments.compress,
                    running=running,
                )
            except BuildError as error:
                results[host] = error

        with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
            try:
                list(pool.map(one, hosts))
            except BaseException:
                # Ctrl-C: else it would wait until the last byte had been sent.
                running.stop()
                raise
    failed = {host: result for host, result in results.items() if isinstance(result, BuildError)}
    for host in hosts:
        result = results[host]
        if isinstance(result, shipping.Shipped):
            how = "was there" if result.was_there else f"{result.sent / 1e9:.2f} GB sent"
            console.result(f"{host}: {image} {result.id} ({how})", "green")
        else:
            console.result(f"x {result}", "red")
            if result.hint:
                console.result(f"  hint: {result.hint}")
    ids = {result.id for result in results.values() if isinstance(result, shipping.Shipped)}
    if len(ids) == 1 and not failed:
        console.result(f"GLM_IMAGE_ID={ids.pop()} in each box's .env makes ranks compare it")
    console.document({
        "image": image,
        "hosts": [
            {"host": host, "error": str(result), "hint": result.hint}
            if isinstance(result, BuildError) else {"host": host, **vars(result)}
            for host, result in results.items()
        ],
    })  # fmt: skip
    if not failed:
        return 0
    return max(error.exit_code for error in failed.values()) or EngineError.exit_code
