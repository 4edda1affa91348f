"""Builds the same thing twice, or an image once more from its labels, and compares the two.

Each build is a process of its own, so that nothing of one reaches the other: other folder, other
file times, another time zone, another seed of Python's hashes. It judges by
`imagebuild.engines.compare` alone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild import dockerfile
from imagebuild.config import ROOT, load_recipe
from imagebuild.engines.compare import Comparison, folders, images
from imagebuild.engines.image import ARCHIVE, LABEL
from imagebuild.engines.layers import Layout
from imagebuild.engines.tree import LAYER
from imagebuild.engines.workplace import SOURCE, worktree
from imagebuild.errors import (
    BrokenError,
    BuildError,
    EngineError,
    IntegrityError,
    ReviewError,
    UsageError,
)

Step = Callable[[str], None]
Echo = Callable[[Sequence[str]], None]

# What a build reads, with what git needs to name the commit.
_READ = (".dockerignore", ".git", ".gitignore", "Dockerfile", "image", "imagebuild", "kernel",
         "patches", "verify-base.py")  # fmt: skip
_CALL = """\
import sys
from pathlib import Path
from imagebuild.cli import main
sys.exit(main(sys.argv[2:], root=Path(sys.argv[1])))
"""
_ELSEWHERE = {"PYTHONHASHSEED": "4242", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
_ERRORS: Mapping[int, type[BuildError]] = {
    1: ReviewError,
    2: UsageError,
    3: BrokenError,
    4: IntegrityError,
}
_OCI = "org.opencontainers.image."


@dataclass(frozen=True)
class Origin:
    """What an image says of itself, as far as a rebuild needs it.

    Attributes:
        recipe: its name.
        version: of the base's vLLM.
        revision: whole commit.
        base: reference for FROM.
        platforms: docker's words.
        flashkda, cluster: the build's choices.
    """

    recipe: str
    version: str
    revision: str
    base: str
    platforms: tuple[str, ...]
    flashkda: str
    cluster: str


def trees(root: Path, arguments: Sequence[str], work: Path, step: Step) -> Comparison:
    """Builds a tree twice with `build` and the given arguments, into folders of `work`.

    Raises:
        BuildError: a build failed, with its own exit code.
    """
    step("first build")
    first = call(root, ["build", *arguments, "--dist", str(work / "one")])
    step("second build, from a copy in another folder")
    copy = copy_of(root, work / "somewhere" / "else" / "copy")
    second = call(copy, ["build", *arguments, "--dist", str(work / "other")], is_second=True)
    step("compare")
    found = folders(Path(first["folder"]), Path(second["folder"]), LAYER)
    digests = tuple(f"sha256:{one['layer_sha256']}" for one in (first, second))
    return Comparison((digests[0], digests[1]), found.differences)


def twice(root: Path, arguments: Sequence[str], work: Path, step: Step) -> Comparison:
    """Builds an image twice: the second time every step runs again, in a copy elsewhere.

    Git sources are kept by the engine under their commit, so they are fetched once.

    Raises:
        BuildError: a build failed, with its own exit code.
    """
    step("first build")
    first = _archive(root, arguments, work / "one", is_second=False)
    step("second build, without the cache, from a copy in another folder")
    copy = copy_of(root, work / "somewhere" / "else" / "copy")
    second = _archive(copy, arguments, work / "other", is_second=True)
    return _compare(first, second, root, _choices(arguments), step)


def again(
    root: Path, given: Layout, arguments: Sequence[str], work: Path, *, echo: Echo, step: Step
) -> Comparison:
    """Rebuilds an image from the commit and the base that its labels name.

    Args:
        root: this project's repository, which has to know the commit.
        given: the image.
        arguments: of `build`, for what labels do not hold, such as named contexts.
        work: an empty folder.
        echo: told each git command.
        step: told what is under way.

    Raises:
        UsageError: the labels do not lead to a commit that is known here.
        BuildError: the build failed.
    """
    origin = origin_of(given)
    with worktree(root, origin.revision, work / SOURCE, echo) as source:
        step(f"build {origin.revision[:12]} on {origin.base}")
        chosen = [*_of_origin(origin, source), *arguments]
        rebuilt = _archive(source, chosen, work / "other", is_second=True)
        return _compare(given.path, rebuilt, source, _choices(chosen), step)


def _of_origin(origin: Origin, source: Path) -> list[str]:
    served = load_recipe(origin.recipe, source).platforms
    named = [arch for arch, platform in served.items() if platform in origin.platforms]
    return ["--recipe", origin.recipe, "--base-version", origin.version, "--base", origin.base,
            "--arch", named[0] if len(named) == 1 else "all", "--flashkda", origin.flashkda,
            "--cluster", origin.cluster]  # fmt: skip


def _archive(root: Path, arguments: Sequence[str], dist: Path, *, is_second: bool) -> Path:
    options = ["--no-cache"] if is_second else []
    document = call(root, ["build", "--engine", "docker", "--no-load", *arguments, *options,
                           "--tag", "imagebuild/reproduce:sm", "--dist", str(dist)],
                    is_second=is_second)  # fmt: skip
    return Path(document["folder"]) / ARCHIVE


def _compare(
    one: Path, other: Path, root: Path, choices: Mapping[str, str], step: Step
) -> Comparison:
    step("compare")
    file = root / "Dockerfile"
    text = file.read_text("utf-8") if file.is_file() else ""
    steps = dockerfile.parse(text).steps(choices)
    with Layout(one) as first, Layout(other) as second:
        return images(first, second, steps)


def _choices(arguments: Sequence[str]) -> dict[str, str]:
    """The build arguments that decide which stages are in the image."""
    given = dict(itertools.pairwise(arguments))
    named = {"--cluster": "CLUSTER", "--flashkda": "FLASHKDA", "--base": "BASE"}
    return {name: given[flag] for flag, name in named.items() if flag in given}


def call(root: Path, arguments: Sequence[str], *, is_second: bool = False) -> dict[str, Any]:
    """Runs a verb in another process on a repository, with that repository's own code.

    Raises:
        BuildError: it failed; message, hint and exit code are its own.
    """
    code = root if (root / "imagebuild").is_dir() else ROOT
    command = [sys.executable, "-B", "-c", _CALL, str(root), *arguments, "--format", "json"]
    environment = {**os.environ, **(_ELSEWHERE if is_second else {"PYTHONHASHSEED": "1"})}
    with subprocess.Popen(command, cwd=code, env=environment, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        try:
            out, _ = process.communicate()
        except BaseException:
            process.terminate()  # and not kill: it has processes of its own to end
            raise
    try:
        document = json.loads(out)
    except ValueError:
        document = {"error": f"the build ended with {process.returncode} and no result"}
    if process.returncode:
        kind = _ERRORS.get(process.returncode, EngineError)
        which = "second" if is_second else "first"
        raise kind(f"{which} build: {document.get('error')}", hint=document.get("hint"))
    return dict(document)


def copy_of(root: Path, target: Path) -> Path:
    """A copy of what a build reads, with other file times; git names the same commit in it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    target.mkdir(parents=True)
    for name in _READ:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored, symlinks=True)
        elif source.exists():
            shutil.copy2(source, target / name)
    for path in target.rglob("*"):
        if ".git" not in path.relative_to(target).parts and not path.is_symlink():
            os.utime(path, (1, 1))
    return target


