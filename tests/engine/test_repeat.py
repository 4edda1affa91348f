"""Two builds give the same digests, the cache keeps what no edit touches, and kills are safe."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from tests.support.images import ROOT, First, Repository, docker, inspect

TAG = "imagebuild-test/image:repeat"


def test_pushed_image_is_pulled_by_digest_and_runs(first: First, registry: str) -> None:
    digest = first.outcome.document["digest"]
    name = f"{registry}/imagebuild-test/image@{digest}"
    assert docker("image", "rm", "--force", first.tag).returncode == 0
    try:
        assert inspect(name) is None
        pulled = docker("pull", "--quiet", name)
        assert pulled.returncode == 0, pulled.stderr
        image = inspect(name)
        assert image is not None
        assert image["Id"] == digest
        said = docker("run", "--rm", "--network=none", "--entrypoint", "python3", name,
                      "-c", "print('runs')")  # fmt: skip
        assert said.stdout == "runs\n", said.stderr
    finally:
        docker("image", "tag", name, first.tag)
        docker("image", "rm", "--force", name)


def test_an_edit_runs_again_only_what_depends_on_it(first: First, tmp_path: Path) -> None:
    mine = first.repository
    repository = Repository(tmp_path / "edited", mine.base, mine.cuda, mine.folder)
    ours = repository.folder / "patches" / "glm53_flash" / "vllm_spin_wait.py"
    ours.write_text(ours.read_text() + f"\n# edited {time.time_ns()}\n")
    steps = repository.build(TAG, "--no-load").steps()
    assert steps["kernel 2/2"] == "cached"
    assert [steps[f"patched {one}/5"] for one in (2, 3, 4)] == ["cached"] * 3
    assert steps["patched 5/5"] != "cached"
    assert steps["verified 3/3"] != "cached"

    entrypoint = repository.folder / "image" / "runtime" / "entrypoint.py"
    entrypoint.write_text(entrypoint.read_text() + f"\n# edited {time.time_ns()}\n")
    steps = repository.build(TAG, "--no-load").steps()
    # "inputs" copies what the others read: it runs, and its equal result keeps them.
    ran = {name for name, what in steps.items() if what != "cached"} - {"inputs 2/2"}
    assert ran == {"runtime 2/2"}


def test_a_killed_build_leaves_no_image_and_the_next_one_succeeds(repository: Repository) -> None:
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 100_000))
    chance = random.Random(seed)
    for index in range(4):
        process = subprocess.Popen(
            repository.command(TAG),
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # The first one comes before any build can end; a later one may come too late.
        seconds = chance.uniform(0.3, 2 if index == 0 else 6)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert inspect(TAG) is None, f"KILL_SEED={seed}, kill {index} after {seconds:.1f} s"
            assert not list(repository.folder.glob("dist/*/image.json"))
        else:
            assert index, f"KILL_SEED={seed}: a build ended within {seconds:.1f} s"
            assert process.returncode == 0
            break

    outcome = repository.build(TAG)
    assert outcome.code == 0, outcome.err[-3000:]
    image = inspect(TAG)
    assert image is not None
    assert image["Id"] == outcome.document["digest"]
    assert not list(repository.folder.glob("dist/*.partial"))


def test_second_clean_build_elsewhere_gives_the_same_digests(widest: First, tmp_path: Path) -> None:
    """For each platform and the index over them. The last, since it wipes what others reuse."""
    if os.environ.get("REQUIRE_ENGINE") == "1":  # only where the engine is nobody's
        assert docker("buildx", "prune", "--all", "--force").returncode == 0
    mine = widest.repository
    other = Repository(tmp_path / "quite" / "elsewhere", mine.base, mine.cuda, mine.folder)
    for path in other.folder.rglob("*"):
        os.utime(path, (1, 1))
    assert other.git("rev-parse", "HEAD") == mine.git("rev-parse", "HEAD")

    again = other.build(widest.tag, "--no-load", "--no-cache", *widest.options, arch=widest.arch)

    assert again.code == 0, again.err[-3000:]
    assert "cached" not in again.steps().values()
    before, now = widest.outcome.document, again.document
    assert list(before["platforms"]) == list(now["platforms"])
    for platform, image in before["platforms"].items():
        assert image["diff_ids"] == now["platforms"][platform]["diff_ids"], platform
        assert image["digest"] == now["platforms"][platform]["digest"], platform
    assert before["digest"] == now["digest"]
    name = f"glm53-flash-image-{widest.arch}"
    for document in ("image.json", "sbom.cdx.json", "provenance.json"):
        one, two = (place.folder / "dist" / name / document for place in (mine, other))
        differs = document == "image.json"  # which says whether it was pushed
        assert differs or one.read_bytes() == two.read_bytes(), document
    assert (other.folder / "dist" / name / "image.tar").is_file()
