"""One truth table for GLM_MLA_ROUTE."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "glm_mla_route.py"
FORMER, RETIRED = "VLLM_GLM53_CUDA_SPARSE_MLA", "VLLM_GLM53_NOPE_PE_PAD"
SM120, SM90 = "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90"


@pytest.fixture(scope="module")
def route():
    spec = importlib.util.spec_from_file_location("glm_mla_route", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", ["stock", "sm90", "cuda", "triton"])
def test_each_route_is_itself(route, value):
    assert route.active_route({"GLM_MLA_ROUTE": value}) == value
    assert route.choose({"GLM_MLA_ROUTE": value}, "stock") == (value, True, "")


@pytest.mark.parametrize("environ", [{}, {"GLM_MLA_ROUTE": ""}])
def test_unset_and_empty_mean_stock_or_the_deployments_route(route, environ):
    assert route.active_route(environ) == "stock"
    assert route.choose(environ, "sm90") == ("sm90", False, "")


@pytest.mark.parametrize("value", ["SM90", " sm90", "1", "sm120", "stock,sm90"])
def test_anything_else_is_one_sentence(route, value):
    expected = f"GLM_MLA_ROUTE={value!r} names no route; expected one of stock, sm90, cuda, triton"
    with pytest.raises(ValueError, match="names no route") as error:
        route.active_route({"GLM_MLA_ROUTE": value})
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_a_default_that_is_no_route_is_refused(route):
    with pytest.raises(ValueError, match="the default route='gpu' names no route"):
        route.choose({}, "gpu")


def test_the_process_environment_is_the_default(route, monkeypatch):
    monkeypatch.delenv(FORMER, raising=False)
    monkeypatch.delenv(RETIRED, raising=False)
    monkeypatch.setenv("GLM_MLA_ROUTE", "triton")
    assert route.active_route() == "triton"
    monkeypatch.delenv("GLM_MLA_ROUTE")
    assert route.active_route() == "stock"


@pytest.mark.parametrize("former", ["1", "true", "TRUE"])
def test_former_variable_on_means_cuda(route, former):
    choice = route.choose({FORMER: former}, "sm90")
    assert choice[:2] == ("cuda", True)
    assert choice.notice == (
        f"{FORMER}={former!r} is read as GLM_MLA_ROUTE=cuda; set GLM_MLA_ROUTE instead"
    )
    assert route.active_route({FORMER: former, "GLM_MLA_ROUTE": "cuda"}) == "cuda"


@pytest.mark.parametrize("former", ["", "0", "false"])
def test_former_variable_off_leaves_the_deployments_route(route, former):
    choice = route.choose({FORMER: former}, "sm90")
    assert choice[:2] == ("sm90", False)
    assert "is read as GLM_MLA_ROUTE=sm90" in choice.notice
    # "0" once kept both backends off; here it says nothing against a route that is asked for.
    asked = route.choose({FORMER: former, "GLM_MLA_ROUTE": "cuda"}, "sm90")
    assert asked[:2] == ("cuda", True)
    assert "is read as GLM_MLA_ROUTE=cuda" in asked.notice


@pytest.mark.parametrize("value", ["stock", "sm90", "triton"])
def test_contradicting_variables_stop(route, value):
    with pytest.raises(ValueError, match=f"GLM_MLA_ROUTE='{value}' and {FORMER}='1' contradict"):
        route.choose({FORMER: "1", "GLM_MLA_ROUTE": value}, "cuda")


@pytest.mark.parametrize("former", ["2", "yes", "cuda", " 1"])
def test_former_variable_is_a_switch(route, former):
    with pytest.raises(ValueError, match="is no switch; expected 0 or 1"):
        route.choose({FORMER: former}, "stock")


@pytest.mark.parametrize("environ", [{}, {"GLM_MLA_ROUTE": "cuda"}, {FORMER: "1"}])
def test_retired_variable_is_refused_with_what_to_do(route, environ):
    with pytest.raises(ValueError, match=f"{RETIRED}='1' is not supported: .* GLM_MLA_ROUTE"):
        route.choose({**environ, RETIRED: "1"}, "stock")
    assert route.choose({RETIRED: ""}, "stock").route == "stock"


def backend(name, *, is_overridden=False):
    return SimpleNamespace(name=name, is_overridden=lambda: is_overridden)


def serving(declared=""):
    return type("Backend", (), {"glm_mla_route": declared} if declared else {})


def confirmed(route, asked, member, cls, major=12, *, use_sparse=True, use_mla=True):
    said = []
    route.confirm(
        major=major,
        config=SimpleNamespace(use_mla=use_mla, use_sparse=use_sparse),
        backend=member,
        backend_class=cls,
        log=said.append,
        environ={"GLM_MLA_ROUTE": asked},
    )
    return said


OWN = {
    "stock": (SM120, ""),
    "sm90": (SM90, ""),
    "cuda": (SM120, "cuda"),
    "triton": (SM120, "triton"),
}


@pytest.mark.parametrize("asked", OWN)
@pytest.mark.parametrize("chosen", OWN)
def test_exactly_the_asked_route_is_confirmed(route, asked, chosen):
    slot, declared = OWN[chosen]
    member, cls = backend(slot, is_overridden=bool(declared)), serving(declared)
    assert route.served_by(cls, member) == chosen
    if asked == chosen:
        (said,) = confirmed(route, asked, member, cls)
        assert said.startswith(f"GLM_MLA_ROUTE={asked}: ")
        assert f"({__name__}.Backend)" in said
        return
    with pytest.raises(ValueError, match=f"^GLM_MLA_ROUTE={asked} ") as error:
        confirmed(route, asked, member, cls)
    # A plug-in that is not there is told from another choice.
    missing = asked in ("cuda", "triton") and chosen == "stock"
    assert ("has not registered" in str(error.value)) is missing
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asked", OWN)
def test_a_class_of_others_in_the_slot_serves_no_route(route, asked):
    member = backend(SM120, is_overridden=True)
    assert route.served_by(serving(), member) == ""
    with pytest.raises(ValueError, match="asks for"):
        confirmed(route, asked, member, serving())


@pytest.mark.parametrize("where", [{"major": 9}, {"use_sparse": False}, {"use_mla": False}])
def test_nothing_is_asked_elsewhere(route, where):
    assert confirmed(route, "cuda", backend("FLASH_ATTN"), serving(), **where) == []


def test_nothing_is_asked_where_no_route_is(route):
    said = []
    route.confirm(
        major=12, config=SimpleNamespace(use_mla=True, use_sparse=True),
        backend=backend("CUSTOM", is_overridden=True), backend_class=serving(),
        log=said.append, environ={FORMER: "0"},
    )  # fmt: skip
    assert said == [f"{FORMER}='0' is read as GLM_MLA_ROUTE=stock; set GLM_MLA_ROUTE instead"]
