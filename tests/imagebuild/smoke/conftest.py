"""A wheel folder behind a loopback index, a session on it, and a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.index_server import IndexServer
from tests.support.smokes import Place, place_at


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "served").mkdir()
    with IndexServer(tmp_path / "served") as server:
        made = place_at(tmp_path, server)
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "XDG_"))]:
            monkeypatch.delenv(name)
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made
