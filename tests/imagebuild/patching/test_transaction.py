"""All or nothing: kills at every step, refusals of the file system, recovery."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagebuild.errors import BrokenError, BuildError, EngineError, IntegrityError, UsageError
from imagebuild.patching import apply as engine
from imagebuild.patching import transaction
from imagebuild.patching.manifest import sha256
from imagebuild.patching.patch import NewFile, Variant
from imagebuild.patching.series import Series
from imagebuild.patching.transaction import Change
from tests.support import faults, site, toy
from tests.support.site import make_site, picture
from tests.support.toy import CEILING, CONFIG, DEFAULT, ENGINE

REPOSITORY = Path(__file__).parents[3]
Picture = dict[str, tuple[str, int, bytes]]


def old_series(runtime: Path) -> Series:
    """Two edited files, their byte code, and a file in two new folders."""
    files = (NewFile(source="trace.py", path="vllm/extra/deep/trace.py"),)
    files += (NewFile(source="trace.py", path="vllm/extra/trace.py"),)
    added = toy.patch("vllm_trace_module", variants=(Variant(versions=toy.RANGE, files=files),))
    return toy.series(*toy.toy_series().patches, added, runtime=runtime)


def new_series(runtime: Path) -> Series:
    """Edits one of the files otherwise, leaves the other alone, adds a file elsewhere."""
    files = (NewFile(source="trace.py", path="vllm/more/trace.py"),)
    edit = replace(CEILING, text="        ceiling = 91\n")
    return toy.series(toy.patch("vllm_engine_ceiling", edit, files=files), runtime=runtime)


def link_tree(source: Path, target: Path) -> Path:
    """A copy by hard links, which the engine must not write through."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


@dataclass(frozen=True)
class Trees:
    """Clean trees to copy, and their pictures."""

    folder: Path
    old: Series
    new: Series
    pictures: dict[str, Picture]

    def copy(self, name: str) -> Path:
        work = self.folder / "work"
        if work.exists():
            shutil.rmtree(work)
        return link_tree(self.folder / name, work)

    def check_moment(self, root: Path, *states: str) -> None:
        """No file is half written, and a tree without a journal is in one of the states."""
        now = picture(root)
        known = [self.pictures[state] for state in states]
        for path, one in now.items():
            if path.split("/")[0] != ".imagebuild" and not path.endswith(".imagebuild-tmp"):
                assert (
                    one in [state[path] for state in known if path in state] or one[0] == "folder"
                )
        manifest = now.get(".imagebuild/manifest.json")
        if ".imagebuild/journal.json" in now:
            with pytest.raises(BrokenError, match=r"a change of this tree was interrupted"):
                engine.pristine(root)
        else:
            assert manifest in [state.get(".imagebuild/manifest.json") for state in known]
            _tree, found = engine.pristine(root)
            assert (found is None) is (manifest is None)


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    memory = Path("/dev/shm")  # thousands of small trees come and go
    where = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=where))
    yield make_trees(folder)
    shutil.rmtree(folder)


def make_trees(folder: Path) -> Trees:
    (folder / "trace.py").write_text("LIMIT = 3\n")
    old, new = old_series(folder), new_series(folder)
    make_site(folder / "pristine", pycs="unchecked")
    (folder / "pristine" / ENGINE).chmod(0o600)
    for name, series in (("old", old), ("new", new)):
        shutil.copytree(folder / "pristine", folder / name)
        toy.apply(folder / name, series)
    names = ("pristine", "old", "new")
    return Trees(folder, old, new, {name: picture(folder / name) for name in names})


def apply_to(root: Path, series: Series) -> Callable[[], object]:
    return lambda: toy.apply(root, series)


def take_back(root: Path) -> None:
    """Reverts; a tree in which nothing had begun has nothing to revert."""
    try:
        engine.revert(root)
    except UsageError:
        assert not (root / ".imagebuild").exists()


# What starts from which state, and the state that it leads to.
CHANGES = {
    "apply": ("pristine", "old"),
    "revert": ("old", "pristine"),
    "upgrade": ("old", "new"),
}


def change(trees: Trees, name: str, root: Path) -> Callable[[], object]:
    if name == "revert":
        return lambda: engine.revert(root)
    return apply_to(root, trees.old if name == "apply" else trees.new)


