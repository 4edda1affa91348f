"""The smoke environment, made in the session's cache where there is none yet: 90 s and 1.3 GB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from imagebuild.deep.run import Where

VERSION = "0.31.0"


@pytest.fixture(scope="session")
def where() -> Iterator[Where]:
    """The environment whose torch goes with the recipe's base."""
    from imagebuild.config import load_recipe
    from imagebuild.console import Console
    from imagebuild.deep.run import Where
    from imagebuild.lock import read_lock
    from imagebuild.smoke import environment
    from imagebuild.upstream import Upstream

    recipe = load_recipe("glm53-flash")
    lock = read_lock(recipe.lock_file)
    with Upstream(recipe, lock) as upstream:
        made = environment.provide(recipe.folder / "smoke.txt", lock.base(VERSION).pins["torch"],
                                   ["2.13.0", "2.14.0"], upstream, Console())  # fmt: skip
    with made.held():
        yield Where(made.python)
