"""docs/drift.md names tests that exist, and every case once."""

from __future__ import annotations

import re

from imagebuild.config import ROOT
from imagebuild.patching.evaluate import Verdict
from tests.drift import field

PAGE = (ROOT / "docs" / "drift.md").read_text()


def test_every_case_has_a_row_and_a_test():
    cases = [f"F{number}" for number in range(1, 13)]
    assert re.findall(r"^\| (F\d+) \|", PAGE, flags=re.MULTILINE) == cases
    rows = re.findall(r"^\| `(tests/[\w/.]+)` \| (F.+) \|$", PAGE, flags=re.MULTILINE)
    tested = {}
    for path, named in rows:
        classes = re.findall(r"^class TestF(\d+)", (ROOT / path).read_text(), flags=re.MULTILINE)
        assert [f"F{number}" for number in classes] == named.split(", "), path
        tested |= dict.fromkeys(named.split(", "), path)
    assert sorted(tested, key=cases.index) == cases


def test_its_paths_and_words_exist():
    for path in re.findall(r"`((?:tests|docs)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w.]+)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    assert callable(field.text_only)
    verdicts = {verdict.value for verdict in Verdict}
    table = "\n".join(line for line in PAGE.split("\n") if line.startswith("| F"))
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert named <= verdicts
    assert {"defeated", "reason_gone", "review", "moved", "drifted", "absorbed"} <= named