@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_at_every_step(trees: Trees, name: str) -> None:
    start, end = CHANGES[name]
    n = 0
    while True:
        n += 1
        root = trees.copy(start)
        if not faults.killed_at(n, change(trees, name, root)):
            assert picture(root) == trees.pictures[end]
            break
        trees.check_moment(root, start, end)
        struck = trees.folder / "struck"
        link_tree(root, struck)
        take_back(root)
        assert picture(root) == trees.pictures["pristine"], n
        shutil.rmtree(root)
        link_tree(struck, root)
        state = ("old", "new")[n % 2]
        toy.apply(root, trees.old if state == "old" else trees.new)
        assert picture(root) == trees.pictures[state], n
        shutil.rmtree(struck)
    assert n > 40  # the steps were counted


@pytest.mark.parametrize("name", CHANGES)
def test_a_second_kill_during_recovery(trees: Trees, name: str) -> None:
    start, end = CHANGES[name]
    choose = random.Random(name)
    second = {"apply": 0, "revert": 0}
    for n in range(1, 200, 2):
        root = trees.copy(start)
        if not faults.killed_at(n, change(trees, name, root)):
            break
        then = ("apply", "revert")[n // 2 % 2]
        again = apply_to(root, trees.old) if then == "apply" else lambda: take_back(root)  # noqa: B023
        second[then] += faults.killed_at(choose.randint(1, 30), again)
        trees.check_moment(root, start, end, "old", "pristine")
        again()
        assert picture(root) == trees.pictures["old" if then == "apply" else "pristine"], n
    assert min(second.values()) >= 7


def test_kills_at_random_moments(trees: Trees) -> None:
    """The same without a hook: SIGKILL from outside, whenever it comes."""
    choose = random.Random(1)
    root = trees.copy("pristine")
    for _ in range(30):
        child = os.fork()
        if child == 0:
            while True:
                toy.apply(root, trees.old)
                engine.revert(root)
        time.sleep(choose.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        trees.check_moment(root, "pristine", "old")
    toy.apply(root, trees.old)
    assert picture(root) == trees.pictures["old"]
    engine.revert(root)
    assert picture(root) == trees.pictures["pristine"]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_refusal_at_every_step(trees: Trees, name: str, code: int) -> None:
    """One call fails: one sentence, and the old state, or a journal that the next call ends."""
    start, end = CHANGES[name]
    sentences = set()

    def refuse(_step: str) -> None:
        raise OSError(code, os.strerror(code))

    # Every step for the full disk, every third one for the others, which differ in words alone.
    unchanged = 0
    for n in itertools.count(1, 1 if code == errno.ENOSPC else 3):
        root = trees.copy(start)
        with faults.armed(n, refuse) as steps:
            try:
                change(trees, name, root)()
            except BuildError as error:
                assert (type(error), error.exit_code) == (EngineError, 5)
                sentences.add(str(error).split(": ", 1)[1])
                unchanged += picture(root) == trees.pictures[start]
            else:
                if steps.count < n:
                    assert picture(root) == trees.pictures[end]
                    break
        change(trees, "apply", root)()
        assert picture(root) == trees.pictures["old"], n
    assert (
        sentences
        == {
            errno.ENOSPC: {"no space left on the device"},
            errno.EACCES: {"cannot be written: Permission denied"},
            errno.EIO: {"Input/output error"},
        }[code]
    )
    assert unchanged >= (30 if code == errno.ENOSPC else 10)


FILL = """
import os, sys
from pathlib import Path
from imagebuild.errors import EngineError
from tests.support import site, toy
disk = Path(sys.argv[1])
root = site.make_site(disk / "site", {"vllm/big.py": "x = 1\\n" + "# filler\\n" * 2000},
                      pycs="unchecked")
edit = toy.Edit(label="big", path="vllm/big.py", anchor="x = 1\\n", text="x = 1\\ny = 2\\n")
series = toy.series(*toy.toy_series().patches, toy.patch("vllm_big_file", edit))
before, refused = site.picture(root), 0
for pages in range(200):
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (free.f_bavail - pages) * free.f_bsize)
    try:
        toy.apply(root, series)
    except EngineError as error:
        assert "no space left on the device" in str(error), error
        assert error.hint == f"free space on the disk of {root}", error.hint
        assert site.picture(root) == before, pages
        refused += 1
        (disk / "filler").unlink()
    else:
        break
print("refused", refused > 10, "applied", site.picture(root) != before)
"""


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs {disk}"
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    probe = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"not run: `{' '.join(unshare)} sh -c '{mount}'` is not allowed here")
    run = f'{mount} && exec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", run, "sh", sys.executable, "-c", FILL, str(disk)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("refused True applied True\n", "", 0)


@pytest.fixture
def unprivileged() -> Iterator[Callable[[Path, Callable[[], str]], str]]:
    """Runs a function as a user whom permissions bind: a child gives up root."""

    def run(root: Path, act: Callable[[], str]) -> str:
        def drop() -> str:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            return act()

        if os.geteuid() == 0:
            for path in [root, *root.rglob("*")]:
                os.chown(path, 65534, 65534, follow_symlinks=False)
        return faults.in_child(drop)

    yield run


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


class TestPermissions:
    @pytest.mark.parametrize("folder", [".", "vllm/core", "vllm/core/__pycache__"])
    def test_a_read_only_folder(
        self, shared: Path, folder: str, unprivileged: Callable[[Path, Callable[[], str]], str]
    ) -> None:
        root = make_site(shared / "site", pycs="unchecked")
        before = picture(root)
        (root / folder).chmod(0o555)
        answer = unprivileged(root, lambda: str(toy.apply(root, toy.toy_series()).written))
        assert answer.startswith(f"EngineError: {root}/")
        assert answer.endswith(": cannot be written: Permission denied")
        (root / folder).chmod(0o755)
        assert picture(root) == before

    def test_a_read_only_file_is_replaced_and_keeps_its_mode(
        self, shared: Path, unprivileged: Callable[[Path, Callable[[], str]], str]
    ) -> None:
        root = make_site(shared / "site")
        (root / ENGINE).chmod(0o444)
        before = picture(root)

        def both() -> str:
            toy.apply(root, toy.toy_series())
            applied = picture(root)[ENGINE]
            engine.revert(root)
            return f"{applied[1]:o} {b'= 90' in applied[2]}"

        assert unprivileged(root, both) == "444 True"
        assert picture(root) == before

    def test_a_file_that_cannot_be_read(
        self, shared: Path, unprivileged: Callable[[Path, Callable[[], str]], str]
    ) -> None:
        root = make_site(shared / "site")
        (root / ENGINE).chmod(0)
        answer = unprivileged(root, lambda: str(toy.apply(root, toy.toy_series()).written))
        assert answer == f"EngineError: {root}/{ENGINE}: cannot be read: Permission denied"


class TestCommit:
    def test_changes_adds_and_removes(self, tmp_path: Path) -> None:
        root = make_site(tmp_path)
        changes = {
            "vllm/new/a.py": Change(b"a", 0o640),
            ENGINE: Change(b"b", 0o777),
            CONFIG: Change(None),
        }
        transaction.commit(root, changes)
        now = picture(root)
        assert now["vllm/new/a.py"] == ("file", 0o640, b"a")
        assert now[ENGINE] == ("file", 0o644, b"b")  # a file that is there keeps its mode
        assert CONFIG not in now
        assert ".imagebuild/journal.json" not in now

    def test_content_and_journal_are_on_the_disk_before_a_file_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For a power cut, which no test can make: the order of the calls."""
        root = make_site(tmp_path)
        events: list[str] = []
        replace_file = os.replace

        def sync(handle: int) -> None:
            events.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink()}")

        def record(source: Path, target: Path) -> None:
            events.append(f"replace {target}")
            replace_file(source, target)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "replace", record)
        transaction.commit(root, {ENGINE: Change(b"a"), CONFIG: Change(b"b")})
        ours, core = root / ".imagebuild", root / "vllm/core"
        kept = [ours / f"originals/{sha256(t.encode())}.bz2" for t in (site.ENGINE, site.CONFIG)]

        def temporary(path: Path) -> Path:
            return path.with_name(f".{path.name}.imagebuild-tmp")

        def written(path: Path) -> list[str]:
            return [f"sync {temporary(path)}", f"replace {path}", f"sync {path.parent}"]

        assert events == [
            *written(kept[0]),
            *written(kept[1]),
            *written(ours / "journal.json"),
            f"sync {root}",
            f"sync {temporary(root / ENGINE)}",
            f"sync {temporary(root / CONFIG)}",
            f"replace {root / ENGINE}",
            f"sync {core}",
            f"replace {root / CONFIG}",
            f"sync {core}",
            f"sync {ours}",
        ]

    def test_folders_go_only_when_empty(self, tmp_path: Path) -> None:
        root = make_site(tmp_path, {"vllm/a/b/x.py": "x", "vllm/c/x.py": "x", "vllm/c/y.py": "y"})
        changes = {"vllm/a/b/x.py": Change(None), "vllm/c/x.py": Change(None)}
        transaction.commit(root, changes, ["vllm/a/b", "vllm/a", "vllm/c"])
        assert not (root / "vllm/a").exists()
        assert (root / "vllm/c/y.py").read_text() == "y"

    def test_links_name_every_fault_before_anything_is_written(self, tmp_path: Path) -> None:
        root = make_site(tmp_path)
        (root / "vllm/link.py").symlink_to("envs.py")
        before = picture(root)
        with pytest.raises(BrokenError) as caught:
            transaction.commit(
                root, {ENGINE: Change(b"x"), "vllm/link.py": Change(b"x"), "vllm": Change(b"x")}
            )
        assert str(caught.value) == (
            f"{root}: vllm/link.py is a symbolic link to envs.py; vllm is no regular file"
        )
        assert picture(root) == before


class TestRecover:
    def journal(self, root: Path, **before_after: tuple[str | None, str | None]) -> None:
        entries = [
            {"path": path, "before": before, "after": after, "mode": 0o644}
            for path, (before, after) in before_after.items()
        ]
        folder = root / ".imagebuild"
        folder.mkdir()
        content = {"schema": 1, "changes": entries, "created": [], "emptied": []}
        (folder / "journal.json").write_text(json.dumps(content))

    def test_nothing_to_do(self, tmp_path: Path) -> None:
        assert transaction.recover(make_site(tmp_path)) is False

    def test_somebody_elses_bytes_are_not_overwritten(self, tmp_path: Path) -> None:
        root = make_site(tmp_path)
        self.journal(root, **{ENGINE: (sha256(b"old"), sha256(b"new"))})
        before = picture(root)
        with pytest.raises(IntegrityError) as caught:
            transaction.recover(root)
        assert caught.value.exit_code == 4
        assert str(caught.value) == (
            f"{root}/{ENGINE}: neither as before nor as after the interrupted change: "
            "something else wrote it"
        )
        assert picture(root) == before

    def test_byte_code_that_python_made_meanwhile_is_no_obstacle(self, trees: Trees) -> None:
        """A server started on a half-patched tree compiles what it imports."""
        pycs = [path for path in trees.pictures["pristine"] if path.endswith(".pyc")]
        assert pycs
        for n in range(20, 60, 3):
            root = trees.copy("pristine")
            assert faults.killed_at(n, change(trees, "apply", root))
            for path in pycs:
                (root / path).unlink(missing_ok=True)
                (root / path).write_bytes(b"made meanwhile")
            if (root / ".imagebuild/journal.json").exists():
                take_back(root)
                for path in (ENGINE, CONFIG):
                    assert picture(root)[path] == trees.pictures["pristine"][path], n

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"changes": [{}]}', "\xff"])
    def test_a_damaged_journal(self, tmp_path: Path, text: str) -> None:
        root = make_site(tmp_path)
        (root / ".imagebuild").mkdir()
        (root / ".imagebuild/journal.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(IntegrityError) as caught:
            transaction.recover(root)
        assert str(caught.value) == (
            f"{root}/.imagebuild/journal.json: the journal of an interrupted change cannot be read"
        )


def test_tidy_keeps_what_the_manifest_names(tmp_path: Path) -> None:
    root = make_site(tmp_path / "site")
    toy.apply(root, toy.series(toy.patch("vllm_a_b", DEFAULT)))
    before = picture(root)
    ours = root / ".imagebuild"
    (ours / "originals/.x.bz2.imagebuild-tmp").write_text("x")
    (ours / f"originals/{'0' * 64}.bz2").write_text("x")
    (ours / "stray").mkdir()
    (ours / "stray/file").write_text("x")
    transaction.tidy(root)
    assert picture(root) == before
    (ours / "manifest.json").unlink()
    transaction.tidy(root)
    assert not ours.exists()
    transaction.tidy(root)
    assert site.upstream(root) == picture(root)
