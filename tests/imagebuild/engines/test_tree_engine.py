"""The tree engine end to end, through the command line, on synthetic wheels of both platforms."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.engines import tree
from tests.support.product import COUNTER, GREETER, PLAN, REPOSITORY, TAGS, Product, files_of
from tests.support.wheels import sha256

SITE_PACKAGES = "usr/lib/python3.12/dist-packages"


@pytest.fixture
def built(product: Product) -> Path:
    assert product.run("build", "--arch", "sm_120").code == 0
    return product.root / "dist" / "tiny-sm_120"


def members(layer: Path) -> dict[str, bytes]:
    with tarfile.open(layer) as tar:
        found = {info.name: info for info in tar.getmembers()}
        assert len(found) == len(tar.getmembers())
        return {
            name: (tar.extractfile(info) or pytest.fail(name)).read()
            for name, info in found.items()
        }


@pytest.mark.parametrize(
    ("arch", "platform", "patched"),
    [
        ("sm_120", "linux/amd64", {GREETER, COUNTER, PLAN}),
        ("sm_121", "linux/arm64", {GREETER, COUNTER}),
    ],
)
def test_a_build_for_each_arch(
    product: Product, arch: str, platform: str, patched: set[str]
) -> None:
    ran = product.run("build", "--arch", arch, "--format", "json")
    assert ran.code == 0
    document = ran.json
    assert (document["did_work"], document["gpu_arch"], document["base"]) == (True, arch, "0.31.0")
    folder = product.root / "dist" / f"tiny-{arch}"
    assert document["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "build.json", "layer.tar", "layer.tar.sha256", "manifest.json", "provenance.json",
        "sbom.cdx.json", "site",
    ]  # fmt: skip
    site = folder / "site"
    native = (site / "vllm" / "_C.abi3.so").read_bytes()
    assert native.startswith(b"library for " + platform.encode())
    assert 'return "good day"' in (site / "vllm" / "greeter.py").read_text()
    assert (site / "tiny_extra.py").read_text() == "EXTRA = 1\n"
    admits = "(9, 12)" in (site / "flashinfer" / "plan.py").read_text()
    assert admits == (PLAN in patched)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["gpu_arch"] == arch
    assert {p["name"] for p in manifest["patches"] if p["files"]} == patched
    assert (site / ".imagebuild" / "manifest.json").read_bytes() == (
        folder / "manifest.json"
    ).read_bytes()


def test_nothing_of_the_target_is_executed(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen.__init__
    commands: list[list[str]] = []

    def watched(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        commands.append([str(part) for part in args])
        real(self, args, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", watched)
    product.asks_pip = True
    assert product.run("build", "--arch", "sm_121").code == 0
    # pip is asked for its configuration; importing the target's vllm would raise.
    assert commands
    assert all(command[1:3] == ["-m", "pip"] for command in commands), commands


def test_a_second_build_does_nothing_and_says_so(product: Product, built: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in built.rglob("*")}
    asked = len(product.server.asked)
    ran = product.run("build", "--arch", "sm_120")
    assert (ran.code, ran.err) == (0, "")
    assert f"{built}: up to date, nothing done" in ran.out
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["did_work"] is False
    assert len(product.server.asked) == asked
    assert {p: p.stat().st_mtime_ns for p in built.rglob("*")} == before


def _touch_up(built: Path, path: str) -> None:
    file = built / path
    file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: _touch_up(b, "layer.tar"),
        lambda b: _touch_up(b, "layer.tar.sha256"),
        lambda b: _touch_up(b, "manifest.json"),
        lambda b: _touch_up(b, "sbom.cdx.json"),
        lambda b: (b / "provenance.json").unlink(),
        lambda b: _touch_up(b, "site/vllm/greeter.py"),
        lambda b: _touch_up(b, "site/.imagebuild/manifest.json"),
        lambda b: (b / "site" / "tiny_extra.py").unlink(),
        lambda b: (b / "layer.tar").unlink(),
        lambda b: (b / "build.json").write_text("[1, "),
        lambda b: shutil.rmtree(b / "site"),
    ],
)
def test_a_damaged_result_is_built_again(product: Product, built: Path, damage: Any) -> None:
    good = files_of(built)
    damage(built)
    document = product.run("build", "--arch", "sm_120", "--format", "json").json
    assert document["did_work"] is True
    assert files_of(built) == good


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (f"patches/tiny/{GREETER}.py", "good day", "good evening"),
        # A probe decides as well, though no patched byte depends on it.
        (f"patches/tiny/{GREETER}.py", '"hello")', '"hello", "x")'),
        ("image/runtime/tiny_extra.py", "1", "2"),
        ("image/tiny/series.toml", f', "{PLAN}"', ""),
        ("image/tiny/recipe.toml", "dist-packages", "site-packages"),
        ("image/tiny/recipe.toml", 'python = "3.12"', 'python = "3.13"'),
        ("image/tiny/lock.toml", "epoch = 1", "epoch = 2"),
        ("image/tiny/recipe.toml", '"for tests"', '"for others"'),
    ],
)
def test_a_changed_input_is_built_again(
    product: Product, built: Path, path: str, old: str, new: str
) -> None:
    product.replace(path, old, new)
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["did_work"] is True
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["did_work"] is False


def test_a_reason_that_is_gone_stops_the_next_build(product: Product, built: Path) -> None:
    product.replace(f"patches/tiny/{GREETER}.py", '"hello")', '"bonjour")')
    before = files_of(built)
    ran = product.run("build", "--arch", "sm_120")
    assert ran.code == 1
    assert "reason_gone" in ran.err
    assert files_of(built) == before


def test_two_builds_give_the_same_bytes(product: Product, built: Path, tmp_path: Path) -> None:
    first = files_of(built)
    elsewhere = tmp_path / "some where" / "else"
    assert product.run("build", "--arch", "sm_120", "--dist", str(elsewhere)).code == 0
    assert files_of(elsewhere / "tiny-sm_120") == first
    shutil.rmtree(built)
    previous = os.umask(0o077)
    try:
        assert product.run("build", "--arch", "sm_120").code == 0
    finally:
        os.umask(previous)
    assert files_of(built) == first


def test_the_layer_is_the_manifest_and_nothing_else(
    product: Product, built: Path, tmp_path: Path
) -> None:
    layer = members(built / "layer.tar")
    manifest = json.loads((built / "manifest.json").read_bytes())
    files = {path for path, entry in manifest["files"].items() if entry["after"]}
    assert {"vllm/greeter.py", "vllm-0.31.0.dist-info/RECORD", "tiny_extra.py"} <= files
    own = {f".imagebuild/{p}" for p in files_of(built / "site" / ".imagebuild")}
    # Byte code that the image compiled from the unpatched source.
    hidden = {
        f"{Path(path).parent / '__pycache__'}/.wh.{Path(path).stem}.cpython-312{level}.pyc"
        for path in files if path.endswith(".py") for level in ("", ".opt-1", ".opt-2")
    }  # fmt: skip
    assert set(layer) == {f"{SITE_PACKAGES}/{path}" for path in files | own | hidden}
    assert all(data == b"" for name, data in layer.items() if "/.wh." in name)
    told = (built / "layer.tar.sha256").read_text()
    assert told == f"{hashlib.sha256((built / 'layer.tar').read_bytes()).hexdigest()}  layer.tar\n"
    # Over the pristine site it gives the patched one.
    pristine = tmp_path / "pristine"
    shutil.copytree(built / "site", pristine)
    assert product.run("patches", "revert", "--tree", str(pristine)).code == 0
    before = files_of(pristine)
    assert before["vllm/greeter.py"] != files_of(built / "site")["vllm/greeter.py"]
    for name, data in layer.items():
        path = pristine / name.removeprefix(f"{SITE_PACKAGES}/")
        if not path.name.startswith(".wh."):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    assert files_of(pristine) == files_of(built / "site")
    assert files_of(pristine) != before


def test_layer_entries_carry_nothing_of_this_machine(product: Product, built: Path) -> None:
    with tarfile.open(built / "layer.tar") as tar:
        entries = tar.getmembers()
    assert [e.name for e in entries] == sorted(e.name for e in entries)
    for entry in entries:
        assert (entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, "", "")
        assert entry.isfile()
        assert entry.mtime == 1791186041  # the index's upload time
        assert entry.mode == 0o644
        assert not entry.name.startswith(("/", ".."))


def test_the_manifest_in_the_site_verifies(product: Product, built: Path) -> None:
    ran = product.run("verify", "--arch", "sm_120", "--format", "json")
    assert (ran.code, ran.json["ok"]) == (0, True)
    (built / "site" / "vllm" / "util.py").write_text("def helper():\n    return 4\n")
    assert product.run("verify", "--arch", "sm_120").code == 3


def test_a_wheel_that_fails_verify_leaves_the_old_result(product: Product, built: Path) -> None:
    before = files_of(built)
    product.replace("image/tiny/lock.toml", 'torch = "2.13.0"', 'torch = "2.12.0"')
    ran = product.run("build", "--arch", "sm_120")
    assert ran.code == 3
    assert "verify failed, nothing was written" in ran.err
    assert "torch: expected 2.12.0" in ran.err
    assert files_of(built) == before
    assert sorted(p.name for p in built.parent.iterdir()) == [".tiny-sm_120.lock", "tiny-sm_120"]


# Interruptions


_STOPS = {
    "while fetching": "imagebuild.sources.download:_Download._copy",
    "before unpacking": "imagebuild.engines.tree:_write",
    "while unpacking": "imagebuild.sources.wheel:WheelTree._extract_one",
    "before applying": "imagebuild.engines.tree:apply",
    "while applying": "imagebuild.patching.transaction:_finish",
    "while verifying": "imagebuild.engines.tree:_verify",
    "before the layer": "imagebuild.engines.tree:write_layer",
    "after the layer": "imagebuild.engines.tree:_sha256",
    "at the swap": "imagebuild.files:_exchange",
}
_KILLED = """
import importlib, os, sys
from pathlib import Path
from imagebuild.cli import main

