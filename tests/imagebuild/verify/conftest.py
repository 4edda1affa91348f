"""A patched tree for each test, and a FlashKDA that the table knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.verify import flashkda
from tests.support import verify_site as site


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashkda, "KNOWN", (site.FIXED,))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., site.Place]:
    """Builds a patched tree; `before` may change it while it is pristine."""

    def build(
        before: Callable[[Path], object] = lambda _root: None, **options: object
    ) -> site.Place:
        root = tmp_path / "site-packages"
        recipe = site.write_repository(tmp_path / "repository")
        site.write_site(root, **options)  # type: ignore[arg-type]
        lock = site.write_lock(recipe, root)
        before(root)
        site.patch_site(root, recipe, lock)
        return site.Place(root, recipe, lock)

    return build
