"""The assembler's report: what is read from it, and what passes a limit."""

from __future__ import annotations

import pytest

from imagebuild.verify import ptxas

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_120a'
ptxas info    : Function properties for _Z3onev
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers
ptxas info    : Compile time = 24.602 ms
ptxas info    : Compiling entry function '_Z3twov' for 'sm_121a'
ptxas info    : Function properties for _Z3twov
    16 bytes stack frame, 24 bytes spill stores, 80 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 5120 bytes smem
"""


def test_report() -> None:
    one, two = ptxas.usages(REPORT)
    assert one == ptxas.Usage("_Z3onev", "sm_120a", 255, 0, 0, 0, 0)
    assert two == ptxas.Usage("_Z3twov", "sm_121a", 40, 16, 24, 80, 5120)


@pytest.mark.parametrize("lost", ["stack frame", "Used 40"])
def test_report_of_another_form(lost: str) -> None:
    cut = "\n".join(line for line in REPORT.splitlines() if lost not in line)
    with pytest.raises(ptxas.ReportError, match="expected stack and registers"):
        ptxas.usages(cut)


def test_limits() -> None:
    found = ptxas.usages(REPORT)
    said = ptxas.broken(found, ptxas.Limits(shared=5119), where="x.cu")
    where = "x.cu: _Z3twov for sm_121a: expected at most"
    assert said == [
        f"{where} 0 bytes of stack, found 16",
        f"{where} 0 bytes of spilled registers, found 80",
        f"{where} 5119 bytes of shared memory, found 5120",
    ]
    assert ptxas.broken(found, ptxas.Limits(stack=16, spills=80), where="x.cu") == []
