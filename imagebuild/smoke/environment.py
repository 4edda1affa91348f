"""Makes the smoke environment on demand, finds it again, and removes it.

One environment is a venv below the cache folder, named by what is in it: the locked requirements,
the torch wheel and the Python. `imagebuild.bootstrap` makes it, under a lock and with a stamp
written last, so that two first calls make one, and a killed one leaves nothing that looks whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from packaging.version import Version

from imagebuild import venvs
from imagebuild.bootstrap import Layer, ensure, flaw
from imagebuild.console import Console
from imagebuild.errors import EngineError
from imagebuild.files import write_atomically
from imagebuild.smoke.torchbuild import Interpreter, TorchBuild, choose, local_path
from imagebuild.sources.cache import SMOKE, default_root
from imagebuild.sources.disk import DiskError, free_bytes
from imagebuild.sources.download import fetch
from imagebuild.testrun import find_interpreter, version_of
from imagebuild.upstream import Upstream

VERSIONS = ("3.12", "3.11", "3.13")
STAMPS = (".stamp", ".stamp-torch")
# Measured with torch 2.13.0+cpu on x86_64, 2026-11-29: 79 packages and torch.
PACKAGES_BYTES = 86_000_000
INSTALLED_BYTES = 1_290_000_000
_FOLDER = re.compile(r"py[\d.]+-torch.+-[0-9a-f]{12}")
# Every package stands in the lock by hash; what one of them says it needs is settled already, and
# two of them name torch, which is not in the lock.
_OPTIONS = ("--no-deps",)


@dataclass(frozen=True)
class Environment:
    """A complete environment.

    Attributes:
        folder: of the venv.
        python_version: such as "3.11".
        torch: version of the torch in it, such as "2.13.0+cpu".
        torch_sha256: of the wheel that it came from.
        torch_file: that wheel's name.
    """

    folder: Path
    python_version: str
    torch: str
    torch_sha256: str
    torch_file: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps `remove` off while the block runs."""
        with _lock_of(self.folder).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield


@dataclass(frozen=True)
class Removed:
    """What `remove` did: environments, bytes, and how many stay since they are in use."""

    environments: int
    bytes: int
    in_use: int


def root() -> Path:
    """The folder of all environments."""
    return default_root() / SMOKE


def provide(
    requirements: Path, wanted: str, accepted: Sequence[str], upstream: Upstream, console: Console
) -> Environment:
    """The environment for a tree whose vLLM pins torch `wanted`; made when there is none.

    Args:
        requirements: the locked requirements, without torch.
        wanted: the version of torch that the tree's vLLM pins.
        accepted: those that some locked base pins.
        upstream: where torch is looked for; offline nothing is made.
        console: is told what is made and how large, before anything is fetched.

    Raises:
        EngineError: no torch that can be used, no Python, offline and absent, or a tool failed.
        IntegrityError: a package has another hash than the lock names.
    """
    known = [e for e in environments(requirements) if Version(e.torch).public == wanted]
    if known:
        return known[0]
    try:
        build = choose(upstream, wanted, accepted, interpreters())
    except EngineError as error:
        if upstream.offline:
            raise _offline(root(), wanted) from error
        raise
    folder = root() / _name(requirements, build)
    made = next((e for e in environments(requirements) if e.folder == folder), None)
    if made is not None:
        return made
    if upstream.offline:
        raise _offline(folder, wanted)
    _announce(build, folder, console)
    return _make(folder, requirements, build, upstream)


def environments(requirements: Path) -> list[Environment]:
    """Every complete environment with these requirements, by name."""
    found = []
    for about in sorted(root().glob("*.json")):
        folder = about.with_suffix("")
        try:
            environment = Environment(folder, **json.loads(about.read_text("utf-8")))
        except (ValueError, TypeError):
            continue  # cut off, or of another version of this tool
        if not any(flaw(folder, layer) for layer in _layers(folder, requirements)):
            found.append(environment)
    return found


def interpreters() -> list[Interpreter]:
    """The Pythons of this machine that the requirements are locked for, the running one first."""
    own = getattr(sys, "_base_executable", None) or sys.executable
    known = {version_of(own): own}
    for version in VERSIONS:
        if version not in known and (path := find_interpreter(version)):
            known[version] = path
    return [
        Interpreter((int(version.split(".")[0]), int(version.split(".")[1])), path)
        for version, path in known.items()
        if version in VERSIONS and version is not None
    ]


