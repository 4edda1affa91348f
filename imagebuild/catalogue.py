"""The page patches/README.md, made from the patch modules so that it cannot disagree with them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from imagebuild.patching.patch import Patch
from imagebuild.patching.series import DOC_LABELS, Series

_PARAGRAPH = re.compile(rf"^(?P<label>{'|'.join(DOC_LABELS)})[.:]\s+", re.MULTILINE)
_WIDTH = 100
_HEAD = """\
# The patches

Made by `./build.py patches list --format markdown > patches/README.md`; do not edit. They are
applied in this order. `./build.py patches show NAME` has each edit as a diff.
"""


def paragraphs(doc: str) -> dict[str, str]:
    """The labelled paragraphs of a patch's docstring, each on one line, by label."""
    starts = list(_PARAGRAPH.finditer(doc))
    ends = [start.start() for start in starts[1:]] + [len(doc)]
    return {
        start["label"]: " ".join(doc[start.end() : end].split())
        for start, end in zip(starts, ends, strict=True)
    }


def markdown(recipe: str, series: Series) -> str:
    """The whole page, with a final newline."""
    return "\n".join([_HEAD, f"Recipe `{recipe}`, {len(series.patches)} patches.", "",
                      *_table(series), *_sections(series)])  # fmt: skip


def versions_of(patch: Patch) -> str:
    """Its ranges in words, such as ">=0.31,<0.32; dropped >=0.32"."""
    kept = [variant.versions for variant in patch.variants]
    return "; ".join(kept + [f"dropped {drop.versions}" for drop in patch.drops])


def _table(series: Series) -> Iterator[str]:
    yield "| patch | vLLM | upstream status | knob |"
    yield "|---|---|---|---|"
    for patch in series.patches:
        knob = f"`{patch.knob}`" if patch.knob else "none"
        link = f"[{patch.name}](#{patch.name})"
        yield f"| {link} | {versions_of(patch)} | {patch.status} | {knob} |"
    yield ""


def _sections(series: Series) -> Iterator[str]:
    for patch in series.patches:
        doc = series.docs[patch.name]
        said = paragraphs(doc)
        yield f"## {patch.name}"
        yield ""
        yield from _filled(doc.strip().split("\n", 1)[0])
        for label in ("Symptom", "Upstream", "Drop when", "Cost"):
            yield from _filled(f"**{label}:** {said[label]}")
        if patch.needs:
            yield from _filled("**Needs:** " + ", ".join(f"`{need}`" for need in patch.needs))


def _filled(text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [*lines, ""]
