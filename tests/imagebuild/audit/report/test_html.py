"""The page's source: it stands alone, escapes everything, and holds what the audit found."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from imagebuild.audit.report import About, render
from imagebuild.audit.results import Audit
from imagebuild.patching.evaluate import Verdict
from tests.support import audits

# Elements that our template writes; whatever else appears came out of somebody's text.
TAGS = {
    "a", "b", "body", "br", "button", "code", "dd", "del", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "form", "h1", "h2", "h3", "h4", "head", "header", "html", "input",
    "ins", "kbd", "label", "legend", "li", "main", "meta", "ol", "option", "p", "path", "pre",
    "script", "section", "select", "span", "style", "summary", "svg", "symbol", "table", "tbody",
    "td", "th", "thead", "title", "tr", "ul", "use",
}  # fmt: skip


class Page(HTMLParser):
    """Elements with their attributes, and the text of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inline: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.inline[self._open] = data
        else:
            self.text += data


def page(audit: Audit, about: About | None = None) -> Page:
    names = [one.patch.name for one in audit.releases[0].reports] if audit.releases else []
    return Page(render("html", audit, about or audits.about(*names)))


EVERY = pytest.mark.parametrize(
    ("audit", "about"),
    [(audits.full(), None), audits.hostile(), (audits.audit(), None),
     (audits.audit(audits.all_green()), None)],
    ids=["full", "hostile", "nothing", "green"],
)  # fmt: skip


@EVERY
def test_it_stands_alone(audit: Audit, about: About | None) -> None:
    found = page(audit, about)
    assert {tag for tag, _attributes in found.elements} <= TAGS
    assert [tag for tag, _attributes in found.elements].count("script") == 1
    for tag, attributes in found.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name in ("src", "srcset", "action", "data", "style"):
                pytest.fail(f"{tag} has {name}={value}")
            if name == "href":
                assert tag == "a" or (tag, (value or "")[:1]) == ("use", "#")
    assert "url(" not in found.inline["style"]
    assert "@import" not in found.inline["style"]
    assert not re.search(r"fetch\(|XMLHttp|import\(|innerHTML|eval\(", found.inline["script"])


@EVERY
def test_ids_are_unique_and_links_lead_somewhere(audit: Audit, about: About | None) -> None:
    found = page(audit, about)
    ids = [attributes["id"] for _tag, attributes in found.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in found.elements:
        target = attributes.get("href") or ""
        if tag in ("a", "use") and target.startswith("#"):
            assert target[1:] in ids
        for name in ("aria-labelledby", "aria-describedby"):
            if name in attributes:
                assert attributes[name] in ids


def test_only_its_own_script_and_style_may_act() -> None:
    found = page(*audits.hostile())
    (policy,) = [
        attributes["content"] for tag, attributes in found.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    for name in ("script", "style"):
        digest = hashlib.sha256(found.inline[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in (policy or "")
    assert "default-src 'none'" in (policy or "")
    assert "unsafe" not in (policy or "")


def test_hostile_text_is_text() -> None:
    audit, about = audits.hostile()
    text = render("html", audit, about)
    found = page(audit, about)
    assert "<script>alert(1)</script>" in found.text
    assert "{{ 7*7 }} {% raw %}" in found.text
    assert "\\x1b[31mred" in found.text
    assert "caf\\xe9 <i>" in found.text
    for raw in ("\x1b", "\u202e", "\r", "\udce9"):
        assert raw not in text
    links = {attributes["href"] for tag, attributes in found.elements if tag == "a"}
    assert all((link or "")[:1] == "#" for link in links)


def test_an_upstream_address_is_a_link() -> None:
    from dataclasses import replace

    one = audits.report(Verdict.REVIEW)
    one.patch = replace(one.patch, upstream="https://example.org/1?a=1&b=2")
    found = page(audits.audit(audits.release(one)))
    assert ("a", {"href": "https://example.org/1?a=1&b=2", "rel": "noreferrer"}) in found.elements


def test_everything_that_was_found_is_there() -> None:
    text = page(audits.full()).text
    for said in (
        "vllm_is_drifted", "absorbed (declared)", "it is moved here", "look at it",
        "its executor uses 2 new names", "all else is as it was",  # of the release
        "-    return old", "+    return new", "--- removed",  # a diff
        "“words” may be now", "vllm/a.py:41", "80 % alike: the same call", "return other1",
        "flashinfer-python", "0.7.2", "vllm_is_ok",  # pins
        "0.34.0: expected a wheel, found none", "its digest moved", "reported before: 0.33.1",
        "First bad release for vllm_is_drifted", "a stock route exists", "abc1234",
        "1.50 MB in 3 requests", "2026-11-29 12:00 UTC", "GPU: all",
    ):  # fmt: skip
        assert said in text, said


def test_every_verdict_has_its_words() -> None:
    text = page(audits.audit()).text
    for verdict in Verdict:
        assert verdict.value in text
