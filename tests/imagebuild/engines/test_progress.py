"""buildx's plain progress, as engine 26.1.5 with buildx 0.13.1 prints it."""

from __future__ import annotations

import pytest

from imagebuild.engines.failure import failure
from imagebuild.engines.progress import Progress, short
from imagebuild.errors import BrokenError, BuildError, EngineError, IntegrityError, ReviewError

GOOD = """\
#0 building with "default" instance using docker driver
#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 5.31kB done
#1 DONE 0.1s

#6 [kernel 1/2] FROM docker.io/library/standin:vllm@sha256:ef1e
#6 DONE 0.1s
#6 CACHED

#8 [patched 2/4] RUN --network=none     --mount=type=bind,from=debs,target=/d     python3 /d.py /d
#8 CACHED

#12 [linux/arm64 patched 4/4] RUN --network=none --mount=type=tmpfs,target=/tmp     cd /src
#12 7.509 vllm_spin_wait: ok
#12 ...

#12 [linux/arm64 patched 4/4] RUN --network=none --mount=type=tmpfs,target=/tmp     cd /src
#12 7.510 37 files written
#12 DONE 10.3s
#16 exporting to oci image format
#16 exporting layers 0.5s done
#16 DONE 15.1s
"""


def read(text: str) -> tuple[Progress, list[str]]:
    said: list[str] = []
    progress = Progress(said.append)
    for line in text.splitlines():
        progress.feed(line)
    return progress, said


def test_each_step_is_told_once_with_its_time() -> None:
    progress, said = read(GOOD)
    assert said == [
        "[kernel 1/2] FROM docker.io/library/standin:vllm@sha256:ef1e: 0.1 s",
        "[patched 2/4] RUN python3 /d.py /d: cached",
        "[linux/arm64 patched 4/4] RUN cd /src: 10.3 s",
        "exporting to oci image format: 15.1 s",
    ]
    assert progress.failed is None


def test_steps_of_stages_are_known_by_name() -> None:
    progress, _ = read(GOOD)
    steps = progress.steps()
    assert list(steps) == ["kernel 1/2", "patched 2/4", "linux/arm64 patched 4/4"]
    assert steps["patched 2/4"].is_cached
    arm = steps["linux/arm64 patched 4/4"]
    assert (arm.stage, arm.seconds) == ("patched", 10.3)
    assert arm.log == ["vllm_spin_wait: ok", "37 files written"]


def failing(code: int, *log: str) -> BuildError:
    lines = [f"#9 0.{index:03} {line}" for index, line in enumerate(log)]
    text = "\n".join([
        "#9 [patched 4/4] RUN --network=none cd /src",
        *lines,
        f'#9 ERROR: process "/bin/sh -c cd /src" did not complete successfully: exit code: {code}',
        "#10 [kernel 2/2] RUN nvcc",
        "#10 CANCELED",
        "------",
        " > [patched 4/4] RUN --network=none cd /src:",
        "------",
        "ERROR: failed to solve: process did not complete successfully",
    ])  # fmt: skip
    return failure(read(text)[0])


@pytest.mark.parametrize(
    ("code", "kind"),
    [(1, ReviewError), (3, BrokenError), (4, IntegrityError), (5, EngineError), (137, EngineError)],
)
def test_failed_step_keeps_its_exit_code(code: int, kind: type[BuildError]) -> None:
    error = failing(code, "series: error: x", "hint: do y")
    assert type(error) is kind
    assert str(error).startswith(
        f"stage patched: expected the step to succeed, found exit code {code}"
    )
    assert error.hint == "do y"
    assert "series: error: x" in str(error)
    assert "do y" not in str(error)


def test_failed_step_shows_the_last_lines_only() -> None:
    error = failing(3, *(f"line {index}" for index in range(30)))
    assert "line 29" in str(error)
    assert "line 21" not in str(error)
    assert len(str(error).splitlines()) == 9
    assert error.hint is None


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("failed to solve: no space left on device", "prune"),
        ("failed to solve: x: failed to resolve source metadata for y: not found", "--base"),
        ("failed to solve: fatal: unable to access 'z'", "flashkda-src"),
        ("failed to solve: exec format error", "qemu"),
    ],
)
def test_what_buildkit_refuses_has_a_next_command(said: str, hint: str) -> None:
    error = failure(read(f"#3 [internal] load\nERROR: {said}")[0])
    assert isinstance(error, EngineError)
    assert said in str(error)
    assert hint in str(error.hint)


def test_silent_end_is_an_error_too() -> None:
    assert "nothing" in str(failure(read("")[0]))


def test_long_names_are_cut() -> None:
    assert len(short("[a 1/1] RUN " + "x" * 300)) == 100