def usage() -> tuple[int, int]:
    """How many environments there are, whole or not, and their bytes on disk."""
    folders = _folders()
    return len(folders), sum(_size(folder) for folder in folders)


def remove() -> Removed:
    """Removes every environment that no process uses. Raises OSError."""
    gone = freed = in_use = 0
    for folder in _folders():
        with _lock_of(folder).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                in_use += 1
                continue
            size = _size(folder)
            for beside in (_about_of(folder), _torch_of(folder)):
                beside.unlink(missing_ok=True)
            shutil.rmtree(_wheel_of(folder), ignore_errors=True)
            venvs.remove(folder, STAMPS)
            gone, freed = gone + 1, freed + size
    return Removed(gone, freed, in_use)


def _offline(place: Path, wanted: str) -> EngineError:
    return EngineError(
        f"{place}: expected a smoke environment for torch {wanted}, found none, and --offline is "
        "set",
        hint="run the same command once without --offline",
    )


def _name(requirements: Path, build: TorchBuild) -> str:
    content = requirements.read_bytes() + str(build.file.sha256).encode()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"py{build.interpreter.text}-torch{Version(build.file.version).public}-{digest}"


def _folders() -> list[Path]:
    return sorted(path for path in root().glob("py*") if _FOLDER.fullmatch(path.name))


def _about_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")


def _torch_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".torch.txt")


def _wheel_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".wheel")


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _layers(folder: Path, requirements: Path) -> list[Layer]:
    return [(STAMPS[0], requirements), (STAMPS[1], _torch_of(folder))]


def _announce(build: TorchBuild, folder: Path, console: Console) -> None:
    """Says what is made and how large it is, before anything is fetched."""
    size = f"{build.file.size / 1e6:.0f} MB" if build.file.size else "of unknown size"
    where = "on this machine" if local_path(build.file) else "to download"
    console.note(
        f"the smoke environment is made once: torch {build.file.version} ({size}, {where}) and "
        f"the packages that vLLM imports ({PACKAGES_BYTES / 1e6:.0f} MB to download) for Python "
        f"{build.interpreter.text}; {INSTALLED_BYTES / 1e9:.1f} GB in {folder}"
    )
    if not build.is_wanted_version:
        console.note(f"vLLM pins torch {build.wanted}, of which pip offers no build without CUDA; "
                     f"{build.file.version} serves for Python code")  # fmt: skip
    if (free := free_bytes(folder)) < INSTALLED_BYTES:
        raise DiskError(f"{folder}: expected {INSTALLED_BYTES / 1e9:.1f} GB for the smoke "
                        f"environment, found {free / 1e9:.1f} GB free",
                        hint="free some space, or set IMAGEBUILD_CACHE=DIR")  # fmt: skip


def _make(folder: Path, requirements: Path, build: TorchBuild, upstream: Upstream) -> Environment:
    sha256 = str(build.file.sha256)
    with _wheel(folder, build, upstream) as wheel:
        line = f"torch @ file://{quote(str(wheel))} --hash=sha256:{sha256}\n"
        write_atomically(_torch_of(folder), line.encode())
        ensure(folder, _layers(folder, requirements), build.interpreter.path, _OPTIONS)
    made = Environment(
        folder, build.interpreter.text, build.file.version, sha256, build.file.filename
    )
    about = asdict(made)
    del about["folder"]
    write_atomically(_about_of(folder), json.dumps(about).encode())
    return made


@contextlib.contextmanager
def _wheel(folder: Path, build: TorchBuild, upstream: Upstream) -> Iterator[Path]:
    """The wheel under its own name, which installers insist on; a fetched one only meanwhile."""
    path = local_path(build.file)
    if path is not None:
        yield path
        return
    blob = fetch(build.file, build.file.sha256, upstream.cache, upstream.http, upstream.progress)
    # One name for all calls: it stands in the requirements, and so in the stamp.
    named = _wheel_of(folder) / build.file.filename
    named.parent.mkdir(parents=True, exist_ok=True)
    temporary = named.with_name(f".{os.getpid()}.tmp")
    try:
        _link(blob, temporary)
        temporary.replace(named)
    finally:
        temporary.unlink(missing_ok=True)
    yield named
    # Not after an error: another call that waits for its turn installs from it.
    shutil.rmtree(named.parent, ignore_errors=True)


def _link(blob: Path, name: Path) -> None:
    try:
        os.link(blob, name)
    except OSError:  # a file system without hard links
        shutil.copyfile(blob, name)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
