"""`patches port` as a person sees it, and the modules that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.patching.series import load_series
from tests.support.product import (
    COUNTER,
    GREETER,
    PLAN,
    REPOSITORY,
    Product,
    files_of,
    release_files,
    write_release,
)

MODULE = f"patches/tiny/{GREETER}.py"
HOUSE = """\
PATCH = Patch(
    name="vllm_greeter_polite_words",
    status="pending",
    upstream="",
    origin="tests",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=(
                Edit(
                    label="words",
                    path="vllm/greeter.py",
                    scope="Greeter.greet",
                    anchor=%s,
                    text=%s,
                ),
            ),
            relies_on=(Symbol("vllm/util.py", "helper"),),
        ),
    ),
    reason=gives("vllm/greeter.py", "Greeter.greet", "hello"),
    effect=gives("vllm/greeter.py", "Greeter.greet", "good day", "good morning"),
    absorbed=gives("vllm/greeter.py", "Greeter.greet", "good day"),
)
"""
SHORT = (r"'        return \"hello\"\n'", r"'        return \"good day\"\n'")
WIDE = tuple(
    repr(f'    def greet(self):\n        return "{word}"\n').replace('"', r"\"")
    for word in ("hello", "good day")
)


@pytest.fixture
def old_greeter(product: Product) -> Product:
    """A product whose greeter was never carried beyond 0.31."""
    return with_greeter(product, *SHORT)


def with_greeter(product: Product, anchor: str, text: str) -> Product:
    path = product.root / MODULE
    head = path.read_text().partition("_EDITS = ")[0]
    plain = [word.replace(r"\"", '"') for word in (anchor, text)]
    path.write_text(head + HOUSE % tuple(plain))
    return product


def variants(product: Product, name: str = GREETER) -> list[tuple[str, list[str]]]:
    """Range and anchors of each variant, as the series says now."""
    root = product.root
    folder = root / "image" / "tiny"
    series = load_series(folder / "series.toml", root / "patches" / "tiny", root / "image/runtime")
    return [(v.versions, [e.anchor for e in v.edits]) for v in series.patch(name).variants]


def test_what_holds_as_it_is_gets_a_wider_range(old_greeter: Product) -> None:
    before = (old_greeter.root / MODULE).read_text()
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.32.0")
    assert ran.code == 0
    assert f"{GREETER}: clean from 0.31.0" in ran.out
    assert "'words': same, vllm/greeter.py:4" in ran.out
    assert "read what changed in vllm/greeter.py::Greeter.greet" in ran.out
    assert '-            versions=">=0.31,<0.32",\n+            versions=">=0.31,<0.33",' in ran.out
    assert (old_greeter.root / MODULE).read_text() == before
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.32.0", "--write")
    assert ran.code == 0
    assert f"written: {MODULE}" in ran.out
    assert "lock update wheels --base-version 0.32.0 --accept " + GREETER in ran.out
    assert (old_greeter.root / MODULE).read_text() == before.replace("<0.32", "<0.33")


def test_a_merge_becomes_a_variant_of_its_own(product: Product) -> None:
    with_greeter(product, *WIDE)
    before = (product.root / MODULE).read_text()
    ran = product.run("patches", "port", GREETER, "--to", "0.32.0", "--write")
    assert ran.code == 0, ran.out + ran.err
    assert "'words': narrowed, vllm/greeter.py:4" in ran.out
    wanted = [(">=0.31,<0.32", 2), (">=0.32,<0.33", 1)]
    assert [(name, one.count("\n")) for name, (one,) in variants(product)] == wanted
    after = (product.root / MODULE).read_text()
    kept = [line for line in before.split("\n") if line not in after.split("\n")]
    assert kept == []
    house = after[after.index("PATCH = ") :]
    again = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--config", str(REPOSITORY / "pyproject.toml"),
         "-"], input=house, capture_output=True, text=True, check=True)  # fmt: skip
    assert again.stdout == house
    # A later run finds nothing to do, and the series is as sound as before.
    assert f"{GREETER}: fits" in product.run("patches", "port", GREETER, "--to", "0.32.0").out


def test_both_sides_of_a_conflict_are_kept(product: Product, tmp_path: Path) -> None:
    with_greeter(product, *WIDE)
    folder = tmp_path / "kept"
    rewrite_release(product, '        return "good evening"\n')
    ran = product.run("patches", "port", GREETER, "--to", "0.32.0", "--write",
                      "--keep", str(folder))  # fmt: skip
    assert ran.code == 3
    assert "not carried over" in ran.out
    for word in ("<<<<<<< " + GREETER, '"good day"', "||||||| 0.31.0", '"hello"', "=======",
                 '"good evening"', ">>>>>>> 0.32.0"):  # fmt: skip
        assert word in ran.out
    (conflict,) = folder.iterdir()
    assert conflict.name == f"{GREETER}.1.conflict"
    assert '"good evening"' in conflict.read_text()
    assert "written:" not in ran.out


def rewrite_release(product: Product, line: str) -> None:
    """Another wheel of 0.32.0 in the index, not locked, whose greeter says something else."""
    text = release_files("0.32.0", "linux/amd64")["vllm/greeter.py"].decode()
    text = text.replace('        return "hello"\n', line)
    write_release(product.wheels, "0.32.0", {"vllm/greeter.py": text.encode()})
    product.only_locked("0.31.0", "0.33.0")


def test_a_tree_that_a_probe_calls_broken_is_said_so_and_not_written(
    old_greeter: Product,
) -> None:
    old_greeter.replace(MODULE, '"good day", "good morning"', '"good night"')
    before = files_of(old_greeter.root)
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.32.0", "--write")
    assert ran.code == 3
    assert f"{GREETER}: broken from 0.31.0: carried over, and BROKEN" in ran.out
    assert "error: after the edits it fails that Greeter.greet gives 'good night'" in ran.out
    assert files_of(old_greeter.root) == before


def test_all_patches_and_json(old_greeter: Product) -> None:
    ran = old_greeter.run("patches", "port", "--all", "--to", "0.33.0", "--format", "json")
    found = {one["name"]: one["result"] for one in ran.json["patches"]}
    assert found == {GREETER: "clean", COUNTER: "dropped", PLAN: "fits"}
    (greeter,) = [one for one in ran.json["patches"] if one["name"] == GREETER]
    assert greeter["base"] == "0.31.0"
    assert set(greeter["fingerprints"]) == {
        "vllm/greeter.py::Greeter.greet", "vllm/util.py::helper",
    }  # fmt: skip
    assert ran.json["exit_code"] == ran.code == 0


def test_what_is_needed_and_was_not_named_is_told(old_greeter: Product) -> None:
    plan = f"patches/tiny/{PLAN}.py"
    old_greeter.replace(plan, 'origin="tests",', f'origin="tests", needs=("{GREETER}",),')
    old_greeter.replace(plan, ">=0.31,<0.34", ">=0.31,<0.32")
    ran = old_greeter.run("patches", "port", PLAN, "--to", "0.32.0")
    assert ran.code == 0, ran
    assert f"{PLAN}: clean" in ran.out
    assert f"! {GREETER} is needed by what you named, and must be ported as well" in ran.out
    assert "is needed by" not in old_greeter.run("patches", "port", "--all", "--to", "0.32.0").out


@pytest.mark.parametrize("words", [[], [GREETER, "--all"]])
def test_names_or_all(product: Product, words: list[str]) -> None:
    ran = product.run("patches", "port", *words, "--to", "0.32.0")
    assert ran.code == 2
    assert "expected names of patches or --all" in ran.err


def test_a_release_before_a_patch_shows_no_sides(old_greeter: Product) -> None:
    old_greeter.replace(MODULE, ">=0.31,<0.32", ">=0.32,<0.33")
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.31.0")
    assert ran.code == 3, ran
    assert f"{GREETER}: conflict: not carried over: there is nothing to start from" in ran.out
    assert "0.31.0 is before its first range" in ran.out
    assert "carry 1 patch over to 0.31.0" in ran.err


def test_a_release_that_nothing_is_locked_for(old_greeter: Product) -> None:
    old_greeter.only_locked("0.33.0")
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.32.0")
    assert ran.code == 4
    assert "no release in >=0.31,<0.32 is locked" in ran.err
    assert "hint: build.py lock update" in ran.err


def test_a_module_that_cannot_be_changed_in_place(old_greeter: Product) -> None:
    old_greeter.replace(MODULE, "    variants=(\n", "    variants=_V,\n    needs=(\n")
    text = (old_greeter.root / MODULE).read_text()
    start = text.index("    needs=(\n") + len("    needs=(\n")
    stop = text.index("    ),\n    reason=")
    moved = text[:start].replace("PATCH =", f"_V = (\n{text[start:stop]})\nPATCH =", 1)
    (old_greeter.root / MODULE).write_text(moved + text[stop:])
    ran = old_greeter.run("patches", "port", GREETER, "--to", "0.32.0", "--write")
    assert (
        "the module cannot be changed in place: `variants` is no tuple of Variant(...)" in ran.out
    )
    assert "written:" not in ran.out
