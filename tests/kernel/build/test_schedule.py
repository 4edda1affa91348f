"""Each tile of each token is computed exactly once, and each part is combined from its own slot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagebuild import nvcc
from tests.kernel.build.conftest import SOURCE

CHECK = Path(__file__).with_name("schedule_check.cpp")


def walk(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the check against some sources and runs it."""
    program = folder / "check"
    subprocess.run([nvcc.host_compiler(host()), "-std=c++17", "-O2", f"-I{source}", str(CHECK),
                    "-o", str(program)], check=True)  # fmt: skip
    return subprocess.run([program], capture_output=True, text=True, check=False)


def host() -> str:
    from imagebuild.toolchain import own_platform

    return own_platform()


def test_every_plan(tmp_path: Path) -> None:
    done = walk(SOURCE, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith(" 0 wrong\n")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("schedule.cuh", "2 * first + is_second, 2 * first", "2 * first, 2 * first"),
        ("schedule.cuh", "end < plan.tiles ? end : plan.all_tiles", "end"),
        ("schedule.cuh", "(i < longer ? i : longer)", "0"),
        ("plan.h", "most = std::max(most, slots_of(schedule, token).parts);", "most = 1;"),
    ],
)
def test_the_check_finds_what_is_wrong(file: str, before: str, after: str, tmp_path: Path) -> None:
    copy = tmp_path / "csrc"
    copy.mkdir()
    for path in SOURCE.iterdir():
        text = path.read_text()
        if path.name == file:
            assert before in text
            text = text.replace(before, after)
        (copy / path.name).write_text(text)
    done = walk(copy, tmp_path)
    assert done.returncode == 1
    assert "wrong: " in done.stdout
