"""The audit of real releases, by range requests through the configured package index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from imagebuild.lock_update import HEAD
from tests.support.product import REPOSITORY

pytestmark = pytest.mark.network
RECIPE = "glm53-flash"
SM90_FP8 = "vllm_sm90_fp8_kv_dtype"
PDL = "vllm_pdl_off_sm12x"
REASONING = "vllm_glm53_reasoning_always_parsed"
_MAIN = (
    "import sys; from pathlib import Path; from imagebuild.cli import main; "
    "sys.exit(main(sys.argv[2:], root=Path(sys.argv[1])))"
)
# Runs the audit as its only child, so that the child's memory can be told.
_MEASURED = (
    "import resource, subprocess, sys; "
    "code = subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=False).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); "
    "sys.exit(code)"
)

Releases = dict[str, dict[str, dict[str, Any]]]


# What --latest 12 named on 2026-11-29.
GRID = ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0",
        "0.31.0", "0.32.0", "0.33.0")  # fmt: skip


def audit(
    root: Path, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, _MAIN, str(root), "audit", "--format", "json",
         *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def by_release(document: dict[str, Any]) -> Releases:
    assert "releases" in document, document
    return {r["version"]: {p["name"]: p for p in r["patches"]} for r in document["releases"]}


@pytest.fixture(scope="module")
def both() -> tuple[int, dict[str, Any], str]:
    return audit(REPOSITORY, "--against", "0.32.0", "--against", "0.33.0")


def test_the_newer_releases_are_green(both: tuple[int, dict[str, Any], str]) -> None:
    code, document, said = both
    assert code == 0, said
    releases = by_release(document)
    assert list(releases) == ["0.32.0", "0.33.0"]
    for patches in releases.values():
        # Absorbed upstream, and declared with its proof: not merely gone.
        assert (patches[SM90_FP8]["verdict"], patches[SM90_FP8]["declared"]) == ("absorbed", True)
        # Same text, other meaning (F4): only a variant that somebody wrote for it makes it green.
        assert (patches[REASONING]["verdict"], patches[REASONING]["variant"]) == (
            "ok", ">=0.32,<0.34",
        )  # fmt: skip
    pdl = releases["0.33.0"][PDL]
    assert (pdl["verdict"], pdl["variant"]) == ("ok", ">=0.33,<0.34")
    assert [edit["state"] for edit in pdl["edits"]] == ["pending"]


def test_the_fields_are_those_of_the_contract(both: tuple[int, dict[str, Any], str]) -> None:
    for release in both[1]["releases"]:
        assert {"version", "commit", "pins", "requests", "bytes_fetched", "seconds"} <= set(release)
        assert release["commit"]
        assert release["pins"]["flashinfer-python"]
        assert release["pins"]["nvidia-nccl-cu13"]


def test_a_lock_of_the_first_release_alone_asks_for_a_person(tmp_path: Path) -> None:
    for name in ("image", "patches"):
        shutil.copytree(REPOSITORY / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    path = tmp_path / "image" / RECIPE / "lock.toml"
    lock = tomllib.loads(path.read_text())
    lock["base"] = {"0.31.0": lock["base"]["0.31.0"]}
    path.write_text(HEAD + tomli_w.dumps(lock))
    code, document, said = audit(tmp_path, "--against", "0.32.0", "--against", "0.33.0")
    assert code == 1, said
    for version, patches in by_release(document).items():
        assert patches[REASONING]["verdict"] == "review"
        assert patches[REASONING]["exit_code"] == 1
        changed = patches[REASONING]["diffs"]
        assert any(path.startswith("vllm/") for path in changed), version
        text = "\n".join(changed.values())
        assert "--- 0.31.0/" in text
        assert f"+++ {version}/" in text
        assert any(line.startswith("+") for line in text.split("\n"))


def test_a_cold_audit_is_small(tmp_path: Path) -> None:
    environment = {"IMAGEBUILD_CACHE": str(tmp_path / "cache")}
    code, document, said = audit(REPOSITORY, "--against", "0.33.0", environment=environment)
    assert code == 0, said
    (release,) = document["releases"]
    assert 0 < release["bytes_fetched"] < 4_000_000
    assert 0 < release["requests"] < 60
    memory = int(said.rstrip().split("\n")[-1]) * 1024  # ru_maxrss is in KiB
    assert memory < 400e6
    _code, document, _said = audit(REPOSITORY, "--against", "0.33.0", "--offline",
                                   environment=environment)  # fmt: skip
    (warm,) = document["releases"]
    assert (warm["bytes_fetched"], warm["requests"]) == (0, 0)
    assert warm["patches"] == release["patches"]


def test_a_grid_of_twelve_releases_is_small(tmp_path: Path) -> None:
    environment = {"IMAGEBUILD_CACHE": str(tmp_path / "cache")}
    wanted = [word for version in GRID for word in ("--against", version)]
    code, document, said = audit(REPOSITORY, *wanted, environment=environment)
    assert (code, document["failures"]) == (0, []), said
    releases = by_release(document)
    assert tuple(releases) == GRID
    for version, patches in releases.items():
        # Those before a patch's first range say so; the others are the supported ones.
        before = {name for name, one in patches.items() if one["verdict"] == "not_applicable"}
        assert before == (set(patches) if version < "0.31" else set())
        assert all("is before its first range, >=0.31" in patches[name]["why"] for name in before)
    assert 0 < document["bytes_fetched"] < 60_000_000
    assert int(said.rstrip().split("\n")[-1]) * 1024 < 400e6  # ru_maxrss is in KiB
    _code, again, _said = audit(REPOSITORY, *wanted, "--offline", environment=environment)
    assert (again["bytes_fetched"], again["requests"]) == (0, 0)
    assert by_release(again) == releases
