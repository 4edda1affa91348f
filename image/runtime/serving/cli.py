"""What the container's arguments mean.

    ARG...            further arguments of `vllm serve`; GLM_DEPLOYMENT says which deployment
    plan [ARG...]     what would be started, and nothing is
    health            exit status 0 when the container serves; for HEALTHCHECK
    knobs             every knob with its value in this environment

Without GLM_DEPLOYMENT the container is `vllm serve ARG...` and no more.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from serving.errors import EnvironmentFault, KnobError, ServingError
from serving.knobs import PREFIX

# What the patched vLLM and the plug-ins read by themselves, with or without a deployment.
_READ_BY_VLLM = ("GLM_MLA_ROUTE", "GLM_TOPK_DETERMINISTIC", "GLM_MOE_INPUT_SCALE")


def main(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Does it, and returns the exit code; a plain `vllm serve` takes the place of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path need not be text; it is shown escaped.
            stream.reconfigure(errors="backslashreplace")
    code = _main(arguments, os.environ if environ is None else environ)
    with contextlib.suppress(OSError, ValueError):
        try:
            sys.stdout.flush()
        except OSError:
            # Nobody can take the rest; Python would try again at exit, and end with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    verb = arguments[0] if arguments else ""
    try:
        if verb == "health":
            from serving import health

            return health.check(environ)
        if verb in ("plan", "knobs"):
            return _show(verb, arguments[1:], environ)
        if environ.get("GLM_DEPLOYMENT"):
            from serving.main import main as start

            return start(arguments, environ)
        return _plain(arguments, environ)
    except ServingError as error:
        for problem in error.problems:
            sys.stderr.write(f"glm53: error: {problem}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"glm53: error: the output cannot be written: {error.strerror}\n")
        return EnvironmentFault.exit_code


def _plain(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from serving.profiles import PROFILES

    lost = [name for name in sorted(environ) if name.startswith(PREFIX) and environ[name]]
    lost = [name for name in lost if name not in _READ_BY_VLLM]
    if lost:
        raise KnobError(
            f"{', '.join(lost)}: set, but GLM_DEPLOYMENT is not, so nothing would read it; "
            f"expected GLM_DEPLOYMENT to be one of {', '.join(PROFILES)}"
        )
    if not arguments:
        raise KnobError(
            f"expected GLM_DEPLOYMENT, one of {', '.join(PROFILES)}, or arguments of `vllm serve`; "
            "found neither"
        )
    own = list(arguments) if arguments[0] == "vllm" else ["vllm", "serve", *arguments]
    try:
        os.execvpe("vllm", own, dict(environ))  # noqa: S606 - it takes our place, signals and all
    except OSError as error:
        raise EnvironmentFault(f"vllm cannot be started: {error.strerror}") from error


def _show(verb: str, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from serving import command
    from serving.cluster import Membership
    from serving.resolve import resolve

    plan = resolve(environ, arguments)
    for notice in plan.notices:
        sys.stderr.write(f"glm53: {notice}\n")
    if verb == "knobs":
        for name, value in plan.settings.shown().items():
            mark = "set" if name in plan.settings.given else "default"
            sys.stdout.write(f"{name}={value}  ({mark})\n")
        sys.stdout.flush()
        return 0
    found = command.Found(
        f"<by the checkpoint: {plan.settings.text('MOE_BACKEND')}>", Path("<edited template>")
    )
    for rank in range(plan.nodes if plan.cluster == "none" else 1):
        member = Membership(rank, plan.nodes, plan.settings.text("HEAD") or "<head>")
        sys.stdout.write(f"# rank {rank}\n")
        for name, value in sorted(command.environment(plan).items()):
            sys.stdout.write(f"{name}={shlex.quote(value)} \\\n")
        sys.stdout.write(shlex.join(command.serve(plan, member, found)) + "\n")
    sys.stdout.flush()
    return 0
