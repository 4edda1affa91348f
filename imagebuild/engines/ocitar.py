"""Reads the OCI archive that a build writes: digests, labels and layers. It unpacks nothing."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild.errors import IntegrityError

# An index may stand in the archive's index, and another one in that.
_DEPTH = 3


@dataclass(frozen=True)
class PlatformImage:
    """One platform of an image.

    Attributes:
        platform: docker's word.
        digest: of its manifest.
        diff_ids: digest of each layer, uncompressed, the base's first.
        sizes: of each layer as stored, in bytes.
        labels: of its configuration.
        annotations: of its manifest.
    """

    platform: str
    digest: str
    diff_ids: tuple[str, ...]
    sizes: tuple[int, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Archive:
    """What an archive holds. `digest` is of its manifest, or of its index over platforms."""

    digest: str
    platforms: Mapping[str, PlatformImage]


def read_archive(path: Path) -> Archive:
    """Reads an archive. Raises IntegrityError when it is cut off or has another form."""
    try:
        with tarfile.open(path) as tar:
            index = _json(tar, "index.json")
            (entry,) = index["manifests"]
            images = _images(tar, entry, _DEPTH)
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, TypeError) as error:
        raise IntegrityError(f"{path}: expected an OCI archive with one image, found: {error}",
                             hint="build again") from error  # fmt: skip
    return Archive(str(entry["digest"]), {image.platform: image for image in images})


def _images(tar: tarfile.TarFile, entry: Mapping[str, Any], depth: int) -> list[PlatformImage]:
    manifest = _json(tar, _blob(entry["digest"]))
    if "manifests" in manifest:
        if depth == 0:
            raise ValueError("indexes in indexes in indexes")
        return [one for child in manifest["manifests"] for one in _images(tar, child, depth - 1)]
    config = _json(tar, _blob(manifest["config"]["digest"]))
    if "os" not in config or config["os"] == "unknown":
        return []  # an attestation
    variant = config.get("variant")
    platform = f"{config['os']}/{config['architecture']}"
    if variant and platform != "linux/arm64":  # v8 is what linux/arm64 means
        platform = f"{platform}/{variant}"
    return [
        PlatformImage(
            platform=platform,
            digest=str(entry["digest"]),
            diff_ids=tuple(config["rootfs"]["diff_ids"]),
            sizes=tuple(int(layer["size"]) for layer in manifest["layers"]),
            labels=dict(config.get("config", {}).get("Labels") or {}),
            annotations=dict(manifest.get("annotations") or {}),
        )
    ]


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _json(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    member = tar.extractfile(name)
    if member is None:
        raise ValueError(f"{name} is no file")
    content = json.load(member)
    if not isinstance(content, dict):
        raise TypeError(f"{name} holds no object")
    return content
