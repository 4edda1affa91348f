"""`reproduce`: trees for real on a small product; images with a stand-in for the build itself.

The real engine's part is in tests/engine/test_reproduce.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from imagebuild.cli import main
from imagebuild.engines import reproduce
from imagebuild.engines.layers import Layout
from imagebuild.engines.workplace import workplace
from imagebuild.errors import UsageError
from tests.support.oci import File, layer, write
from tests.support.product import GREETER, RECIPE, Product

DOCKERFILE = "ARG BASE=x\nFROM ${BASE} AS patched\nRUN apply\n"
HISTORY = ("base", "RUN /bin/sh -c apply")
_GIT = {
    "GIT_AUTHOR_NAME": "T", "GIT_AUTHOR_EMAIL": "t@example.invalid", "GIT_COMMITTER_NAME": "T",
    "GIT_COMMITTER_EMAIL": "t@example.invalid", "GIT_CONFIG_GLOBAL": "/dev/null",
}  # fmt: skip


def test_two_trees_are_bit_identical(product: Product) -> None:
    ran = product.spawn("reproduce", "--arch", "sm_120", "--format", "json")
    assert ran.code == 0, ran.err
    document = ran.json
    assert (document["grade"], document["identical"]) == ("bit-identical", True)
    assert (document["engine"], document["differences"]) == ("tree", [])
    first, second = document["digests"]
    assert first == second
    assert list((product.root / "dist").iterdir()) == []
    assert product.run("build", "--arch", "sm_120", "--format", "json").json["layer_sha256"] == (
        first.removeprefix("sha256:")
    )


def test_a_tree_that_depends_on_a_hash_seed_is_named(product: Product) -> None:
    """The patch writes a hash into its text, so its file, and all that holds its digest, differ."""
    path = f"patches/tiny/{GREETER}.py"
    product.replace(path, '        return "good day"\\n', '        return "good day"  # {SEED}\\n')
    product.replace(path, "text='", "text=f'")
    product.replace(path, "import ast\n", 'import ast\n\nSEED = hash("a")\n')
    ran = product.spawn("reproduce", "--arch", "sm_120", "--keep", "--format", "json")
    assert ran.code == 1, ran.err
    document = ran.json
    assert document["grade"] == "identical but for named files"
    found = {one["path"]: one for one in document["differences"]}
    assert found["site/vllm/greeter.py"]["causes"] == ["content"]
    assert "line 3: " in found["site/vllm/greeter.py"]["detail"]
    assert "layer.tar/usr/lib/python3.12/dist-packages/vllm/greeter.py" in found
    assert "site/vllm/counter.py" not in found
    kept = Path(document["kept"])
    assert (kept / "one" / "tiny-sm_120" / "layer.tar").is_file()
    assert (kept / "other" / "tiny-sm_120" / "layer.tar").is_file()


def test_a_build_that_fails_keeps_its_code_and_words(product: Product) -> None:
    product.replace("image/tiny/lock.toml", 'torch = "2.13.0"', 'torch = "2.12.0"')
    ran = product.spawn("reproduce", "--arch", "sm_120")
    assert ran.code == 3
    assert "first build: " in ran.err
    assert "torch: expected 2.12.0" in ran.err


def test_a_run_that_is_told_to_end_leaves_nothing(product: Product) -> None:
    product.server.faults.hold = hold = threading.Event()
    process = product.start("reproduce", "--arch", "sm_120", "--format", "json")
    deadline = time.monotonic() + 60
    while not product.server.asked and not _is_asked() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    hold.set()
    assert process.returncode == 130, err
    assert json.loads(out)["exit_code"] == 130
    assert "error: interrupted" in err
    assert list((product.root / "dist").iterdir()) == []


def _is_asked() -> bool:
    """Whether a request is waiting at the server."""
    return any(t.name.endswith("(process_request_thread)") for t in threading.enumerate())


# The folder


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    root, dist = tmp_path / "repository", tmp_path / "dist"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "one")
    head = git(root, "rev-parse", "HEAD")
    code = (
        "import os, sys; from pathlib import Path; from imagebuild.engines.workplace import *\n"
        "root, dist, head = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
        "with workplace(dist, root, is_kept=False) as work, "
        "worktree(root, head, work / SOURCE, lambda _c: None):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(root), str(dist), head], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = dist.iterdir()
    assert (left / "source" / ".git").is_file()
    assert str(left) in git(root, "worktree", "list")
    (dist / "glm53-flash-sm_120").mkdir()
    with workplace(dist, root, is_kept=True) as kept:
        assert not left.exists()
        assert str(left) not in git(root, "worktree", "list", "--porcelain")
    with (
        workplace(dist, root, is_kept=False) as running,
        workplace(dist, root, is_kept=False) as other,
    ):
        assert running.exists()  # it is somebody's
        assert other != running
    assert sorted(path.name for path in dist.iterdir()) == ["glm53-flash-sm_120", kept.name]
    assert list(kept.iterdir()) == []


# Images


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], env={**os.environ, **_GIT},
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout.strip()


class Repository:
    """A repository with two commits, whose builds write what `files` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "repository"
        self.root.mkdir()
        git(self.root, "init", "--quiet", "--initial-branch=main")
        (self.root / ".gitignore").write_text("dist/\n")
        (self.root / "Dockerfile").write_text(DOCKERFILE)
        self.first = self.commit("one")
        self.second = self.commit("two")
        self.files = [File("opt/a", b"a")]
        self.calls: list[tuple[str, list[str], bool]] = []
        monkeypatch.setattr(reproduce, "call", self.call)

    def commit(self, text: str) -> str:
        (self.root / "image" / "tiny").mkdir(parents=True, exist_ok=True)
        (self.root / "image" / "tiny" / "recipe.toml").write_text(RECIPE)
        (self.root / "image" / "text").write_text(text)
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", text)
        return git(self.root, "rev-parse", "HEAD")

    def labels(self, revision: str) -> dict[str, str]:
        found = {
            "org.opencontainers.image.base.name": "some/name:tag",
            "org.opencontainers.image.base.digest": "sha256:" + "b" * 64,
            "org.opencontainers.image.version": "0.31.0",
            "org.opencontainers.image.revision": revision,
            "imagebuild.recipe": "tiny", "imagebuild.flashkda": "base",
            "imagebuild.cluster": "none",
        }  # fmt: skip
        return {name: value for name, value in found.items() if value}

    def image(self, path: Path, revision: str) -> Path:
        layers = [layer(File("etc/base")), layer(*self.files)]
        return write(path, layers, HISTORY, labels=self.labels(revision))

    def call(
        self, root: Path, arguments: Sequence[str], *, is_second: bool = False
    ) -> dict[str, Any]:
        text = (root / "image" / "text").read_text()
        self.calls.append((text, list(arguments), is_second))
        folder = Path(arguments[arguments.index("--dist") + 1])
        folder.mkdir(parents=True)
        self.image(folder / "image.tar", self.first)
        return {"folder": str(folder)}

    def run(self, *arguments: str, capture: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
        code = main(["reproduce", *arguments, "--format", "json"], root=self.root)
        out, err = capture.readouterr()
        return code, json.loads(out), err


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path, monkeypatch)


