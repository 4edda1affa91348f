"""A small product of its own for each test; see tests/support/product.py.

Imports are inside: the engine's tests below this folder run where the sources' libraries are
absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.product import Product


@pytest.fixture(scope="session")
def product_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.product import template

    folder = tmp_path_factory.mktemp("product")
    template(folder)
    return folder


@pytest.fixture
def product(product_template: Path, tmp_path: Path) -> Iterator[Product]:
    """A locked repository, an index with three releases, and an empty cache."""
    from tests.support.product import Product, QuickIndex

    folder = tmp_path / "product"
    shutil.copytree(product_template, folder)
    with QuickIndex(folder / "served") as server:
        yield Product(folder, server)
