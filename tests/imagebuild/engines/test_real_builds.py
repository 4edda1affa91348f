"""Real releases built, verified and looked into: the series is ported, not only audited.

0.31.0 for sm_120 is built by the README's own commands, see tests/test_readme.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from imagebuild.patching.apply import pristine
from imagebuild.patching.evaluate import Verdict, evaluate
from imagebuild.patching.manifest import Manifest, read_manifest
from imagebuild.patching.tree import DirTree, OverlayTree, Tree
from tests.drift import naive
from tests.drift.field import codes, judge
from tests.support.product import REPOSITORY

pytestmark = pytest.mark.network
_MAIN = (
    "import sys; from pathlib import Path; from imagebuild.cli import main; "
    "sys.exit(main(sys.argv[2:], root=Path(sys.argv[1])))"
)
# A release each time, both processors, and of 0.32.0 the wheel that the README's commands fetch.
BUILDS = (("0.31.0", "sm_121"), ("0.32.0", "sm_121"), ("0.33.0", "sm_120"))


@dataclass(frozen=True)
class Built:
    """One real result."""

    version: str
    arch: str
    site: Path
    document: dict[str, Any]

    @property
    def manifest(self) -> Manifest:
        manifest = read_manifest(self.site)
        assert manifest is not None
        return manifest


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", _MAIN, str(REPOSITORY), *arguments, "--format", "json"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-3000:])
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module", params=BUILDS, ids=[f"{v}-{arch}" for v, arch in BUILDS])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    version, arch = request.param
    dist = tmp_path_factory.mktemp("real")
    document = run("build", "--arch", arch, "--base-version", version, "--dist", str(dist))
    yield Built(version, arch, dist / f"glm53-flash-{arch}" / "site", document)
    shutil.rmtree(dist)  # some gigabytes


def test_the_tree_verifies(built: Built) -> None:
    report = run("verify", "--tree", str(built.site), "--arch", built.arch)
    assert (report["ok"], report["base"]["version"]) == (True, built.version)
    assert report["gpu_arch"] == built.arch
    groups = {group["title"]: group["summary"] for group in report["groups"]}
    patches = built.manifest.patches
    kept = sum(bool(patch.files) for patch in patches)
    gone = len(patches) - kept
    assert groups["effects"] == f"{kept} hold"
    assert groups["series"].endswith(f", {gone} of {gone} drops proven")
    # F12 of docs/drift.md: no stage has to bring another one.
    assert groups["FlashKDA"].startswith("the fixed one, the file of vLLM 0.3")


def test_it_carries_the_series_of_its_release(built: Built) -> None:
    series = load_recipe("glm53-flash").series()
    manifest = built.manifest
    assert (manifest.version, manifest.gpu_arch) == (built.version, built.arch)
    assert manifest.series == series.digest
    assert [patch.name for patch in manifest.patches] == [patch.name for patch in series.patches]
    dropped = {patch.name for patch in series.patches if patch.drops}
    if built.version == "0.31.0":
        dropped = set()
    for patch in manifest.patches:
        assert bool(patch.files) is (patch.name not in dropped), patch.name
        assert patch.verdict == ("absorbed" if patch.name in dropped else "ok"), patch.name


def test_both_processors_get_the_same_patched_files(
    built: Built, real_base: Callable[[str], Tree]
) -> None:
    """The audit reads the wheel of x86_64, whatever is built."""
    audited_tree = real_base(built.version)
    lock = read_lock(load_recipe("glm53-flash").lock_file)
    known = lock.identify(audited_tree.identity)
    files = evaluate(
        load_recipe("glm53-flash").series(),
        OverlayTree(audited_tree, {}, known),
        None,
        lock.fingerprints_for(known),
    ).files
    after = {path: entry.after for path, entry in built.manifest.files.items()
             if not path.endswith(".dist-info/RECORD")}  # fmt: skip
    assert after == {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}


def test_the_binary_knows_rows_without_rope(built: Built) -> None:
    """F2 of docs/drift.md on the library itself, which lies here as a whole."""
    claim = dataclasses.replace(naive.SM90_FIRST, reason=naive.BINARY_REASON)
    stock, _manifest = pristine(built.site)
    report = judge(claim, stock, seen=stock)
    assert (report.verdict, codes(report)) == (Verdict.REASON_GONE, ["reason-gone"])
    assert naive.NEW_CHECK in DirTree(built.site).read(naive.LIBRARY)
