"""Logins of docker: what config.json may hold, and helpers that answer in every way."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources.dockerauth import Logins, config_file

HOST = "registry.example"
SECRET = "s3cret"
PACKED = base64.b64encode(f"me:{SECRET}:x".encode()).decode()


class Home:
    """A configuration, helpers on PATH, and what was echoed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "config.json"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.echoed: list[str] = []

    def write(self, **content: Any) -> None:
        self.file.write_text(json.dumps(content))

    def helper(self, name: str, script: str) -> None:
        path = self.bin / f"docker-credential-{name}"
        path.write_text(f"#!/bin/sh\nread asked\n{script}\n")
        path.chmod(0o755)

    def find(self, *names: str) -> tuple[str, str] | None:
        return Logins(self._echo, self.file).find(*(names or (HOST,)))

    def _echo(self, command: Sequence[str]) -> None:
        self.echoed.append(" ".join(command))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    return made


def test_nobody_is_logged_in(home: Home) -> None:
    assert home.find() is None
    home.write()
    assert home.find() is None


@pytest.mark.parametrize("key", [HOST, f"https://{HOST}", f"http://{HOST}"])
def test_a_stored_login(home: Home, key: str) -> None:
    home.write(auths={"other.example": {"auth": "odd"}, key: {"auth": PACKED}})
    assert home.find() == ("me", f"{SECRET}:x")
    assert home.find("registry.example.org") is None


def test_names_are_tried_in_order(home: Home) -> None:
    home.write(auths={"b": {"username": "b", "password": "1"}, "a": {"username": "a"}})
    assert home.find("b", "a") == ("b", "1")
    assert home.find("c", "a") == ("a", "")


def test_an_entry_without_a_login_is_none(home: Home) -> None:
    home.write(auths={HOST: {}})
    assert home.find() is None


def test_a_helper_of_the_registry_comes_before_the_store(home: Home) -> None:
    home.write(credHelpers={HOST: "own"}, credsStore="general", auths={HOST: {"auth": PACKED}})
    answer = 'echo "{\\"Username\\": \\"%s\\", \\"Secret\\": \\"$asked\\"}"'
    home.helper("own", answer % "helped")
    home.helper("general", answer % "stored")
    assert home.find() == ("helped", HOST)
    assert home.echoed == ["docker-credential-own get"]
    assert home.find("other.example") == ("stored", "other.example")


def test_a_helper_that_knows_nothing_leaves_it_to_what_is_stored(home: Home) -> None:
    home.write(credsStore="general", auths={HOST: {"auth": PACKED}})
    home.helper("general", "echo credentials not found in native keychain; exit 1")
    assert home.find() == ("me", f"{SECRET}:x")
    assert home.find("other.example") is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo the keychain is locked; exit 1", "found: the keychain is locked"),
        ("exit 3", "found: no word"),
        ("echo odd", "expected JSON with Username and Secret"),
        ('echo "{}"', "expected JSON with Username and Secret"),
        ("echo '[1]'", "expected JSON with Username and Secret"),
        ('echo \'{"Username": "<token>", "Secret": "s3cret"}\'', "found an identity token"),
    ],
)
def test_a_helper_that_fails(home: Home, script: str, said: str) -> None:
    home.write(credsStore="general")
    home.helper("general", script)
    with pytest.raises(EngineError, match=said) as caught:
        home.find()
    assert SECRET not in f"{caught.value} {caught.value.hint}"
    assert "\n" not in str(caught.value)


def test_a_helper_that_is_not_there(home: Home) -> None:
    home.write(credsStore="desktop")
    with pytest.raises(EngineError, match="docker-credential-desktop: expected the credential"):
        home.find()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected the configuration of docker in JSON"),
        ("\xff", "expected the configuration of docker in JSON"),
        ("[]", "expected an object, found list"),
        ('{"auths": 3}', "auths: expected an object, found int"),
        ('{"credHelpers": []}', None),
        ('{"credHelpers": [1]}', "credHelpers: expected an object, found list"),
        ('{"credsStore": "../../bin/sh"}', "expected the name of a credential helper"),
        ('{"auths": {"registry.example": {"auth": "s3cret"}}}', "expected base64"),
        ('{"auths": {"registry.example": {"auth": "/////w=="}}}', "expected base64"),
    ],
)
def test_a_malformed_configuration(home: Home, text: str, said: str | None) -> None:
    home.file.write_bytes(text.encode("latin-1"))
    if said is None:
        assert home.find() is None
        return
    with pytest.raises(UsageError, match=said) as caught:
        home.find()
    assert SECRET not in str(caught.value)


def test_an_identity_token_is_refused_with_the_way_out(home: Home) -> None:
    home.write(auths={HOST: {"auth": PACKED, "identitytoken": SECRET}})
    with pytest.raises(EngineError, match="found an identity token") as caught:
        home.find()
    assert caught.value.hint == "docker login with an access token as the password"


def test_where_the_configuration_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert config_file() == tmp_path / "config.json"
    monkeypatch.delenv("DOCKER_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config_file() == tmp_path / "home" / ".docker" / "config.json"
