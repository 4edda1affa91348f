"""What whole and remote wheels have in common: RECORD, METADATA and checks; it opens nothing."""

from __future__ import annotations

import email.message
import email.parser
import functools
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name, canonicalize_version

from imagebuild.errors import IntegrityError
from imagebuild.patching.tree import Identity, identify
from imagebuild.sources import archive as zips
from imagebuild.sources.index import BASE_PYTHON, machine_of, wheel_tags


class Wheel(ABC):
    """A wheel as a `Tree` of imagebuild.patching.tree.

    Attributes:
        source: the name in messages.
        platform: "linux/amd64" or "linux/arm64"; decides which requirements count.
    """

    def __init__(self, source: str, platform: str) -> None:
        machine_of(platform)
        self.source = source
        self.platform = platform
        self._identity: Identity | None = None
        self._record: dict[str, zips.Entry] | None = None

    @property
    def identity(self) -> Identity:
        """Of its own project; for vLLM with the commit, which is in a file of the package."""
        if self._identity is None:
            self._identity = identify(self, source=self.source, project=self.project)
        return self._identity

    @property
    def project(self) -> str:
        """The normalised name of its project, by the name of its dist-info."""
        return canonicalize_name(self._record_path.partition("-")[0])

    @abstractmethod
    def members(self) -> dict[str, zipfile.ZipInfo]:
        """Every file by its path."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Whole content of one file, checked. Raises FileNotFoundError when there is none."""

    @abstractmethod
    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetches these files together; names that are not in the wheel are skipped."""

    def exists(self, path: str) -> bool:
        return path in self.members()

    def iter(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted(path for path in self.members() if path.startswith(prefix)))

    def record(self) -> dict[str, zips.Entry]:
        """sha256 (hex) and size (bytes) of every file that RECORD gives a hash for."""
        if self._record is None:
            data = self.read(self._record_path)
            self._record = zips.parse_record(data, self.source)
        return self._record

    def metadata(self) -> email.message.Message:
        """The parsed METADATA: Name, Version, Requires-Dist and the rest."""
        data = self.read(self._info_path("METADATA"))
        try:
            return email.parser.Parser().parsestr(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise IntegrityError(
                f"{self.source}, METADATA: expected UTF-8, found other bytes"
            ) from error

    def specifier(self, name: str) -> str | None:
        """The versions of `name` that METADATA asks for ("<5.18.0,>=5.10.4"), or None.

        Markers are judged for CPython 3.12 on linux and the platform's machine, without extras.
        """
        wanted = canonicalize_name(name)
        found = [
            str(requirement.specifier)
            for requirement in self._requirements()
            if canonicalize_name(requirement.name) == wanted
            and (requirement.marker is None or requirement.marker.evaluate(self._environment()))
        ]
        return (
            ",".join(sorted(part for text in found for part in text.split(","))) if found else None
        )

    def requirement(self, name: str) -> str | None:
        """The exact version of `name` that METADATA asks for, or None when it pins none."""
        for part in (self.specifier(name) or "").split(","):
            version = part.removeprefix("===").removeprefix("==")
            if part.startswith("==") and not version.endswith(".*"):
                return version.strip()
        return None

    def require(self, project: str, version: str) -> None:
        """Checks that it is the wheel of one release, for this platform.

        Raises:
            IntegrityError: its own METADATA or tags say something else.
        """
        metadata = self.metadata()
        found, wanted = (
            f"{canonicalize_name(str(name))} {canonicalize_version(str(one))}"
            for name, one in ((metadata["Name"], metadata["Version"]), (project, version))
        )
        about = self._info_path("WHEEL")
        data = self.read(about) if self.exists(about) else b""
        lines = data.decode("utf-8", "replace").splitlines()
        tags = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
        known = set(wheel_tags(self.platform))
        fits = any(not known.isdisjoint(parse_tag(tag)) for tag in tags if tag.count("-") == 2)
        if found != wanted or not fits:
            raise IntegrityError(
                f"{self.source}: expected {wanted} for {self.platform}, found {found} with the "
                f"tags {', '.join(tags) or 'none'}",
                hint="the lock has another file's sha256 there: restore it with git, or build.py "
                "lock update wheels",
            )

    def _requirements(self) -> list[Requirement]:
        lines = [str(line) for line in self.metadata().get_all("Requires-Dist", [])]
        try:
            return [Requirement(line) for line in lines]
        except InvalidRequirement as error:
            raise IntegrityError(
                f"{self.source}, METADATA: expected valid Requires-Dist lines, found: {error}"
            ) from error

    def _environment(self) -> dict[str, str]:
        python = ".".join(map(str, BASE_PYTHON))
        return {
            "extra": "",
            "implementation_name": "cpython",
            "implementation_version": f"{python}.0",
            "os_name": "posix",
            "platform_machine": machine_of(self.platform),
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": "linux",
        }

    def _info_path(self, name: str) -> str:
        return self._record_path.removesuffix("RECORD") + name

    @functools.cached_property
    def _record_path(self) -> str:
        # Kept: it is asked for with every member that is checked.
        return zips.find_record(self.members(), self.source)

    def _is_unhashed(self, path: str) -> bool:
        # RECORD cannot hold its own hash, nor that of its signatures.
        return path in {self._info_path(name) for name in ("RECORD", "RECORD.jws", "RECORD.p7s")}

    def _check(self, path: str, data: bytes) -> None:
        if not self._is_unhashed(path):
            zips.check_member(path, zips.sha256_of(data), len(data), self.record(), self.source)
