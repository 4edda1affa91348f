"""The browser that tests share: where none is, that is said or is a failure; never hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import Browser, chromium


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any browser."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("REQUIRE_BROWSER", raising=False)
    return monkeypatch


def test_a_machine_without_one_is_told_what_to_install(nowhere: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"not run: no chromium, .* apt-get install"):
        chromium().__enter__()


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("REQUIRE_BROWSER", "1")])
def test_where_it_must_not_be_missing(nowhere: pytest.MonkeyPatch, name: str, value: str) -> None:
    nowhere.setenv(name, value)
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        chromium().__enter__()


@pytest.mark.parametrize(
    "fault",
    [
        "<script>console.warn('a')</script>",
        "<script>throw new Error('a')</script>",
        "<img src='http://127.0.0.1:9/a.png'>",
        "<link rel=stylesheet href='other.css'>",
    ],
)
def test_a_page_that_complains_or_asks_for_more_fails(
    browser: Browser, tmp_path: Path, fault: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>a</title>{fault}")
    with pytest.raises(AssertionError), browser.open(page.as_uri()):
        pass
    page.write_text("<!doctype html><title>a</title>")
    with browser.open(page.as_uri() + "#here") as opened:
        assert opened.sideways == 0