module, _, name = sys.argv[1].partition(":")
owner = importlib.import_module(module)
*parents, last = name.split(".")
for parent in parents:
    owner = getattr(owner, parent)
assert callable(getattr(owner, last))
setattr(owner, last, lambda *a, **k: os.kill(os.getpid(), 9))
sys.exit(main(sys.argv[3:], root=Path(sys.argv[2])))
"""


_KILLS = [("while fetching", False), ("before the layer", False), *((s, True) for s in _STOPS)]


@pytest.mark.parametrize(("stop", "has_result"), _KILLS)
def test_kill_leaves_the_old_result(product: Product, stop: str, has_result: bool) -> None:
    folder = product.root / "dist" / "tiny-sm_120"
    if has_result:
        assert product.run("build", "--arch", "sm_120").code == 0
        product.replace(f"patches/tiny/{GREETER}.py", "good day", "good evening")
        if stop == "while fetching":
            shutil.rmtree(product.cache)
    before = files_of(folder)
    command = product.command("build", "--arch", "sm_120")
    command[2:3] = [_KILLED, _STOPS[stop], str(product.root)]
    run = subprocess.run(command, env=product.environment, capture_output=True, text=True,
                         check=False, cwd=REPOSITORY)  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert files_of(folder) == before
    assert product.run("build", "--arch", "sm_120").code == 0
    assert product.run("verify", "--arch", "sm_120").code == 0
    word = b"good evening" if has_result else b"good day"
    assert word in files_of(folder)["site/vllm/greeter.py"]
    assert sorted(p.name for p in folder.parent.iterdir()) == [".tiny-sm_120.lock", "tiny-sm_120"]


@pytest.fixture
def held(product: Product) -> Iterator[subprocess.Popen[str]]:
    """A build of another process that waits inside."""
    process = subprocess.Popen(
        [*product.command()[:2], _HOLDING, str(product.root)], env=product.environment, text=True,
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    yield process
    if process.poll() is None:
        process.communicate("go\n")


_HOLDING = """
import sys
from pathlib import Path
from imagebuild.cli import main
from imagebuild.engines import tree

