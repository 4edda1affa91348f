"""Reading OCI archives, whole, nested and damaged."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from imagebuild.engines.ocitar import read_archive
from imagebuild.errors import IntegrityError


class Writer:
    """Collects blobs of an archive."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def blob(self, content: dict[str, Any]) -> str:
        data = json.dumps(content).encode()
        digest = hashlib.sha256(data).hexdigest()
        self.files[f"blobs/sha256/{digest}"] = data
        return f"sha256:{digest}"

    def image(self, arch: str, system: str = "linux", **more: Any) -> str:
        config = {
            "os": system, "architecture": arch, **more, "config": {"Labels": {"a": arch}},
            "rootfs": {"diff_ids": ["sha256:1", "sha256:2"]},
        }  # fmt: skip
        manifest = {
            "config": {"digest": self.blob(config)},
            "layers": [{"size": 5}, {"size": 7}],
            "annotations": {"b": "c"},
        }
        return self.blob(manifest)

    def index(self, *digests: str) -> str:
        return self.blob({"manifests": [{"digest": digest} for digest in digests]})

    def write(self, path: Path, *digests: str) -> Path:
        self.files["index.json"] = json.dumps(
            {"manifests": [{"digest": digest} for digest in digests]}
        ).encode()
        with tarfile.open(path, "w") as tar:
            for name, data in self.files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path


def test_single_image(tmp_path: Path) -> None:
    writer = Writer()
    digest = writer.image("amd64")
    archive = read_archive(writer.write(tmp_path / "a.tar", digest))
    assert archive.digest == digest
    image = archive.platforms["linux/amd64"]
    assert image.digest == digest
    assert image.diff_ids == ("sha256:1", "sha256:2")
    assert image.sizes == (5, 7)
    assert image.labels == {"a": "amd64"}
    assert image.annotations == {"b": "c"}


def test_index_over_platforms_leaves_attestations_out(tmp_path: Path) -> None:
    writer = Writer()
    amd, arm = writer.image("amd64"), writer.image("arm64", variant="v8")
    index = writer.index(amd, arm, writer.image("unknown", "unknown"))
    archive = read_archive(writer.write(tmp_path / "a.tar", index))
    assert archive.digest == index
    assert {name: one.digest for name, one in archive.platforms.items()} == {
        "linux/amd64": amd,
        "linux/arm64": arm,
    }


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    writer = Writer()
    digest = writer.image("amd64")
    for _ in range(6):
        digest = writer.index(digest)
    with pytest.raises(IntegrityError, match="indexes in indexes"):
        read_archive(writer.write(tmp_path / "a.tar", digest))


def test_two_images_are_refused(tmp_path: Path) -> None:
    writer = Writer()
    path = writer.write(tmp_path / "a.tar", writer.image("amd64"), writer.image("arm64"))
    with pytest.raises(IntegrityError, match="one image"):
        read_archive(path)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6])
def test_cut_archive_is_an_error(tmp_path: Path, kept: float) -> None:
    writer = Writer()
    path = writer.write(tmp_path / "a.tar", writer.image("amd64"))
    data = path.read_bytes()[: 512 * 7]
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(IntegrityError, match="OCI archive"):
        read_archive(path)
