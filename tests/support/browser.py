"""A headless Chromium for the tests of pages; nothing is downloaded for it.

`Browser.open` loads a page and notes what no page of ours may do: an error or warning on its
console, an exception, a request to anywhere but its own file or the server named. Screenshots go
to the folder in SCREENSHOTS, if set, for a person to look at.

Where no Chromium is installed the tests are reported as not run, with the command that enables
them; with CI=true or REQUIRE_BROWSER=1 they fail instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser as Engine
from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "apt-get install --no-install-recommends chromium; then: ./build.py test -m browser"
WIDE, NARROW = (1600, 1000), (400, 900)
# How far a page may be scrolled sideways, in CSS pixels.
_SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Opened:
    """A page and what it did that it must not.

    Attributes:
        complaints: messages of its console, and exceptions.
        requests: addresses that it asked for beside what it may ask.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def screenshot(self, name: str) -> None:
        """Keeps the whole page as NAME.png where SCREENSHOTS says; else does nothing."""
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    @property
    def sideways(self) -> int:
        """By how many CSS pixels the page is wider than the window."""
        found = self.page.evaluate(_SIDEWAYS)
        assert isinstance(found, int)
        return found


class Browser:
    """One Chromium for a whole test session; each page has cookies and storage of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextlib.contextmanager
    def open(
        self,
        url: str,
        size: tuple[int, int] = WIDE,
        scheme: Literal["light", "dark"] = "light",
        **options: Any,
    ) -> Iterator[Opened]:
        """Loads `url`; afterwards asserts that it complained of nothing and asked for nothing.

        Args:
            url: of a file or of a server on this machine.
            size: width and height of the window in CSS pixels.
            scheme: what the system is said to prefer.
            options: further ones of Playwright's `new_context`, such as java_script_enabled.
        """
        viewport = {"width": size[0], "height": size[1]}
        context = self._engine.new_context(viewport=viewport, color_scheme=scheme, **options)
        own = (
            url.partition("#")[0] if url.startswith("file:") else "/".join(url.split("/")[:3]) + "/"
        )
        try:
            page = context.new_page()
            opened = Opened(page)
            page.on("console", lambda m: opened.complaints.append(f"{m.type}: {m.text}"))
            page.on("pageerror", lambda error: opened.complaints.append(f"exception: {error}"))
            page.on("request", lambda request: _note(opened, request.url, own))
            page.goto(url)
            yield opened
            assert opened.complaints == []
            assert opened.requests == []
        finally:
            context.close()


def _note(opened: Opened, url: str, own: str) -> None:
    is_own = url.partition("#")[0] == own if own.startswith("file:") else url.startswith(own)
    if not is_own and not url.startswith("data:"):
        opened.requests.append(url)


def find_chromium() -> str | None:
    """The program, where one is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Starts one, or ends the test with the reason and what to do."""
    program = find_chromium()
    if program is None:
        reason = f"no {', '.join(NAMES[:-1])} or {NAMES[-1]} on PATH"
        if os.environ.get("CI") == "true" or os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(f"{reason}, and here it must not be missing; {HOW}")
        pytest.skip(f"not run: {reason}; to run it: {HOW}")
    with sync_playwright() as playwright:
        # A page that is larger than /dev/shm of a container must not end the browser.
        engine = playwright.chromium.launch(
            executable_path=program, args=["--disable-dev-shm-usage"]
        )
        try:
            yield Browser(engine)
        finally:
            engine.close()
