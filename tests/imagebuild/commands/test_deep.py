"""`verify --deep`, `lock update --deep` and `cache remove-smoke` as a user calls them.

The environment is this very Python, and the probes are of the tests; making a real environment is
tested in tests/imagebuild/smoke, real probes in tests/drift.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from imagebuild.deep import run as deep
from imagebuild.deep.base import About
from imagebuild.smoke import environment
from imagebuild.smoke.environment import Environment

if TYPE_CHECKING:
    from tests.support.product import Product, Ran

SHA = "a" * 64
GREETS = """
from imagebuild.deep.base import tree
def probe():
    text = (tree() / "vllm" / "greeter.py").read_text()
    return "it says " + text.split('"')[1]
"""
# Stands for the environment's Python: this one, which also finds the probes of the test.
RUNNER = """#!{python}
import os, sys
child, job = sys.argv[-2:]
code = (
    "import runpy, sys; sys.path.append({folder!r}); "
    f"sys.argv = [{{child!r}}, {{job!r}}]; runpy.run_path({{child!r}}, run_name='__main__')"
)
os.execv({python!r}, [{python!r}, "-I", "-B", "-c", code])
"""
DIES = "import os\ndef probe():\n    os.abort()\n"


class Stage:
    """A patched tiny tree, whose probes are files that a test writes."""

    def __init__(self, product: Product, folder: Path) -> None:
        self.product = product
        self.folder = folder
        self.site = product.root / "dist" / "tiny-sm_120" / "site"

    def probe(self, name: str, text: str, about: About | None = None) -> None:
        """Adds or replaces a probe."""
        file = self.folder / f"{name}.py"
        file.write_text(text)
        one = deep.Probe(name, name, about or About(claim=f"{name} holds"), f"{hash(text):064x}")
        self.probes[name] = one

    probes: dict[str, deep.Probe]


@pytest.fixture
def stage(product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    ran = product.run("build", "--arch", "sm_120")
    assert ran.code == 0, ran
    made = Stage(product, tmp_path / "probes")
    made.folder.mkdir()
    made.probes = {}
    where = Environment(tmp_path / "venv", "3.11", "2.13.0+cpu", SHA, "torch.whl")
    where.python.parent.mkdir(parents=True)
    where.python.write_text(RUNNER.format(python=sys.executable, folder=str(made.folder)))
    where.python.chmod(0o755)
    (product.root / "image" / "tiny" / "smoke.txt").write_text("")
    monkeypatch.setattr(environment, "provide", lambda *_arguments: where)
    monkeypatch.setattr(deep, "probes", lambda: list(made.probes.values()))
    return made


def verify(stage: Stage, *more: str) -> Ran:
    return stage.product.run("verify", "--tree", str(stage.site), "--deep", *more)


def record(stage: Stage) -> Ran:
    return stage.product.run("lock", "update", "--deep", "--tree", str(stage.site))


def test_what_probes_find_is_a_table_and_part_of_the_document(stage: Stage) -> None:
    stage.probe("greets", GREETS)
    ran = verify(stage)
    assert ran.code == 0, ran
    assert "greets  ok      it says good day" in ran.out
    assert "unverified: no recorded result names this wheel's sha256" in ran.out
    assert "deep probes, now: 1 of 1 hold ok" in ran.out
    document = verify(stage, "--format", "json").json
    (one,) = document["deep"]["probes"]
    assert (one["probe"], one["result"], one["evidence"]) == ("greets", "ok", "it says good day")
    assert document["deep"]["torch"] == "2.13.0+cpu"
    assert document["deep"]["torch_verified"] is False
    assert document["ok"] is True


def test_a_probe_that_fails_or_dies_is_exit_3_and_the_others_are_shown(stage: Stage) -> None:
    stage.probe("dies", DIES)
    stage.probe("greets", GREETS)
    stage.probe("wrong", "def probe():\n    raise RuntimeError('two is not one')\n",
                About(claim="two is one", patches=("vllm_counter_starts_zero",)))  # fmt: skip
    ran = verify(stage)
    assert ran.code == 3
    assert "it says good day" in ran.out
    assert "wrong (vllm_counter_starts_zero): failed: two is not one [deep-failed]" in ran.out
    assert "hint: the claim is: two is one" in ran.out
    assert "dies (the base): crashed: the process ended with signal 6 [deep-failed]" in ran.out
    assert "deep probes, now: 1 of 3 hold, 2 errors" in ran.out


def test_a_probe_of_another_release_or_series_is_shown_as_skipped(stage: Stage) -> None:
    stage.probe("later", DIES, About(claim="x", versions=">=0.33,<0.34"))
    stage.probe("other", DIES, About(claim="x", patches=("vllm_not_here",)))
    ran = verify(stage)
    assert ran.code == 3, "nothing was shown"
    assert "no deep probe is about this tree" in ran.out
    assert "later  skipped  it is for vLLM >=0.33,<0.34" in ran.out
    assert "other  skipped  vllm_not_here is not in this series" in ran.out
    stage.probe("greets", GREETS)
    ran = verify(stage)
    assert ran.code == 0, ran
    assert "deep probes, now: 1 of 1 hold ok" in ran.out


def test_a_tree_of_a_release_that_is_not_locked_is_exit_4(stage: Stage) -> None:
    stage.product.only_locked("0.32.0")
    assert verify(stage).code == 4


def test_a_recipe_without_locked_packages_is_exit_2(stage: Stage) -> None:
    (stage.product.root / "image" / "tiny" / "smoke.txt").unlink()
    ran = verify(stage)
    assert ran.code == 2
    assert "smoke.txt: expected the smoke environment's locked packages" in ran.err


def test_results_are_recorded_and_plain_verify_shows_them(stage: Stage) -> None:
    stage.probe("greets", GREETS)
    stage.probe("later", DIES, About(claim="x", versions=">=0.33,<0.34"))
    ran = record(stage)
    assert ran.code == 0, ran
    table = tomllib.loads(stage.product.lock_file.read_text())["base"]["0.31.0"]["deep"]
    assert list(table["results"]) == ["greets"]
    assert table["torch_sha256"] == SHA
    assert table["gpu_arch"] == "sm_120"
    plain = stage.product.run("verify", "--tree", str(stage.site))
    assert plain.code == 0, plain
    made = f"{table['date']}, Python 3.11, torch 2.13.0+cpu"
    assert f"deep probes: 1 recorded ({made}) ok" in plain.out
    assert "the wheel of the recorded results" in verify(stage).out
    assert "1 deep results" in stage.product.run("lock", "show").out


def test_recording_again_writes_nothing_and_a_new_lock_keeps_the_results(stage: Stage) -> None:
    stage.probe("greets", GREETS)
    assert record(stage).code == 0
    before = stage.product.lock_file.read_bytes()
    ran = record(stage)
    assert "nothing changed" in ran.out
    assert stage.product.lock_file.read_bytes() == before
    assert stage.product.run("lock", "update", "--base-version", "0.31.0").code == 0
    assert stage.product.lock_file.read_bytes() == before


def test_what_another_call_wrote_meanwhile_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.probe("greets", GREETS)
    real = deep.run

    def slow(*arguments: Any) -> list[deep.Outcome]:
        stage.product.only_locked("0.31.0", "0.33.0")
        return real(*arguments)

    monkeypatch.setattr(deep, "run", slow)
    assert record(stage).code == 0
    bases = tomllib.loads(stage.product.lock_file.read_text())["base"]
    assert list(bases) == ["0.31.0", "0.33.0"]
    assert "deep" in bases["0.31.0"]


def test_a_failing_probe_is_not_recorded(stage: Stage) -> None:
    stage.probe("dies", DIES)
    before = stage.product.lock_file.read_bytes()
    ran = record(stage)
    assert ran.code == 3
    assert "nothing was written" in ran.err
    assert stage.product.lock_file.read_bytes() == before


def test_a_fresh_result_that_contradicts_the_record_is_red(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.probe("greets", GREETS)
    assert record(stage).code == 0
    # The probe is the same; what it looks at, outside of the manifest's files, is another.
    known = stage.probes["greets"]
    (stage.folder / "greets.py").write_text(DIES)
    ran = verify(stage)
    assert ran.code == 3
    assert "greets: expected ok as recorded" in ran.out
    assert "found crashed [deep-contradicts]" in ran.out
    (stage.folder / "greets.py").write_text("def probe():\n    return 'something else'\n")
    assert stage.probes["greets"] is known
    ran = verify(stage)
    assert ran.code == 0
    assert "something else [deep-differs]" in ran.out


def test_results_of_another_series_are_named_and_not_compared(stage: Stage) -> None:
    stage.probe("greets", GREETS)
    assert record(stage).code == 0
    text = stage.product.lock_file.read_text()
    series = tomllib.loads(text)["base"]["0.31.0"]["deep"]["series"]
    stage.product.lock_file.write_text(text.replace(series, "f" * 64))
    (stage.folder / "greets.py").write_text("def probe():\n    return 'something else'\n")
    ran = verify(stage)
    assert ran.code == 0, ran
    assert "deep probes: not checked: 1 recorded on another series" in ran.out
    assert "deep-differs" not in ran.out
    findings = verify(stage, "--format", "json").json["findings"]
    assert "deep-other-series" in [finding["code"] for finding in findings]


def test_a_recorded_failure_is_an_error_of_every_verify(stage: Stage) -> None:
    stage.probe("greets", GREETS)
    assert record(stage).code == 0
    text = stage.product.lock_file.read_text()
    stage.product.lock_file.write_text(text.replace('result = "ok"', 'result = "failed"'))
    ran = stage.product.run("verify", "--tree", str(stage.site))
    assert ran.code == 3
    assert "greets: recorded as failed [deep-recorded]" in ran.out


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace('torch_sha256 = "', 'torch_sha = "'), "no 'torch_sha256'"),
        (lambda text: text.replace("[base.\"0.31.0\".deep.results.greets]", "[odd]"), "results"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_exit_4(stage: Stage, spoil: Callable[[str], str], said: str) -> None:
    stage.probe("greets", GREETS)
    assert record(stage).code == 0
    text = stage.product.lock_file.read_text()
    assert spoil(text) != text
    stage.product.lock_file.write_text(spoil(text))
    ran = stage.product.run("verify", "--tree", str(stage.site))
    assert ran.code == 4
    assert said in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("--deep", "--base-version", "0.31.0"),
        ("--deep", "--accept", "all"),
        ("--tree", "somewhere"),
        ("--deep", "--tree", "/nowhere"),
    ],
)
def test_words_that_do_not_go_together_are_exit_2(stage: Stage, words: tuple[str, ...]) -> None:
    assert stage.product.run("lock", "update", *words).code == 2


def test_only_cuda_builds_are_exit_5_that_names_the_setting(
    product: Product,
) -> None:
    (product.root / "image" / "tiny" / "smoke.txt").write_text("")
    assert product.run("build", "--arch", "sm_120").code == 0
    ran = product.run("verify", "--arch", "sm_120", "--deep")
    assert ran.code == 5
    assert "torch 2.13.0: expected a build without CUDA" in ran.err
    assert "extra-index-url" in ran.err
    assert product.run("verify", "--arch", "sm_120").code == 0, "plain verify needs no torch"


def test_environments_are_shown_and_removed_by_the_cache_verb(product: Product) -> None:
    folder = product.cache / "smoke" / "py3.11-torch2.13.0-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"x" * 1000)
    assert f"{folder.parent}: 1 for deep probes" in product.run("cache", "show").out
    assert product.run("cache", "show", "--format", "json").json["smoke_bytes"] == 1000
    assert product.run("cache", "prune", "--to", "0").code == 0
    assert folder.exists()
    ran = product.run("cache", "remove-smoke", "--format", "json")
    assert (ran.code, ran.json["removed_environments"]) == (0, 1)
    assert not folder.exists()
    assert "for deep probes" not in product.run("cache", "show").out
