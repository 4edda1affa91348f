"""`kernel bench`: a machine that cannot time is told so before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.commands import kernelruns


@pytest.mark.parametrize(
    ("code", "found"), [(1, "found none"), (4, "found no GPU that it can use")]
)
def test_no_torch_or_gpu_is_said_before_the_baselines_are_made(
    code: int,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    made: list[Path] = []
    monkeypatch.setattr(kernelruns, "_prepare", lambda context, parts: made.append(parts))
    words = ["kernel", "bench", "--parts", str(tmp_path / "parts"), "--python", str(python)]
    assert main(words) == 5
    said = capsys.readouterr().err
    assert f"{python}: expected torch with a GPU to time on, {found}" in said
    assert "--prepare makes the baselines without" in said
    assert not made
    # Where it can, they are made first.
    python.write_text("#!/bin/sh\nexit 0\n")
    assert main(words) == 0
    assert made == [tmp_path / "parts"]
