"""The tables of kernel/README.md, made from the results; a test compares them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from imagebuild.errors import BrokenError
from kernel.bench.cases import KERNELS
from kernel.bench.results import CASE, Results
from kernel.bench.targets import Target, read_bandwidth, targets

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def markdown(results: Results) -> str:
    """Everything between the two marks."""
    parts = [
        f"Machine: {results.machine}. Date: {results.date}. Command: `{results.command}`. "
        f"{_bandwidth(results)}",
        "Microseconds of a launch, ours first:",
        _times(results, is_plain=True),
        "Variants of a case:",
        _variants(results),
        "How far from fp64 (max-relative / norm-relative / cosine), the worst of a kernel's rows:",
        _accuracy(results),
        "Targets, and what came of them:",
        _targets(results),
    ]
    return "\n\n".join(parts)


def _bandwidth(results: Results) -> str:
    try:
        return f"Read bandwidth measured in the run: {read_bandwidth(results) / 1e6:.2f} TB/s."
    except BrokenError:
        return "Read bandwidth was not measured in the run."


def update(results: Results, readme: Path = README) -> str:
    """The README's text with new tables. Raises BrokenError where it has no marks."""
    text = readme.read_text()
    head, begin, rest = text.partition(BEGIN)
    _old, end, tail = rest.partition(END)
    if not begin or not end:
        raise BrokenError(f"{readme}: expected the marks {BEGIN} and {END}, found none")
    return f"{head}{BEGIN}\n\n{markdown(results)}\n\n{END}{tail}"


def _variant(case: str) -> str:
    match = CASE.fullmatch(case)
    return match[5] if match else ""


def _times(results: Results, *, is_plain: bool) -> str:
    names = dict.fromkeys(r.case for r in results.rows if bool(_variant(r.case)) != is_plain)
    known = [kernel for kernel in KERNELS if any(r.kernel == kernel for r in results.rows)]
    lines = []
    for case in names:
        found = [results.find(case, kernel) for kernel in known]
        lines.append([case, *(f"{row.microseconds:.1f}" if row else "" for row in found)])
    return _table(["case", *known], lines)


def _variants(results: Results) -> str:
    rows = [row for row in results.rows if _variant(row.case)]
    return _table(["case", "kernel", "us"],
                  [[row.case, row.kernel, f"{row.microseconds:.1f}"] for row in rows])  # fmt: skip


def _accuracy(results: Results) -> str:
    lines = []
    for kernel in KERNELS:
        rows = [row for row in results.rows if row.kernel == kernel
                and not row.case.endswith(("causal", "read", "matmul"))]  # fmt: skip
        if rows and kernel != "gather":
            lines.append([kernel, f"{max(r.max_rel for r in rows):.2e}",
                          f"{max(r.norm_rel for r in rows):.2e}",
                          f"{min(r.cosine for r in rows):.7f}"])  # fmt: skip
    return _table(["kernel", "max-relative", "norm-relative", "cosine"], lines)


def _targets(results: Results) -> str:
    lines = []
    for one in targets():
        found = _value(one, results)
        limit = f"{'<=' if one.at_most else '>='} {_number(one, one.limit)}"
        if found is None:
            lines.append([one.kind, one.what, limit, "", "not measured"])
            continue
        verdict = "met" if one.is_met(results) else "**not met**"
        lines.append([one.kind, one.what, limit, _number(one, found), verdict])
    return _table(["", "target", "limit", "measured", ""], lines)


def _value(target: Target, results: Results) -> float | None:
    """The number; None where a kernel that it needs was not timed, as FA3 is not on every card."""
    try:
        return target.value(results)
    except BrokenError:
        return None


def _number(target: Target, value: float) -> str:
    if target.unit:
        return f"{value:.2f} {target.unit}"
    return f"{value:.7f}" if value > 0.5 else f"{value:.2e}"


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def missed(results: Results) -> list[str]:
    """Hard targets that a run did not reach, in words; those that it did not measure are none."""
    problems = []
    for one in targets():
        found = _value(one, results)
        if one.kind == "hard" and found is not None and not one.is_met(results):
            problems.append(f"{one.what}: expected {'at most' if one.at_most else 'at least'} "
                            f"{_number(one, one.limit)}, found {_number(one, found)}")  # fmt: skip
    return problems
