"""The check of a few seconds that our kernels compute right on this card, before the weights load.

It runs as a process of its own: what it takes of the GPU is gone afterwards, and a kernel that
hangs or kills its process is a sentence like any other failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from serving.errors import CheckError, EnvironmentFault
from serving.process import kill_group
from serving.resolve import Plan

_COMMAND = (sys.executable, "-m", "glm53_sparse_mla.check", "--quick", "--format", "json")
_MISS = 3
_FLASHKDA_ADVICE = (
    'GLM_EXTRA_ARGS=["--kda-prefill-backend","triton"] does without FlashKDA; more slowly'
)


def check(
    plan: Plan,
    environ: Mapping[str, str],
    log: Callable[[str], object],
    command: Sequence[str] = _COMMAND,
) -> None:
    """Runs the check for the plan's route.

    Raises:
        CheckError: a result is wrong, or the check hung; names the route that would work.
        EnvironmentFault: it could not be run.
    """
    # The routes that are not ours have no kernel to compare; FlashKDA serves all of them.
    only = () if plan.route == "cuda" else ("--only", "flashkda")
    if "--kda-prefill-backend" in plan.extra and plan.route != "cuda":
        log("numeric check: nothing of ours runs on this route, and FlashKDA is off")
        return
    limit = plan.settings.number("NUMERIC_CHECK_TIMEOUT_S")
    done = _run([*command, *only], environ, limit)
    if done is None:
        raise CheckError(f"the numeric check did not end in {limit} s: {_advice(plan)}")
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode < 0:
        raise CheckError(
            f"the numeric check was killed by signal {-done.returncode}"
            f"{_last(said)}: {_advice(plan)}"
        )
    document = _document(done.stdout)
    if done.returncode in (0, 1) and document is not None:
        log(f"numeric check: {'all well' if done.returncode == 0 else 'well, as far as it ran'}")
        return
    if done.returncode == _MISS and document is not None:
        raise CheckError(*_misses(plan, document))
    why = str(document.get("error", "")) if document else ""
    raise EnvironmentFault(
        f"the numeric check could not be run (exit {done.returncode})"
        f"{': ' + why if why else _last(said)}; GLM_NUMERIC_CHECK=0 starts without it"
    )


def _run(
    command: Sequence[str], environ: Mapping[str, str], limit: float
) -> subprocess.CompletedProcess[bytes] | None:
    """Runs a command to its end; None when the time is up. Nothing of it is left."""
    try:
        process = subprocess.Popen(
            command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentFault(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _misses(plan: Plan, document: Mapping[str, Any]) -> Iterator[str]:
    cases = [case for case in _rows(document, "cases") if not case.get("ok")]
    if cases:
        names = ", ".join(str(case.get("case")) for case in cases[:4])
        more = f" and {len(cases) - 4} more" if len(cases) > 4 else ""
        yield (
            f"the CUDA kernel computes wrong values on this card ({names}{more}): {_advice(plan)}"
        )
    for one in _rows(document, "flashkda"):
        if not one.get("ok"):
            yield (
                f"FlashKDA {one.get('test')}: expected {one.get('expected')}, found "
                f"{one.get('value')}; {_FLASHKDA_ADVICE}"
            )
    if not cases and all(one.get("ok") for one in _rows(document, "flashkda")):
        yield "the numeric check failed and did not say where; run it by hand: " + " ".join(
            _COMMAND
        )


def _rows(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = document.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _advice(plan: Plan) -> str:
    if plan.route != "cuda":
        return _FLASHKDA_ADVICE
    others = [] if plan.settings.text("KV_CACHE_DTYPE") == "bfloat16" else ["stock"]
    others += ["sm90"]
    return f"GLM_MLA_ROUTE={others[0]} does without it" + (
        f", and so does {others[1]}" if len(others) > 1 else ""
    )


def _document(data: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == 1 else None


def _last(lines: Sequence[str]) -> str:
    return f": {lines[-1]}" if lines else ""
