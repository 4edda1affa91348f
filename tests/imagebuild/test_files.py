"""Replacing files and folders: whatever stops it, the old state or the new one is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild import files
from imagebuild.errors import EngineError
from imagebuild.files import only_one, replaced_folder, write_atomically
from tests.support.product import REPOSITORY


class Stopped(BaseException):
    """Like an interrupt: no Exception."""


def result(tmp_path: Path, text: str = "old") -> Path:
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "a").write_text(text)
    return folder


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["file"]


def test_a_folder_that_refuses_is_not_taken_for_the_cache() -> None:
    """The cache is one place of several: its variable moves no report and no lock file."""
    with pytest.raises(EngineError, match="expected room for 3 bytes") as caught:
        write_atomically(Path("/proc/none/file"), b"abc")
    assert caught.value.hint == "name a folder that can be written"
    with pytest.raises(EngineError) as caught, only_one(Path("/proc/none/lock"), "x"):
        pass
    assert caught.value.hint == "name a folder that can be written"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def refuse(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(EngineError, match="no space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_second_holder_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sub" / ".lock"
    with only_one(path, "a build of x"):
        for _ in range(2):  # the refused one must not let go of the first one's lock
            with pytest.raises(EngineError, match="a build of x is under way"):
                only_one(path, "a build of x").__enter__()
    with only_one(path, "a build of x"):
        pass


def test_what_blocks_inside_is_not_taken_for_a_second_holder(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), only_one(tmp_path / ".lock", "a build"):
        raise BlockingIOError(11, "some pipe")


@pytest.fixture(params=["exchange", "rename"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's exchange, and as on a system without it."""
    if request.param == "rename":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("swap")
def test_a_link_is_replaced_and_its_target_is_left_alone(tmp_path: Path) -> None:
    elsewhere = result(tmp_path).rename(tmp_path / "elsewhere")
    folder = tmp_path / "result"
    folder.symlink_to(elsewhere)
    for text in ("new", "newer"):
        with replaced_folder(folder) as partial:
            (partial / "b").write_text(text)
        assert (folder / "b").read_text() == text
    assert (elsewhere / "a").read_text() == "old"
    assert names(tmp_path) == ["elsewhere", "result"]
    assert not folder.is_symlink()


@pytest.mark.usefixtures("swap")
def test_a_folder_is_replaced(tmp_path: Path) -> None:
    folder = result(tmp_path)
    with replaced_folder(folder) as partial:
        (partial / "b").write_text("new")
        assert (folder / "a").read_text() == "old"
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert names(tmp_path) == ["result"]


@pytest.mark.usefixtures("swap")
def test_a_folder_is_made(tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "deep" / "result") as partial:
        (partial / "b").write_text("new")
    assert names(tmp_path / "deep") == ["result"]


@pytest.mark.usefixtures("swap")
@pytest.mark.parametrize("stop", [Stopped, ValueError])
def test_what_is_stopped_inside_keeps_the_old_one(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    folder = result(tmp_path)
    with pytest.raises(stop), replaced_folder(folder) as partial:
        (partial / "b").write_text("half")
        raise stop
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["result"]


def test_an_interrupt_between_the_two_renames_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = result(tmp_path)
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise Stopped
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Stopped), replaced_folder(folder) as partial:
        (partial / "b").write_text("new")
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["result"]


def test_this_file_system_exchanges_folders(tmp_path: Path) -> None:
    # Were it not so, the exchange above would be a second test of the fallback.
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (other / "x").mkdir(parents=True)
    assert files._exchange(one, other)
    assert (one / "x").is_dir()
    assert not files._exchange(one, tmp_path / "absent")


_CHILD = """
import os, sys
from pathlib import Path
from imagebuild import files

folder, point = Path(sys.argv[1]), sys.argv[2]
def stop(*_):
    os.kill(os.getpid(), 9)
if point == "fallback":
    files._exchange = lambda *_: False
    real = Path.rename
    Path.rename = lambda self, to: stop() if self.name.endswith(".partial") else real(self, to)
if point == "swap":
    files._exchange = stop
if point == "swapped":
    files.sync_folder = stop
with files.replaced_folder(folder) as partial:
    (partial / "b").write_text("half")
    if point == "inside":
        stop()
    (partial / "c").write_text("new")
"""


@pytest.mark.parametrize(
    ("point", "left"),
    [("inside", ["a"]), ("swap", ["a"]), ("swapped", ["b", "c"]), ("fallback", None)],
)
def test_kill_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, point: str, left: list[str] | None
) -> None:
    folder = result(tmp_path)
    command = [sys.executable, "-c", _CHILD, str(folder), point]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    # Only where the kernel cannot exchange is there a moment without either: the next run heals it.
    assert (sorted(p.name for p in folder.iterdir()) if folder.exists() else None) == left
    with pytest.raises(Stopped), replaced_folder(folder):
        assert sorted(p.name for p in folder.iterdir()) == (left or ["a"])
        raise Stopped
    assert names(tmp_path) == ["result"]


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    calls: list[Callable[[], object]] = [
        lambda: replaced_folder(tmp_path / "x").__enter__(),
        lambda: only_one(tmp_path / "x" / "y", "a build").__enter__(),
        lambda: write_atomically(tmp_path / "x" / "y", b""),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="found Permission denied"):
            call()
