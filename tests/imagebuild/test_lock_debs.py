"""Packages of a base: what apt prints, what is locked of it, and when it no longer holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild import lock_debs
from imagebuild.config import load_recipe
from imagebuild.engines.docker import BaseImage
from imagebuild.errors import BuildError, EngineError, IntegrityError
from imagebuild.lock import BaseLock, Lock, read_lock
from imagebuild.lock_update import write
from imagebuild.pins import DebPin, DebsPin, ImagePin
from imagebuild.sources.http import Http
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer
from tests.support.product import Product

RECIPE = load_recipe("glm53-flash")
LOCKED = read_lock(RECIPE.lock_file).base("0.31.0")
DIGEST, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
SHA256 = "cd" * 32
PRINTED = f"""\
'http://a.example/pool/i/iproute2_6.15-1_amd64.deb' iproute2_6.15-1_amd64.deb 1088 SHA256:{SHA256}

'http://a.example/pool/l/libbpf1_1.5_amd64.deb' libbpf1_1%3a1.5_amd64.deb 168 SHA256:{SHA256}
"""


class FakeDocker:
    """A base whose apt answers on some platforms."""

    def __init__(self, answers: dict[str, str], digest: str = DIGEST) -> None:
        self.answers, self.digest = answers, digest
        self.asked: list[tuple[str, str]] = []

    def engine_version(self) -> str:
        return "26.1.5"

    def base(self, reference: str, _platforms: object) -> BaseImage:
        return BaseImage(reference, self.digest, (), 10, is_local=True)

    def run(self, image: str, platform: str, script: str) -> str:
        self.asked.append((image, platform))
        assert script.endswith(" ".join(RECIPE.image.debs))
        if platform not in self.answers:
            raise EngineError("exec format error")
        return self.answers[platform]


def resolve(docker: FakeDocker, base: BaseLock = LOCKED, reference: str | None = None,
            today: str = "2026-11-29") -> tuple[DebsPin, list[str]]:  # fmt: skip
    return lock_debs.resolve(RECIPE, base, docker, today, reference)  # type: ignore[arg-type]


def test_what_apt_prints_is_locked_for_each_platform() -> None:
    docker = FakeDocker(dict.fromkeys(("linux/amd64", "linux/arm64"), PRINTED))
    pin, kept = resolve(docker)
    assert not kept
    assert (pin.state, pin.base, pin.seen, pin.packages) == (
        "resolved", DIGEST, "2026-11-29", RECIPE.image.debs,
    )  # fmt: skip
    assert list(pin.files) == ["linux/amd64", "linux/arm64"]
    assert pin.files["linux/amd64"][1] == DebPin(
        "libbpf1_1%3a1.5_amd64.deb", "http://a.example/pool/l/libbpf1_1.5_amd64.deb", SHA256, 168
    )
    assert LOCKED.image is not None
    assert {image for image, _platform in docker.asked} == {LOCKED.image.reference}


def test_it_is_written_and_read_again(tmp_path: Path) -> None:
    pin, _kept = resolve(FakeDocker({"linux/amd64": PRINTED, "linux/arm64": ""}))
    lock = lock_debs.with_debs(Lock(tmp_path / "lock.toml", {"0.31.0": LOCKED}), "0.31.0", pin)
    assert write(lock)
    assert read_lock(lock.path).base("0.31.0").debs == pin
    later = lock_debs.with_debs(lock, "0.31.0", replace(pin, seen="2027-01-01"))
    assert not write(later)  # the same files on another day


def test_a_platform_that_cannot_run_here_keeps_its_files_of_the_same_base() -> None:
    both = FakeDocker(dict.fromkeys(("linux/amd64", "linux/arm64"), PRINTED))
    known = replace(LOCKED, debs=resolve(both)[0])
    pin, kept = resolve(FakeDocker({"linux/amd64": ""}), known)
    assert pin.files["linux/amd64"] == ()
    assert len(pin.files["linux/arm64"]) == 2
    assert ["linux/arm64 keep their state: exec format" in one for one in kept] == [True]
    moved, _kept = resolve(FakeDocker({"linux/amd64": PRINTED}, OTHER), known)
    assert list(moved.files) == ["linux/amd64"]


@pytest.mark.parametrize(
    ("docker", "base", "kind", "said"),
    [
        (FakeDocker({}), LOCKED, EngineError, "exec format error"),
        (FakeDocker({"linux/amd64": PRINTED.replace("SHA256", "MD5Sum")}), LOCKED, IntegrityError,
         "MD5Sum:cd"),
        (FakeDocker({"linux/amd64": PRINTED.replace("http", "cdrom")}), LOCKED, IntegrityError,
         "cdrom://"),
        (FakeDocker({}), replace(LOCKED, image=ImagePin("a/b", "v1")), IntegrityError,
         "its image is unresolved"),
    ],
)  # fmt: skip
def test_what_cannot_be_locked(
    docker: FakeDocker, base: BaseLock, kind: type[BuildError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        resolve(docker, base)


def test_packages_that_the_archive_dropped_are_named(tmp_path: Path) -> None:
    (tmp_path / "here.deb").write_bytes(b"deb")
    with IndexServer(tmp_path) as server, Http(PipSettings("", retries=0), backoff=0) as http:
        pins = tuple(DebPin(name, server.file_url(name), SHA256, 3)
                     for name in ("here.deb", "gone_1%3a2.deb"))  # fmt: skip
        pin = DebsPin(("a",), "resolved", DIGEST, "2026-11-29", {"linux/amd64": pins})
        assert lock_debs.gone(pin, http) == ["gone_1:2.deb"]


def test_the_base_option_is_for_packages_alone(product: Product) -> None:
    ran = product.run("lock", "update", "wheels", "--base", "a:b")
    assert ran.code == 2
    assert "--base goes with the entry debs" in ran.err
