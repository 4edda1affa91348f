"""A loopback index with builds of torch of a few lines, and requirements with one small package."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.config import Recipe
from imagebuild.lock import Lock
from imagebuild.smoke.torchbuild import Interpreter
from imagebuild.upstream import Upstream
from tests.support.index_server import IndexServer
from tests.support.wheels import build_wheel

CUDA = ("filelock", 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"', "triton==3.7.1")
# A marker that holds nowhere: the requirement is in the METADATA, and is none.
ELSEWHERE = ("filelock", 'triton==3.7.1; platform_system == "Plan9"')


@dataclass
class Place:
    """A served folder, and what a session on it is told."""

    folder: Path
    server: IndexServer
    requirements: Path
    notices: list[str] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def environment(self) -> dict[str, str]:
        """Of a user whose pip knows the loopback index and nothing else; PATH has no uv."""
        return {
            "HOME": str(self.folder),
            "IMAGEBUILD_CACHE": str(self.cache),
            "PIP_INDEX_URL": self.server.url,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
            "PATH": str(path_without_uv(self.folder / "bin")),
        }

    def torch(
        self,
        version: str,
        requires: tuple[str, ...] = ("filelock",),
        *,
        tag: str = "py3-none-any",
        folder: Path | None = None,
    ) -> Path:
        """Adds a build to the index, or to another folder."""
        public = version.partition("+")[0]
        files = {"torch/__init__.py": f"__version__ = {public!r}\n".encode()}
        place = folder or self.server.folder
        return _wheel(place, "torch", version, files=files, requires=requires, tag=tag)

    def session(self, *, offline: bool = False) -> Upstream:
        """Recipe and lock are not asked by what is tested here."""
        recipe, lock = Recipe.__new__(Recipe), Lock(self.folder / "lock.toml", {})
        return Upstream(recipe, lock, offline=offline, notice=self.notices.append)


def _wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    files: dict[str, bytes],
    requires: tuple[str, ...],
    tag: str = "py3-none-any",
) -> Path:
    """A wheel that pip installs."""
    about = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
    files = {**files, f"{name}-{version}.dist-info/WHEEL": about.encode()}
    return build_wheel(folder, name=name, version=version, tag=tag, files=files, requires=requires)


def path_without_uv(folder: Path) -> Path:
    """A folder with every program of the system's but uv."""
    if not folder.exists():
        folder.mkdir()
        for place in ("/usr/bin", "/bin"):
            for program in Path(place).glob("*"):
                link = folder / program.name
                if program.name != "uv" and not link.is_symlink():
                    link.symlink_to(program)
    return folder


def place_at(folder: Path, server: IndexServer) -> Place:
    """Serves one small package, and locks it by hash."""
    files = {"tiny.py": b"WORD = 'here'\n"}
    wheel = _wheel(server.folder, "tiny", "1.0", files=files, requires=("torch",))
    requirements = folder / "smoke.txt"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements.write_text(f"tiny==1.0 --hash=sha256:{sha256}\n")
    return Place(folder, server, requirements)


def interpreter(minor: int = 12) -> Interpreter:
    return Interpreter((3, minor), f"/nowhere/python3.{minor}")
