"""What tags promise, and which release the lock can propose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from imagebuild import tags
from imagebuild.lock import BaseLock, Lock


@pytest.mark.parametrize(
    "tag",
    ["v0.31.0", "0.17.1", "v0.31.0-cu130", "v0.31.0-aarch64-cu130", "0.7.0.post1", "v0.33.0rc1",
     "13.3", "v1.2.3.post2-x86_64".replace("_", "")],
)  # fmt: skip
def test_releases_stay(tag: str) -> None:
    assert tags.fault_of(tag) is None


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("nightly", "nightly"), ("cu130-nightly", "nightly"), ("NIGHTLY-aarch64", "nightly"),
        ("nightly-0961bbae2894d574be790d219651824eb199318e", "nightly"),
        ("v0.31.0-nightly", "nightly"), ("latest", "every build"), ("main", "every build"),
        ("glm53-flash-arm64-cu130", "rebuilt"), ("v0.31.0-dev", "rebuilt"), ("v1", "rebuilt"),
        ("2026", "rebuilt"), ("cu130", "rebuilt"), ("", "rebuilt"),
    ],
)  # fmt: skip
def test_others_do_not(tag: str, said: str) -> None:
    assert said in str(tags.fault_of(tag))


@pytest.mark.parametrize(
    ("tag", "commit"),
    [
        ("nightly-0961bbae", "0961bbae"), ("cu130-nightly-0961bbae", "0961bbae"),
        ("nightly-0961bbae-aarch64", "0961bbae"), ("nightly", ""), ("nightly-arm64", ""),
        ("nightly-cafe", ""), ("v0.31.0", ""), ("nightly-" + "a" * 41, ""),
    ],
)  # fmt: skip
def test_the_commit_in_a_tag(tag: str, commit: str) -> None:
    assert tags.commit_of(tag) == commit


@pytest.fixture
def lock() -> Lock:
    base = BaseLock("0.31.0", "db9527a46", 1791186062, {}, {}, {})  # 2026-10-05
    later = dataclasses.replace(base, version="0.32.0", commit="aaaaaaa32", epoch=1792317832)
    return Lock(Path("lock.toml"), {"0.31.0": base, "0.32.0": later})


@pytest.mark.parametrize(
    ("commit", "created", "version"),
    [
        ("aaaaaaa32ffff", "", "0.32.0 is built from that very commit"),
        ("ddd6fbca", "2026-09-26T01:02:03.123456789Z", "0.31.0 is the first locked release"),
        ("ddd6fbca", "2026-10-06", "0.32.0 is the first locked release"),
        ("ddd6fbca", "2026-10-18T12:00:00+02:00", "0.32.0 is the first locked release"),
        ("ddd6fbca", "2026-11-29T00:00:00Z", None),
        ("ddd6fbca", "", None),
        ("", "noon", None),
    ],
)
def test_the_release_to_move_to(lock: Lock, commit: str, created: str, version: str | None) -> None:
    found = tags.first_release(lock, commit, created)
    assert (found is None) if version is None else f"vLLM {version}" in str(found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1970-01-01T00:01:00Z", 60), ("1970-01-02", 86400), ("1970-01-01T01:00:00+01:00", 0),
     ("1970-01-01T00:00:01.123456789Z", 1), ("", None), ("x", None)],
)  # fmt: skip
def test_times(text: str, seconds: int | None) -> None:
    assert tags.seconds_of(text) == seconds
