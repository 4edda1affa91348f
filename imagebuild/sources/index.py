"""Lists and chooses the files of a project from the indexes that pip is configured with.

It downloads no distribution. Online every page is asked for again; the cache serves `--offline`.
"""

from __future__ import annotations

import bisect
import json
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pypi_simple import ACCEPT_JSON_PREFERRED, DistributionPackage, ProjectPage
from pypi_simple.errors import UnsupportedRepoVersionError

from imagebuild.errors import EngineError, IntegrityError, ReviewError, UsageError
from imagebuild.sources.cache import Cache
from imagebuild.sources.http import Http, Reply
from imagebuild.sources.pipconf import PipSettings, scrub, split_credentials

BASE_PYTHON = (3, 12)  # the Python of the base images; wheels are chosen for it, not for ours
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_NEWEST_GLIBC = 60  # minor version; far above any that wheels name
_JSON = "application/vnd.pypi.simple.v1+json"


class NoProjectError(EngineError):
    """Every index answered, and none of them has the project."""


@dataclass(frozen=True)
class IndexFile:
    """One file that an index offers.

    Attributes:
        project: normalised name.
        url: absolute, without credentials.
        sha256: hex digits, or None where the index gives none.
        size: bytes, or None where the index gives none.
        yanked: False, or upstream's reason.
        upload_time: ISO 8601, or None.
    """

    project: str
    filename: str
    version: str
    url: str
    sha256: str | None = None
    size: int | None = None
    yanked: bool | str = False
    requires_python: str | None = None
    upload_time: str | None = None


@dataclass(frozen=True)
class _Page:
    """An answer of an index as it is cached; status 404 means that it has no such project."""

    status: int
    url: str
    content_type: str
    etag: str
    body: bytes

    def pack(self) -> bytes:
        fields = asdict(replace(self, body=b""))
        del fields["body"]
        return json.dumps(fields).encode() + b"\n" + self.body

    @classmethod
    def unpack(cls, data: bytes) -> _Page | None:
        """Reads what `pack` wrote; None for what another version of it wrote."""
        head, _, body = data.partition(b"\n")
        try:
            return cls(**json.loads(head), body=body)
        except (ValueError, TypeError):
            return None


def machine_of(platform: str) -> str:
    """The kernel's word for the machine of a platform: "linux/arm64" -> "aarch64".

    Raises:
        UsageError: no such platform.
    """
    if platform not in MACHINES:
        raise UsageError(f"platform: expected {' or '.join(MACHINES)}, found {platform!r}")
    return MACHINES[platform]


def wheel_tags(platform: str) -> list[Tag]:
    """Tags that the base images can install, best first."""
    machine = machine_of(platform)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, 4, -1)]
    # The old names of 2_17, 2_12 and 2_5.
    platforms += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
    platforms += [f"linux_{machine}"]
    return [
        *cpython_tags(BASE_PYTHON, platforms=platforms),
        *compatible_tags(BASE_PYTHON, interpreter="cp312", platforms=platforms),
    ]


