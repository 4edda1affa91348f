"""`patches list|show|check|apply|revert` and `cache`, as a person sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.product import COUNTER, GREETER, PATCHES, PLAN, TAGS, Product, files_of


@pytest.fixture
def site(product: Product) -> Path:
    assert product.run("build", "--arch", "sm_121").code == 0
    return product.root / "dist" / "tiny-sm_121" / "site"


def test_list(product: Product) -> None:
    ran = product.run("patches", "list", "--format", "json")
    assert tuple(patch["name"] for patch in ran.json["patches"]) == PATCHES
    counter = ran.json["patches"][1]
    assert (counter["variants"], counter["drops"]) == ([">=0.31,<0.32"], [">=0.32"])
    assert (counter["knob"], counter["summary"]) == ("TINY_COUNTER", f"Make {COUNTER} true.")
    lines = product.run("patches", "list").out.split("\n")
    assert lines[0] == "tiny: 3 patches"
    (row,) = [line for line in lines if COUNTER in line and "dropped" in line]
    assert row.split()[:4] == [COUNTER, ">=0.31,<0.32;", "dropped", ">=0.32"]


def test_show(product: Product) -> None:
    text = product.run("patches", "show", COUNTER).out
    assert f"Make {COUNTER} true." in text
    assert "upstream: https://example.org/1" in text
    assert "    -     return 1\n    +     return 0\n" in text
    assert "new file: tiny_extra.py from image/runtime/tiny_extra.py" in text
    assert "dropped >=0.32: vLLM 0.32 starts at zero itself." in text
    assert "locked for: 0.31.0\n" in text
    text = product.run("patches", "show", GREETER).out
    assert "  relies on: vllm/util.py::helper\n" in text
    assert "locked for: 0.31.0, 0.32.0, 0.33.0" in text


def test_show_of_a_name_that_is_nearly_one(product: Product) -> None:
    ran = product.run("patches", "show", "vllm_greeter_polite_word")
    assert ran.code == 2
    assert f"hint: did you mean {GREETER}?" in ran.err


@pytest.mark.parametrize("what", ["tree", "wheel", "against", "default"])
def test_check_names_each_edit_of_the_patches_asked_for(
    product: Product, site: Path, what: str
) -> None:
    wheel = product.wheels / f"vllm-0.31.0-{TAGS['linux/arm64']}.whl"
    where = {
        "tree": ["--tree", str(site)],
        "wheel": ["--wheel", str(wheel)],
        "against": ["--against", "0.31"],
        "default": [],
    }[what]
    ran = product.run("patches", "check", COUNTER, GREETER, *where)
    assert ran.code == 0, ran
    assert f"  {GREETER} / 'words': pending, vllm/greeter.py:3\n" in ran.out
    assert f"  {COUNTER} / 'new file': pending, tiny_extra.py\n" in ran.out
    assert PLAN not in ran.out
    assert ("is patched; it is judged as it was before" in ran.err) == (what == "tree")


def test_check_is_as_grave_as_the_patches_asked_for(product: Product) -> None:
    product.replace(f"patches/tiny/{GREETER}.py", 'return "hello"', 'return "hullo"')
    ran = product.run("patches", "check")
    assert ran.code == 3
    assert " / 'words': " not in ran.out  # edits are listed for patches asked for by name
    assert product.run("patches", "check", COUNTER).code == 0


def test_revert_and_apply(product: Product, site: Path) -> None:
    patched = files_of(site)
    ran = product.run("patches", "revert", "--tree", str(site), "--format", "json")
    assert (ran.code, ran.json["is_patched"]) == (0, False)
    assert "vllm/greeter.py" in ran.json["written"]
    assert not (site / ".imagebuild").exists()
    ran = product.run("patches", "apply", "--tree", str(site), "--arch", "sm_121")
    assert ran.code == 0
    assert "files patched" in ran.out
    assert files_of(site) == patched


def test_apply_keeps_the_arch_that_a_tree_was_built_for(
    product: Product, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    before = files_of(site)
    ran = product.run("patches", "apply", "--tree", str(site))
    assert ran.code == 0
    assert "nothing to do" in ran.out
    assert files_of(site) == before
    # Asked for by name it switches.
    assert product.run("patches", "apply", "--tree", str(site), "--arch", "sm_120").code == 0
    manifest = json.loads((site / ".imagebuild" / "manifest.json").read_bytes())
    assert manifest["gpu_arch"] == "sm_120"
    assert "(9, 12)" in (site / "flashinfer" / "plan.py").read_text()


def test_apply_refuses_what_is_not_green_and_writes_nothing(product: Product, site: Path) -> None:
    product.run("patches", "revert", "--tree", str(site))
    product.replace(f"patches/tiny/{GREETER}.py", '"hello")', '"bonjour")')
    before = files_of(site)
    ran = product.run("patches", "apply", "--tree", str(site))
    assert ran.code == 1
    assert f"{GREETER}: reason_gone: no longer true that Greeter.greet gives 'bonjour'" in ran.err
    assert files_of(site) == before


def test_cache_show_and_prune(product: Product, site: Path) -> None:
    assert site.exists()
    stats = product.run("cache", "show", "--format", "json").json
    real = files_of(product.cache)
    assert (stats["files"], stats["bytes"]) == (len(real), sum(map(len, real.values())))
    assert f"{product.cache}: {len(real)} files" in product.run("cache", "show").out
    assert product.run("cache", "prune").out == "removed 0 files, 0.00 GiB\n"
    ran = product.run("cache", "prune", "--to", "0", "--format", "json")
    assert ran.json["removed_files"] == len(real)
    assert files_of(product.cache) == {}


def test_prune_says_what_is_in_use(product: Product, site: Path) -> None:
    import fcntl

    assert site.exists()
    blob = next((product.cache / "sha256").glob("*/*"))
    with blob.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        ran = product.run("cache", "prune", "--to", "0")
    assert "; 1 are in use and stay" in ran.out
    assert blob.exists()
