"""What an audit remembers: the same answer without reading, and only for the very same question."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.imagebuild.audit.test_grid import drifted, newer
from tests.support.product import GREETER, Product, Ran
from tests.support.wheels import build_wheel

ARGUMENTS = ("audit", "--against", "0.34.0", "--format", "json")


def found(ran: Ran) -> list[dict[str, Any]]:
    """Everything but what it cost."""
    volatile = ("requests", "bytes_fetched", "seconds")
    return [
        {key: value for key, value in release.items() if key not in volatile}
        for release in ran.json["releases"]
    ]


def read(product: Product, call: Callable[[], Ran]) -> tuple[Ran, int]:
    """A call, and how many files it asked for; pages of the index are asked for each time."""
    before = len(product.server.files_asked())
    ran = call()
    return ran, len(product.server.files_asked()) - before


@pytest.fixture
def known(product: Product) -> list[dict[str, Any]]:
    """A release with all kinds of evidence, audited once."""
    newer(product.wheels, "0.34.0", drifted())
    ran = product.run(*ARGUMENTS)
    assert ran.code == 3
    release = found(ran)[0]
    patch = next(patch for patch in release["patches"] if patch["name"] == GREETER)
    assert patch["evidence"]["scopes"]
    assert patch["evidence"]["candidates"]
    assert patch["edits"][0]["candidate"]
    return found(ran)


def test_the_same_question_is_answered_without_reading(
    product: Product, known: list[dict[str, Any]]
) -> None:
    ran, files = read(product, lambda: product.run(*ARGUMENTS))
    assert (ran.code, files) == (3, 0)
    assert found(ran) == known
    offline = product.run(*ARGUMENTS, "--offline")
    assert found(offline) == known


def other_wheel(product: Product) -> None:
    newer(product.wheels, "0.34.0", {**drifted(), "vllm/util.py": b"def helper():\n    return 4\n"})


def other_flashinfer(product: Product) -> None:
    files = {"flashinfer/plan.py": b"def majors():\n    return (9, 10)\n"}
    build_wheel(product.wheels, name="flashinfer_python", version="0.7.2", tag="py3-none-any",
                files=files)  # fmt: skip
    # A locked release would refuse it; this one takes what the index has.
    assert "0.34.0" not in product.lock_file.read_text()


def other_patch(product: Product) -> None:
    product.replace(f"patches/tiny/{GREETER}.py", '"good day"', '"good night"')


def other_lock(product: Product) -> None:
    product.only_locked("0.31.0", "0.32.0")


def other_runtime(product: Product) -> None:
    (product.root / "image" / "runtime" / "tiny_extra.py").write_text("EXTRA = 2\n")


def damaged(product: Product) -> None:
    """An entry that carries its own hash and is of another make."""
    content = b'{"identity": {"version": 3}}'
    head = f"imagebuild-entry-1 {hashlib.sha256(content).hexdigest()}\n".encode()
    entries = [path for path in (product.cache / "audit").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(head + content)


@pytest.mark.parametrize(
    "change", [other_wheel, other_flashinfer, other_patch, other_lock, other_runtime, damaged]
)
def test_another_question_is_judged_again(
    product: Product,
    known: list[dict[str, Any]],
    change: Callable[[Product], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[str] = []
    from imagebuild.audit import run

    genuine = run._judge
    monkeypatch.setattr(run, "_judge", lambda job, target: judged.append(target.name)
                        or genuine(job, target))  # fmt: skip
    assert found(product.run(*ARGUMENTS)) == known
    assert judged == []
    change(product)
    ran = product.run(*ARGUMENTS)
    assert judged == ["0.34.0"]
    if change in (other_wheel, other_flashinfer):
        assert found(ran) != known
    if change is damaged:
        assert found(ran) == known


def test_another_arch_is_another_question(product: Product, known: list[dict[str, Any]]) -> None:
    ran = product.run(*ARGUMENTS, "--arch", "sm_120")
    assert ran.json["gpu_arch"] == "sm_120"
    assert [patch["verdict"] for patch in found(ran)[0]["patches"]] == [
        patch["verdict"] for patch in known[0]["patches"]
    ]
    refused = product.run(*ARGUMENTS, "--arch", "sm_121")  # there is no such wheel of it
    assert refused.code == 2
    assert "expected a wheel for linux/arm64" in refused.err


def test_what_could_not_be_had_is_not_kept(product: Product, tmp_path: Path) -> None:
    """Evidence needs the base that is compared with; without it the next call tries again."""
    wheel = newer(product.wheels, "0.34.0", drifted())
    assert wheel.exists()
    for path in product.wheels.glob("vllm-0.33.0-*"):
        path.rename(tmp_path / path.name)
    first = product.run(*ARGUMENTS)
    assert "no diff against vLLM 0.33.0" in first.err
    for path in tmp_path.glob("vllm-0.33.0-*"):
        path.rename(product.wheels / path.name)
    second = product.run(*ARGUMENTS)
    patch = next(p for p in found(second)[0]["patches"] if p["name"] == GREETER)
    assert patch["evidence"]["scopes"]