def origin_of(given: Layout) -> Origin:
    """Reads the labels of an image.

    Raises:
        UsageError: they do not say enough for a rebuild; the message says what is missing.
    """
    image = next(iter(given.images.values()))
    labels = image.labels
    wanted = {"recipe": LABEL, "version": f"{_OCI}version", "base": f"{_OCI}base.name",
              "base digest": f"{_OCI}base.digest", "flashkda": "imagebuild.flashkda",
              "cluster": "imagebuild.cluster"}  # fmt: skip
    missing = [label for label in wanted.values() if not labels.get(label)]
    if missing:
        raise UsageError(f"{given.path.name}: expected the labels of a build by this project, "
                         f"found none of {', '.join(missing)}")  # fmt: skip
    revision = labels.get(f"{_OCI}revision", "")
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise UsageError(
            f"{given.path.name}: expected the commit that it was built from, found "
            + (f"{revision!r}: the files were edited after that commit" if revision
               else "none: it was not built in a git repository"),
            hint="commit, then build; or build.py reproduce without an image",
        )  # fmt: skip
    return Origin(
        recipe=labels[LABEL],
        version=labels[f"{_OCI}version"],
        revision=revision,
        base=_base_of(labels, json.dumps(dict(image.config))),
        platforms=tuple(given.images),
        flashkda=labels["imagebuild.flashkda"],
        cluster=labels["imagebuild.cluster"],
    )


def _base_of(labels: Mapping[str, str], config: str) -> str:
    """The base as FROM named it: by digest, where the image's history shows it so."""
    name, digest = labels[f"{_OCI}base.name"], labels[f"{_OCI}base.digest"]
    whole = f"{name}@{digest}"
    return whole if whole in config or ":" not in name.rpartition("/")[2] else name
