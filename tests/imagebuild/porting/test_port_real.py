"""Our variants for vLLM 0.33 taken away, and each patch ported to it again, on the real wheels.

The figures stand in docs/audit.md.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.config import ROOT
from imagebuild.patching import text as source
from imagebuild.patching.evaluate import Verdict
from imagebuild.patching.patch import Edit, Patch
from imagebuild.patching.series import Series, load_series
from imagebuild.patching.tree import Tree
from imagebuild.patching.versions import VersionRange, release
from imagebuild.porting import module
from imagebuild.porting.edits import How
from imagebuild.porting.port import Ported, Releases, Result, port
from tests.drift.field import RECIPE

TO = "0.33.0"
BROKEN = "flashinfer_mla_fp8_sm12x"
DROPPED = {"vllm_sm90_fp8_kv_dtype", "vllm_glm53_eagle3_aux", "vllm_glm53_dflash2_kv_groups"}
PAGE = (ROOT / "docs" / "audit.md").read_text("utf-8")


def without(text: str, high: str) -> str:
    """A patch's module without its variants from `high` on; a drop from there on goes too."""
    spans = []
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    for node in ast.walk(ast.parse(text)):
        words = {word.arg: word.value for word in getattr(node, "keywords", [])}
        versions = words.get("versions")
        if not isinstance(versions, ast.Constant) or not isinstance(node, ast.Call):
            continue
        wanted = VersionRange.parse(versions.value)
        first, last = starts[node.lineno - 1] + node.col_offset, None
        if wanted.low >= release(high):
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            spans.append((first, last, ""))
        elif (
            isinstance(node.func, ast.Name)
            and node.func.id == "Variant"
            and (wanted.high and wanted.high > release(high))
        ):
            first = starts[versions.lineno - 1] + versions.col_offset
            last = starts[versions.lineno - 1] + (versions.end_col_offset or 0)
            low = ".".join(map(str, wanted.low))
            spans.append((first, last, f'">={low},<{high}"'))
    data = text.encode()
    for first, last, put in sorted(spans, reverse=True):
        rest = data[last:]
        if put:
            data = data[:first] + put.encode() + rest
        else:
            data = data[:first].rstrip(b" ") + re.sub(rb"^,\s*\n", b"", rest)
    return data.decode()


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Series]]:
    """A copy of the series without what it has from a release on."""

    @functools.cache
    def make(high: str) -> tuple[Path, Series]:
        folder = tmp_path_factory.mktemp("series") / "patches"
        shutil.copytree(RECIPE.patches_dir, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for name in [patch.name for patch in RECIPE.series().patches]:
            path = folder / f"{name}.py"
            path.write_text(without(path.read_text("utf-8"), high), "utf-8")
        return folder, load_series(RECIPE.series_file, folder, ROOT / "image" / "runtime")

    return make


def all_ported(series: Series, base: str, open_: Callable[[str], Tree]) -> dict[str, Ported]:
    releases = Releases(TO, open_(TO), lambda _range: (base, open_(base)))
    found = port(series, [patch.name for patch in series.patches], releases)
    return {one.patch.name: one for one in found}


def figures(found: dict[str, Ported]) -> str:
    """What the page says of a run."""
    counts = Counter(one.result for one in found.values())
    return ", ".join(f"{counts[result]} {result.value}" for result in Result if counts[result])


def test_from_the_release_before(
    cut: Callable[[str], tuple[Path, Series]], real_base: Callable[[str], Tree], tmp_path: Path
) -> None:
    """All but one come out clean; the one whose variant for 0.33 has more edits is red (F1)."""
    folder, series = cut("0.33")
    assert all(
        VersionRange.parse(v.versions).high == (0, 33) or p.name in DROPPED
        for p in series.patches for v in p.variants[-1:]
    )  # fmt: skip
    found = all_ported(series, "0.32.0", real_base)
    assert {name for name, one in found.items() if one.result is Result.DROPPED} == DROPPED
    assert {name for name, one in found.items() if one.result is Result.BROKEN} == {BROKEN}
    clean = {name: one for name, one in found.items() if one.result is Result.CLEAN}
    assert len(clean) == len(series.patches) - len(DROPPED) - 1
    assert f"| 0.32.0 | {figures(found)} |" in PAGE
    for one in clean.values():
        assert one.judged is not None
        assert one.judged.verdict is Verdict.OK
    red = found[BROKEN].judged
    assert red is not None
    assert red.verdict is Verdict.DEFEATED
    assert any("117312" in finding.message for finding in red.findings)
    # What would be written loads, says what was ported, and is as our tools want it.
    texts = {}
    for name, one in clean.items():
        texts[name] = module.rewritten((folder / f"{name}.py").read_text("utf-8"), one)
        (tmp_path / f"{name}.py").write_text(texts[name], "utf-8")
    files = {f"{name}.py": text for name, text in texts.items()}
    module.require_same(RECIPE.series_file, folder, ROOT / "image" / "runtime", files,
                        {name: one.new_patch() for name, one in clean.items()})  # fmt: skip
    assert_formatted(tmp_path)


def test_from_two_releases_before(
    cut: Callable[[str], tuple[Path, Series]], real_base: Callable[[str], Tree]
) -> None:
    """The drops of 0.32 are gone as well, and the absorbed probes find their fixes."""
    found = all_ported(cut("0.32")[1], "0.31.0", real_base)
    assert {name for name, one in found.items() if one.result is Result.ABSORBED} == DROPPED
    broken = {name for name, one in found.items() if one.result is Result.BROKEN}
    assert broken == {BROKEN, "vllm_glm53_deterministic_topk"}  # F1, and F5: the merge over ranks
    assert f"| 0.31.0 | {figures(found)} |" in PAGE


def wide(patch: Patch, tree: Tree, lines: int) -> Patch:
    """The patch with some lines around each anchor in it, as a unified diff has them."""
    return dataclasses.replace(patch, variants=tuple(
        dataclasses.replace(variant, edits=tuple(_wide(edit, tree, lines)
                                                 for edit in variant.edits))
        for variant in patch.variants
    ))  # fmt: skip


def _wide(edit: Edit, tree: Tree, lines: int) -> Edit:
    try:
        text = source.decode(tree.read(edit.path)).text
        spans = source.scope_spans(text, edit.path, edit.scope)
    except (FileNotFoundError, source.ScopeMissingError):
        return edit
    found = source.find_all(text, edit.anchor, spans)
    if len(found) != 1 or len(spans) != 1:
        return edit
    start, stop = found[0], found[0] + len(edit.anchor)
    first = text.rfind("\n", 0, start) + 1
    last = stop
    for _ in range(lines):
        first = max(spans[0].start, text.rfind("\n", 0, max(first - 1, 0)) + 1)
        last = min(spans[0].stop, (text.find("\n", last) + 1) or len(text))
    anchor = text[first:last]
    put = text[first:start] + edit.result + text[stop:last]
    return dataclasses.replace(edit, kind="replace", anchor=anchor, text=put)


def test_wide_anchors_are_merged_and_cut_short_again(
    cut: Callable[[str], tuple[Path, Series]], real_base: Callable[[str], Tree]
) -> None:
    """With eight lines of context, as recipes have them, most anchors miss and no merge does."""
    _folder, series = cut("0.32")
    base = real_base("0.31.0")
    # These two have edits whose wide anchors lie in each other.
    left = [p for p in series.patches if p.name not in {*DROPPED, "vllm_mla_sm90_on_sm12x",
            "vllm_mla_route_switch", "vllm_glm53_deterministic_topk"}]  # fmt: skip
    series = dataclasses.replace(series, patches=tuple(wide(p, base, 8) for p in left))
    found = all_ported(series, "0.31.0", real_base)
    hows = Counter(edit.how for one in found.values() for edit in one.edits)
    assert hows[How.MERGED] >= 5
    assert not hows[How.CONFLICT] + hows[How.LOST]
    assert {name for name, one in found.items() if one.result is not Result.CLEAN} == {BROKEN}
    short = {patch.name: patch for patch in RECIPE.series().patches}
    for name, one in found.items():
        for edit in one.edits:
            if edit.how is How.MERGED:
                longest = max(len(e.anchor) for v in short[name].variants for e in v.edits)
                assert all(len(new.anchor) <= longest + 80 for new in edit.new)


def assert_formatted(folder: Path) -> None:
    """Ruff finds nothing to say."""
    config = ["--config", str(ROOT / "pyproject.toml")]
    for words in (["check"], ["format", "--check"]):
        ran = subprocess.run([sys.executable, "-m", "ruff", *words, *config, str(folder)],
                             capture_output=True, text=True, check=False)  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
