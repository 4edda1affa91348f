"""Shows what was found: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm53_sparse_mla.check.attention import Row
from glm53_sparse_mla.check.flashkda import Outcome

_COLUMNS = ("case", "launches", "max-relative", "norm-relative", "cosine", "lse", "")
_MOST_PROBLEMS = 3


def attention_lines(rows: Sequence[Row]) -> list[str]:
    """The table of the kernel's cases, each miss below its row."""
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = []
    for number, line in enumerate(cells):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(shown.rstrip())
        problems = rows[number - 1].measures.problems if number else ()
        lines += [f"    {problem}" for problem in problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"    and {len(problems) - _MOST_PROBLEMS} more")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    found = row.measures
    verdict = "ok" if row.is_well else "MISS"
    if row.not_run:
        verdict = f"{verdict}, some not run: {row.not_run}" if row.runs else (
            f"not run: {row.not_run}")  # fmt: skip
    if not row.runs and row.is_well:
        return (row.name, "0", "", "", "", "", verdict)
    return (row.name, str(row.runs), f"{found.max_rel:.2e}", f"{found.norm_rel:.2e}",
            f"{found.cosine:.7f}", f"{found.lse:.1e}", verdict)  # fmt: skip


def flashkda_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a test of FlashKDA."""
    return [f"FlashKDA {one.name}: {one.value:.4g}, expected {one.expected}: "
            f"{'ok' if one.is_well else 'MISS'}" for one in outcomes]  # fmt: skip


def document(
    machine: dict[str, Any], rows: Sequence[Row], outcomes: Sequence[Outcome], code: int
) -> dict[str, Any]:
    """All of it for programs; infinite values become null, which JSON has."""
    return {
        "schema": 1,
        **machine,
        "cases": [
            {
                "case": row.name,
                "launches": row.runs,
                "max_rel": _finite(row.measures.max_rel) if row.runs else None,
                "norm_rel": _finite(row.measures.norm_rel) if row.runs else None,
                "cosine": row.measures.cosine if row.runs else None,
                "lse": _finite(row.measures.lse) if row.runs else None,
                "ok": row.is_well,
                "problems": list(row.measures.problems),
                "not_run": row.not_run,
            }
            for row in rows
        ],
        "flashkda": [
            {"test": one.name, "value": _finite(one.value), "expected": one.expected,
             "ok": one.is_well} for one in outcomes
        ],
        "exit_code": code,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
