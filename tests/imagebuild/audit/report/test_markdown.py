"""Markdown: read back with a CommonMark parser, and never longer than GitHub takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from imagebuild.audit.report import About, render
from imagebuild.audit.report.markdown import LIMIT
from imagebuild.audit.results import Audit, Evidence, ScopeDiff
from imagebuild.patching.evaluate import Verdict
from tests.support import audits

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def markdown(audit: Audit, about: About | None = None) -> str:
    return render("markdown", audit, about or audits.about())


def tokens(text: str) -> Iterator[Token]:
    for token in PARSER.parse(text):
        yield token
        yield from token.children or ()


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table's rows, as text."""
    found: list[list[list[str]]] = []
    parsed = PARSER.parse(text)
    for index, token in enumerate(parsed):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            children = parsed[index + 1].children or []
            found[-1][-1].append("".join(child.content for child in children))
    return found


def test_the_grid_is_a_table() -> None:
    grid, pins = tables(markdown(audits.full()))
    assert grid[0] == ["patch", "0.33.0", "0.32.0", "0.31.0"]
    rows = {row[0]: row[1:] for row in grid[1:]}
    assert rows["vllm_is_drifted"] == ["❌ drifted", "✅ ok", "✅ ok"]
    assert rows["vllm_is_review"][0] == "⚠️ review"
    assert rows["vllm_is_not_applicable"][0] == "⚪ not_applicable"
    assert rows["declared_one"][0] == "✅ absorbed (declared)"
    assert pins[1] == ["0.33.0", "flashinfer-python", "0.7.0", "0.7.2", "vllm_is_ok"]


def test_problems_come_gravest_first_with_place_and_next_step() -> None:
    text = markdown(audits.full())
    told = text.partition("## What needs you")[2].partition("\n## ")[0]
    items = [line for line in told.split("\n") if line.startswith("- ")]
    marks = [line[2:].split(" ")[0] for line in items]
    assert marks == ["❌"] * 8 + ["⚠️"] * 4
    assert "- ❌ `vllm_is_drifted` on `0.33.0`: **drifted**\n  - it is drifted here\n" in text
    assert "  - upstream: `vllm/a.py:40` ('words' is 90% like this)\n" in text
    assert "  - next: look at it\n" in text
    assert "12 need a person" in text


def test_many_releases_are_several_tables() -> None:
    releases = [audits.all_green(f"0.{number}.0") for number in range(30)]
    found = tables(markdown(audits.audit(*releases)))
    assert [len(table[0]) for table in found] == [13, 13, 7]
    assert [table[0][1] for table in found] == ["0.29.0", "0.17.0", "0.5.0"]


def test_hostile_text_is_text() -> None:
    text = markdown(*audits.hostile())
    allowed = {"<details>", "<summary>", "</summary>", "</details>", "<code>", "</code>",
               "<!-- -->"}  # fmt: skip
    for token in tokens(text):
        assert token.type not in ("image", "link_open")
        if token.type == "html_inline":
            assert token.content in allowed
        if token.type == "html_block":
            assert "<script" not in token.content
            assert token.content.count("<details>") <= 1
    grid, pins = tables(text)
    assert [len(row) for row in grid] == [2, 2]
    assert [len(row) for row in pins] == [5, 5]
    for raw in ("\x1b", "\u202e", "\r"):
        assert raw not in text


def test_nobody_is_mentioned_and_no_issue_is_linked() -> None:
    text = markdown(*audits.hostile())
    # Code is left alone by GitHub; in prose a comment parts the mark from the name.
    for token in tokens(text):
        if token.type == "text":
            assert "@someone" not in token.content
            assert "#12" not in token.content
            assert "#34" not in token.content
            assert "GH-5" not in token.content
    assert "@<!-- -->someone" in text


@pytest.mark.parametrize(
    "text",
    ["1. one", "- a", "+ a", "> a", "# a", "= a", "**a** _b_ ~~c~~", "a | b", "`a", "<b>", "&lt;",
     "[a](b)", "![a](b)", "https://github.com/a/b/issues/1", ":smile: $x$", "\\", "| a |"],
)  # fmt: skip
def test_prose_comes_out_as_it_went_in(text: str) -> None:
    one = audits.report(Verdict.REVIEW)
    one.add("warning", "told", text)
    said = markdown(audits.audit(audits.release(one)))
    item = said.partition("**review**\n")[2].partition("\n")[0]
    shown = list(tokens(item.strip()))
    content = "".join(token.content for token in shown if token.type in ("text", "text_special"))
    assert content == text
    kinds = {token.type for token in shown} - {"text", "text_special", "inline", "html_inline"}
    assert kinds == {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close",
                     "paragraph_open", "paragraph_close"}  # fmt: skip


@pytest.mark.parametrize("count", [6, 90])
@pytest.mark.parametrize("word", ["word ", "é中`|", "<&@#"])
def test_it_is_never_longer_than_github_takes(count: int, word: str) -> None:
    long = word * 600
    reports = []
    for number in range(count):
        one = audits.report(Verdict.DRIFTED, f"vllm_{number}" + word * 20)
        one.add("error", "drifted", long, file="vllm/a.py", line=3)
        reports.append(one)
    evidence = {one.patch.name: Evidence((ScopeDiff("a", "a", "", "0", 1, long, ()),))
                for one in reports}  # fmt: skip
    releases = [audits.release(*reports, version=f"0.{n}.0", evidence=evidence) for n in range(3)]
    text = markdown(audits.audit(*releases))
    assert len(text.encode()) <= LIMIT == 65_536
    assert len(text.encode()) > LIMIT / 2
    assert text.endswith("The html report has all.*\n")
    # What is there is whole.
    assert text.count("<details>") == text.count("</details>")
    assert PARSER.parse(text)[-2].content.startswith("*Left out")


def test_a_long_head_leaves_room() -> None:
    found = replace(audits.full(), recipe="x" * 100_000)
    assert len(markdown(found).encode()) <= LIMIT


def test_a_fence_is_longer_than_any_in_a_diff() -> None:
    scope = ScopeDiff("a", "a", "", "0", 1, "+````\n+</details>\n+x", ())
    one = audits.report(Verdict.REVIEW)
    found = audits.release(one, evidence={one.patch.name: Evidence((scope,))})
    fences = [t for t in PARSER.parse(markdown(audits.audit(found))) if t.type == "fence"]
    assert [(fence.info, fence.content) for fence in fences] == [
        ("diff", "+````\n+</details>\n+x\n")
    ]
