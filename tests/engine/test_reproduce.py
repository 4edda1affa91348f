"""`reproduce` on a real engine: an image again from its labels; a planted time is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.cli import main
from tests.support.images import First, Repository, docker

# What the verified stage begins with.
STAGE = "FROM patched AS verified\n"
PLANTED = "usr/local/share/planted"
# A step that needs a secret, as one with a private CA would.
STEP = f"RUN test -s /run/secrets/ca && date > /{PLANTED}"
MOUNT = "--mount=type=secret,id=ca,required=true"


def reproduce(
    repository: Repository, *words: str, capture: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    """Calls the verb on a clone."""
    code = main(["reproduce", *words, "--build-context", f"cuda={repository.cuda}",
                 "--format", "json"], root=repository.folder)  # fmt: skip
    out, err = capture.readouterr()
    return code, json.loads(out), err


def test_an_image_is_rebuilt_from_its_labels_bit_for_bit(
    first: First, capfd: pytest.CaptureFixture[str]
) -> None:
    """The clone has moved on: the commit that the labels name is what is built."""
    repository = first.repository
    # Another test may have taken its tag away; the registry has it.
    assert docker("pull", "--quiet", first.tag).returncode == 0
    head = repository.git("rev-parse", "HEAD")
    later = repository.folder / "image" / "runtime" / "entrypoint.py"
    before = later.read_text()
    later.write_text(before + "\n# later\n")
    repository.commit()
    try:
        code, document, err = reproduce(repository, first.tag, capture=capfd)
    finally:
        repository.git("reset", "--quiet", "--hard", head)
    assert code == 0, json.dumps(document, indent=1)[:3000] + err[-3000:]
    assert document["grade"] == "bit-identical"
    assert document["digests"] == [first.outcome.document["digest"]] * 2
    assert "worktree add --quiet --detach" in err
    assert later.read_text() == before
    assert not list((repository.folder / "dist").glob("reproduce-*"))


@pytest.fixture
def planted(base: str, source: Path, cuda: Path, tmp_path: Path) -> Iterator[Repository]:
    """A clone whose verified stage writes the time into a file."""
    made = Repository(tmp_path / "planted", base, cuda, source)
    file = made.folder / "Dockerfile"
    text = file.read_text()
    assert text.count(STAGE) == 1
    file.write_text(text.replace(STAGE, f"{STAGE}{STEP.replace('RUN', f'RUN {MOUNT}')}\n"))
    made.commit()
    yield made
    shutil.rmtree(made.folder)


def test_a_planted_time_is_named_by_file_and_stage(
    planted: Repository, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both builds get the secret, whose content is nowhere to be seen."""
    (tmp_path / "ca.pem").write_text("what nobody may see\n")
    code, document, err = reproduce(planted, "--engine", "docker", "--arch", "sm_120",
                                    "--base", planted.base, "--secret",
                                    f"id=ca,src={tmp_path / 'ca.pem'}", capture=capfd)  # fmt: skip
    assert "what nobody may see" not in err + json.dumps(document)
    assert code == 1, json.dumps(document, indent=1)[:3000] + err[-3000:]
    assert document["grade"] == "identical but for named files"
    assert document["files"] == [PLANTED]
    (one,) = document["differences"]
    assert one["stage"] == "verified"
    assert one["step"] == STEP
    assert one["causes"] == ["content"]
    assert "which looks like a time" in one["detail"]
