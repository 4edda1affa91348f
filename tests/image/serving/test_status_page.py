"""The status page in a real browser, at the width of a phone and of a desk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import state
from serving.status import Options, StatusServer

from tests.support.browser import NARROW, WIDE, Browser, Opened

RUNTIME = Path(__file__).resolve().parents[3] / "image" / "runtime"
TOKEN = "0123456789abcdef0123"


@pytest.fixture
def shown(tmp_path: Path) -> state.StateFile:
    made = state.StateFile(tmp_path, "gb10-4x")
    made.update(
        route="sm90",
        rank=0,
        ranks=4,
        fingerprint={"digest": "0f" * 32},
        knobs={"GLM_SPECULATION": "dflash2", "GLM_NOTE": "<b>not bold</b>", "GLM_LONG": "x" * 300},
    )
    return made


@pytest.fixture
def server(shown: state.StateFile) -> Iterator[StatusServer]:
    made = StatusServer(Options("127.0.0.1", 0, shown.path.parent))
    made.start()
    yield made
    made.stop()


def address(server: StatusServer) -> str:
    return f"http://{server.options.host}:{server.port}/"


def stages(opened: Opened) -> dict[str, str]:
    items = opened.page.locator("#stages li")
    found = items.evaluate_all("all => all.map(one => [one.dataset.stage, one.dataset.state])")
    return dict(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["phone", "desk"])
def test_it_is_readable(browser: Browser, server: StatusServer, shown: state.StateFile,
                        size: tuple[int, int], scheme: str) -> None:  # fmt: skip
    for stage in state.STAGES[:5]:
        shown.begin(stage, f"what {stage} is at")
    with browser.open(address(server), size, scheme) as opened:  # type: ignore[arg-type]
        page = opened.page
        assert page.title() == "gb10-4x: load"
        assert page.locator("#health").inner_text() == "load weights"
        assert list(stages(opened)) == list(state.STAGES)
        assert "what load is at" in page.locator("#stages").inner_text()
        assert "0 of 4, the head" in page.locator("#facts").inner_text()
        assert opened.sideways == 0
        page.locator("summary").focus()
        page.keyboard.press("Enter")
        assert page.get_by_text("<b>not bold</b>").is_visible()
        assert opened.sideways == 0, "a long value must wrap"
        opened.screenshot(f"status-{size[0]}-{scheme}")


def test_stages_move_as_the_start_proceeds(
    browser: Browser, server: StatusServer, shown: state.StateFile
) -> None:
    with browser.open(address(server)) as opened:
        page = opened.page
        # The page asks every two seconds; a test does not wait for that.
        page.clock.install()
        page.reload()
        seen = []
        for stage in state.STAGES[:-1]:
            shown.begin(stage)
            page.clock.run_for(2500)
            running = page.locator(f'li[data-stage="{stage}"][aria-current="step"]')
            running.wait_for()
            seen.append(stages(opened)[stage])
        assert seen == ["running"] * 8
        assert set(list(stages(opened).values())[:7]) == {"done"}
        page.locator("#health", has_text="serving").wait_for()
        shown.fail("rank 2 (10.0.0.4) is lost: it closed the connection")
        page.clock.run_for(2500)
        page.locator("#health", has_text="failed").wait_for()
        assert page.get_by_role("alert").inner_text() == (
            "rank 2 (10.0.0.4) is lost: it closed the connection"
        )
        assert stages(opened)["serving"] == "failed"
        opened.screenshot("status-failed")


def test_a_rank_that_went_is_said(browser: Browser, shown: state.StateFile) -> None:
    """As the entry point runs it: a process of its own, which is killed here."""
    command = [sys.executable, "-m", "serving.status", "--port", "0", "--folder"]
    with subprocess.Popen(
        [*command, str(shown.path.parent)], cwd=RUNTIME, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        port = process.stderr.readline().rpartition(":")[2].strip()
        with browser.open(f"http://127.0.0.1:{port}/") as opened:
            opened.page.clock.install()
            opened.page.reload()
            process.kill()
            process.wait()
            opened.page.clock.run_for(2500)
            opened.page.locator("#health", has_text="no answer from this rank").wait_for()
            # Chromium itself reports the refused connection; the page adds nothing to it.
            assert all("ERR_CONNECTION" in line for line in opened.complaints)
            opened.complaints.clear()


def test_the_token_opens_it_once_and_stays_out_of_the_address(
    browser: Browser, shown: state.StateFile
) -> None:
    server = StatusServer(Options("127.0.0.2", 0, shown.path.parent, None, TOKEN))
    server.start()
    try:
        with browser.open(address(server) + f"?token={TOKEN}") as opened:
            page = opened.page
            assert page.url == address(server)
            assert page.locator("#title").inner_text() == "gb10-4x"
            page.clock.install()
            page.reload()
            shown.begin("preflight")
            page.clock.run_for(2500)
            page.locator('li[data-stage="preflight"][aria-current]').wait_for()
            assert TOKEN not in page.content()
            page.context.clear_cookies()
            page.reload()
            assert page.locator("body").inner_text().strip() == "a token is needed"
            opened.complaints.clear()  # Chromium reports the 401
    finally:
        server.stop()
