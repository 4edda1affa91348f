"""Which FlashKDA is in a tree: by file, by device code, or open; and the fatbin reader."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebuild.patching.patch import GpuArch
from imagebuild.verify import Group, fatbin, flashkda
from tests.support import verify_site as site
from tests.support.verify_site import damaged, problems, text

ORIGINAL_KNOWN = flashkda.KNOWN


# FlashKDA.


@dataclass(frozen=True)
class Kda:
    """A library and what is said about it on a tree that was installed with it."""

    options: dict[str, object]
    codes: set[str]
    words: str
    gpu_arch: str = "sm_120"


SHORT = site.SCHEMAS[1].replace(
    ", Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None", ""
)
KDA = {
    "other host code": Kda(
        {"host": b"other"}, set(), "the fixed one, the sm_120 device code of vLLM 0.31.0 (x86_64)"
    ),
    "other device code": Kda(
        {"targets": [(120, "f", b"new")]},
        {"flashkda-unknown"},
        "it is open whether it is the fixed one",
    ),
    "fourteen arguments": Kda(
        {"schemas": [site.SCHEMAS[0], SHORT]},
        {"flashkda-schema"},
        f"operator fwd: expected {site.SCHEMAS[1]!r}, found {SHORT!r}",
    ),
    "no operators": Kda(
        {"schemas": []}, {"flashkda-schema"}, "operator get_workspace_size: expected"
    ),
    "no code for the card": Kda(
        {"targets": [(90, "a", b"hopper"), (100, "f", b"b200")]},
        {"flashkda-arch", "flashkda-unknown"},
        "expected machine code that runs on sm_120, found code for sm_90a, sm_100f",
    ),
    "no code at all": Kda(
        {"targets": []}, {"flashkda-arch", "flashkda-unknown"}, "found no machine code for any GPU"
    ),
    "sm_120a on sm_121": Kda(
        {"machine": 183, "targets": [(120, "a", b"blackwell")]},
        {"flashkda-arch"},
        "expected machine code that runs on sm_121, found code for sm_120a",
        "sm_121",
    ),
    "sm_120f on sm_121": Kda({"machine": 183}, set(), "the fixed one", "sm_121"),
    "the other processor": Kda(
        {"machine": 183},
        {"flashkda-machine"},
        "expected a library for x86_64, as sm_120 needs, found one for aarch64",
    ),
}


@pytest.mark.parametrize("name", KDA)
def test_flashkda(name: str, make: Callable[..., site.Place]) -> None:
    case = KDA[name]
    place = make(library=site.flashkda_library(**case.options))  # type: ignore[arg-type]
    if case.gpu_arch == "sm_121":
        site.edit_manifest(place.root, gpu_arch="sm_121")
    report = place.verify(gpu_arch=case.gpu_arch)
    assert case.words in text(report)
    assert problems(report) == case.codes


@pytest.mark.parametrize("how", ["file", "code"])
def test_the_broken_flashkda_is_an_error_by_file_and_by_code(
    how: str, make: Callable[..., site.Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(site.FIXED, wheels="0.30.0", is_fixed=False)
    if how == "code":
        broken = dataclasses.replace(broken, file="0" * 64)
    monkeypatch.setattr(flashkda, "KNOWN", (broken,))
    report = make().verify()
    assert problems(report) == {"flashkda-broken"}
    assert "rounds the recurrent state to bf16 after every tile" in text(report)
    assert "use a base of vLLM 0.31.0 or newer" in text(report)
    assert report.exit_code == 3


def test_an_unknown_flashkda_asks_for_the_gpu_check_and_is_not_red(
    make: Callable[..., site.Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashkda, "KNOWN", ())
    report = make().verify()
    assert problems(report) == {"flashkda-unknown"}
    assert "`build.py kernel check` on a GPU: its tests T2" in text(report)
    assert report.exit_code == 0


def test_gpu_code_of_another_layout_is_a_warning(make: Callable[..., site.Place]) -> None:
    strings = b"\0" + b"\0".join(schema.encode() for schema in site.SCHEMAS) + b"\0"
    library = site.elf({".rodata": strings, ".nv_fatbin": b"new layout, 24 bytes long"})
    report = make(library=library).verify()
    assert problems(report) == {"flashkda-device-code", "flashkda-unknown"}
    assert "its GPU code cannot be read: expected a container at 0" in text(report)


def test_the_table_is_well_formed() -> None:
    known = ORIGINAL_KNOWN
    digests = [digest for one in known for digest in (one.file, one.code)]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    files = [one.file for one in known]
    assert len(set(files)) == len(files)
    assert not {k.code for k in known if k.is_fixed} & {k.code for k in known if not k.is_fixed}


class TestFatbin:
    def test_entries_of_several_containers(self) -> None:
        first = site.container([site.entry(90, "a", b"one"), site.entry(120, "", b"three!!!!")])
        second = site.container([site.entry(120, "f", b"two", kind=1)])
        padding = b"\0" * 24
        codes = fatbin.device_code(site.elf({".nv_fatbin": first + padding + second}))
        assert [(c.kind, c.target, c.size) for c in codes] == [
            ("elf", "sm_90a", 3),
            ("elf", "sm_120", 9),
            ("ptx", "compute_120f", 3),
        ]
        assert codes[0].digest == hashlib.sha256(b"one").hexdigest()

    def test_a_payload_that_is_not_compressed(self) -> None:
        content = site.container([site.entry(120, "", b"12345678", stored=False)])
        (code,) = fatbin.device_code(site.elf({".nv_fatbin": content}))
        assert (code.size, code.digest) == (8, hashlib.sha256(b"12345678").hexdigest())

    def test_a_library_without_gpu_code(self) -> None:
        assert fatbin.device_code(site.elf({".text": b"x"})) == ()

    @pytest.mark.parametrize("data", [b"", b"MZ", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF"])
    def test_no_elf(self, data: bytes) -> None:
        with pytest.raises(fatbin.NotElfError):
            fatbin.device_code(data)

    def test_every_cut_is_an_error_of_its_own_kind(self) -> None:
        whole = site.elf({".nv_fatbin": site.container([site.entry(120, "f", b"payload")])})
        for size in range(len(whole)):
            try:
                codes = fatbin.device_code(whole[:size])
            except (fatbin.NotElfError, fatbin.FatbinError):
                continue
            pytest.fail(f"{size} of {len(whole)} bytes gave {codes}")

    def test_damage_never_hangs_or_escapes(self) -> None:
        whole = bytearray(site.flashkda_library())
        for at in range(len(whole)):
            for value in (0x00, 0xFF, 0x7F):
                damaged = bytes([*whole[:at], value, *whole[at + 1 :]])
                with contextlib.suppress(fatbin.NotElfError, fatbin.FatbinError):
                    fatbin.device_code(damaged)

    @pytest.mark.parametrize(
        ("targets", "arches"),
        [
            (["120f"], {"sm_120", "sm_121"}),
            (["120"], {"sm_120", "sm_121"}),
            (["120a"], {"sm_120"}),
            (["121a"], {"sm_121"}),
            (["121"], {"sm_121"}),
            (["120a", "121a"], {"sm_120", "sm_121"}),
            (["90a", "100f"], set()),
            ([], set()),
        ],
    )
    def test_what_runs_where(self, targets: list[str], arches: set[str]) -> None:
        codes = tuple(
            fatbin.Code("elf", f"sm_{target}", int(target.rstrip("af")), "", 0)
            for target in targets
        )
        assert {arch for arch in ("sm_120", "sm_121") if fatbin.runs_on(codes, arch)} == arches

    def test_ptx_is_no_code_for_a_card(self) -> None:
        assert not fatbin.runs_on((fatbin.Code("ptx", "compute_120", 120, "", 0),), "sm_120")


# Real libraries.

# By hand, 2026-11-29: files by sha256sum; the code by cutting the sm_120 payload out of the library
# and sha256sum of that, after its unpacked form had the SHA-256 of what `cuobjdump -xelf` (13.4)
# wrote. `cuobjdump -lelf` lists sm_90a, sm_100 and sm_120 for each: it leaves out the letter f.
REAL = [
    ("0.30.0", "linux/amd64", "321a64a3ae3d14c173bf1e890dd770513b61bc3e86bca1e9abf92dd4819c2351",
     "69ab93edd93099f580c0878e3c3fe3cc2517d12c2e396029c9bc4fd2f6d5d4b6"),
    ("0.31.0", "linux/amd64", "94fed636cc610e199b7b486f97c790d0919ae384f80d264e380566196dcdb862",
     "951dad2e1f2b12503fb873d2f66b8b3c8e99d35ee4a70336d5798aa5770636b3"),
    ("0.33.0", "linux/amd64", "2f10bcce0114256411e18a70c64ce61cdb80fd54ada49dcc65a7f7994736f047",
     "951dad2e1f2b12503fb873d2f66b8b3c8e99d35ee4a70336d5798aa5770636b3"),
    ("0.31.0", "linux/arm64", "8945a7e7b9e52e833208ef0c56753e3e1cd0c2d49e91fb9e31bf95e43d87ff1f",
     "59113ead6d703e5e1470ed56306e8bc1c7d9d46623e9348692e4dfd0c9a7d451"),
    ("0.33.0", "linux/arm64", "412e9c8eb9c4b69b8bc93de39cad7470f831fc205e6d44930a30d8d0e9982e08",
     "59113ead6d703e5e1470ed56306e8bc1c7d9d46623e9348692e4dfd0c9a7d451"),
]  # fmt: skip


def real_library(version: str, platform: str) -> bytes:
    """The library of a real wheel, by range reads through the product's own sources."""
    from imagebuild.sources.cache import Cache
    from imagebuild.sources.http import Http
    from imagebuild.sources.index import PackageIndex
    from imagebuild.sources.pipconf import read_settings
    from imagebuild.sources.wheel import open_wheel

    http, cache = Http(read_settings()), Cache()
    try:
        file = PackageIndex(http.settings, http, cache).wheel(
            "vllm", version, platform, allow_yanked=True
        )
        return open_wheel(file, http, cache, platform=platform).read(site.LIBRARY)
    finally:
        http.close()
        cache.close()


