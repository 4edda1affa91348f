"""What is printed, to the character."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagebuild.console import Console, counted
from imagebuild.errors import UsageError


def test_text_comes_out_as_it_went_in(capsys: pytest.CaptureFixture[str]) -> None:
    text = "-\tx = y[:key:]\t# [bold]not markup[/] :smile: " + "long " * 60 + "1234567890abcdef"
    Console().result(text)
    Console().note(text)
    said = capsys.readouterr()
    assert said.out == said.err == text + "\n"


def test_forced_colour_wraps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = "x[:key:] [bold] " + "long " * 60
    Console(color="always").result(text, "green")
    said = capsys.readouterr().out
    assert "\x1b[32m" in said
    assert text in said
    assert said.count("\n") == 1


def test_never_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    Console(color="never").verdict("red", 3)
    assert capsys.readouterr().out == "red\n"


def test_a_table_is_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("title", ("a", "what"), [("x", "one\ntwo"), ("longer", "")])
    assert capsys.readouterr().out == "title\n  a       what\n  x       one two\n  longer\n"


@pytest.mark.parametrize("color", ["auto", "always"])
def test_what_a_terminal_would_obey_is_shown(
    color: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b[2Jb\rc\x9b8md\u202ee"
    console = Console(color=color)
    console.result(hostile)
    console.note(hostile)
    console.table("title", ("what",), [(hostile,)])
    said = capsys.readouterr()
    assert said.out.count("a\\x1b[2Jb\\rc\\x9b8md\\u202ee") == 2
    assert "a\\x1b[2Jb" in said.err
    for raw in ("\x1b[2J", "\r", "\x9b", "\u202e"):
        assert raw not in said.out + said.err


def test_a_report_is_printed_to_the_character(capsys: pytest.CaptureFixture[str]) -> None:
    Console(color="always").report("::error::a%0Ab\n[bold]\t\n")
    assert capsys.readouterr().out == "::error::a%0Ab\n[bold]\t\n"


def test_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("title", ("a", "what"), [])
    assert capsys.readouterr().out == "title\n  a  what\n"


def test_json_mode_prints_the_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(output="json")
    console.result("text")
    console.verdict("text", 0)
    console.table("t", ("a",), [("b",)])
    console.step("fetch")
    console.command(["docker", "build", "a b"])
    console.document({"name": "Ä"})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"schema": 1, "name": "Ä"}
    assert said.err == "- fetch\n+ docker build 'a b'\n"


def test_an_error_has_its_hint_and_on_request_its_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = UsageError("where: expected x, found y", hint="do z")
    error.__cause__ = ValueError("deep")
    Console().error(error)
    assert capsys.readouterr().err == "error: where: expected x, found y\nhint: do z\n"
    Console(verbose=True).error(error)
    assert capsys.readouterr().err.endswith("cause: ValueError('deep')\n")


def test_progress_without_a_terminal_is_a_line_a_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console().progress() as show:
        for done in range(0, 101, 5):
            show("a.whl", done * 10**6, 100 * 10**6)
        show("unknown", 5, None)
    assert capsys.readouterr().err == "".join(
        f"- a.whl: {quarter} % of 100 MB\n" for quarter in (25, 50, 75, 100)
    )


def test_progress_is_told_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0

    def tell(name: str, done: int, total: int | None) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        moment.wait(0.02)
        inside -= 1

    moment = threading.Event()
    console = Console()
    monkeypatch.setattr(console, "_quarters", lambda: tell)
    with console.progress() as show, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: show(str(number), 1, 2), range(8)))
    assert most == 1


def test_one_is_no_plural() -> None:
    assert [counted(n, "error") for n in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]
    assert [counted(n, "patch", "patches") for n in (1, 2)] == ["1 patch", "2 patches"]


@pytest.mark.parametrize(("size", "said"), [(4_000_000, "4 MB"), (28, "1 kB")])
def test_progress_of_a_small_file_is_one_line(
    capsys: pytest.CaptureFixture[str], size: int, said: str
) -> None:
    with Console().progress() as show:
        for quarter in range(1, 5):
            show("a.json", size * quarter // 4, size)
    assert capsys.readouterr().err == f"- a.json: 100 % of {said}\n"
