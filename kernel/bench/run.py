"""Runs every contender on every case, on the GPU that is there, and keeps what was measured."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.errors import EngineError
from kernel.bench import cases, inputs, results
from kernel.bench.cases import SM_SCALE, Case
from kernel.bench.contenders import Contender, Plan, load
from kernel.bench.inputs import Pools, Set
from kernel.bench.results import Results, Row
from kernel.bench.timing import time_launches

if TYPE_CHECKING:
    from glm53_sparse_mla.check.compare import Measures
    from torch import Tensor

_COMPARED = 16  # tokens of a case


def run(
    parts: Path, library: Path | None, out: Path, command: Sequence[str], only: Sequence[str] = ()
) -> list[str]:
    """Times everything and writes the results; returns a sentence on each that failed.

    Args:
        parts: folder with the baselines.
        library: ours; None for the installed one.
        out: the file; it is written after every case.
        command: to be recorded.
        only: names of kernels to time; () for all.

    Raises:
        EngineError: there is no torch or no GPU.
    """
    require_gpu()
    contenders, problems = load(parts, library)
    chosen = [one for one in contenders if not only or one.name in only]
    if only:
        problems = []
    pools, rows = Pools(), []
    machine, date = machine_words(), datetime.datetime.now(datetime.UTC).date().isoformat()
    for case in cases.cases():
        given = inputs.sets(case, pools)
        for contender in chosen:
            rows += _contender(case, contender, given, problems)
        results.write(out, Results(machine, date, shlex.join(command), tuple(_sorted(rows))))
    return problems


def require_gpu() -> None:
    """Raises EngineError where there is nothing to time on."""
    try:
        import torch
    except ImportError as error:
        raise EngineError(f"torch: expected it for timing and comparing, found none ({error})",
                          hint="run it where torch with CUDA is installed") from error  # fmt: skip
    if not torch.cuda.is_available():
        raise EngineError(f"GPU: expected one that torch {torch.__version__} can use, found none",
                          hint="build.py kernel bench --prepare DIR makes what the GPU machine "
                          "needs; run there: python3 -m kernel.bench --parts DIR")  # fmt: skip


def machine_words() -> str:
    """GPU, driver, torch and Triton in one line."""
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    driver = told[0] if told else "unknown"
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return (f"{torch.cuda.get_device_name()}, {count} multiprocessors, driver {driver}, "
            f"torch {torch.__version__}")  # fmt: skip


def _contender(
    case: Case, contender: Contender, given: Sequence[Set], problems: list[str]
) -> list[Row]:
    import torch

    rows = []
    for plan in contender.plans(case):
        name = f"{case.name} {plan.variant}".rstrip()
        try:
            row = _plan(case, contender, plan, given, name)
        except Exception as error:
            # A baseline may fail in any way; the others are still worth their time.
            said = (str(error).strip() or repr(error)).splitlines()[0][:300]
            problems.append(f"{contender.name} on {name!r}: {type(error).__name__}: {said}")
            sys.stderr.write(f"- {problems[-1]}\n")
            continue
        finally:
            torch.cuda.empty_cache()
        rows.append(row)
        sys.stderr.write(f"- {row.case:34} {row.kernel:17} {row.microseconds:10.2f} us  "
                         f"{row.max_rel:.2e} {row.norm_rel:.2e} {row.cosine:.7f}\n")  # fmt: skip
    return rows


def _plan(case: Case, contender: Contender, plan: Plan, given: Sequence[Set], name: str) -> Row:
    changed = plan.change(given) if plan.change else given
    call = plan.prepare(changed)
    timed = time_launches(call, len(changed))
    found = plan.proof(changed, call) if plan.proof else _against_fp64(changed[-1], timed.out)
    return Row(name, contender.name, round(timed.microseconds, 3), plan.bytes or case.bytes,
               found.max_rel, found.norm_rel, found.cosine)  # fmt: skip


def _against_fp64(one: Set, out: Tensor) -> Measures:
    """What the timed graph's last launch left, some tokens of it."""
    from glm53_sparse_mla.check.compare import measure
    from glm53_sparse_mla.check.reference import attention

    tokens = len(one.q)
    step = max(1, tokens // _COMPARED)
    picked = sorted({*range(0, tokens, step), tokens - 1})
    expected, _lse = attention(one.q[picked], one.kv, one.indices[picked], sm_scale=SM_SCALE)
    return measure(out[picked], expected)


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Plain rows of a case before its variants; else as they came."""
    order: dict[str, int] = {}
    for row in rows:
        order.setdefault(plain_of(row.case), len(order))
    return sorted(rows, key=lambda row: (order[plain_of(row.case)], row.case != plain_of(row.case)))


def plain_of(case: str) -> str:
    """A case's name without its variant."""
    match = results.CASE.fullmatch(case)
    return case.removesuffix(match[5]) if match else case
