"""`audit --watch`: what is newer than the lock, once, and whether the lock still resolves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.imagebuild.audit.test_grid import drifted, newer
from tests.support.product import TAGS, Product, Ran


def state_of(product: Product) -> Path:
    return product.root / "dist" / "tiny" / "audit-watch.json"


def watch(product: Product, *more: str) -> tuple[Ran, dict[str, Any]]:
    ran = product.run("audit", "--watch", "--format", "json", *more)
    found: dict[str, Any] = ran.json["watch"]
    return ran, found


def audited(ran: Ran) -> list[str]:
    return [release["version"] for release in ran.json["releases"]]


def test_without_news_it_says_so_and_writes_nothing(product: Product) -> None:
    ran, found = watch(product)
    assert (ran.code, audited(ran)) == (0, [])
    assert (found["newest_locked"], found["newer"], found["reported"]) == ("0.33.0", [], [])
    assert found["lock_code"] == 0
    assert ran.json["conclusion"] == "no release to report (none newer than the lock); the lock: " \
                                     "every entry is as locked"  # fmt: skip
    assert not state_of(product).exists()


def test_each_release_is_reported_once(product: Product) -> None:
    newer(product.wheels, "0.34.0")
    newer(product.wheels, "0.35.0", drifted())
    newer(product.wheels, "0.36.0rc1")  # no release
    ran, found = watch(product)
    assert (ran.code, audited(ran)) == (3, ["0.34.0", "0.35.0"])
    assert (found["newer"], found["reported"]) == (["0.34.0", "0.35.0"], [])
    assert json.loads(state_of(product).read_text()) == {
        "schema": 1, "recipe": "tiny", "reported": ["0.34.0", "0.35.0"],
    }  # fmt: skip
    newer(product.wheels, "0.36.0")
    again, found = watch(product)
    assert audited(again) == ["0.36.0"]
    assert found["reported"] == ["0.34.0", "0.35.0"]
    last, _found = watch(product)
    assert (last.code, audited(last)) == (0, [])
    assert "no release to report (reported before)" in last.json["conclusion"]


def test_the_report_is_an_issues_body(product: Product) -> None:
    newer(product.wheels, "0.34.0", drifted())
    ran = product.run("audit", "--watch")
    assert ran.out.startswith("# Drift audit of `tiny`\n")
    assert "0.34.0" in ran.out
    assert "drifted" in ran.out
    assert "- newest locked vLLM 0.33.0; newer: 0.34.0; not reported yet: 0.34.0\n" in ran.err


def test_what_could_not_be_read_is_tried_again(product: Product) -> None:
    wheel = newer(product.wheels, "0.34.0")
    good = wheel.read_bytes()
    wheel.write_bytes(b"no zip" * 99)
    ran, _found = watch(product)
    assert ran.code == 4
    assert [failure["name"] for failure in ran.json["failures"]] == ["0.34.0"]
    assert not state_of(product).exists()
    wheel.write_bytes(good)
    again, _found = watch(product)
    assert audited(again) == ["0.34.0"]


def test_a_report_that_cannot_be_written_leaves_nothing_reported(product: Product) -> None:
    newer(product.wheels, "0.34.0")
    (product.folder / "file").write_text("")
    ran = product.run("audit", "--watch", "--report", f"json={product.folder}/file/x.json")
    assert ran.code == 5
    assert not state_of(product).exists()


def test_an_entry_of_the_lock_that_is_gone_counts(product: Product) -> None:
    name = f"vllm-0.31.0-{TAGS['linux/arm64']}.whl"
    (product.wheels / name).unlink()
    ran, found = watch(product)
    assert ran.code == found["lock_code"] == 4
    assert {"level": "error", "entry": name, "message": "the index no longer offers it"} in \
        found["lock"]  # fmt: skip
    assert "the lock: 1 broken" in ran.json["conclusion"]


def test_a_withdrawn_release_is_no_news_and_a_locked_one_is_told(product: Product) -> None:
    product.server.faults.yanked[newer(product.wheels, "0.34.0").name] = "broken"
    locked = f"vllm-0.31.0-{TAGS['linux/amd64']}.whl"
    product.server.faults.yanked[locked] = "wrong torch"
    ran, found = watch(product)
    assert (ran.code, found["newer"]) == (1, [])
    assert "upstream withdrew it: wrong torch" in str(found["lock"])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": 2, "recipe": "tiny", "reported": []}',
     '{"schema": 1, "recipe": "other", "reported": []}',
     '{"schema": 1, "recipe": "tiny", "reported": [1]}'],
)  # fmt: skip
def test_a_state_that_is_none(product: Product, content: str, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(content)
    ran = product.run("audit", "--watch", "--state", str(state))
    assert ran.code == 2
    assert f"{state}: expected the state of a watch of 'tiny'" in ran.err
    assert "hint: delete it; then every newer release is reported again" in ran.err
    assert state.read_text() == content


@pytest.mark.parametrize(
    "named",
    [("--against", "0.31.0"), ("--latest", "2"), ("--since", "0.31"), ("--tree", "."),
     ("--first-bad", "vllm_counter_starts_zero")],
)  # fmt: skip
def test_it_finds_the_releases_itself(product: Product, named: tuple[str, str]) -> None:
    ran = product.run("audit", "--watch", *named)
    assert ran.code == 2
    assert "--watch: finds the releases itself" in ran.err
