"""Challenges of registries: which one is taken, and to whom a password never goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.errors import EngineError
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.http import Http
from imagebuild.sources.pipconf import PipSettings
from imagebuild.sources.registryauth import Authorizer, Place
from tests.support.registry_server import RegistryServer


@pytest.fixture
def http() -> Iterator[Http]:
    with Http(PipSettings("", retries=0, timeout=5), backoff=0) as session:
        yield session


@pytest.fixture
def authorizer(http: Http, tmp_path: Path) -> Authorizer:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auths": {"r.example": {"username": "me", "password": "x"}}}))
    return Authorizer(http, Logins(lambda _command: None, path))


def place(api: str = "https://r.example") -> Place:
    return Place(api, "team/app", ("r.example",))


@pytest.mark.parametrize("challenge", ["", "Digest realm=x", "Negotiate", "odd, words"])
def test_other_ways_are_not_taken(authorizer: Authorizer, challenge: str) -> None:
    assert authorizer.answer(place(), challenge) is False
    assert authorizer.headers(place()) == {}


def test_basic_goes_out_over_tls_only(authorizer: Authorizer) -> None:
    assert authorizer.answer(place("http://r.example"), 'Basic realm="x"') is False
    assert authorizer.headers(place("http://r.example")) == {}
    assert authorizer.answer(place(), 'Basic realm="x"') is True
    assert authorizer.headers(place()) == {"Authorization": "Basic bWU6eA=="}


def test_a_token_service_without_tls_gets_no_password(authorizer: Authorizer, http: Http) -> None:
    with pytest.raises(EngineError, match=r"takes passwords over TLS, found http://t\.example"):
        authorizer.answer(place(), 'Bearer realm="http://t.example/token"')
    assert http.requests == 0


@pytest.mark.parametrize("realm", ["", "file:///etc/passwd", "t.example/token"])
def test_a_token_service_that_is_no_address(authorizer: Authorizer, http: Http, realm: str) -> None:
    with pytest.raises(EngineError, match="expected the address of its token service"):
        authorizer.answer(place(), f'Bearer realm="{realm}"')
    assert http.requests == 0


@pytest.mark.parametrize(
    "challenge",
    [
        'Bearer realm="{realm}",service="a, b",scope="{scope}"',
        'bearer realm={realm}, service="a, b", scope="{scope}"',
        'Basic realm="x", Bearer realm="{realm}",service="a, b",scope="{scope}"',
        'Bearer service="a, b",scope="{scope}",realm="{realm}"',
    ],
)  # fmt: skip
def test_bearer_is_preferred_and_read_in_every_form(authorizer: Authorizer, challenge: str) -> None:
    with RegistryServer() as served:
        realm, scope = f"http://{served.host}/token", "repository:team/app:pull,push"
        assert authorizer.answer(place(), challenge.format(realm=realm, scope=scope)) is True
        (asked,) = served.paths()
    assert "service=a%2C+b" in asked
    assert "scope=repository%3Ateam%2Fapp%3Apull%2Cpush" in asked
    assert authorizer.headers(place())["Authorization"].startswith("Bearer t0.")
    assert authorizer.headers(Place("https://r.example", "team/other", ())) == {}


def test_a_realm_with_a_query_and_no_scope(authorizer: Authorizer) -> None:
    with RegistryServer() as served:
        assert authorizer.answer(place(), f'Bearer realm="http://{served.host}/token?account=me"')
        (asked,) = served.paths()
    assert asked == "/token?account=me&scope=repository%3Ateam%2Fapp%3Apull"


def test_a_token_is_not_used_after_its_end(
    authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = [1000.0]
    monkeypatch.setattr("imagebuild.sources.registryauth.time.monotonic", lambda: moment[0])
    with RegistryServer() as served:
        authorizer.answer(place(), f'Bearer realm="http://{served.host}/token"')
    moment[0] += 294
    assert authorizer.headers(place())
    moment[0] += 2  # the double gives 300 s, of which the last five are not used
    assert authorizer.headers(place()) == {}
