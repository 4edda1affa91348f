"""One truth table for GLM_MLA_ROUTE."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "glm_mla_route.py"


@pytest.fixture(scope="module")
def route():
    spec = importlib.util.spec_from_file_location("glm_mla_route", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", ["stock", "sm90", "cuda", "triton"])
def test_each_route_is_itself(route, value):
    assert route.active_route({"GLM_MLA_ROUTE": value}) == value


@pytest.mark.parametrize("environ", [{}, {"GLM_MLA_ROUTE": ""}])
def test_unset_and_empty_mean_stock(route, environ):
    assert route.active_route(environ) == "stock"


@pytest.mark.parametrize("value", ["SM90", " sm90", "1", "sm120", "stock,sm90"])
def test_anything_else_is_one_sentence(route, value):
    expected = f"GLM_MLA_ROUTE={value!r} names no route; expected one of stock, sm90, cuda, triton"
    with pytest.raises(ValueError, match="names no route") as error:
        route.active_route({"GLM_MLA_ROUTE": value})
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_the_process_environment_is_the_default(route, monkeypatch):
    monkeypatch.setenv("GLM_MLA_ROUTE", "triton")
    assert route.active_route() == "triton"
    monkeypatch.delenv("GLM_MLA_ROUTE")
    assert route.active_route() == "stock"
