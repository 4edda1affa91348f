"""Every deep probe on the real vLLM 0.31.0: it holds on the patched tree and fails on stock.

The smoke environment is made in the session's cache where there is none yet: 90 s and 1.3 GB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.config import load_recipe
from imagebuild.deep import run as deep
from imagebuild.deep import tables
from imagebuild.deep.run import Outcome, Where

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.network
VERSION = "0.31.0"
# Facts of the base that no patch changes; how the first one fails is tested below.
FACTS = {"register_backend", "serving_flags"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A patched tree of this machine's arch."""
    dist = tmp_path_factory.mktemp("deep")
    assert main(["build", "--base-version", VERSION, "--dist", str(dist)]) == 0
    (found,) = dist.glob("glm53-flash-sm_*/site")
    (found.parent / "layer.tar").unlink()
    yield found
    shutil.rmtree(dist)


def results(site: Path, where: Where, probes: list[deep.Probe] | None = None) -> list[Outcome]:
    series = load_recipe("glm53-flash").series()
    names = {patch.name for patch in series.patches} | {fix.name for fix in series.fixes}
    chosen = deep.probes() if probes is None else probes
    return deep.run(site, chosen, where, lambda one: deep.why_skipped(one, VERSION, names))


def test_each_probe_holds_patched_and_fails_stock(site: Path, where: Where) -> None:
    patched = results(site, where)
    assert {one.probe.name: one.evidence for one in patched if one.result != "ok"} == {}
    assert len(patched) >= 14

    assert main(["patches", "revert", "--tree", str(site)]) == 0
    stock = results(site, where)
    wrong = {one.probe.name: (one.result, one.evidence) for one in stock
             if one.result != ("ok" if one.probe.name in FACTS else "failed")}  # fmt: skip
    assert wrong == {}, "a probe cannot tell a patched tree from a stock one"

    _check_facts(site, where)


def _check_facts(site: Path, where: Where) -> None:
    """In a tree that calls itself 0.32 without its registry, a string name must be missed."""
    version = site / "vllm" / "_version.py"
    version.write_text(version.read_text().replace("version = '0.31.0'", "version = '0.32.0'"))
    fact = [probe for probe in deep.probes() if probe.name == "register_backend"]
    (one,) = results(site, where, fact)
    assert one.evidence == "a string name is not found in 0.32"


def test_where_replies_land_is_what_docs_parsers_says(site: Path, where: Where) -> None:
    assert main(["patches", "apply", "--tree", str(site)]) == 0  # another test reverts it
    [outcome] = deep.run(site, deep.probes(tables), where)
    assert outcome.result == "ok", outcome.evidence
    found: dict[tuple[str, str], set[str]] = {}
    for row in json.loads(outcome.evidence):
        landed = "; ".join((row["reasoning"], row["content"], row["calls"]))
        found.setdefault((row["case"], row["pair"]), set()).add(landed)
    assert all(len(ways) == 1 for ways in found.values()), "whole and streamed differ"
    lines = (ROOT / "docs" / "parsers.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines
             if line.startswith("| ")]  # fmt: skip
    _, *pairs = cells[0]
    told = {(row[0], pair): {cell} for row in cells[1:]
            for pair, cell in zip(pairs, row[1:], strict=True)}  # fmt: skip
    assert told == found
