"""Text that others wrote, made harmless to show: file names, upstream code, messages with them.

What a terminal, a browser or a log would act on is shown as its escape; nothing is dropped. The
markup of a format is that format's own part.
"""

from __future__ import annotations

import re

# Controls but tab and newline, invisible format characters (also those that turn the direction of
# writing), further line ends, halves of surrogate pairs, and what XML does not admit.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Shows characters that act instead of being seen: ESC as \x1b, a byte of no text as \xff.

    Tabs and newlines stay.
    """
    return _ACTIVE.sub(_shown, text)


def one_line(text: str) -> str:
    """The same on a single line: runs of blanks, tabs and newlines are one blank."""
    return visible(" ".join(text.split()))


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a path that is not UTF-8
        code -= 0xDC00
    if match[0] == "\r":
        return "\\r"
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
