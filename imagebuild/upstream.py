"""Bases as trees: opens the wheels of a vLLM release and of the projects it pins.

It joins recipe, lock and `imagebuild.sources`; it judges nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from imagebuild.config import Recipe
from imagebuild.errors import EngineError, IntegrityError, ReviewError, UsageError
from imagebuild.lock import BaseLock, Lock
from imagebuild.patching.tree import Identity, Tree, UnionTree
from imagebuild.pins import DebPin, WheelPin
from imagebuild.sources.cache import Cache
from imagebuild.sources.download import Progress, fetch, no_progress
from imagebuild.sources.http import Http
from imagebuild.sources.index import IndexFile, PackageIndex
from imagebuild.sources.pipconf import read_settings, scrub
from imagebuild.sources.wheel import RemoteWheel, WheelTree, open_wheel
from imagebuild.sources.wheelbase import Wheel


class LazyTree:
    """A wheel of one package that is opened when a file of that package is asked for."""

    def __init__(self, package: str, opener: Callable[[], Tree]) -> None:
        self._prefix = package + "/"
        self._open = opener
        self._tree: Tree | None = None

    def _get(self) -> Tree:
        if self._tree is None:
            self._tree = self._open()
        return self._tree

    @property
    def identity(self) -> Identity:
        return self._get().identity

    def read(self, path: str) -> bytes:
        if not path.startswith(self._prefix):
            raise FileNotFoundError(path)
        return self._get().read(path)

    def exists(self, path: str) -> bool:
        return path.startswith(self._prefix) and self._get().exists(path)

    def iter(self, prefix: str = "") -> Iterator[str]:
        if prefix.startswith(self._prefix) or self._prefix.startswith(prefix):
            yield from self._get().iter(prefix)

    def prefetch(self, paths: Iterable[str]) -> None:
        wanted = [path for path in paths if path.startswith(self._prefix)]
        if wanted:
            self._get().prefetch(wanted)


@dataclass(frozen=True)
class Base:
    """One vLLM release, ready to be read.

    Attributes:
        version: of the release.
        tree: the site's wheels side by side.
        pins: what its wheels require of the watched projects: an exact version, or a range.
        others: the exact version of each other project that the tree is made of.
    """

    version: str
    tree: Tree
    pins: dict[str, str]
    others: dict[str, str] = field(default_factory=dict)


class Upstream:
    """One session of reading bases. Use it as a context manager.

    Nothing is asked of the network, of pip or of the disk before it is needed.
    """

    def __init__(
        self,
        recipe: Recipe,
        lock: Lock,
        *,
        offline: bool = False,
        progress: Progress = no_progress,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.recipe = recipe
        self.lock = lock
        self.progress = progress
        self.offline = offline
        self._notice = notice
        self.notices = 0  # sentences said so far
        self.cache = Cache(offline=offline, notice=notice)
        self._wheels: dict[tuple[str, str, str, str], WheelTree | RemoteWheel] = {}
        # Releases are read side by side; a wheel that two of them need is opened once.
        self._opening = threading.Lock()

    @functools.cached_property
    def http(self) -> Http:
        """The session, as pip is configured."""
        return Http(read_settings(), offline=self.offline)

    @functools.cached_property
    def index(self) -> PackageIndex:
        """The package indexes."""
        return PackageIndex(self.http.settings, self.http, self.cache)

    def notice(self, text: str) -> None:
        """Says what could not be had, where the work goes on without it."""
        self.notices += 1
        self._notice(text)

    @property
    def traffic(self) -> tuple[int, int]:
        """Requests sent and body bytes received so far."""
        if "http" not in vars(self):
            return 0, 0
        return self.http.requests, self.http.bytes_fetched

    def __enter__(self) -> Upstream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for wheel in self._wheels.values():
            wheel.close()
        if "http" in vars(self):
            self.http.close()
        self.cache.close()

    def file(
        self, project: str, version: str, platform: str, pin: WheelPin | None = None
    ) -> IndexFile:
        """The wheel of a version; a locked one is taken even when upstream withdrew it."""
        locked = pin is not None
        return self.index.wheel(project, version, platform, allow_yanked=locked,
                                sha256=pin.sha256 if pin else None)  # fmt: skip

    def sha256(self, project: str, version: str, platform: str, vllm: str) -> str | None:
        """The hash of the wheel that `open` would read, as the index has it now; None: not known.

        Args:
            project: vllm, or one that it pins.
            version: of the project.
            platform: docker's word.
            vllm: the release; its locked wheels are taken where it is locked.

        Raises:
            UsageError, ReviewError, IntegrityError, EngineError: as `PackageIndex.wheel`.
        """
        locked = self.lock.find(vllm)
        pin = locked.wheel(project, platform) if locked else None
        if pin is not None and self.offline:
            return pin.sha256
        return self.file(project, version, platform, pin).sha256

    def open(self, version: str, platform: str, *, by_lock: bool = True) -> Base:
        """Opens a release by ranges, or from the cache where its wheel is there whole.

        Args:
            version: of vLLM.
            platform: docker's word, such as "linux/amd64".
            by_lock: take the locked wheel of a locked release; else what the index offers now.

        Raises:
            UsageError, ReviewError, IntegrityError, EngineError: as `PackageIndex.wheel` and
            `open_wheel`.
        """
        locked = self.lock.find(version) if by_lock else None
        wheel = self._wheel(next(iter(self.recipe.site)), version, platform, locked)
        return self._join(wheel, version, platform, locked)

    def nightly(self, url: str, platform: str) -> Wheel:
        """The newest vLLM wheel of another index, such as one of a single commit.

        Args:
            url: of the index (its page of vLLM is at URL/vllm/), or of the page itself.
            platform: docker's word.

        Raises:
            UsageError: neither has a vLLM wheel for the platform.
            EngineError: as `PackageIndex.files`.
        """
        settings = self.http.settings
        self.http.remember_login(url)
        empty = replace(settings, extra_index_urls=(), find_links=(), no_index=False)
        index = PackageIndex(replace(empty, index_url=url), self.http, self.cache)
        page = PackageIndex(replace(empty, no_index=True, find_links=(url,)), self.http, self.cache)
        offered = index.offered("vllm") or page.offered("vllm")
        wheels = [file for file in offered if file.filename.endswith(".whl")]
        if not wheels:
            raise UsageError(f"{scrub(url)}: expected an index with vllm wheels, found none",
                             hint="name the index of one commit, or its page of vllm")  # fmt: skip
        owner = index if index.offered("vllm") else page
        file = owner.wheel("vllm", owner.versions("vllm")[-1], platform)
        key = ("vllm", file.url, platform, "")
        with self._opening:
            if key not in self._wheels:
                self._wheels[key] = open_wheel(file, self.http, self.cache, platform=platform,
                                               progress=self.progress)  # fmt: skip
            return self._wheels[key]

    def beside(self, wheel: Wheel, version: str, platform: str) -> Base:
        """Joins a vLLM wheel with the wheels of what it pins."""
        return self._join(wheel, version, platform, None)

    def _join(self, wheel: Wheel, version: str, platform: str, locked: BaseLock | None) -> Base:
        others = list(self.recipe.site)[1:]
        trees: list[Tree] = [wheel]
        trees += [self._lazy(project, wheel, platform, locked) for project in others]
        exact = {project: wheel.requirement(project) or "" for project in others}
        return Base(version, UnionTree(trees), self.pins(wheel, platform), exact)

    def _wheel(self, project: str, version: str, platform: str, locked: BaseLock | None) -> Wheel:
        pin = locked.wheel(project, platform) if locked else None
        key = (project, version, platform, pin.sha256 if pin else "")
        with self._opening:
            if key not in self._wheels:
                self._wheels[key] = self._open(project, version, platform, pin)
            return self._wheels[key]

    def _open(
        self, project: str, version: str, platform: str, pin: WheelPin | None
    ) -> WheelTree | RemoteWheel:
        path = self.cache.blob(pin.sha256) if pin else None
        if path is not None and pin is not None:
            tree = WheelTree(path, platform=platform, source=pin.filename)
            tree.require(project, version)
            return tree
        file = self.file(project, version, platform, pin)
        # A part of a remote wheel cannot be checked by the whole one's hash, so it gets none.
        wanted = pin.sha256 if pin and file.url.startswith("file:") else None
        return open_wheel(file, self.http, self.cache, platform=platform, sha256=wanted,
                          progress=self.progress)  # fmt: skip

    def _lazy(self, project: str, vllm: Wheel, platform: str, locked: BaseLock | None) -> LazyTree:
        def opener() -> Tree:
            version = vllm.requirement(project)
            if version is None:
                raise IntegrityError(f"{vllm.identity.source}: expected an exact pin of {project} "
                                     "in its METADATA, found none")  # fmt: skip
            return self._wheel(project, version, platform, locked)

        return LazyTree(self.recipe.site[project], opener)

    def pins(self, vllm: Wheel, platform: str) -> dict[str, str]:
        """What vLLM requires of the watched projects, and what its torch requires of the others.

        An index need not have that torch; then its requirements are left out and a notice says so.
        """
        found = _required(vllm, self.recipe.pins)
        torch = found.get("torch", "")
        if is_exact(torch):
            try:
                found = self.torch_pins(torch, platform) | found
            except (UsageError, ReviewError) as error:
                self.notice(f"what torch {torch} requires is not known: {error}")
        return {project: found[project] for project in self.recipe.pins if project in found}

    def torch_pins(self, version: str, platform: str) -> dict[str, str]:
        """What a torch wheel requires of the watched projects, by the lock or by its METADATA."""
        known = self.lock.requires.get(f"torch=={version}")
        if known is not None:
            return dict(known)
        wheel = self._wheel("torch", version, platform, None)
        return _required(wheel, [project for project in self.recipe.pins if project != "torch"])

    def fetch(self, project: str, version: str, platform: str, pin: WheelPin) -> Path:
        """The whole wheel, verified, from the cache or downloaded.

        Raises:
            IntegrityError: other bytes, or a locked hash that is another wheel's.
            EngineError: as `fetch`.
        """
        path = self.cache.blob(pin.sha256)
        if path is None:
            file = self.file(project, version, platform, pin)
            path = fetch(file, pin.sha256, self.cache, self.http, self.progress)
        with WheelTree(path, platform=platform, source=pin.filename) as tree:
            tree.require(project, version)
        return path

    def is_cached(self, pin: WheelPin) -> bool:
        """Whether a whole file is in the cache, so that nothing is downloaded."""
        return self.cache.blob_path(pin.sha256).exists()

    def fetch_sdist(self, project: str, pin: WheelPin) -> Path:
        """The whole sdist, verified, from the cache or downloaded.

        Raises:
            IntegrityError: the index no longer offers it, or offers other bytes.
            EngineError: as `fetch`.
        """
        path = self.cache.blob(pin.sha256)
        if path is not None:
            return path
        offered = self.index.files(project)
        file = next((one for one in offered if one.filename == pin.filename), None)
        if file is None:
            raise IntegrityError(f"{pin.filename}: expected it in the index, found none",
                                 hint="build.py lock check wheels")  # fmt: skip
        return fetch(file, pin.sha256, self.cache, self.http, self.progress)

    def fetch_deb(self, pin: DebPin) -> Path:
        """A locked .deb, verified, from the cache or downloaded.

        Raises:
            IntegrityError: its archive offers other bytes.
            EngineError: as `fetch`; an archive keeps the newest version of a package only.
        """
        path = self.cache.blob(pin.sha256)
        if path is not None:
            return path
        file = IndexFile("", pin.filename, "", pin.url, pin.sha256, pin.size)
        try:
            return fetch(file, pin.sha256, self.cache, self.http, self.progress)
        except IntegrityError as error:
            hint = "build.py lock update debs, or give them: --build-context debs=DIR"
            raise IntegrityError(str(error), hint=hint) from error
        except EngineError as error:
            if self.http.offline:
                raise
            hint = ("an archive drops what is superseded: build.py lock update debs, or give the "
                    "packages: --build-context debs=DIR")  # fmt: skip
            raise EngineError(str(error), hint=hint) from error


def is_exact(pin: str) -> bool:
    """Whether a pin is one version ("2.13.0") and not a range ("<3,>=2")."""
    return pin[:1].isdigit()


def _required(wheel: Wheel, projects: Iterable[str]) -> dict[str, str]:
    """The exact version, or else the range, that a wheel requires of each project."""
    wanted = {p: wheel.requirement(p) or wheel.specifier(p) for p in projects}
    return {project: version for project, version in wanted.items() if version}
