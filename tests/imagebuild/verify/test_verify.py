"""verify on a small site-packages: a tree without fault, its base, lock and versions."""

from __future__ import annotations

import dataclasses
import json
import py_compile
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.errors import UsageError
from imagebuild.lock import Lock
from imagebuild.verify.installed import fits
from tests.support import verify_site as site
from tests.support.verify_site import problems, text

# A tree without fault.


def test_a_patched_tree_is_ok_and_each_group_is_one_line(make: Callable[..., site.Place]) -> None:
    place = make()
    report = place.verify()
    files = next(group for group in report.groups if group.title == "wheel files")
    assert re.fullmatch(r"11 hashes of 1\d files", files.summary)
    assert text(report).splitlines() == [
        f"{place.root}: vLLM 0.31.0, recipe tiny, sm_120",
        "  manifest: 4 files ok",
        "  series: 3 patches, 1 of 1 drops proven ok",
        "  effects: 2 hold ok",
        "  upstream fixes: 1 hold ok",
        "  sources: 3 of 3 compile ok",
        "  base: vLLM 0.31.0 at 0a1b2c3d4 ok",
        "  versions: 4 compared ok",
        f"  wheel files: {files.summary} ok",
        "  foreign files: 11 files below vllm/, flashinfer/ ok",
        "  installed: 2 projects ok",
        "  FlashKDA: the fixed one, the file of vLLM 0.31.0 (x86_64); code for sm_90a, sm_120f ok",
        "  plug-in: not checked: the tree has no plug-in, so that only the routes of vLLM itself "
        "are served",
        "  deep probes: not checked: none is recorded for this release",
        "verify ok",
    ]
    assert report.is_ok
    assert report.exit_code == 0


def test_it_writes_nothing(make: Callable[..., site.Place]) -> None:
    place = make()
    before = site.snapshot(place.root)
    place.verify()
    assert site.snapshot(place.root) == before


def test_json_has_a_schema_and_every_finding(make: Callable[..., site.Place]) -> None:
    place = make()
    (place.root / "vllm/greeter.py").unlink()
    content = json.loads(json.dumps(place.verify().to_json()))
    assert (content["schema"], content["ok"], content["exit_code"]) == (1, False, 3)
    assert content["base"] == {"version": "0.31.0", "commit": site.COMMIT}
    found = next(f for f in content["findings"] if f["code"] == "file-changed")
    assert found == {
        "level": "error",
        "code": "file-changed",
        "file": "vllm/greeter.py",
        "line": 0,
        "message": found["message"],
        "fix": "start from a pristine tree",
    }
    assert found["message"].startswith("vllm/greeter.py: expected sha256 ")
    assert found["message"].endswith(", found no file")


def test_the_arch_comes_from_the_manifest_where_nobody_names_one(
    make: Callable[..., site.Place],
) -> None:
    report = make().verify(gpu_arch=None)
    assert report.gpu_arch == "sm_120"
    assert report.is_ok


def test_every_version_is_said_with_its_origin(make: Callable[..., site.Place]) -> None:
    said = [f.message for f in make().verify().findings if f.code.startswith("version")]
    assert said == [
        "vllm: expected 0.31.0 (lock, wheels), found 0.31.0 (installed, vllm-0.31.0.dist-info)",
        "flashinfer-python: expected 0.7.0.post1 (lock, wheels), found 0.7.0.post1 "
        "(installed, flashinfer_python-0.7.0.post1.dist-info)",
        "torch: expected 2.13.0 (lock, pins), found 2.13.0 (required by vLLM's METADATA)",
        "nvidia-nccl-cu13: expected 2.29.7 (lock, pins); it is not in this tree and vLLM's "
        "METADATA does not name it",
        "transformers: expected <5.18.0,>=5.10.4 (lock, pins), found <5.18.0,>=5.10.4 "
        "(required by vLLM's METADATA)",
    ]


def test_byte_code_that_python_made_since_is_no_fault(make: Callable[..., site.Place]) -> None:
    place = make()
    for name in ("greeter.py", "fixed.py"):
        py_compile.compile(str(place.root / "vllm" / name), doraise=True)
    assert problems(place.verify()) == set()


# The base, its lock and its versions.


def test_a_base_that_is_not_locked(make: Callable[..., site.Place]) -> None:
    place = make()
    report = dataclasses.replace(place, lock=Lock(place.lock.path, {})).verify()
    assert "vLLM 0.31.0 is not in lock.toml (locked: none)" in text(report)
    assert "versions: not checked: the base is not locked" in text(report)
    assert report.exit_code == 4


