from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources import pipconf
from imagebuild.sources.pipconf import PipSettings, read_settings, scrub, split_credentials


@pytest.fixture
def pip_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:s3@cret@a.example/x", "https://a.example/x"),
        ("https://me:s3/cret@a.example/x", "https://a.example/x"),
        ("https://me:s3/c@ret@a.example:8080/x", "https://a.example:8080/x"),
        ("https://t0ken@a.example/x", "https://a.example/x"),
        ("https://a.example:8080/x@1", "https://a.example:8080/x@1"),
        ("https://a.example/x:y@1", "https://a.example/x:y@1"),
        ("http://a.example:80 or x@y", "http://a.example:80 or x@y"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    assert scrub(f"see {url}, please") == f"see {shown}, please"


def test_environment_is_read_through_pip(pip_env: pytest.MonkeyPatch) -> None:
    pip_env.setenv("PIP_INDEX_URL", "https://me:s3cret@index.example/simple")
    pip_env.setenv("PIP_EXTRA_INDEX_URL", "https://a.example/simple\n  file:///srv/simple")
    pip_env.setenv("PIP_FIND_LINKS", "/srv/wheels /srv/more")
    pip_env.setenv("PIP_CERT", "/etc/ca.pem")
    pip_env.setenv("PIP_CLIENT_CERT", "/etc/me.pem")
    pip_env.setenv("PIP_TRUSTED_HOST", "a.example b.example:8443")
    pip_env.setenv("PIP_DEFAULT_TIMEOUT", "7.5")
    pip_env.setenv("PIP_RETRIES", "2")
    pip_env.setenv("PIP_PROXY", "http://proxy.example:3128")
    assert read_settings() == PipSettings(
        index_url="https://me:s3cret@index.example/simple",
        extra_index_urls=("https://a.example/simple", "file:///srv/simple"),
        find_links=("/srv/wheels", "/srv/more"),
        cert="/etc/ca.pem",
        client_cert="/etc/me.pem",
        trusted_hosts=("a.example", "b.example:8443"),
        timeout=7.5,
        retries=2,
        proxy="http://proxy.example:3128",
    )


def test_a_pip_conf_file_is_read_and_the_environment_wins(
    pip_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://global.example/simple\ntimeout = 5\n"
        "[install]\nindex-url = https://install.example/simple\n"
    )
    pip_env.setenv("PIP_CONFIG_FILE", str(file))
    assert read_settings().index_url == "https://install.example/simple"
    pip_env.setenv("PIP_INDEX_URL", "https://env.example/simple")
    settings = read_settings()
    assert (settings.index_url, settings.timeout) == ("https://env.example/simple", 5)


def test_without_a_setting_the_index_is_pips_own(pip_env: pytest.MonkeyPatch) -> None:
    pip_env.setenv("COLUMNS", "30")  # a narrow terminal would break the line with the URL
    settings = read_settings()
    parts = urlsplit(settings.index_url)
    assert parts.scheme == "https" and "." in parts.netloc and parts.path.endswith("/simple")
    assert settings.index_urls == (settings.index_url,)


def test_no_index_needs_no_index_url(pip_env: pytest.MonkeyPatch) -> None:
    pip_env.setenv("PIP_NO_INDEX", "1")
    pip_env.setenv("PIP_EXTRA_INDEX_URL", "https://a.example/simple")
    assert read_settings().index_urls == ()


def test_sections_of_other_commands_and_odd_lines_are_ignored() -> None:
    listing = "search.index='https://x'\nnonsense\nglobal.timeout='3'\n:env:.timeout=''\n"
    assert pipconf._merged(listing) == {"timeout": "3"}


def test_a_value_that_is_no_literal_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"expected global.proxy='value', found 'http://p:1'"):
        pipconf._merged("global.proxy=http://u:secret@p:1")


@pytest.mark.parametrize(
    ("name", "value"),
    [("PIP_RETRIES", "-1"), ("PIP_NO_INDEX", "perhaps")],
)
def test_malformed_values_are_named(pip_env: pytest.MonkeyPatch, name: str, value: str) -> None:
    pip_env.setenv(name, value)
    with pytest.raises(UsageError, match=f"pip configuration, .*found '{value}'"):
        read_settings()


def test_what_pip_itself_refuses_is_shown(pip_env: pytest.MonkeyPatch) -> None:
    pip_env.setenv("PIP_DEFAULT_TIMEOUT", "soon")
    with pytest.raises(
        EngineError, match=r"pip config list: .*invalid floating-point value: 'soon'"
    ):
        read_settings()


def test_an_interpreter_that_is_absent_or_has_no_pip(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="expected to run pip, found No such file"):
        read_settings(str(tmp_path / "python"))
    fake = tmp_path / "fake"
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('http://u:secret@x: no pip here')\n")
    fake.chmod(0o755)
    with pytest.raises(EngineError, match="found 'http://x: no pip here'"):
        read_settings(str(fake))


def test_help_without_a_default_is_an_error(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    with pytest.raises(EngineError, match="expected the default of --index-url") as error:
        read_settings(str(fake))
    assert "config set global.index-url" in str(error.value.hint)


def test_credentials_never_show() -> None:
    settings = PipSettings("https://me:s3cret@a.example/simple", proxy="http://me:s3cret@p")
    assert "s3cret" not in repr(settings)
    assert scrub("see https://me:s3cret@a.example/x, http://u@b/") == (
        "see https://a.example/x, http://b/"
    )
    assert split_credentials("https://me:s%40cret@a.example:8/x?y#z") == (
        "https://a.example:8/x?y#z",
        ("me", "s@cret"),
    )
    assert split_credentials("file:///srv/simple") == ("file:///srv/simple", None)
