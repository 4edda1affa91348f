"""FlashKDA's library is replaced whole, with its RECORD, and judged by what it asks of others."""

from __future__ import annotations

import base64
import csv
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from imagebuild.config import load_recipe
from imagebuild.errors import BrokenError, UsageError
from imagebuild.steps import flashkda
from imagebuild.steps.elf import defined_symbols, undefined_symbols
from imagebuild.verify.flashkda import LIBRARY
from tests.support import parts
from tests.support.verify_site import flashkda_library

RECIPE = load_recipe("glm53-flash")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with the base's library, and a left-over one beside it."""
    folder = tmp_path / "site"
    (folder / "vllm").mkdir(parents=True)
    (folder / LIBRARY).write_bytes(flashkda_library())
    (folder / "vllm" / "_flashkda_C.cpython-312-x86_64-linux-gnu.so").write_bytes(b"old")
    info = folder / "vllm-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.31.0\n")
    rows = [
        ("vllm/__init__.py", "sha256=x", "1"),
        (LIBRARY, "sha256=old", "3"),
        ("vllm/_flashkda_C.cpython-312-x86_64-linux-gnu.so", "sha256=old", "3"),
        ('vllm/a,"b.py', "", ""),
    ]
    with (info / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return folder


def test_library_record_and_left_over_follow(site: Path) -> None:
    flashkda.replace_library(site, b"new library")
    assert (site / LIBRARY).read_bytes() == b"new library"
    assert [path.name for path in (site / "vllm").iterdir()] == ["_flashkda_C.abi3.so"]
    with (site / "vllm-0.31.0.dist-info" / "RECORD").open(newline="") as file:
        rows = list(csv.reader(file))
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"new library").digest()).decode().rstrip("=")
    assert rows == [["vllm/__init__.py", "sha256=x", "1"], [LIBRARY, f"sha256={digest}", "11"],
                    ['vllm/a,"b.py', "", ""]]  # fmt: skip


def test_tree_whose_record_lacks_the_library_is_refused(site: Path) -> None:
    (site / "vllm-0.31.0.dist-info" / "RECORD").write_text("vllm/__init__.py,,\n")
    before = (site / LIBRARY).read_bytes()
    with pytest.raises(BrokenError, match="RECORD"):
        flashkda.replace_library(site, b"new")
    assert (site / LIBRARY).read_bytes() == before


def test_good_library_of_unknown_origin_asks_for_the_gpu_check(site: Path) -> None:
    notes = list(flashkda.problems_and_notes(site, RECIPE, "linux/amd64"))
    assert len(notes) == 1
    assert notes[0].startswith("warning: ")
    assert "is one that we know" in notes[0]


@pytest.mark.parametrize(
    ("data", "platform", "expected"),
    [
        (flashkda_library(schemas=("fwd(Tensor q) -> ()",)), "linux/amd64", "operator fwd"),
        (flashkda_library(targets=[(90, "a", b"x")]), "linux/amd64", "runs on sm_120"),
        (
            flashkda_library(targets=[(120, "a", b"x")], machine=183),
            "linux/arm64",
            "runs on sm_121",
        ),
        (flashkda_library(), "linux/arm64", "library for aarch64"),
        (b"text", "linux/amd64", "shared library"),
    ],
)
def test_library_that_cannot_serve_is_refused(
    site: Path, data: bytes, platform: str, expected: str
) -> None:
    (site / LIBRARY).write_bytes(data)
    with pytest.raises(BrokenError, match=expected):
        list(flashkda.problems_and_notes(site, RECIPE, platform))


@pytest.mark.parametrize(
    ("symbol", "is_unstable"),
    [
        ("_ZN3c105ErrorC1Ev", True),
        ("_ZNK2at6Tensor4sizeEl", True),
        ("_ZN5torch3jit4loadEv", True),
        ("_ZNKR3c106StringE", True),
        ("aoti_torch_get_dim", False),
        ("torch_library_impl", False),
        ("_ZNSt13runtime_errorD1Ev", False),
        ("_ZN4ours5torchEv", False),
        ("cudaMalloc", False),
    ],
)
def test_torch_s_classes_are_told_from_its_c_interface(symbol: str, *, is_unstable: bool) -> None:
    assert flashkda.is_unstable(symbol) is is_unstable


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_symbols_of_a_real_library(tmp_path: Path) -> None:
    (tmp_path / "x.cc").write_text("namespace c10 { void boom(); }\nvoid ours() { c10::boom(); }\n")
    command = ["g++", "-shared", "-fPIC", "-o", str(tmp_path / "x.so"), str(tmp_path / "x.cc")]
    subprocess.run(command, check=True)
    data = (tmp_path / "x.so").read_bytes()
    assert "_ZN3c104boomEv" in undefined_symbols(data)
    assert "_Z4oursv" in defined_symbols(data)
    assert "_Z4oursv" not in undefined_symbols(data)


def test_what_the_sources_lack_is_listed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, _vllm = parts.flashkda(tmp_path)
    (ours / "LICENSE").unlink()
    code = flashkda.main(["build", "--recipe", "glm53-flash", "--platform", "linux/amd64",
                          "--source", str(ours), "--out", str(tmp_path / "out")])  # fmt: skip
    said = capsys.readouterr().err
    assert code == UsageError.exit_code
    assert "vllm/csrc/flashkda_registration.cpp" in said
    assert "LICENSE" in said
    assert "--build-context vllm-src=DIR" in said
    assert not (tmp_path / "out").exists()


def test_digest_of_sources_follows_content_and_name(tmp_path: Path) -> None:
    ours, _vllm = parts.flashkda(tmp_path)
    first = flashkda._digest(ours)
    (ours / ".git").mkdir()
    (ours / ".git" / "HEAD").write_text("x")
    assert flashkda._digest(ours) == first
    (ours / "LICENSE").rename(ours / "LICENCE")
    assert flashkda._digest(ours) != first
