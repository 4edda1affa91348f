"""What vLLM calls, without vLLM: settings that are read, routes that are left alone, releases."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.kernel.conftest import ROOT


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "kernel"))
    monkeypatch.syspath_prepend(str(ROOT / "image" / "runtime"))
    for name in ("GLM_MLA_ROUTE", "VLLM_GLM53_CUDA_SPARSE_MLA", "VLLM_GLM53_NOPE_PE_PAD",
                 "GLM_MOE_INPUT_SCALE", "VLLM_GLM53_MOE_INPUT_SCALE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def module(name):
    return importlib.import_module(f"glm53_sparse_mla.{name}")


@pytest.mark.parametrize("route", ["", "stock", "sm90"])
def test_other_routes_load_nothing(monkeypatch, route):
    monkeypatch.setenv("GLM_MLA_ROUTE", route)
    # Whatever of vLLM or torch it asked for would not be here.
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    module("register").register()


def test_routes_of_ours_are_those_of_the_table():
    table = importlib.import_module("glm_mla_route")
    register = module("register")
    plugins = {name for name, route in table.ROUTES.items() if route.is_plugin}
    assert set(register.BACKENDS) == plugins
    assert {table.ROUTES[name].slot for name in plugins} == {register.SLOT}


def test_a_route_of_ours_without_vllm_is_a_stop(monkeypatch):
    monkeypatch.setenv("GLM_MLA_ROUTE", "cuda")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match=r"^GLM_MLA_ROUTE=cuda: the server must not start"):
        module("register").register()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0rc1.dev3+gabc", "0.31.1.post1"])
def test_releases_that_were_read(version):
    module("releases").check(version)


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "0.3", "1.31.0", "dev", ""])
def test_releases_that_nobody_read(version):
    with pytest.raises(RuntimeError, match=r"^expected vLLM 0\.31, 0\.32, 0\.33, found "):
        module("releases").check(version)


def test_scales_are_left_alone_unless_asked(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    module("moe_scale").register()
    assert caplog.text == ""
    monkeypatch.setenv("VLLM_GLM53_MOE_INPUT_SCALE", "1.0")
    module("moe_scale").register()
    assert "VLLM_GLM53_MOE_INPUT_SCALE='1.0' is not read" in caplog.text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("GLM-5.3-Flash-NVFP4=1.6e-3", ("GLM-5.3-Flash-NVFP4", 1.6e-3)),
        ("some/name=with=2", ("some/name=with", 2.0)),
    ],
)
def test_setting_of_a_scale(text, wanted):
    found = module("moe_scale").read({"GLM_MOE_INPUT_SCALE": text})
    assert found == wanted if wanted is None else tuple(found) == wanted


@pytest.mark.parametrize("text", ["1.0", "=1.0", "GLM=", "GLM=x", "GLM=0", "GLM=-1", "GLM=inf",
                                  "GLM=nan"])  # fmt: skip
def test_setting_of_a_scale_that_is_none(text):
    with pytest.raises(ValueError, match="expected CHECKPOINT=SCALE"):
        module("moe_scale").read({"GLM_MOE_INPUT_SCALE": text})
