"""Manifests, indexes and descriptors, read and compared with their digests. Asks nobody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imagebuild.errors import EngineError, IntegrityError
from imagebuild.sources.imageref import DIGEST, Reference

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPT = ", ".join((*INDEXES, *MANIFESTS))
# Attestations of BuildKit are children of an index that are no images.
_ATTESTATION = "vnd.docker.reference.type"


@dataclass(frozen=True)
class Descriptor:
    """What a manifest says of another object. `platform` is "" where it says none."""

    media_type: str
    digest: str
    size: int
    platform: str = ""
    is_attestation: bool = False


@dataclass(frozen=True)
class Manifest:
    """One manifest or index. `where` names it by digest."""

    where: Reference
    media_type: str
    size: int
    content: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The SHA-256 of its bytes."""
        return self.where.digest

    @property
    def is_index(self) -> bool:
        """Whether it lists manifests instead of layers."""
        return "manifests" in self.content

    @property
    def children(self) -> list[Descriptor]:
        """What an index lists. Raises EngineError when it is malformed."""
        return _descriptors(self, "manifests")

    @property
    def layers(self) -> list[Descriptor]:
        """From the lowest one. Raises EngineError when it is malformed."""
        return _descriptors(self, "layers")

    @property
    def config(self) -> Descriptor:
        """The image's configuration. Raises EngineError when it is malformed."""
        return _descriptor(self.where, self.content.get("config"))


def hasher(digest: str) -> hashlib._Hash:
    """The hash that a digest names."""
    return hashlib.new(digest.partition(":")[0])


def digest_of(body: bytes) -> str:
    """The SHA-256 of `body`, as a digest."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def checked(body: bytes, wanted: str, what: str) -> str:
    """Returns `wanted`. Raises IntegrityError when it is not the digest of `body`."""
    if not DIGEST.fullmatch(wanted):
        raise EngineError(f"{what}: expected a digest, found {wanted!r}")
    digest = hasher(wanted)
    digest.update(body)
    found = f"{digest.name}:{digest.hexdigest()}"
    if found != wanted:
        hint = "a proxy or mirror changed it; try again without one"
        raise IntegrityError(f"{what}: expected {wanted}, found {found}", hint=hint)
    return wanted


def json_object(body: bytes, what: str) -> dict[str, Any]:
    """Reads a JSON object. Raises EngineError when it is none."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise EngineError(f"{what}: expected JSON, found {len(body)} bytes that are none",
                          hint="is it a registry that answers there?") from error  # fmt: skip
    if not isinstance(content, dict):
        raise EngineError(f"{what}: expected an object, found {type(content).__name__}")
    return content


def _descriptors(manifest: Manifest, key: str) -> list[Descriptor]:
    entries = manifest.content.get(key) or []
    if not isinstance(entries, list):
        raise EngineError(f"{manifest.where}: {key}: expected a list, found {entries!r}")
    return [_descriptor(manifest.where, entry) for entry in entries]


def _descriptor(where: Reference, entry: object) -> Descriptor:
    try:
        if not isinstance(entry, dict):
            raise TypeError(entry)
        digest, size = str(entry["digest"]), int(entry["size"])
        if not DIGEST.fullmatch(digest) or size < 0:
            raise ValueError(digest)
        place = entry.get("platform") or {}
        parts = [place.get(key) for key in ("os", "architecture", "variant")]
        platform = "/".join(str(part) for part in parts if part)
        notes = entry.get("annotations") or {}
        is_attestation = platform == "unknown/unknown" or _ATTESTATION in notes
        return Descriptor(str(entry.get("mediaType", "")), digest, size, platform, is_attestation)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{where}: expected a descriptor with digest and size, "
                          f"found {entry!r:.120}") from error  # fmt: skip


def parse_manifest(where: Reference, body: bytes, told: str, declared_type: str) -> Manifest:
    """Reads a manifest.

    Args:
        where: the image as it was asked for.
        body: what the registry sent.
        told: the digest that the registry says it has; "" when it says none.
        declared_type: the answer's media type.

    Raises:
        IntegrityError: the bytes are not those of the digest.
        EngineError: it is neither an image nor an index of schema 2.
    """
    what = f"the manifest of {where}"
    wanted = where.digest or told
    digest = checked(body, wanted, what) if wanted else digest_of(body)
    content = json_object(body, what)
    # One that is both could mean one image here and another one in the engine (CVE-2021-41190).
    if content.get("schemaVersion") != 2 or ("manifests" in content) == ("layers" in content):
        kind = content.get("mediaType") or declared_type or "no type"
        raise EngineError(f"{what}: expected an image or an index of schema 2, found {kind}")
    media_type = str(content.get("mediaType") or declared_type)
    return Manifest(where.at(digest), media_type, len(body), content)