class PackageIndex:
    """All configured indexes and find-links folders as one."""

    def __init__(self, settings: PipSettings, http: Http, cache: Cache) -> None:
        self.settings = settings
        self.http = http
        self.cache = cache
        self._files: dict[str, list[IndexFile]] = {}
        self._lock = threading.Lock()

    def files(self, project: str) -> list[IndexFile]:
        """Every distribution of `project`, in the order of the indexes.

        Raises:
            EngineError: no index has the project, or one cannot be read.
        """
        name = str(canonicalize_name(project))
        with self._lock:
            if name not in self._files:
                self._files[name] = self._ask(name)
            return list(self._files[name])

    def offered(self, project: str) -> list[IndexFile]:
        """As `files`, and empty where no index has the project."""
        try:
            return self.files(project)
        except NoProjectError:
            return []

    def versions(self, project: str) -> list[str]:
        """Every version that has a file, oldest first. Raises as `files`."""
        return sorted({file.version for file in self.files(project)}, key=Version)

    def wheel(
        self,
        project: str,
        version: str,
        platform: str,
        *,
        allow_yanked: bool = False,
        sha256: str | None = None,
    ) -> IndexFile:
        """The best wheel of one version for "linux/amd64" or "linux/arm64".

        Args:
            project: name, normalised or not.
            version: exact; a pre-release when it is named.
            platform: where the wheel is to be installed, under Python 3.12.
            allow_yanked: take a version that upstream withdrew.
            sha256: take the file with that hash where indexes offer several, else one whose hash
                no index gives.

        Raises:
            UsageError: no such version, or none of its files fits.
            ReviewError: upstream withdrew it.
            IntegrityError: no file has that hash.
            EngineError: as `files`.
        """
        where = f"{project} {version}"
        released = self._released(project, version)
        rank = {tag: number for number, tag in reversed(list(enumerate(wheel_tags(platform))))}
        fitting = _fitting(released, rank)
        if not fitting:
            names = ", ".join(sorted(file.filename for file in released))
            raise UsageError(f"{where}: expected a wheel for {platform}, found {names}")
        if sha256 is not None:
            # Where an index gives no hash, as a folder does, the bytes themselves will tell.
            same = [file for file in fitting if file.sha256 == sha256]
            fitting = same or [file for file in fitting if file.sha256 is None]
        if not fitting:
            raise IntegrityError(
                f"{where}: expected a wheel for {platform} with sha256 {sha256}, found none",
                hint="the index offers other bytes than the lock records; build.py lock check",
            )
        chosen = next((file for file in fitting if file.yanked is False), fitting[0])
        if chosen.yanked is not False and not allow_yanked:
            raise ReviewError(
                f"{where}: expected a release, found that upstream withdrew it: {chosen.yanked}",
                hint="choose another version",
            )
        return chosen

    def _released(self, project: str, version: str) -> list[IndexFile]:
        try:
            wanted = Version(version)
        except InvalidVersion as error:
            raise UsageError(f"{project}: expected a version, found {version!r}") from error
        released = [file for file in self.files(project) if Version(file.version) == wanted]
        if not released:
            near = ", ".join(_nearest(wanted, self.versions(project)))
            raise UsageError(
                f"{project}: expected version {version}, found none; nearest are {near}",
                hint="name one of these versions",
            )
        return released

    def _ask(self, name: str) -> list[IndexFile]:
        found: list[IndexFile] = []
        missing: list[str] = []
        for base in self.settings.index_urls:
            page = self._page(_page_url(base, name), name, missing)
            found += _parse(page, name) if page is not None else []
        for place in self.settings.find_links:
            found += self._linked(place, name, missing)
        unique = {(file.filename, file.sha256): file for file in reversed(found)}
        if not unique:
            raise self._not_found(name, missing)
        return list(reversed(unique.values()))

    def _page(self, url: str, name: str, missing: list[str]) -> _Page | None:
        """One page, or None when there is none; an uncached one goes to `missing` offline."""
        key = split_credentials(url)[0]
        what = f"the index page of {name}"
        if key.startswith("file:"):
            return _page_of(self.http.get(url, what=what, accept=(200, 404)))
        packed = self.cache.get("index", key)
        known = _Page.unpack(packed) if packed is not None else None
        if self.http.offline:
            if known is None:
                missing.append(key)
            return known
        headers = {"Accept": ACCEPT_JSON_PREFERRED}
        if known is not None and known.etag:
            headers["If-None-Match"] = known.etag
        reply = self.http.get(url, what=what, headers=headers, accept=(200, 304, 404))
        if reply.status == 304 and known is not None:
            return known
        page = _page_of(reply)
        self.cache.put("index", key, page.pack())
        return page

    def _linked(self, place: str, name: str, missing: list[str]) -> list[IndexFile]:
        if (path := _local(place)) is not None and path.is_dir():
            return _folder(path, name)
        url = place if path is None else path.absolute().as_uri()
        page = self._page(url, f"{name} in find-links", missing)
        return [] if page is None else _parse(page, name)

    def _not_found(self, name: str, missing: list[str]) -> EngineError:
        if missing:
            return EngineError(
                f"{', '.join(missing)}: expected the index page of {name} in the cache, "
                "found nothing there and --offline is set",
                hint="run the same command once without --offline",
            )
        asked = [f"index-url {self.settings.index_url}"] if not self.settings.no_index else []
        asked += [f"extra-index-url {url}" for url in self.settings.index_urls[1:]]
        asked += [f"find-links {place}" for place in self.settings.find_links]
        return NoProjectError(
            f"{scrub(', '.join(asked)) or 'pip configuration'}: expected the project {name}, "
            "found no file of it",
            hint="check index-url and no-index in `python -m pip config list`",
        )


