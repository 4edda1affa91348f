"""`lock update` and `lock check` against an index that changes under the lock."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from imagebuild.errors import ReviewError
from imagebuild.lock_update import Changed, require_accepted
from tests.support.product import (
    COUNTER,
    FLASHINFER,
    GREETER,
    TAGS,
    VERSIONS,
    Product,
    release_files,
    write_release,
)
from tests.support.wheels import build_wheel, sha256

HELPER = "vllm/util.py::helper"
CHANGED = {"vllm/util.py": b"def helper():\n    return 4\n"}


def table(product: Product, version: str = "0.31.0") -> dict[str, Any]:
    base = tomllib.loads(product.lock_file.read_text())["base"]
    found = base[version]
    assert isinstance(found, dict)
    return found


def test_what_a_new_base_gets(product: Product) -> None:
    product.lock_file.unlink()
    ran = product.run("lock", "update", "--format", "json")
    assert ran.code == 0, ran
    assert (ran.json["written"], ran.json["bases"]) == (True, ["0.31.0"])
    base = table(product)
    assert (base["commit"], base["epoch"]) == ("aaaaaaa31", 1791186041)
    assert base["pins"] == {
        "torch": "2.13.0",
        "triton": "3.7.1",
        "flashinfer-python": "0.7.0",
        "transformers": "<6,>=5",
    }
    for platform, tag in TAGS.items():
        wheel = product.wheels / f"vllm-0.31.0-{tag}.whl"
        assert base["wheels"]["vllm"]["files"][platform] == {
            "filename": wheel.name, "sha256": sha256(wheel), "size": wheel.stat().st_size,
        }  # fmt: skip
    assert list(base["wheels"]["flashinfer-python"]["files"]) == ["any"]
    assert set(base["fingerprints"][GREETER]) == {HELPER, "vllm/greeter.py::Greeter.greet"}
    greeter = release_files("0.31.0", "linux/amd64")["vllm/greeter.py"]
    assert base["targets"]["vllm/greeter.py"] == hashlib.sha256(greeter).hexdigest()
    assert "vllm/util.py" not in base["targets"]  # which a patch reads and does not edit
    assert tomllib.loads(product.lock_file.read_text())["requires"] == {
        "torch==2.13.0": {"triton": "3.7.1"}
    }


def test_the_same_bytes_twice(product: Product) -> None:
    before = product.lock_file.read_bytes()
    stamp = product.lock_file.stat().st_mtime_ns
    ran = product.run("lock", "update", "--format", "json")
    assert (ran.code, ran.json["written"], ran.json["moved"]) == (0, False, [])
    assert ran.json["bases"] == list(VERSIONS)
    assert product.lock_file.stat().st_mtime_ns == stamp
    product.lock_file.unlink()
    words = [word for version in reversed(VERSIONS) for word in ("--base-version", version)]
    assert product.run("lock", "update", *words, "--accept", "all").code == 0
    assert product.lock_file.read_bytes() == before


def test_only_what_is_read_is_fetched(product: Product) -> None:
    noise = {"vllm/large.bin": bytes(range(256)) * 20_000}
    write_release(product.wheels, "0.31.0", noise)
    product.run("lock", "update", "--base-version", "0.31.0")
    sizes = {p.name: p.stat().st_size for p in product.wheels.iterdir()}
    whole = [one for one in product.server.files_asked() if not one.range]
    assert whole == [], sizes


@pytest.mark.parametrize("version", VERSIONS)
def test_another_spelling_is_the_same_base(product: Product, version: str) -> None:
    before = product.lock_file.read_bytes()
    ran = product.run("lock", "update", "--base-version", version.removesuffix(".0"))
    assert ran.code == 0, ran
    assert product.lock_file.read_bytes() == before


@pytest.mark.parametrize(
    ("accept", "code"),
    [([], 1), ([COUNTER], 1), ([GREETER], 0), ([COUNTER, GREETER], 0), (["all"], 0)],
)
def test_a_changed_scope_needs_its_patch_to_be_named(
    product: Product, accept: list[str], code: int
) -> None:
    before = product.lock_file.read_bytes()
    write_release(product.wheels, "0.31.0", CHANGED)
    words = [word for name in accept for word in ("--accept", name)]
    ran = product.run("lock", "update", "--base-version", "0.31.0", *words)
    assert ran.code == code, ran
    if code:
        assert f"vLLM 0.31.0, {GREETER}: {HELPER}: " in ran.err
        assert f"build.py audit --against 0.31.0`, then add --accept {GREETER}" in ran.err
        assert product.lock_file.read_bytes() == before
        return
    assert f"accepted vLLM 0.31.0, {GREETER}: {HELPER}" in ran.out
    # A release that changed its bytes is worth a sentence of its own.
    assert "vLLM 0.31.0: wheels was" in ran.out
    assert product.lock_file.read_bytes() != before
    assert product.run("audit", "--against", "0.31.0").code == 0


def test_another_project_is_not_called_vllm() -> None:
    changed = Changed("1.3.0", "limit", "toylib/core.py", "t1:a", "t1:b")
    with pytest.raises(
        ReviewError, match=r"- toy-lib 1\.3\.0, limit: toylib/core\.py: t1:a -> t1:b"
    ):
        require_accepted([changed], [], "toy-lib")
    require_accepted([changed], ["limit"], "toy-lib")


def test_every_release_is_told_before_anybody_has_to_accept(product: Product) -> None:
    for version in ("0.31.0", "0.33.0"):
        write_release(product.wheels, version, CHANGED)
    ran = product.run("lock", "update")
    assert ran.code == 1
    assert "vLLM 0.31.0, " in ran.err
    assert "vLLM 0.33.0, " in ran.err


def test_a_new_base_is_compared_with_the_one_before(product: Product) -> None:
    product.only_locked("0.31.0")
    ran = product.run("lock", "update", "--base-version", "0.32.0")
    assert ran.code == 1
    assert f"vLLM 0.32.0, {GREETER}: vllm/greeter.py::Greeter.greet" in ran.err
    assert product.run("lock", "update", "--base-version", "0.32.0", "--accept", GREETER).code == 0
    # The next one has nothing new.
    assert product.run("lock", "update", "--base-version", "0.33.0").code == 0


def test_a_mistyped_patch_is_told_at_once(product: Product) -> None:
    ran = product.run("lock", "update", "--accept", GREETER[:-1])
    assert ran.code == 2
    assert f"did you mean {GREETER}?" in ran.err
    assert product.server.asked == []


def test_a_file_that_a_person_wrote_is_not_overwritten(product: Product) -> None:
    text = "# mine\nschema = 1\n"
    product.lock_file.write_text(text)
    ran = product.run("lock", "update")
    assert ran.code == 2
    assert "expected a generated lock, found a file without our head" in ran.err
    assert product.lock_file.read_text() == text
    assert product.server.asked == []


def test_a_scope_that_is_gone_cannot_be_locked(product: Product) -> None:
    before = product.lock_file.read_bytes()
    write_release(product.wheels, "0.31.0", {"vllm/util.py": b"def other():\n    return 3\n"})
    ran = product.run("lock", "update", "--base-version", "0.31.0")
    assert ran.code == 4
    assert f"{GREETER}: {HELPER} is not in the tree" in ran.err
    assert product.lock_file.read_bytes() == before


def test_platforms_that_differ_in_a_file_we_look_at(product: Product) -> None:
    files = {**release_files("0.31.0", "linux/arm64"), **CHANGED}
    requires = ["torch==2.13.0", f"flashinfer-python=={FLASHINFER['0.31.0']}"]
    build_wheel(product.wheels, tag=TAGS["linux/arm64"], files=files, requires=requires)
    ran = product.run("lock", "update", "--base-version", "0.31.0", "--accept", "all")
    assert ran.code == 4
    assert "vllm/util.py differs between linux/amd64 and linux/arm64" in ran.err


def test_a_platform_without_a_wheel(product: Product) -> None:
    (product.wheels / f"vllm-0.31.0-{TAGS['linux/arm64']}.whl").unlink()
    ran = product.run("lock", "update", "--base-version", "0.31.0")
    assert ran.code == 2
    assert "expected a wheel for linux/arm64" in ran.err


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        (["torch==2.13.0"], "expected it to require one version of flashinfer-python, found none"),
        (["flashinfer-python>=0.7"], "one version of flashinfer-python, found >=0.7"),
    ],
)
def test_a_release_that_pins_no_flashinfer(
    product: Product, requires: list[str], said: str
) -> None:
    for platform, tag in TAGS.items():
        build_wheel(product.wheels, tag=tag, files=release_files("0.31.0", platform),
                    requires=requires)  # fmt: skip
    ran = product.run("lock", "update", "--base-version", "0.31.0")
    assert ran.code == 4
    assert said in ran.err


def test_torch_by_range_is_no_version(product: Product) -> None:
    for platform, tag in TAGS.items():
        build_wheel(product.wheels, tag=tag, files=release_files("0.31.0", platform),
                    requires=["torch<3,>=2", "flashinfer-python==0.7.0"])  # fmt: skip
    ran = product.run("lock", "update", "--base-version", "0.31.0")
    assert ran.code == 0, ran
    assert table(product)["pins"] == {"torch": "<3,>=2", "flashinfer-python": "0.7.0"}


def test_an_index_without_hashes_cannot_be_locked(product: Product) -> None:
    product.server.faults.hashes = False
    ran = product.run("lock", "update", "--base-version", "0.31.0")
    assert ran.code == 4
    assert "the index gives no sha256 or size to lock" in ran.err


def test_an_index_without_times_keeps_the_known_date(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imagebuild.sources import index

    real = index._index_file

    def timeless(package: Any, name: str) -> index.IndexFile | None:
        package.upload_time = None
        return real(package, name)

    monkeypatch.setattr(index, "_index_file", timeless)
    before = product.lock_file.read_bytes()
    assert product.run("lock", "update").code == 0
    assert product.lock_file.read_bytes() == before
    product.lock_file.unlink()
    ran = product.run("lock", "update")
    assert ran.code == 4
    assert "gives no upload time" in ran.err


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [
        ("9.9.9", 2, "vllm: expected version 9.9.9, found none; nearest are"),
        ("newest", 2, "vllm: expected a version, found 'newest'"),
    ],
)
def test_a_version_that_is_none(product: Product, version: str, code: int, said: str) -> None:
    ran = product.run("lock", "update", "--base-version", version)
    assert ran.code == code
    assert said in ran.err


# check


def wheel(product: Product, platform: str = "linux/amd64") -> Path:
    return product.wheels / f"vllm-0.31.0-{TAGS[platform]}.whl"


def test_check_finds_all_as_locked(product: Product) -> None:
    ran = product.run("lock", "check", "--format", "json")
    assert (ran.code, ran.json["exit_code"]) == (0, 0)
    assert (ran.json["problems"], ran.json["warnings"], ran.json["newer"]) == ([], [], [])


def test_check_names_newer_releases_without_a_warning(product: Product) -> None:
    for version in ("0.34.0", "0.35.0rc1"):
        build_wheel(product.wheels, version=version)
    ran = product.run("lock", "check", "--format", "json")
    assert (ran.code, ran.json["newer"]) == (0, ["0.34.0"])
    assert "newer releases, not locked: 0.34.0" in product.run("lock", "check").out


def test_check_finds_changed_vanished_and_withdrawn_wheels(product: Product) -> None:
    changed, vanished = wheel(product), wheel(product, "linux/arm64")
    withdrawn = product.wheels / f"vllm-0.32.0-{TAGS['linux/amd64']}.whl"
    locked = sha256(changed)
    build_wheel(product.wheels, tag=TAGS["linux/amd64"], files={"vllm/__init__.py": b"# other"})
    vanished.unlink()
    product.server.faults.yanked[withdrawn.name] = "wrong torch"
    ran = product.run("lock", "check", "--format", "json")
    assert ran.code == 4
    assert ran.json["problems"] == [
        f"{changed.name}: expected sha256 {locked}, found {sha256(changed)}",
        f"{vanished.name}: the index no longer offers it",
    ]
    assert ran.json["warnings"] == [f"{withdrawn.name}: upstream withdrew it: wrong torch"]


def test_check_is_yellow_for_a_withdrawn_wheel_alone(product: Product) -> None:
    product.server.faults.yanked[wheel(product).name] = "wrong torch"
    ran = product.run("lock", "check")
    assert ran.code == 1
    assert f"  ! {wheel(product).name}: upstream withdrew it: wrong torch" in ran.out


def test_check_says_when_an_index_gives_nothing_to_compare(product: Product) -> None:
    product.server.faults.hashes = False
    ran = product.run("lock", "check", "--format", "json")
    assert ran.code == 1
    assert f"{wheel(product).name}: the index gives no sha256 to compare" in ran.json["warnings"]


def test_check_of_nothing(product: Product) -> None:
    product.lock_file.unlink()
    assert "nothing is locked" in product.run("lock", "check").out
    assert product.run("lock", "check").code == 4


def test_check_wants_the_recipes_base(product: Product) -> None:
    product.only_locked("0.32.0")
    ran = product.run("lock", "check")
    assert ran.code == 4
    assert "the recipe's base 0.31.0 is not locked" in ran.out


def test_show(product: Product) -> None:
    ran = product.run("lock", "show", "--format", "json")
    assert ran.code == 0
    assert list(ran.json["bases"]) == list(VERSIONS)
    pin = ran.json["bases"]["0.31.0"]["wheels"]["vllm"]["linux/amd64"]
    assert pin["sha256"] == sha256(wheel(product))
    assert product.server.asked == []
