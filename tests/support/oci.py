"""Small OCI images made here, with any one thing changed."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN = "application/vnd.oci.image.layer.v1.tar"
ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


@dataclass
class File:
    """One entry of a layer."""

    name: str
    data: bytes = b""
    mode: int = 0o644
    mtime: float = 1000
    uid: int = 0
    link: str = ""
    pax: dict[str, str] = field(default_factory=dict)

    def add(self, tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(self.name)
        info.mode, info.mtime, info.uid, info.pax_headers = (
            self.mode, self.mtime, self.uid, self.pax,
        )  # fmt: skip
        if self.link:
            info.type, info.linkname = tarfile.SYMTYPE, self.link
        info.size = len(self.data)
        tar.addfile(info, io.BytesIO(self.data))


def layer(*files: File, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer, not packed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for file in files:
            file.add(tar)
    return buffer.getvalue()


def _packed(data: bytes, kind: str, level: int) -> bytes:
    if kind == ZSTD:
        packed: bytes = importlib.import_module(_ZSTD).compress(data)
        return packed
    return gzip.compress(data, level, mtime=0) if kind == GZIP else data


def write(
    path: Path,
    layers: Sequence[bytes],
    history: Sequence[str] = (),
    *,
    level: int = 6,
    config: dict[str, Any] | None = None,
    platforms: Sequence[str] = ("amd64",),
    labels: dict[str, str] | None = None,
    plain: bool = False,
    zstd: bool = False,
) -> Path:
    """Writes an archive of one image, or of an index over several platforms."""
    blobs: dict[str, bytes] = {}

    def keep(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def image(arch: str) -> dict[str, Any]:
        made = {
            "os": "linux", "architecture": arch, "created": "1970-01-01T00:00:00Z",
            "config": {"Labels": labels or {}, "Env": ["A=1"]},
            "rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(d).hexdigest()}" for d in layers]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": said}
                        for said in history],
            **(config or {}),
        }  # fmt: skip
        kind = ZSTD if zstd else PLAIN if plain else GZIP
        stored = [{"mediaType": kind, **keep(_packed(data, kind, level))} for data in layers]
        return keep(json.dumps({"config": keep(json.dumps(made).encode()),
                                "layers": stored}).encode())  # fmt: skip

    entries = [image(arch) for arch in platforms]
    if len(entries) > 1:
        entries = [keep(json.dumps({"manifests": entries}).encode())]
    blobs["index.json"] = json.dumps({"manifests": entries}).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in blobs.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
