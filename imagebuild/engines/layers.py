"""Reads images as they lie in an OCI archive or folder: manifests, and layers entry by entry.

It streams: no layer is held in memory or unpacked to disk. It needs no engine.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from imagebuild.errors import IntegrityError
from imagebuild.sources import zstd

# An index may stand in the archive's index, and another one in that.
_DEPTH = 3
_CHUNK = 1 << 20
_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.GNUTYPE_SPARSE: "file",
    tarfile.LNKTYPE: "hard link",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.DIRTYPE: "folder",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.FIFOTYPE: "pipe",
}
# What a pax header says of things that an entry has of its own.
_KNOWN = ("path", "linkpath", "size", "mtime", "uid", "gid", "uname", "gname")


@dataclass(frozen=True)
class Entry:
    """One entry of a layer.

    Attributes:
        name: path without a leading "./" or "/"; a whiteout keeps its ".wh.".
        kind: in words, such as "file".
        mode: permission bits.
        owner: "uid:gid", with names where the archive has them.
        time: seconds since 1970.
        size: in bytes.
        link: where a link leads.
        sha256: of the content; "" for all but files.
        attributes: extended attributes and other pax fields.
    """

    name: str
    kind: str
    mode: int
    owner: str
    time: float
    size: int
    link: str
    sha256: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """One platform's image. `digest` is of its manifest."""

    platform: str
    digest: str
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """Digest of each layer, unpacked, the base's first."""
        return tuple(self.config["rootfs"]["diff_ids"])

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.config.get("config", {}).get("Labels") or {})

    @property
    def history(self) -> tuple[str, ...]:
        """What made each layer, as the history says it; as long as there are layers, or empty."""
        made = [
            str(entry.get("created_by", ""))
            for entry in self.config.get("history", ())
            if not entry.get("empty_layer")
        ]
        return tuple(made) if len(made) == len(self.diff_ids) else ()


class Layout:
    """An open archive or folder. Use it as a context manager.

    Attributes:
        path: where it is.
        digest: of its only image, or of its index over platforms.
        images: by platform.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tar: tarfile.TarFile | None = None
        try:
            if not path.is_dir():
                self._tar = tarfile.open(path)  # noqa: SIM115
            entries = self._json("index.json")["manifests"]
            if len(entries) != 1:
                raise ValueError(f"{len(entries)} images where one is expected")
            self.digest = str(entries[0]["digest"])
            found = self._images(entries[0], _DEPTH)
            self.images: Mapping[str, Image] = {image.platform: image for image in found}
            if not found:
                raise ValueError("no image of any platform")
        except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, TypeError) as error:
            self.close()
            raise IntegrityError(f"{path}: expected an OCI archive or folder with one image, "
                                 f"found: {error}") from error  # fmt: skip

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the archive."""
        if self._tar is not None:
            self._tar.close()

    def open_blob(self, digest: str) -> IO[bytes]:
        """A blob as it is stored. Raises KeyError when it is not there."""
        return self._open("blobs/" + digest.replace(":", "/"))

    @contextlib.contextmanager
    def layer(self, image: Image, index: int) -> Iterator[tarfile.TarFile]:
        """A layer as a stream of entries."""
        stored = image.manifest["layers"][index]
        with (
            self.open_blob(stored["digest"]) as blob,
            _unpacked(blob, str(stored["mediaType"])) as stream,
            tarfile.open(fileobj=stream, mode="r|", errorlevel=0) as tar,
        ):
            yield tar

    def _open(self, name: str) -> IO[bytes]:
        if self._tar is None:
            try:
                return (self.path / name).open("rb")
            except FileNotFoundError as error:
                raise KeyError(name) from error
        member = self._tar.extractfile(name)
        if member is None:
            raise KeyError(name)
        return member

    def _json(self, name: str) -> dict[str, Any]:
        with self._open(name) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise TypeError(f"{name} holds no object")
        return content

    def _blob_json(self, digest: str) -> dict[str, Any]:
        return self._json("blobs/" + digest.replace(":", "/"))

    def _images(self, entry: Mapping[str, Any], depth: int) -> list[Image]:
        manifest = self._blob_json(entry["digest"])
        if "manifests" in manifest:
            if depth == 0:
                raise ValueError("indexes in indexes in indexes")
            found = []
            for child in manifest["manifests"]:
                # An engine saves an index whole, but only the platforms that it pulled.
                with contextlib.suppress(KeyError):
                    found += self._images(child, depth - 1)
            return found
        config = self._blob_json(manifest["config"]["digest"])
        if config.get("os", "unknown") == "unknown":
            return []  # an attestation
        platform = f"{config['os']}/{config['architecture']}"
        return [Image(platform, str(entry["digest"]), manifest, config)]


@contextlib.contextmanager
def _unpacked(blob: IO[bytes], media_type: str) -> Iterator[IO[bytes]]:
    if media_type.endswith("gzip"):
        with gzip.GzipFile(fileobj=blob) as stream:
            yield cast("IO[bytes]", stream)
    elif media_type.endswith("zstd"):
        with zstd.open_stream(blob) as stream:
            yield stream
    else:
        yield blob


def entries(tar: tarfile.TarFile) -> Iterator[Entry]:
    """The entries of a layer, in their order."""
    for info in tar:
        yield Entry(
            name=_clean(info.name),
            kind=_KINDS.get(info.type, f"type {info.type!r}"),
            mode=info.mode,
            owner=f"{info.uid}:{info.gid}" + (f" {info.uname}:{info.gname}" if info.uname else ""),
            time=info.mtime,
            size=info.size,
            link=info.linkname,
            sha256=_content_digest(tar, info),
            attributes={k: v for k, v in info.pax_headers.items() if k not in _KNOWN},
        )


def contents(tar: tarfile.TarFile, names: frozenset[str]) -> dict[str, bytes]:
    """Content of some files of a layer; of a name that occurs twice, the last."""
    found = {}
    for info in tar:
        if info.isreg() and _clean(info.name) in names:
            file = tar.extractfile(info)
            found[_clean(info.name)] = file.read() if file else b""
    return found


def _content_digest(tar: tarfile.TarFile, info: tarfile.TarInfo) -> str:
    file = tar.extractfile(info) if info.isreg() else None
    if file is None:
        return ""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _clean(name: str) -> str:
    return name.removeprefix("./").strip("/") or "."
