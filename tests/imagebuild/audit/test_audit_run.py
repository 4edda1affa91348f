"""The audit through the command line: verdicts, JSON, ranges, and what it reads and writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.product import (
    COMMITS,
    COUNTER,
    GREETER,
    PLAN,
    TAGS,
    Product,
    Ran,
    files_of,
    release_files,
)
from tests.support.wheels import build_wheel

SCOPE = "vllm/greeter.py::Greeter.greet"


def audited(ran: Ran) -> dict[str, dict[str, Any]]:
    """Releases by version, each with its patches by name."""
    return {
        release["version"]: {patch["name"]: patch for patch in release["patches"]}
        for release in ran.json["releases"]
    }


def unpack(product: Product, folder: Path, version: str = "0.31.0") -> Path:
    """A pristine site-packages of a release."""
    import zipfile

    for name in (f"vllm-{version}-{TAGS['linux/amd64']}", "flashinfer_python-0.7.0-py3-none-any"):
        with zipfile.ZipFile(product.wheels / f"{name}.whl") as archive:
            archive.extractall(folder)
    return folder


def test_the_fields_that_others_rely_on(product: Product) -> None:
    ran = product.run("audit", "--against", "0.32.0", "--format", "json")
    assert ran.code == 0
    assert {"schema", "recipe", "exit_code", "releases"} <= set(ran.json)
    (release,) = ran.json["releases"]
    wanted = {"version", "commit", "pins", "requests", "bytes_fetched", "seconds", "patches"}
    assert wanted <= set(release)
    assert (release["version"], release["commit"]) == ("0.32.0", COMMITS["0.32.0"])
    assert release["pins"]["triton"] == "3.7.1"
    for patch in release["patches"]:
        assert {"name", "verdict", "declared", "edits", "findings"} <= set(patch)
        for finding in patch["findings"]:
            assert set(finding) == {"level", "code", "file", "line", "message", "fix"}
            assert finding["level"] in ("error", "warning", "info")
    patches = audited(ran)["0.32.0"]
    assert [patches[n]["verdict"] for n in (GREETER, COUNTER, PLAN)] == ["ok", "absorbed", "ok"]
    assert [patches[n]["declared"] for n in (GREETER, COUNTER, PLAN)] == [False, True, False]
    (edit,) = patches[GREETER]["edits"]
    assert (edit["state"], edit["path"], edit["line"]) == ("pending", "vllm/greeter.py", 4)


def test_the_recipes_base_is_the_default(product: Product) -> None:
    assert list(audited(product.run("audit", "--format", "json"))) == ["0.31.0"]


def test_several_releases_come_in_order_and_once(product: Product) -> None:
    ran = product.run("audit", "--against", "0.33", "--against", ">=0.32", "--against", "0.32.0",
                      "--format", "json")  # fmt: skip
    assert [release["version"] for release in ran.json["releases"]] == ["0.32.0", "0.33.0"]


def test_pins_are_compared_with_the_base(product: Product) -> None:
    ran = product.run("audit", "--against", "0.33.0", "--format", "json")
    (release,) = ran.json["releases"]
    assert release["changed_pins"] == [
        {"project": "flashinfer-python", "locked": "0.7.0", "found": "0.7.2"}
    ]


def test_a_range_leaves_out_what_is_withdrawn_and_what_is_no_release(product: Product) -> None:
    (product.wheels / "vllm-0.34.0.tar.gz").write_bytes(b"")
    for platform in TAGS:
        build_wheel(product.wheels, version="0.33.1rc1", tag=TAGS[platform])
        name = build_wheel(product.wheels, version="0.33.1", tag=TAGS[platform]).name
        product.server.faults.yanked[name] = "wrong torch"
    ran = product.run("audit", "--against", ">=0.33", "--format", "json")
    assert (ran.code, list(audited(ran))) == (0, ["0.33.0"])


@pytest.mark.parametrize("spec", ["", " ", "latest", ">=", "0.32 0.33", "=>0.32"])
def test_a_spec_that_is_none(product: Product, spec: str) -> None:
    ran = product.run("audit", "--against", spec)
    assert ran.code == 2
    assert "--against: expected a version such as 0.32.0 or a range" in ran.err


def test_a_range_without_releases(product: Product) -> None:
    ran = product.run("audit", "--against", ">=5")
    assert ran.code == 2
    assert "the index has no vLLM release in '>=5'" in ran.err


def test_a_changed_scope_is_review_with_its_diff(product: Product) -> None:
    files = release_files("0.33.0", "linux/amd64")
    files["vllm/_version.py"] = b"__version__ = '0.33.1'\n__commit_id__ = 'gddddddd'\n"
    files["vllm/greeter.py"] = files["vllm/greeter.py"].replace(b"greeted = True", b"greeted = 1")
    build_wheel(product.wheels, version="0.33.1", tag=TAGS["linux/amd64"], files=files,
                requires=["flashinfer-python==0.7.2"])  # fmt: skip
    ran = product.run("audit", "--against", "0.33.1", "--format", "json")
    assert ran.code == 1
    patch = audited(ran)["0.33.1"][GREETER]
    assert (patch["verdict"], patch["declared"], patch["exit_code"]) == ("review", False, 1)
    assert list(patch["diffs"]) == [SCOPE]
    diff = patch["diffs"][SCOPE].split("\n")
    assert diff[:2] == [f"--- 0.33.0/{SCOPE}", f"+++ 0.33.1/{SCOPE}"]
    assert [line for line in diff[3:] if line[:1] in "+-"] == [
        "-        self.greeted = True", "+        self.greeted = 1",
    ]  # fmt: skip
    text = product.run("audit", "--against", "0.33.1")
    assert text.code == 1
    assert "        +        self.greeted = 1" in text.out
    assert text.out.endswith("a person must look\n")


def test_a_variant_of_which_nothing_is_locked_is_review_with_a_diff(product: Product) -> None:
    product.only_locked("0.31.0")
    ran = product.run("audit", "--against", "0.32.0", "--format", "json")
    assert ran.code == 1
    patches = audited(ran)["0.32.0"]
    assert patches[GREETER]["verdict"] == "review"
    assert "+        self.greeted = True" in patches[GREETER]["diffs"][SCOPE]
    assert patches[PLAN]["verdict"] == "ok"


def test_a_diff_that_cannot_be_had_is_told(product: Product) -> None:
    product.only_locked("0.31.0")
    for wheel in product.wheels.glob("vllm-0.31.0-*"):
        wheel.unlink()
    ran = product.run("audit", "--against", "0.32.0", "--format", "json")
    assert (ran.code, audited(ran)["0.32.0"][GREETER]["verdict"]) == (1, "review")
    assert f"{GREETER}: no diff against vLLM 0.31.0: vllm: expected version 0.31.0" in ran.err


def test_a_release_past_every_range_is_review_at_best(product: Product) -> None:
    files = release_files("0.33.0", "linux/amd64")
    files["vllm/_version.py"] = b"__version__ = '0.34.0'\n__commit_id__ = 'gddddddd'\n"
    build_wheel(product.wheels, version="0.34.0", tag=TAGS["linux/amd64"], files=files,
                requires=["flashinfer-python==0.7.2"])  # fmt: skip
    ran = product.run("audit", "--against", "0.34.0", "--format", "json")
    assert ran.code == 1
    patches = audited(ran)["0.34.0"]
    assert {n: patches[n]["verdict"] for n in (GREETER, COUNTER, PLAN)} == {
        GREETER: "review", COUNTER: "absorbed", PLAN: "review",
    }  # fmt: skip


def test_a_known_commit_is_its_release_whatever_its_version_says(product: Product) -> None:
    files = release_files("0.33.0", "linux/amd64")
    made_up = f"0.1.dev20051+g{COMMITS['0.33.0']}"
    files["vllm/_version.py"] = (
        f"__version__ = '{made_up}'\n__commit_id__ = 'g{COMMITS['0.33.0']}'\n".encode()
    )
    wheel = build_wheel(product.folder, version=made_up, tag=TAGS["linux/amd64"], files=files,
                        requires=["flashinfer-python==0.7.2"])  # fmt: skip
    ran = product.run("audit", "--wheel", str(wheel), "--format", "json")
    assert (ran.code, list(audited(ran))) == (0, ["0.33.0"])
    assert audited(ran)["0.33.0"][COUNTER]["declared"] is True
    # Another commit of the same made-up version names no release.
    files["vllm/_version.py"] = f"__version__ = '{made_up}'\n__commit_id__ = 'g1234567'\n".encode()
    wheel = build_wheel(product.folder, version=made_up, tag=TAGS["linux/amd64"], files=files,
                        requires=["flashinfer-python==0.7.2"])  # fmt: skip
    ran = product.run("audit", "--wheel", str(wheel), "--format", "json")
    assert ran.code == 1
    assert audited(ran)[made_up][GREETER]["verdict"] == "review"


@pytest.mark.parametrize(
    ("greeter", "verdict"),
    [
        (b'class Greeter:\n    def greet(self):\n        return "hullo"\n', "drifted"),
        (b'class Greeter:\n    def greeting(self):\n        return "hello"\n', "moved"),
        (b"", "missing"),
        (b'class Greeter:\n    def greet(self):\n        return "good day"\n', "absorbed"),
    ],
)
def test_what_is_broken(product: Product, tmp_path: Path, greeter: bytes, verdict: str) -> None:
    tree = unpack(product, tmp_path / "site")
    (tree / "vllm" / "greeter.py").write_bytes(greeter)
    ran = product.run("audit", "--tree", str(tree), "--format", "json")
    patch = audited(ran)["0.31.0"][GREETER]
    assert patch["verdict"] == verdict
    assert (
        ran.code
        == patch["exit_code"]
        == ran.json["exit_code"]
        == (1 if verdict == "absorbed" else 3)
    )
    text = product.run("audit", "--tree", str(tree)).out
    assert text.endswith("broken\n" if ran.code == 3 else "a person must look\n")
    if verdict == "drifted":
        assert "'words' is most like vllm/greeter.py:3" in text
        assert '        |         return "hullo"' in text


def test_a_tree_needs_no_index_and_no_pip(product: Product, tmp_path: Path) -> None:
    tree = unpack(product, tmp_path / "site")
    product.asks_pip = True
    product.extra["PIP_CERT"] = "/nowhere"
    product.server.faults.page = b"nonsense"
    before = files_of(tree)
    ran = product.run("audit", "--tree", str(tree), "--format", "json")
    assert ran.code == 0, ran
    assert ran.json["releases"][0]["requests"] == 0
    assert product.server.asked == []
    assert files_of(tree) == before


def test_a_tree_that_we_patched_is_judged_as_it_was(product: Product) -> None:
    product.run("build", "--arch", "sm_120")
    site = product.root / "dist" / "tiny-sm_120" / "site"
    ran = product.run("audit", "--tree", str(site), "--arch", "sm_120", "--format", "json")
    assert ran.code == 0
    assert {p["verdict"] for p in audited(ran)["0.31.0"].values()} == {"ok"}


def test_an_arch_leaves_out_what_does_not_matter_for_it(product: Product) -> None:
    ran = product.run("audit", "--arch", "sm_121", "--format", "json")
    assert audited(ran)["0.31.0"][PLAN]["verdict"] == "not_applicable"


def test_plan_and_audit_write_nothing(product: Product) -> None:
    before = files_of(product.root)
    assert product.run("plan", "--arch", "sm_121").code == 0
    assert not product.cache.exists()
    assert product.run("audit", "--against", ">=0.31").code == 0
    assert product.run("patches", "list").code == 0
    assert product.run("lock", "check").code == 0
    assert files_of(product.root) == before


def test_a_warm_cache_serves_offline_and_a_cold_one_says_what_is_missing(product: Product) -> None:
    cold = product.run("audit", "--against", "0.32.0", "--offline")
    assert cold.code == 5
    assert "expected the index page of vllm in the cache, found nothing there" in cold.err
    assert "hint: run the same command once without --offline" in cold.err
    online = product.run("audit", "--against", "0.32.0", "--format", "json")
    asked = len(product.server.asked)
    warm = product.run("audit", "--against", "0.32.0", "--offline", "--format", "json")
    assert warm.code == 0
    assert len(product.server.asked) == asked
    assert warm.json["releases"][0]["bytes_fetched"] == 0
    assert audited(warm) == audited(online)


def test_a_built_wheel_serves_an_offline_audit_without_an_index_page(product: Product) -> None:
    assert product.run("build", "--arch", "sm_120").code == 0
    shutil.rmtree(product.cache / "index")
    assert product.run("audit", "--arch", "sm_120", "--offline").code == 0


def test_a_torch_that_the_mirror_lacks_is_told_and_ends_nothing(product: Product) -> None:
    product.only_locked("0.31.0", "0.32.0", "0.33.0")
    product.replace("image/tiny/lock.toml", 'requires."torch==2.13.0"', 'requires."torch==2.12.0"')
    for wheel in product.wheels.glob("torch-*"):
        wheel.rename(wheel.with_name(wheel.name.replace("2.13.0", "2.11.0")))
    ran = product.run("audit", "--against", "0.32.0", "--format", "json")
    assert ran.code == 0, ran
    assert "what torch 2.13.0 requires is not known" in ran.err
    assert "triton" not in ran.json["releases"][0]["pins"]


def test_an_index_without_ranges_is_read_whole_with_progress(product: Product) -> None:
    product.server.faults.ranges = False
    ran = product.run("audit", "--against", "0.32.0")
    assert ran.code == 0
    assert f"- vllm-0.32.0-{TAGS['linux/amd64']}.whl: 100 % of" in ran.err


@pytest.mark.parametrize("kind", ["--wheel", "--tree"])
def test_what_is_not_there(product: Product, kind: str) -> None:
    ran = product.run("audit", kind, str(product.root / "nothing"))
    assert ran.code == 2
    assert f"{product.root / 'nothing'}: expected a " in ran.err


def test_what_is_no_vllm(product: Product) -> None:
    other = product.wheels / "flashinfer_python-0.7.0-py3-none-any.whl"
    tree = product.run("audit", "--tree", str(product.root))
    wheel = product.run("audit", "--wheel", str(other))
    assert tree.code == wheel.code == 2
    assert "found no usable vllm/_version.py" in tree.err
    assert "expected a wheel of vLLM, found one of flashinfer-python" in wheel.err
