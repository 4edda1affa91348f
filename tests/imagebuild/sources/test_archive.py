from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.errors import BuildError, EngineError, IntegrityError
from imagebuild.sources import archive as zips
from imagebuild.sources.wheel import WheelTree
from tests.support.wheels import build_wheel, member, record_line

Spoil = Callable[[zipfile.ZipFile], None]
BYTECODE = "vllm/envs.py"


def rename(name: str) -> Spoil:
    def spoil(archive: zipfile.ZipFile) -> None:
        member(archive, BYTECODE).filename = name

    return spoil


def declare(size: int, packed: int | None = None) -> Spoil:
    def spoil(archive: zipfile.ZipFile) -> None:
        entry = member(archive, BYTECODE)
        entry.file_size = size
        entry.compress_size = entry.compress_size if packed is None else packed

    return spoil


def link(archive: zipfile.ZipFile) -> None:
    member(archive, BYTECODE).external_attr = 0o120777 << 16


def overlap(archive: zipfile.ZipFile) -> None:
    member(archive, BYTECODE).header_offset = member(archive, "vllm/_version.py").header_offset + 9


def twice(archive: zipfile.ZipFile) -> None:
    archive.writestr(BYTECODE, b"other")


def below_a_file(archive: zipfile.ZipFile) -> None:
    archive.writestr(f"{BYTECODE}/x", b"other")


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (rename("../envs.py"), "expected paths inside the wheel, found '../envs.py'"),
        (rename("vllm/../../x"), "expected paths inside the wheel"),
        (rename("/etc/passwd"), "expected paths inside the wheel, found '/etc/passwd'"),
        (rename("vllm\\envs.py"), "expected paths inside the wheel"),
        (rename("vllm//envs.py"), "expected paths inside the wheel"),
        (rename("./vllm.py"), "expected paths inside the wheel"),
        (rename("C:/x.py"), "expected paths inside the wheel"),
        (rename("vllm/e\0.py"), "expected paths inside the wheel"),
        (twice, "expected each name once, found 'vllm/envs.py' 2 times"),
        (below_a_file, "expected a folder above 'vllm/envs.py/x', found a file"),
        (link, "expected plain files, found the link 'vllm/envs.py'"),
        (declare(3 << 30), "vllm/envs.py: expected at most 2147483648 bytes, .* found 3221225472"),
        (declare(65 << 20), "packed at most 1000:1, found 68157440 bytes packed into"),
        (overlap, "found that it overlaps the next"),
        (declare(100, 1 << 20), "found that it overlaps the next"),
    ],
)
def test_what_is_refused(tmp_path: Path, spoil: Spoil, found: str) -> None:
    path = build_wheel(tmp_path, spoil=spoil)
    with WheelTree(path) as wheel, pytest.raises(IntegrityError, match=found) as caught:
        wheel.read("vllm/_version.py")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))


def test_highly_packed_small_files_are_fine(tmp_path: Path) -> None:
    files = {"vllm/zeros.bin": bytes(1 << 20)}
    with WheelTree(build_wheel(tmp_path, files=files)) as wheel:
        assert wheel.read("vllm/zeros.bin") == bytes(1 << 20)


@pytest.mark.parametrize("options", [{"zip64": True}, {"prefix": b"#!launcher\n"}])
def test_rare_but_honest_forms(tmp_path: Path, options: dict[str, object]) -> None:
    path = build_wheel(tmp_path, **options)  # type: ignore[arg-type]
    if "zip64" in options:
        assert b"PK\6\6" in path.read_bytes()
    with WheelTree(path) as wheel:
        assert wheel.read("vllm/envs.py") == b"USE_IT = True\n"
        assert wheel.identity.version == "0.31.0"


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip at all" * 100])
def test_no_zip(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="expected an intact wheel, found"):
        WheelTree(path).members()


def test_damage_never_goes_unnoticed(tmp_path: Path) -> None:
    path = build_wheel(tmp_path)
    good = path.read_bytes()
    with WheelTree(path) as wheel:
        names = list(wheel.iter())
        contents = {name: wheel.read(name) for name in names}
    rng = random.Random(7)
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with WheelTree(path) as wheel:
            try:
                for name in wheel.iter():
                    if not name.endswith("RECORD"):
                        assert wheel.read(name) == contents[name]
            except BuildError as error:
                assert "\n" not in str(error)


def test_truncation_is_noticed(tmp_path: Path) -> None:
    path = build_wheel(tmp_path)
    good = path.read_bytes()
    for keep in (len(good) - 1, len(good) // 2, 30):
        path.write_bytes(good[:keep])
        with pytest.raises(IntegrityError):
            WheelTree(path).read("vllm/envs.py")


def test_unreadable_files_are_no_integrity_question() -> None:
    broken = OSError(5, "Input/output error")
    found = pytest.raises(EngineError, match="x, y: expected to read it, found Input/output error")
    with found, zips.zip_errors("x", "y"):
        raise broken


def test_record() -> None:
    line = record_line("a/b,c.py", b"x").replace("a/b,c.py", '"a/b,c.py"')
    entries = zips.parse_record(f"{line}\nx.dist-info/RECORD,,\n".encode(), "w")
    assert entries == {"a/b,c.py": zips.Entry(zips.sha256_of(b"x"), 1)}


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n",
        "a,md5=AAAA,3\n",
        "a,sha256=!!!!,3\n",
        "a,sha256=AAAA,\n",
        "a,sha256=AAAA,x\n",
        "a,sha256=AAAA,1\na,sha256=AAAA,1\n",
        "\xff,sha256=AAAA,1\n",
    ],
)
def test_malformed_records(text: str) -> None:
    with pytest.raises(IntegrityError, match="w, RECORD: expected one line a file"):
        zips.parse_record(text.encode("latin-1"), "w")


@pytest.mark.parametrize("extra", [{}, {"b-1.dist-info/RECORD": b""}])
def test_one_record(extra: dict[str, bytes], tmp_path: Path) -> None:
    names = ["x/a.dist-info/RECORD", *extra, *(["a-1.dist-info/RECORD"] if extra else [])]
    with pytest.raises(
        IntegrityError, match=f"expected one .dist-info/RECORD, found {len(extra) * 2}"
    ):
        zips.find_record(dict.fromkeys(names), "w")
