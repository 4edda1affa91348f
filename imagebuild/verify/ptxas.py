"""What each GPU kernel costs its multiprocessor, read from the assembler's report, and its limits.

Standard library only. The report is what `ptxas -v` writes; it has the shared memory that a kernel
declares, not what its launch asks for beside that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


@dataclass(frozen=True)
class Usage:
    """One kernel for one target; everything but registers in bytes.

    Attributes:
        kernel: mangled name.
        target: such as "sm_120a".
        registers: of a thread.
        stack: of a thread.
        spill_stores: of registers, by a thread.
        spill_loads: likewise.
        shared: static shared memory of a block.
    """

    kernel: str
    target: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Limits:
    """The most that a kernel may use, in bytes.

    sm_120 and sm_121 give a block 101,376 bytes of shared memory. A spill or a stack lies in device
    memory and is touched in the inner loop: slow, and a sign that a change went too far.
    """

    stack: int = 0
    spills: int = 0
    shared: int = 101_376


class ReportError(ValueError):
    """The report has another form than the one known here."""


def usages(report: str) -> list[Usage]:
    """Every kernel of a report, in its order.

    Raises:
        ReportError: a kernel without its numbers.
    """
    found: list[Usage] = []
    lines = iter(report.splitlines())
    for line in lines:
        entry = _ENTRY.search(line)
        if entry:
            found.append(_usage(entry[1], entry[2], [next(lines, "") for _ in range(3)]))
    return found


def _usage(kernel: str, target: str, following: Sequence[str]) -> Usage:
    text = "\n".join(following)
    stack, used = _STACK.search(text), _USED.search(text)
    if not stack or not used:
        raise ReportError(f"{kernel} for {target}: expected stack and registers, found {text!r}")
    shared = _SHARED.search(used[2])
    declared = sum(int(part) for part in shared.groups() if part) if shared else 0
    frame, stores, loads = (int(number) for number in stack.groups())
    return Usage(kernel, target, int(used[1]), frame, stores, loads, declared)


def broken(found: Sequence[Usage], limits: Limits, *, where: str) -> list[str]:
    """A sentence for each limit that is passed: file, kernel, what was found, what is allowed."""
    return [
        f"{where}: {one.kernel} for {one.target}: expected at most {allowed} bytes of {what}, "
        f"found {value}"
        for one in found
        for what, value, allowed in (
            ("stack", one.stack, limits.stack),
            ("spilled registers", max(one.spill_stores, one.spill_loads), limits.spills),
            ("shared memory", one.shared, limits.shared),
        )
        if value > allowed
    ]
