"""The file of results: its form, reading it, writing it. Standard library only."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imagebuild.errors import BrokenError, UsageError
from kernel.bench.cases import KERNELS

SCHEMA = 1
FILE = Path(__file__).parent / "results.json"
# Phase, size, heads, type; then words of a variant.
CASE = re.compile(r"(decode bs|prefill )(\d+) h(\d+) (bf16|fp8)((?: [a-z0-9_]+)*)")
_FIELDS = ("schema", "machine", "date", "command", "rows")
_NUMBERS = ("microseconds", "bytes", "max_rel", "norm_rel", "cosine")


@dataclass(frozen=True)
class Row:
    """One kernel on one case.

    Attributes:
        case: such as "decode bs64 h16 bf16"; a variant's words come after.
        kernel: one of cases.KERNELS.
        microseconds: median time of one launch.
        bytes: that such a launch must move to and from memory.
        max_rel: largest difference from fp64 over the largest value.
        norm_rel: norm of the difference over the norm.
        cosine: of result and fp64.
    """

    case: str
    kernel: str
    microseconds: float
    bytes: int
    max_rel: float
    norm_rel: float
    cosine: float


@dataclass(frozen=True)
class Results:
    """One run on one machine: date as ISO 8601, command as it was given."""

    machine: str
    date: str
    command: str
    rows: tuple[Row, ...]

    def find(self, case: str, kernel: str) -> Row | None:
        """The row of a kernel on a case; None where there is none."""
        return next((r for r in self.rows if r.case == case and r.kernel == kernel), None)

    def time(self, case: str, kernel: str) -> float:
        """Microseconds. Raises BrokenError where there is no such row."""
        row = self.find(case, kernel)
        if row is None:
            raise BrokenError(f"results: expected a row of {kernel} on {case!r}, found none",
                              hint="build.py kernel bench")  # fmt: skip
        return row.microseconds


def write(path: Path, results: Results) -> None:
    """Replaces the file in one step."""
    content = {"schema": SCHEMA, **asdict(results)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read(path: Path = FILE) -> Results:
    """Reads and checks a file. Raises UsageError that lists all that is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="build.py kernel bench") from error
    except ValueError as error:
        raise UsageError(f"{path}: expected JSON, found: {error}") from error
    problems = check(content)
    if problems:
        raise UsageError(f"{path}:\n" + "\n".join(f"  - {one}" for one in problems))
    rows = tuple(Row(**row) for row in content["rows"])
    return Results(content["machine"], content["date"], content["command"], rows)


def check(content: Any) -> list[str]:  # noqa: ANN401 - whatever the file holds
    """Everything that is wrong with the content of such a file."""
    if not isinstance(content, dict) or tuple(content) != _FIELDS:
        return [f"expected the fields {', '.join(_FIELDS)}, found {_keys(content)}"]
    problems = [f"{name}: expected text, found {content[name]!r}"
                for name in ("machine", "date", "command")
                if not (isinstance(content[name], str) and content[name])]  # fmt: skip
    if content["schema"] != SCHEMA:
        problems.append(f"schema: expected {SCHEMA}, found {content['schema']!r}")
    rows = content["rows"]
    if not isinstance(rows, list) or not rows:
        return [*problems, "rows: expected a list with rows, found none"]
    for number, row in enumerate(rows):
        problems += [f"row {number}: {one}" for one in _row_problems(row)]
    if not problems:
        problems += _order_problems(rows)
    return problems


def _row_problems(row: Any) -> list[str]:  # noqa: ANN401
    wanted = ("case", "kernel", *_NUMBERS)
    if not isinstance(row, dict) or tuple(row) != wanted:
        return [f"expected the fields {', '.join(wanted)}, found {_keys(row)}"]
    problems = []
    if not CASE.fullmatch(str(row["case"])):
        problems.append(f"case: expected one like 'decode bs64 h16 bf16', found {row['case']!r}")
    if row["kernel"] not in KERNELS:
        problems.append(f"kernel: expected one of {', '.join(KERNELS)}, found {row['kernel']!r}")
    for name in _NUMBERS:
        value = row[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            problems.append(f"{name}: expected a finite number, found {value!r}")
        elif name in {"microseconds", "bytes"} and value <= 0:
            problems.append(f"{name}: expected more than 0, found {value!r}")
    return problems


def _order_problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Two rows of one kind, or a variant before its plain case."""
    problems, seen = [], set()
    for row in rows:
        key = (row["case"], row["kernel"])
        if key in seen:
            problems.append(f"{row['kernel']} on {row['case']!r}: expected one row, found two")
        seen.add(key)
        match = CASE.fullmatch(row["case"])
        variant = match[5] if match else ""
        plain = row["case"].removesuffix(variant)
        if variant and not any(case == plain for case, _kernel in seen):
            problems.append(f"{row['case']!r}: expected rows of the plain case before it")
    return problems


def _keys(value: Any) -> str:  # noqa: ANN401
    return ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)[:80]
