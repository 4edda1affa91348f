"""Bases as trees: what is opened when, and what a base requires."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from imagebuild import upstream
from imagebuild.config import load_recipe
from imagebuild.errors import IntegrityError, UsageError
from imagebuild.lock import Lock, read_lock
from imagebuild.sources.cache import Cache
from imagebuild.sources.pipconf import PipSettings
from imagebuild.upstream import LazyTree, Upstream, is_exact
from tests.support.product import COMMITS, NAME, TAGS, Product, release_files
from tests.support.wheels import build_wheel

AMD64 = "linux/amd64"


@pytest.fixture
def session(product: Product, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    monkeypatch.setenv("IMAGEBUILD_CACHE", str(product.cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings = PipSettings(product.index_url, timeout=20, retries=0)
    monkeypatch.setattr(upstream, "read_settings", lambda: settings)
    with Upstream(load_recipe(NAME, product.root), read_lock(product.lock_file)) as opened:
        yield opened


def test_nothing_is_asked_before_it_is_needed(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "read_settings", lambda: pytest.fail("pip was asked"))
    monkeypatch.setenv("IMAGEBUILD_CACHE", str(product.cache))
    with Upstream(load_recipe(NAME, product.root), Lock(product.lock_file, {})) as opened:
        assert opened.traffic == (0, 0)
    assert not product.cache.exists()


def test_flashinfer_is_opened_when_a_file_of_it_is_read(
    product: Product, session: Upstream
) -> None:
    base = session.open("0.31.0", AMD64)
    assert base.tree.identity.commit == COMMITS["0.31.0"]
    assert base.tree.read("vllm/util.py") == b"def helper():\n    return 3\n"
    assert not base.tree.exists("torch/__init__.py")
    asked = [one.path for one in product.server.asked]
    assert not any("flashinfer" in path for path in asked)
    assert base.tree.read("flashinfer/plan.py").startswith(b"# 0.7.0\n")


def test_a_base_is_opened_once(product: Product, session: Upstream) -> None:
    first = session.open("0.31.0", AMD64)
    first.tree.read("flashinfer/plan.py")
    asked = len(product.server.asked)
    again = session.open("0.31", AMD64)
    assert again.tree.read("flashinfer/plan.py") == first.tree.read("flashinfer/plan.py")
    assert len(product.server.asked) == asked


def test_pins_are_those_of_vllm_and_of_its_torch(session: Upstream) -> None:
    assert session.open("0.33.0", AMD64).pins == {
        "torch": "2.13.0", "triton": "3.7.1", "flashinfer-python": "0.7.2",
        "transformers": "<6,>=5",
    }  # fmt: skip


def test_a_locked_release_is_taken_though_withdrawn_and_no_other(
    product: Product, session: Upstream
) -> None:
    name = f"vllm-0.31.0-{TAGS[AMD64]}.whl"
    product.server.faults.yanked[name] = "wrong torch"
    build_wheel(product.wheels, tag=TAGS["linux/arm64"])
    assert session.open("0.31.0", AMD64).tree.exists("vllm/util.py")
    with pytest.raises(IntegrityError, match="expected a wheel for linux/arm64 with sha256"):
        session.open("0.31.0", "linux/arm64")


def test_a_vllm_without_an_exact_flashinfer_is_told_when_it_matters(
    product: Product, session: Upstream
) -> None:
    build_wheel(product.wheels, version="0.33.7", tag=TAGS[AMD64],
                files=release_files("0.33.0", AMD64))  # fmt: skip
    base = session.open("0.33.7", AMD64)
    assert base.tree.exists("vllm/util.py")
    with pytest.raises(IntegrityError, match="expected an exact pin of flashinfer-python"):
        base.tree.read("flashinfer/plan.py")


def test_a_lazy_tree_answers_for_its_package_alone() -> None:
    opened: list[int] = []

    def opener() -> LazyTree:
        opened.append(1)
        raise UsageError("opened")

    tree = LazyTree("flashinfer", opener)
    assert not tree.exists("vllm/a.py")
    assert list(tree.iter("vllm/")) == []
    tree.prefetch(["vllm/a.py"])
    with pytest.raises(FileNotFoundError):
        tree.read("flashinfer_python/a.py")
    assert opened == []
    with pytest.raises(UsageError, match="opened"):
        tree.exists("flashinfer/a.py")


def test_the_cache_serves_a_whole_wheel(product: Product, session: Upstream) -> None:
    pin = session.lock.base("0.31.0").wheel("vllm", AMD64)
    path = session.fetch("vllm", "0.31.0", AMD64, pin)
    assert path == Cache(product.cache).blob_path(pin.sha256)
    asked = len(product.server.asked)
    assert session.open("0.31.0", AMD64).tree.exists("vllm/util.py")
    assert session.fetch("vllm", "0.31.0", AMD64, pin) == path
    assert len(product.server.asked) == asked


@pytest.mark.parametrize(
    ("pin", "exact"), [("2.13.0", True), ("<3,>=2", False), ("~=3.8.0", False), ("", False)]
)
def test_exact_pins(pin: str, exact: bool) -> None:
    assert is_exact(pin) is exact
