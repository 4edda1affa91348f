"""The page in a browser: what a person sees, with a mouse, with keys, in the dark, on a phone.

SCREENSHOTS=DIR keeps pictures of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from imagebuild.audit.report import render
from imagebuild.audit.results import Audit
from tests.support import audits
from tests.support.browser import NARROW, WIDE, Browser

Url = Callable[[str], str]
SHOWN = "elements => elements.filter(e => e.offsetParent !== null).map(e => e.textContent.trim())"


def many() -> Audit:
    """Twelve releases, so that the grid is as wide as it gets."""
    green = [audits.all_green(f"0.{number}.0") for number in range(22, 31)]
    full = audits.full()
    return audits.audit(*green, *full.releases, failures=full.failures, watch=full.watch,
                        bisection=full.bisection, seconds=12.5)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Url:
    """Addresses of the pages `full`, `many`, `green`, `hostile` and `nothing`."""
    folder = tmp_path_factory.mktemp("pages")
    names = [one.patch.name for one in audits.every_verdict().reports]
    pages = {
        "full": (audits.full(), audits.about(*names)),
        "many": (many(), audits.about(*names)),
        "green": (audits.audit(audits.all_green()), audits.about(*names)),
        "hostile": audits.hostile(),
        "nothing": (audits.audit(), audits.about()),
    }
    for name, (audit, about) in pages.items():
        (folder / f"{name}.html").write_text(render("html", audit, about))
    return lambda name: Path(folder, f"{name}.html").as_uri()


def shown(page: Page, selector: str) -> list[str]:
    """Text of the elements that are laid out."""
    found: list[str] = page.locator(selector).evaluate_all(SHOWN)
    return found


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id"))


def rows(page: Page) -> list[str]:
    return shown(page, ".grid tbody th")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["many", "hostile"])
def test_it_can_be_read(
    browser: Browser, url: Url, name: str, scheme: str, size: tuple[int, int]
) -> None:
    with browser.open(url(name), size, scheme) as opened:  # type: ignore[arg-type]
        opened.screenshot(f"audit-{name}-{size[0]}-{scheme}")
        assert opened.sideways == 0
        page = opened.page
        if name == "many":
            assert len(rows(page)) == 12
            assert shown(page, ".cell .word").count("drifted") == 1
        # Nothing that is laid out lies outside of the window, but what its own box scrolls.
        outside = page.evaluate(
            "width => [...document.querySelectorAll('body *')].filter(e => e.offsetParent !== null"
            " && !e.closest('.scroll, pre, .sr, .skip') && e.getBoundingClientRect().right > width"
            " + 1).map(e => e.outerHTML.slice(0, 200))",
            size[0],
        )
        assert outside == []
        assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_finds_no_fault(browser: Browser, url: Url, scheme: str, size: tuple[int, int]) -> None:
    with browser.open(url("full"), size, scheme, bypass_csp=True) as opened:  # type: ignore[arg-type]
        opened.page.get_by_role("button", name="Open all shown").click()
        found = Axe().run(opened.page).response["violations"]
    assert json.dumps([(one["id"], [node["html"] for node in one["nodes"]]) for one in found],
                      indent=1) == "[]"  # fmt: skip


def test_the_window_of_the_grid_scrolls_and_keeps_the_names(browser: Browser, url: Url) -> None:
    with browser.open(url("many"), (800, 700)) as opened:
        assert opened.sideways == 0
        page = opened.page
        page.evaluate("document.querySelector('.scroll').scrollLeft = 500")
        box = page.locator(".grid tbody th").first.bounding_box()
        frame = page.locator(".scroll").first.bounding_box()
        assert box and frame
        assert 0 <= box["x"] - frame["x"] < 3


def test_a_verdict_a_word_and_a_release_filter(browser: Browser, url: Url) -> None:
    with browser.open(url("full")) as opened:
        page = opened.page
        status = page.locator("#status")
        assert status.inner_text() == "12 of 12 patches, 3 of 3 releases"
        chip = page.get_by_role("button", name="drifted 1")
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true"
        assert rows(page) == ["vllm_is_drifted"]
        assert status.inner_text() == "1 of 12 patches, 3 of 3 releases"
        assert [text.split()[0] for text in shown(page, ".entry summary")] == ["drifted"]
        page.get_by_role("button", name="review 1").click()
        assert rows(page) == ["vllm_is_review", "vllm_is_drifted"]
        page.get_by_role("button", name="Clear filters").click()
        assert len(rows(page)) == 12
        page.get_by_role("searchbox").fill("IS_MOVED")
        assert rows(page) == ["vllm_is_moved"]
        page.get_by_role("searchbox").fill("no such text")
        assert rows(page) == []
        assert page.get_by_text("Nothing matches these filters.").is_visible()
        page.get_by_role("searchbox").press("Escape")
        page.get_by_role("combobox").select_option(label="vLLM 0.33.0")
        assert shown(page, ".grid thead th") == ["patch", "0.33.0"]
        assert shown(page, ".release h3")[0].startswith("vLLM 0.33.0")
        assert len(shown(page, ".release h3")) == 1
        assert status.inner_text() == "12 of 12 patches, 1 of 3 releases"


def test_a_word_of_the_evidence_is_found(browser: Browser, url: Url) -> None:
    with browser.open(url("green")) as opened:
        opened.page.get_by_role("searchbox").fill("stock route")
        assert rows(opened.page) == ["vllm_is_ok"]


def test_a_cell_shows_its_evidence(browser: Browser, url: Url) -> None:
    with browser.open(url("full")) as opened:
        page = opened.page
        body = page.locator("#e2-5 .body")
        assert not body.is_visible()
        page.locator("#c2-5").click()
        assert body.is_visible()
        assert "return new" in body.locator("ins").first.inner_text()
        assert page.evaluate("document.activeElement.closest('.entry').id") == "e2-5"
        # What is green is shown when somebody asks.
        green = page.locator("#e1-3")
        assert not green.is_visible()
        page.locator("#c1-3").click()
        assert green.is_visible()
        assert page.url.endswith("#e1-3")


def test_an_address_leads_to_the_evidence(browser: Browser, url: Url) -> None:
    with browser.open(url("full") + "#e1-3") as opened:
        assert opened.page.locator("#e1-3 .body").is_visible()


def test_keys_are_enough(browser: Browser, url: Url) -> None:
    with browser.open(url("full")) as opened:
        page = opened.page
        press = page.keyboard.press
        press("/")
        assert focused(page) == "find"
        assert page.get_by_role("searchbox", name="Find", exact=True).count() == 1
        page.keyboard.type("vllm_is/")
        assert page.locator("#find").input_value() == "vllm_is/"
        press("Escape")
        assert page.locator("#find").input_value() == ""
        # One cell of the grid is in the order of Tab.
        assert page.locator(".cell[tabindex='0']").count() == 1
        page.locator(".cell[tabindex='0']").focus()
        for key, wanted in (
            ("ArrowRight", "c1-0"), ("ArrowDown", "c1-1"), ("End", "c0-1"), ("Home", "c2-1"),
            ("ArrowUp", "c2-0"), ("ArrowUp", "c2-0"), ("ArrowLeft", "c2-0"),
            ("n", "c2-2"), ("n", "c2-3"), ("p", "c2-2"),
        ):  # fmt: skip
            press(key)
            assert focused(page) == wanted, key
        # Rows and cells that a filter hides are stepped over.
        page.get_by_role("button", name="absorbed 1", exact=True).click()
        page.get_by_role("button", name="drifted 1", exact=True).click()
        page.locator("#c2-2").focus()
        press("ArrowDown")
        assert focused(page) == "c2-5"
        page.get_by_role("button", name="Clear filters").click()
        page.locator("#c2-2").focus()
        press("Enter")
        assert page.evaluate("document.activeElement.closest('.entry').id") == "e2-2"
        press("Escape")
        assert focused(page) == "c2-2"


def test_every_control_shows_where_the_focus_is(browser: Browser, url: Url) -> None:
    with browser.open(url("full")) as opened:
        seen = set()
        for _ in range(60):
            opened.page.keyboard.press("Tab")
            tag, outline = opened.page.evaluate(
                "(() => { const e = document.activeElement,"
                " o = e.matches('[name=theme]') ? e.nextElementSibling : e;"
                " return [e.tagName, getComputedStyle(o).outlineStyle] })()"
            )
            if tag == "BODY":
                break
            seen.add(tag)
            assert outline != "none", tag
        assert {"INPUT", "SELECT", "BUTTON", "A", "SUMMARY"} <= seen


def test_colours_follow_the_system_until_somebody_chooses(browser: Browser, url: Url) -> None:
    def back(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with browser.open(url("full"), scheme="light") as opened:
        light = back(opened.page)
    with browser.open(url("full"), scheme="dark") as opened:
        page = opened.page
        dark = back(page)
        assert dark != light
        page.get_by_role("radio", name="Light").check()
        assert back(page) == light
        page.reload()
        assert back(page) == light  # kept
        page.get_by_role("radio", name="Auto").check()
        assert back(page) == dark
        page.emulate_media(color_scheme="light")
        assert back(page) == light


def test_a_verdict_is_told_by_more_than_colour(browser: Browser, url: Url) -> None:
    with browser.open(url("full")) as opened:
        cells = opened.page.locator(".grid .cell")
        said = cells.evaluate_all(
            "cells => cells.map(c => [c.querySelector('.word').textContent,"
            " c.querySelector('use').getAttribute('href')])"
        )
        assert len(said) == 36
        icons = dict(said)
        assert icons["ok"] == "#i-good"
        assert icons["review"] == "#i-look"
        assert icons["drifted"] == "#i-broken"
        assert icons["not_applicable"] == "#i-idle"


def test_without_a_script_all_of_it_can_be_read(browser: Browser, url: Url) -> None:
    with browser.open(url("full"), NARROW, java_script_enabled=False) as opened:
        page = opened.page
        opened.screenshot("audit-no-script-400")
        assert page.locator(".filters").is_hidden()
        assert page.locator("#e1-3").is_visible()
        page.locator("#e1-3 summary").click()
        assert page.locator("#e1-3 .body").is_visible()


def test_an_empty_audit_is_a_page(browser: Browser, url: Url) -> None:
    with browser.open(url("nothing")) as opened:
        assert opened.page.get_by_role("heading", name="Drift audit").is_visible()
        assert opened.sideways == 0