def _page_url(base: str, name: str) -> str:
    local = _local(base)
    root = base if local is None else local.absolute().as_uri()
    return f"{root.rstrip('/')}/{name}/"


def _local(place: str) -> Path | None:
    """The path that a `file:` URL or a plain path names; None for an address of a server."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(place).expanduser() if "://" not in place else None


def _page_of(reply: Reply) -> _Page:
    kind = reply.headers.get("Content-Type", "text/html")
    body = reply.body if reply.status == 200 else b""
    return _Page(reply.status, reply.url, kind, reply.headers.get("ETag", ""), body)


def _parse(page: _Page, name: str) -> list[IndexFile]:
    if page.status == 404:
        return []
    kind, _, parameters = page.content_type.partition(";")
    charset = parameters.partition("charset=")[2].strip(" \"'") or None
    try:
        # A newer minor version of the index protocol is no news to the user.
        with warnings.catch_warnings(action="ignore"):
            if kind.strip().lower() == _JSON:
                parsed = ProjectPage.from_json_data(json.loads(page.body), page.url)
            else:
                parsed = ProjectPage.from_html(name, page.body, page.url, charset)
    except (ValueError, UnsupportedRepoVersionError) as error:
        raise EngineError(
            f"{page.url}: expected a simple index page of {name}, "
            f"found {len(page.body)} bytes of {kind or 'no type'} that are none",
            hint="check index-url in `python -m pip config list`",
        ) from error
    files = (_index_file(package, name) for package in parsed.packages)
    return [file for file in files if file is not None]


def _index_file(package: DistributionPackage, name: str) -> IndexFile | None:
    url = scrub(package.url)
    for filename in (package.filename, unquote(urlsplit(url).path.rpartition("/")[2])):
        if (version := _version_of(filename, name)) is not None:
            break
    else:
        return None
    yanked: bool | str = False
    if package.is_yanked:
        yanked = package.yanked_reason or "no reason given"
    time = package.upload_time
    return IndexFile(
        project=name,
        filename=filename,
        version=version,
        url=url,
        sha256=package.digests.get("sha256", "").lower() or None,
        size=package.size,
        yanked=yanked,
        requires_python=package.requires_python,
        upload_time=time.isoformat() if time else None,
    )


def _version_of(filename: str, name: str) -> str | None:
    """The version in a file name of `name`; None for another project or an odd name."""
    try:
        if filename.endswith(".whl"):
            project, version, _, _ = parse_wheel_filename(filename)
        else:
            project, version = parse_sdist_filename(filename)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return str(version) if project == name else None


def _folder(folder: Path, name: str) -> list[IndexFile]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and (version := _version_of(path.name, name)) is not None:
            url = path.absolute().as_uri()
            found.append(IndexFile(name, path.name, version, url, size=path.stat().st_size))
    return found


def _fitting(files: Iterable[IndexFile], rank: dict[Tag, int]) -> list[IndexFile]:
    """The wheels whose tags are in `rank`, best tag and then highest build number first."""
    ranked: list[tuple[int, int, int, IndexFile]] = []
    for file in files:
        if file.filename.endswith(".whl"):
            _, _, build, tags = parse_wheel_filename(file.filename)
            if fits := [rank[tag] for tag in tags if tag in rank]:
                ranked.append((min(fits), -(build[0] if build else 0), len(ranked), file))
    return [file for *_, file in sorted(ranked)]


def _nearest(wanted: Version, versions: Sequence[str], count: int = 5) -> list[str]:
    """The `count` versions around the place where `wanted` would be; `versions` is sorted."""
    at = bisect.bisect([Version(version) for version in versions], wanted)
    start = max(0, min(at - count // 2, len(versions) - count))
    return list(versions[start : start + count])
