"""The status page: one HTML document, drawn here and redrawn in the browser from /status.json.

Nothing is loaded from elsewhere. Every value is put in as text, never as markup.
"""

from __future__ import annotations

import html
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("status.html")


def nonce() -> str:
    """Names this page's own script and style to the browser, which runs no others."""
    return secrets.token_urlsafe(16)


def policy(number: str) -> str:
    """The Content-Security-Policy of a page."""
    own = f"'nonce-{number}'"
    return (f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip


def render(document: Mapping[str, Any], number: str) -> str:
    """The page with a first state in it."""
    data = json.dumps(document)
    # Inside of a script element only these could end it; JSON may hold them escaped.
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    title = html.escape(f"{document.get('deployment') or 'GLM-5.3-Flash'}: {document['stage']}")
    page = _TEMPLATE.read_text("utf-8")
    for name, value in {"NONCE": number, "TITLE": title, "STATE": data}.items():
        page = page.replace(f"{{{{{name}}}}}", value)
    return page