def test_another_build_of_the_same_version(make: Callable[..., site.Place]) -> None:
    place = make()
    base = dataclasses.replace(place.lock.bases["0.31.0"], commit="fffffffff")
    report = dataclasses.replace(place, lock=Lock(place.lock.path, {"0.31.0": base})).verify()
    assert problems(report) == {"base-commit"}
    assert "expected commit fffffffff as locked, found 0a1b2c3d4" in text(report)


def test_changed_context_since_the_tree_was_built(make: Callable[..., site.Place]) -> None:
    place = make()
    fingerprints = {name: dict.fromkeys(known, "00") for name, known in
                    place.lock.bases["0.31.0"].fingerprints.items()}  # fmt: skip
    base = dataclasses.replace(place.lock.bases["0.31.0"], fingerprints=fingerprints)
    report = dataclasses.replace(place, lock=Lock(place.lock.path, {"0.31.0": base})).verify()
    assert problems(report) == {"context-changed", "patch-differs"}
    assert "vllm_core_counts_once: review: vllm/core.py::count changed" in text(report)


def test_a_drop_that_is_not_proven(make: Callable[..., site.Place]) -> None:
    place = make()
    series = place.recipe.patches_dir / "vllm_math_sums_right.py"
    series.write_text(series.read_text("utf-8").replace(
        'proof=gives("vllm/math.py", "total", 4)', 'proof=gives("vllm/math.py", "total", 3)'
    ), "utf-8")  # fmt: skip
    report = place.verify()
    assert problems(report) == {"drop-not-proven", "patch-differs"}
    assert "the proof fails: total gives 4" in text(report)


def test_a_tree_without_vllm(make: Callable[..., site.Place], tmp_path: Path) -> None:
    place = make()
    with pytest.raises(UsageError, match=r"found no usable vllm/_version\.py"):
        dataclasses.replace(place, root=tmp_path).verify()
    with pytest.raises(UsageError, match="expected a site-packages folder, found none"):
        dataclasses.replace(place, root=tmp_path / "nowhere").verify()
    (place.root / "vllm/_version.py").unlink()
    report = place.verify()
    assert {"no-vllm", "record-missing", "base-not-locked"} <= problems(report)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"requires": {"torch": "2.14.0"}}, "torch: expected 2.13.0 (lock, pins), found 2.14.0"),
        (
            {"requires": {"transformers": ">=5"}},
            "expected <5.18.0,>=5.10.4 (lock, pins), found >=5",
        ),
        (
            {"flashinfer": "0.7.2"},
            "flashinfer-python: expected 0.7.0.post1 (lock, wheels), found 0.7.2",
        ),
    ],
)
def test_a_version_that_differs(
    options: dict[str, object], sentence: str, make: Callable[..., site.Place]
) -> None:
    report = make(**options).verify()
    assert problems(report) == {"version-differs"}
    assert sentence in text(report)


def test_what_vllm_requires_is_no_proof_of_what_is_in_the_tree(
    make: Callable[..., site.Place],
) -> None:
    report = make(flashinfer="", requires={"flashinfer-python": "0.7.0.post1"}).verify()
    assert problems(report) == {"version-missing"}
    assert "flashinfer-python: expected 0.7.0.post1 (lock, wheels), found none" in text(report)


def test_an_installed_version_counts_more_than_a_required_one(
    make: Callable[..., site.Place],
) -> None:
    def install(root: Path) -> None:
        site.install(root, "torch", "2.13.0+cu130", {})
        site.install(root, "transformers", "5.18.0rc1", {})

    report = make(install).verify()
    assert "found 2.13.0+cu130 (installed" in str(report.findings)
    assert "transformers: expected <5.18.0,>=5.10.4 (lock, pins), found 5.18.0rc1" in text(report)
    assert problems(report) == {"version-differs"}


@pytest.mark.parametrize(
    ("version", "wanted", "is_fit"),
    [
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0+cu130", "2.13.0+cu126", False),
        ("2.13.0", "2.13.1", False),
        ("3.8.0", "~=3.8.0", True),
        ("3.8.7", "~=3.8.0", True),
        ("3.9.0", "~=3.8.0", False),
        ("3.9.0", "~=3.8", True),
        ("4.0", "~=3.8", False),
        ("5.18.0rc1", "<5.18.0,>=5.10.4", False),
        ("5.17.9.post2", "<5.18.0,>=5.10.4", True),
        ("5.10.4.dev1", "<5.18.0,>=5.10.4", False),
        ("1.0.post1", ">1.0", False),
        ("1.0", "!=1.*", False),
        ("1.2", "==1.*", True),
        ("nightly", ">=1", False),
    ],
)
def test_ranges(version: str, wanted: str, is_fit: bool) -> None:
    assert fits(version, wanted) is is_fit
