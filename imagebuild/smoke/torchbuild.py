"""Chooses a build of torch that runs without CUDA, from where pip is configured to look.

It installs nothing. What the index itself offers is of no use here: the wheels of torch 2.13 and
2.14 link cuDNN, NCCL and the rest, so that without several gigabytes of them `import torch` fails
with "libcudnn.so.9: cannot open shared object file" (tried). So a build counts when its METADATA
asks for no such project; its name alone is not believed.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from imagebuild.errors import EngineError
from imagebuild.sources.disk import hash_file
from imagebuild.sources.index import MACHINES, IndexFile
from imagebuild.sources.wheel import open_wheel
from imagebuild.upstream import Upstream

# Projects that only a build for some accelerator asks for.
_ACCELERATORS = ("nvidia-", "cuda-", "triton", "pytorch-triton", "intel-", "onemkl-sycl")
_LOOKED_AT = 8  # candidates whose METADATA is read; each costs a request or two


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine: its minor version, such as (3, 11), and its path."""

    version: tuple[int, int]
    path: str

    @property
    def text(self) -> str:
        """Such as "3.11"."""
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class TorchBuild:
    """One wheel of torch that needs no accelerator.

    Attributes:
        file: where it is; `sha256` is always set.
        wanted: the version that the tree's vLLM pins.
        interpreter: the Python that it is for.
    """

    file: IndexFile
    wanted: str
    interpreter: Interpreter

    @property
    def is_wanted_version(self) -> bool:
        """Whether it is a build of the very version that vLLM pins."""
        return Version(self.file.version).public == self.wanted


def choose(
    upstream: Upstream, wanted: str, accepted: Sequence[str], interpreters: Sequence[Interpreter]
) -> TorchBuild:
    """The best build of torch for one of the interpreters.

    A build of `wanted` wins, for whichever interpreter; else the newest of a minor version in
    `accepted`: Python code that imports under both is what the probes need.

    Args:
        upstream: where to ask.
        wanted: the version that the tree's vLLM pins.
        accepted: versions that some locked base pins.
        interpreters: in the order of preference.

    Raises:
        EngineError: pip's configuration leads to no such build, and the message says what was
            found; or an index cannot be read.
    """
    try:
        files = upstream.index.files("torch")
    except EngineError as error:
        # An index that cannot be reached is another matter, with a hint of its own.
        if "found no file of it" not in str(error):
            raise
        raise _none(wanted, [], str(error)) from error
    minors = {Version(version).release[:2] for version in [wanted, *accepted]}
    fitting = [
        (file, interpreter)
        for interpreter in interpreters
        for file in _fitting(files, interpreter)
        if Version(file.version).release[:2] in minors and not file.yanked
    ]
    # The stable sort keeps the interpreters' order among builds of one version.
    fitting.sort(key=lambda item: Version(item[0].version), reverse=True)
    fitting.sort(key=lambda item: (Version(item[0].version).public != wanted,
                                   Version(item[0].version).local != "cpu"))  # fmt: skip
    refused = []
    for file, interpreter in fitting[:_LOOKED_AT]:
        why = _why_not(file, upstream)
        if not why:
            return TorchBuild(_hashed(file), wanted, interpreter)
        refused.append(f"{file.filename} {why}")
    raise _none(wanted, refused, "")


def local_path(file: IndexFile) -> Path | None:
    """The path of a file on this machine, None for one that has to be fetched."""
    is_local = file.url.startswith("file:")
    return Path(url2pathname(urlsplit(file.url).path)) if is_local else None


def _fitting(files: Sequence[IndexFile], interpreter: Interpreter) -> Iterator[IndexFile]:
    tags = frozenset(_tags(interpreter))
    for file in files:
        if file.filename.endswith(".whl") and parse_wheel_filename(file.filename)[3] & tags:
            yield file


def _tags(interpreter: Interpreter) -> Iterator[Tag]:
    """What that Python can install on this very machine."""
    yield from cpython_tags(interpreter.version)
    yield from compatible_tags(interpreter.version)


def _why_not(file: IndexFile, upstream: Upstream) -> str:
    """Why a build is of no use, "" where it is."""
    if file.sha256 is None and local_path(file) is None:
        return "comes without a sha256 from its index"
    name = next(name for name, machine in MACHINES.items() if machine == platform.machine())
    with open_wheel(file, upstream.http, upstream.cache, platform=name) as wheel:
        lines = [str(line) for line in wheel.metadata().get_all("Requires-Dist", [])]
    needs = sorted({need for line in lines if (need := _accelerator(line))})
    if not needs:
        return ""
    size = f"of {file.size / 1e6:.0f} MB " if file.size else ""
    return f"{size}cannot be loaded without {needs[0]} and {len(needs) - 1} more projects"


def _accelerator(line: str) -> str:
    """The project that a requirement names, if it is one of an accelerator's; else ""."""
    try:
        need = Requirement(line)
    except InvalidRequirement:
        return ""
    name = str(canonicalize_name(need.name))
    holds = need.marker is None or need.marker.evaluate({"extra": ""})
    return name if holds and name.startswith(_ACCELERATORS) else ""


def _hashed(file: IndexFile) -> IndexFile:
    """The file with the hash of its bytes, where only the disk can give it."""
    path = local_path(file)
    if file.sha256 is not None or path is None:
        return file
    with path.open("rb") as opened:
        return replace(file, sha256=hash_file(opened).hexdigest())


def _none(wanted: str, refused: Sequence[str], cause: str) -> EngineError:
    found = "; ".join(refused[:2]) or cause or "no wheel for this machine's Pythons"
    return EngineError(
        f"torch {wanted}: expected a build without CUDA through pip's configuration, found {found}",
        hint="name an index of CPU builds in pip's own settings "
        "(pip config set global.extra-index-url URL, or PIP_EXTRA_INDEX_URL), or a folder that "
        "holds a +cpu wheel (find-links); nothing but --deep needs it",
    )
