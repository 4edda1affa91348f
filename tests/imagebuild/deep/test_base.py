"""The helpers of probe modules, and what holds for every probe of the project."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from imagebuild.config import ROOT, load_recipe
from imagebuild.deep import run as deep
from imagebuild.deep.base import ClaimError, environment, require
from imagebuild.patching.versions import VersionRange

PROBES = deep.probes()


def test_a_variable_is_set_or_taken_away_for_the_block_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEP_TEST", "before")
    with environment("DEEP_TEST", None):
        assert "DEEP_TEST" not in os.environ
        with environment("DEEP_TEST", "inside"):
            assert os.environ["DEEP_TEST"] == "inside"
        assert "DEEP_TEST" not in os.environ
    assert os.environ["DEEP_TEST"] == "before"
    with pytest.raises(KeyError), environment("DEEP_TEST", "inside"):
        raise KeyError
    assert os.environ["DEEP_TEST"] == "before"


def test_a_claim_that_does_not_hold_is_its_sentence() -> None:
    require(True, "never seen")
    with pytest.raises(ClaimError, match=r"^one is not two$"):
        require(False, "one is not two")


@pytest.mark.parametrize("probe", PROBES, ids=[probe.name for probe in PROBES])
def test_a_probe_says_what_it_claims_and_for_what(probe: deep.Probe) -> None:
    series = load_recipe("glm53-flash").series()
    known = {patch.name for patch in series.patches} | {fix.name for fix in series.fixes}
    assert probe.about.claim.strip()
    assert set(probe.about.patches) <= known, f"{probe.name} speaks for what is not in the series"
    assert VersionRange.parse(probe.about.versions).high is not None
    for name in probe.about.imports:
        top = name.partition(".")[0]
        is_added = (ROOT / "image" / "runtime" / f"{top}.py").is_file()
        assert top in ("vllm", "flashinfer") or is_added, f"{name} is no module of a tree"


def test_every_probe_is_read_without_a_third_party_module() -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from imagebuild.deep import run\n"
        "names = [probe.name for probe in run.probes()]\n"
        "print(len(names), sorted(set(m.split('.')[0] for m in sys.modules)\n"
        "      - sys.stdlib_module_names - {'imagebuild', '__main__'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split(maxsplit=1) == [str(len(PROBES)), "[]\n"]
    assert len(PROBES) >= 9
