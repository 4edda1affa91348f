"""Annotations: each line is one command, read back here as a runner reads it."""

from __future__ import annotations

import re

import pytest

from imagebuild.audit.report import About, render
from imagebuild.audit.results import Audit
from tests.support import audits

COMMAND = re.compile(r"::(\w+)(?: ([^:]*))?::(.*)")


def commands(audit: Audit, about: About) -> list[tuple[str, dict[str, str], str]]:
    """Name, properties and message of every line.

    Source: actions/runner, ActionCommand.cs: how each part is unescaped, % last.
    """
    found = []
    text = render("github", audit, about)
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        match = COMMAND.fullmatch(line)
        assert match, line
        pairs = [pair.partition("=") for pair in (match[2] or "").split(",")]
        properties = {key: plain(value, ":,") for key, _equals, value in pairs}
        found.append((match[1], properties, plain(match[3])))
    return found


def plain(text: str, more: str = "") -> str:
    for char in "\r\n" + more:
        text = text.replace(f"%{ord(char):02X}", char)
    return text.replace("%25", "%")


def test_each_problem_is_one_at_its_patch() -> None:
    about = audits.about(*(one.patch.name for one in audits.every_verdict().reports))
    found = commands(audits.full(), about)
    names = [name for name, _properties, _message in found]
    assert names == ["error"] * 8 + ["warning"] * 4 + ["notice"]
    by_title = {properties["title"]: (properties, message) for _n, properties, message in found}
    properties, message = by_title["vllm_is_drifted on vLLM 0.33.0: drifted"]
    assert properties["file"] == "patches/tiny/vllm_is_drifted.py"
    assert properties["line"] == "1"
    assert message == ("it is drifted here\nupstream: vllm/a.py:7, vllm/a.py:40, vllm/a.py:41\n"
                       "next: look at it")  # fmt: skip
    _properties, message = by_title["vLLM on vLLM 0.34.0: unreadable"]
    assert message == "0.34.0: expected a wheel, found none\nnext: try again"
    assert found[-1][1] == {"title": "Drift audit of tiny"}
    assert found[-1][2].startswith("broken")


def test_hostile_text_starts_no_command_and_ends_no_property() -> None:
    audit, about = audits.hostile()
    found = commands(audit, about)
    assert {name for name, _properties, _message in found} == {"error", "warning", "notice"}
    for _name, properties, message in found:
        assert set(properties) <= {"file", "line", "title"}
        assert "\x1b" not in message
    assert any("::error::owned" in message for _n, _p, message in found)
    assert any("100%0A a" in message for _n, _p, message in found)
    files = {properties["file"] for _n, properties, _m in found if "file" in properties}
    assert files == {"vllm/caf\\xe9 <i>&'\".py"}


def test_green_is_a_notice_alone() -> None:
    found = commands(audits.audit(audits.all_green()), audits.about())
    assert found == [("notice", {"title": "Drift audit of tiny"}, "all well")]


@pytest.mark.parametrize(("count", "hidden"), [(1, 0), (2, 2), (4, 16)])
def test_what_github_would_not_show_is_counted(count: int, hidden: int) -> None:
    releases = [audits.every_verdict(f"0.{33 + number}.0") for number in range(count)]
    found = commands(audits.audit(*releases), audits.about())
    more = f"; {hidden} more than GitHub shows here, see the reports"
    errors = sum(name == "error" for name, _properties, _message in found)
    warnings = sum(name == "warning" for name, _properties, _message in found)
    assert max(errors - 10, 0) + max(warnings - 10, 0) == hidden
    assert (more in found[-1][2]) == bool(hidden)
