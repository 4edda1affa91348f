"""Settings of the engine's tests: the same examples on every run, whatever the machine's speed."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "engine",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("engine")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill takes no page from the kernel, so that waiting for the disk would show nothing."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)