real = tree._write
def wait(*a):
    print("inside", flush=True)
    sys.stdin.readline()
    return real(*a)
tree._write = wait
sys.exit(main(["build", "--arch", "sm_120"], root=Path(sys.argv[1])))
"""


def test_two_builds_at_once(product: Product, held: subprocess.Popen[str]) -> None:
    ran = product.run("build", "--arch", "sm_120")
    assert ran.code == 5
    assert "is under way in another process" in ran.err
    assert "hint: wait for it, then try again" in ran.err
    # Another arch is another result.
    assert product.run("build", "--arch", "sm_121").code == 0
    held.communicate("go\n", timeout=60)
    assert held.returncode == 0
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["did_work"] is False


def test_what_another_process_built_meanwhile_is_not_built_again(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = tree.up_to_date, []

    def late(request: tree.Request) -> tree.Built | None:
        seen.append(request)
        if len(seen) == 1:
            assert product.spawn("build", "--arch", "sm_120").code == 0
            return None
        return real(request)

    monkeypatch.setattr(tree, "up_to_date", late)
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["did_work"] is False
    assert len(seen) == 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_told_to_end_says_so_and_leaves_nothing(
    product: Product, sent: signal.Signals
) -> None:
    product.server.faults.hold = hold = threading.Event()
    process = product.start("build", "--arch", "sm_120", "--format", "json")
    deadline = time.monotonic() + 60
    while not _is_connected(product) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    hold.set()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out)["exit_code"] == 130
    assert not list((product.root / "dist").glob("tiny-sm_120*"))
    assert not list(product.cache.glob("partial/*"))


def _is_connected(product: Product) -> bool:
    """Whether a request is waiting at the server."""
    return any(t.name.endswith("(process_request_thread)") for t in threading.enumerate())


def test_hashes_of_two_platforms_that_were_mixed_up_stop_it_before_anything_is_unpacked(
    product: Product,
) -> None:
    for arch in ("sm_120", "sm_121"):
        assert product.run("build", "--arch", arch).code == 0  # both are in the cache
    shutil.rmtree(product.root / "dist")
    one, other = (sha256(product.wheels / f"vllm-0.31.0-{tag}.whl") for tag in TAGS.values())
    text = product.lock_file.read_text()
    swapped = text.replace(one, "?").replace(other, one).replace("?", other)
    product.lock_file.write_text(swapped)
    ran = product.run("build", "--arch", "sm_120")
    assert ran.code == 4
    assert "expected vllm 0.31 for linux/amd64, found vllm 0.31 with the tags" in ran.err
    assert "aarch64" in ran.err
    assert "unpack" not in ran.err
    assert "hint: the lock has another file's sha256 there" in ran.err
    assert not (product.root / "dist" / "tiny-sm_120").exists()
    # What reads a wheel by ranges asks the index, which has no such file for that platform.
    checked = product.run("patches", "check")
    assert checked.code == 4
    assert f"expected a wheel for linux/amd64 with sha256 {other}, found none" in checked.err
    product.lock_file.write_text(text)
    again = product.run("build", "--arch", "sm_120")
    assert again.code == 0
    assert "- check vllm-0.31.0-cp38-abi3-manylinux_2_28_x86_64.whl, cached" in again.err
    assert "- fetch" not in again.err


def test_the_wheels_are_the_locked_ones(product: Product, built: Path) -> None:
    wheel = product.wheels / f"vllm-0.31.0-{TAGS['linux/amd64']}.whl"
    assert json.loads((built / "build.json").read_bytes())["inputs"]["vllm"] == sha256(wheel)
