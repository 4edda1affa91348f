"""A wheel folder, an index over it, and a session and cache to read it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loopback server is asked directly and without anybody's netrc."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    (tmp_path / "netrc").touch(mode=0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "served"
    path.mkdir()
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[IndexServer]:
    with IndexServer(folder) as running:
        yield running


@pytest.fixture
def settings(server: IndexServer) -> PipSettings:
    return PipSettings(server.url, timeout=30, retries=3)


@pytest.fixture
def http(settings: PipSettings) -> Iterator[Http]:
    with Http(settings, backoff=0) as session:
        yield session


@pytest.fixture
def offline(settings: PipSettings) -> Iterator[Http]:
    with Http(settings, offline=True, backoff=0) as session:
        yield session


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, notices: list[str]) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", notice=notices.append) as opened:
        yield opened