@pytest.mark.network
@pytest.mark.parametrize("real", REAL, ids=[f"{one[0]}-{one[1]}" for one in REAL])
def test_real_flashkda(
    real: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, platform, file, code = real
    data = real_library(version, platform)
    assert hashlib.sha256(data).hexdigest() == file
    codes = fatbin.device_code(data)
    assert [(one.kind, one.target) for one in codes] == [
        ("elf", "sm_90a"),
        ("elf", "sm_100f"),
        ("elf", "sm_120f"),
    ]
    assert codes[2].digest == code
    monkeypatch.setattr(flashkda, "KNOWN", ORIGINAL_KNOWN)
    arch: GpuArch = "sm_120" if platform == "linux/amd64" else "sm_121"
    recipe = site.write_repository(tmp_path / "repository")
    # With another end of file the hash is unknown, and the device code must tell.
    for content, how in ((data, "file"), (data + b"\0", "sm_120 device code")):
        damaged(site.LIBRARY, content)(tmp_path)
        group = Group("FlashKDA")
        flashkda.check(group, tmp_path, arch, recipe.platforms)
        assert f"the {how} of vLLM 0.3" in group.summary
        codes_found = [finding.code for finding in group.findings]
        assert codes_found == (["flashkda-broken"] if version == "0.30.0" else [])
