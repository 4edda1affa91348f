"""The real wheels, a few bytes of each, from the index of the user's pip configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http
from imagebuild.sources.index import PackageIndex
from imagebuild.sources.pipconf import PipSettings, read_settings
from imagebuild.sources.wheel import RemoteWheel

pytestmark = pytest.mark.network

MEMBERS = [
    "vllm/_version.py",
    "vllm/config/model.py",
    "vllm/config/vllm.py",
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/openai/api_server.py",
    "vllm/envs.py",
    "vllm/model_executor/layers/quantization/modelopt.py",
    "vllm/platforms/cuda.py",
    "vllm/utils/flashinfer.py",
    "vllm/v1/attention/backends/utils.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu_worker.py",
]


@pytest.fixture(scope="module")
def pip_settings() -> PipSettings:
    return read_settings()


@pytest.fixture
def real(
    pip_settings: PipSettings, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PackageIndex]:
    monkeypatch.delenv("NETRC")
    with Http(pip_settings) as http:
        yield PackageIndex(pip_settings, http, cache)


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_a_release_is_audited_within_the_budget(
    real: PackageIndex, cache: Cache, platform: str
) -> None:
    file = real.wheel("vllm", "0.31.0", platform)
    with RemoteWheel(file, real.http, cache, platform=platform) as wheel:
        wheel.prefetch(MEMBERS)
        assert all(len(wheel.read(name)) > 100 for name in MEMBERS)
        assert wheel.identity.version == "0.31.0"
        assert wheel.metadata()["Version"] == "0.31.0"
        assert wheel.requirement("flashinfer-python") == "0.7.0.post1"
    assert real.http.requests < 60 and real.http.bytes_fetched < 4_000_000
    before = real.http.requests
    with RemoteWheel(file, real.http, cache, platform=platform) as again:
        assert {len(again.read(name)) > 100 for name in MEMBERS} == {True}
    assert real.http.requests == before


def test_offline_afterwards(real: PackageIndex, cache: Cache, tmp_path: Path) -> None:
    file = real.wheel("flashinfer-python", "0.7.0.post1", "linux/arm64")
    with RemoteWheel(file, real.http, cache) as wheel:
        names = list(wheel.iter("flashinfer/"))
        init = wheel.read("flashinfer/__init__.py")
    with Http(real.settings, offline=True) as offline:
        again = PackageIndex(real.settings, offline, cache)
        assert again.wheel("flashinfer-python", "0.7.0.post1", "linux/arm64") == file
        with RemoteWheel(file, offline, cache) as wheel:
            assert list(wheel.iter("flashinfer/")) == names
            assert wheel.read("flashinfer/__init__.py") == init
    assert offline.requests == 0
