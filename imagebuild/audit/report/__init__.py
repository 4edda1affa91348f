"""Audit results for people and for machines, one module a format."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from json import dumps  # `json` is a module of this package

from imagebuild.audit.report.json import json_report
from imagebuild.audit.report.problems import About
from imagebuild.audit.report.text import text_report
from imagebuild.audit.results import Audit

# The function of each format that is one document; imported when asked for.
_RENDERERS: Mapping[str, str] = {
    "markdown": "markdown:markdown_report",
    "html": "html:html_report",
    "sarif": "sarif:sarif_report",
    "junit": "junit:junit_report",
    "github": "github:github_report",
}
FORMATS = ("text", "json", *_RENDERERS)

__all__ = ["FORMATS", "About", "json_report", "render", "text_report"]


def render(name: str, audit: Audit, about: About) -> str:
    """The audit in one of `FORMATS` but text, with a final newline."""
    if name == "json":
        return dumps({"schema": 1, **json_report(audit)}, indent=2) + "\n"
    module, _, function = _RENDERERS[name].partition(":")
    module_of = importlib.import_module(f"imagebuild.audit.report.{module}")
    text: str = getattr(module_of, function)(audit, about)
    return text