def test_an_archive_is_rebuilt_from_its_commit_and_labels(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = repository.image(tmp_path / "given.tar", repository.first)
    (tmp_path / "toolkit").mkdir()
    context = f"cuda={tmp_path / 'toolkit'}"
    code, document, err = repository.run(str(given), "--build-context", context, capture=capsys)
    assert (code, document["grade"]) == (0, "bit-identical"), document
    ((text, arguments, is_second),) = repository.calls
    assert text == "one"  # not what is checked out
    assert is_second
    for pair in (("--recipe", "tiny"), ("--base-version", "0.31.0"), ("--base", "some/name:tag"),
                 ("--arch", "sm_120"), ("--cluster", "none"), ("--flashkda", "base"),
                 ("--build-context", context)):  # fmt: skip
        assert " ".join(pair) in " ".join(arguments)
    assert "--no-cache" in arguments
    assert "git -C" in err
    assert "worktree add" in err
    # The checkout is gone, and the repository is as it was.
    assert len(git(repository.root, "worktree", "list").splitlines()) == 1
    assert git(repository.root, "rev-parse", "HEAD") == repository.second
    assert list((repository.root / "dist").iterdir()) == []


def test_a_rebuilt_image_that_differs_is_graded(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = repository.image(tmp_path / "given.tar", repository.first)
    repository.files = [File("opt/a", b"b")]
    code, document, _err = repository.run(str(given), capture=capsys)
    assert code == 1
    (one,) = document["differences"]
    assert (one["path"], one["stage"], one["causes"]) == ("opt/a", "patched", ["content"])


@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("", "it was not built in a git repository"),
        ("HEAD-dirty", "the files were edited after that commit"),
        ("f" * 40, "expected the commit ffff"),
    ],
)
def test_why_an_image_cannot_be_rebuilt(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], revision: str,
    said: str,
) -> None:  # fmt: skip
    given = repository.image(tmp_path / "given.tar", revision.replace("HEAD", repository.first))
    code, document, _err = repository.run(str(given), capture=capsys)
    assert code == 2
    assert said in document["error"]
    assert document["hint"]
    assert repository.calls == []


def test_an_image_of_others_is_refused(tmp_path: Path) -> None:
    given = write(tmp_path / "given.tar", [layer(File("a"))])
    with Layout(given) as layout, pytest.raises(UsageError, match=r"found none of .*recipe"):
        reproduce.origin_of(layout)


def test_a_base_named_by_digest_is_asked_for_by_digest(
    repository: Repository, tmp_path: Path
) -> None:
    whole = "some/name:tag@sha256:" + "b" * 64
    layers = [layer(File("a"))]
    labels = repository.labels(repository.first)
    for history, base in (((f"ARG BASE={whole}",), whole), (("ARG BASE=x",), "some/name:tag")):
        path = write(tmp_path / "given.tar", layers, history, labels=labels)
        with Layout(path) as layout:
            assert reproduce.origin_of(layout).base == base


def test_the_copy_has_other_times_and_names_the_same_commit(
    repository: Repository, tmp_path: Path
) -> None:
    from imagebuild.engines.image import revision_of

    (repository.root / "image" / "text").write_text("edited")
    (repository.root / "image" / "__pycache__").mkdir()
    copy = reproduce.copy_of(repository.root, tmp_path / "copy")
    assert (copy / "image" / "text").read_text() == "edited"
    assert (copy / "image" / "text").stat().st_mtime == 1
    assert not (copy / "image" / "__pycache__").exists()
    assert revision_of(copy) == revision_of(repository.root) == f"{repository.second}-dirty"


def test_an_image_has_no_tree_engine(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document, _err = repository.run(str(tmp_path), "--engine", "tree", capture=capsys)
    assert code == 2
    assert "expected no image with it" in document["error"]
