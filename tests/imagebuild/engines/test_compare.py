"""Each cause of a difference gets its own name and place, and no better grade than it deserves."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from imagebuild import dockerfile
from imagebuild.engines import compare
from imagebuild.engines.compare import NAMED_AT_MOST, Comparison, Difference, Grade
from imagebuild.engines.layers import Layout
from imagebuild.errors import IntegrityError
from tests.support.oci import File, layer, write

DOCKERFILE = """\
ARG BASE=x
FROM scratch AS kernel
RUN make
FROM ${BASE} AS patched
RUN --network=none apply
FROM patched AS runtime
COPY --from=kernel /out/ /
RUN verify
"""
STEPS = dockerfile.parse(DOCKERFILE).steps()
HISTORY = ("base", "RUN |1 A=B /bin/sh -c apply # buildkit", "COPY /out/ / # buildkit",
           "RUN /bin/sh -c verify # buildkit")  # fmt: skip
LAYERS = (
    layer(File("etc/base", b"base")),
    layer(File("opt/a.py", b"a\nb\n"), File("opt/b", b"x")),
    layer(File("lib/k.so", b"\0elf")),
    layer(File("var/ok", b"")),
)


def against(tmp_path: Path, layers: Sequence[bytes] = LAYERS, **other: Any) -> Comparison:
    """The image above against one that is changed."""
    one = write(tmp_path / "one.tar", LAYERS, HISTORY)
    two = write(tmp_path / "two.tar", layers, **{"history": HISTORY, **other})
    with Layout(one) as first, Layout(two) as second:
        return compare.images(first, second, STEPS)


def with_layer(index: int, *files: File) -> list[bytes]:
    return [layer(*files) if at == index else data for at, data in enumerate(LAYERS)]


def only(found: Comparison) -> Difference:
    (one,) = found.differences
    return one


def test_equal_images_are_bit_identical(tmp_path: Path) -> None:
    found = against(tmp_path)
    assert (found.grade, found.differences) == (Grade.IDENTICAL, ())
    assert found.grade.exit_code == 0


def test_layers_that_are_packed_in_three_ways_are_read(tmp_path: Path) -> None:
    """Packed by zstd, as many a base is, a layer's files are compared like any others."""
    changed = with_layer(1, File("opt/a.py", b"a\nc\n"), B)
    for how in ({"zstd": True}, {"plain": True}, {}):
        found = against(tmp_path, changed, **how)
        files = [one for one in found.differences if one.path]
        assert [(one.path, one.causes) for one in files] == [("opt/a.py", ("content",))], how
        assert "line 2: 'b' against 'c'" in files[0].detail


A, B = File("opt/a.py", b"a\nb\n"), File("opt/b", b"x")
CHANGES: list[tuple[str, tuple[File, ...], str, str]] = [
    ("content", (File("opt/a.py", b"a\nc\n"), B), "opt/a.py", "line 2: 'b' against 'c'"),
    ("timestamps", (File("opt/a.py", b"a\nb\n", mtime=1001), B), "opt/a.py", "1000 against 1001"),
    ("mode", (File("opt/a.py", b"a\nb\n", mode=0o755), B), "opt/a.py", "644 against 755"),
    ("owner", (File("opt/a.py", b"a\nb\n", uid=7), B), "opt/a.py", "0:0 against 7:0"),
    ("link", (A, B, File("opt/l", link="a")), "opt/l", "second build alone"),
    ("extra", (A, B, File("opt/c")), "opt/c", "second build alone"),
    ("missing", (A,), "opt/b", "first build alone"),
    ("kind", (A, File("opt/b", link="a.py")), "opt/b", "file against symbolic link"),
    ("attributes", (A, File("opt/b", b"x", pax={"SCHILY.xattr.user.a": "1"})), "opt/b", "xattr"),
    ("order", (B, A), "", "first opt/a.py against opt/b"),
]


@pytest.mark.parametrize(("cause", "files", "path", "said"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_change_is_named_by_file_cause_and_stage(
    tmp_path: Path, cause: str, files: tuple[File, ...], path: str, said: str
) -> None:
    found = against(tmp_path, with_layer(1, *files))
    one = only(found)
    assert (cause if cause != "link" else "extra") in one.causes
    assert said in one.detail
    assert (one.path, one.layer, one.platform) == (path, 1, "linux/amd64")
    assert (one.stage, one.step) == ("patched", "RUN apply")
    assert (found.grade, found.grade.exit_code) == (Grade.NAMED, 1)
    assert found.files == ((path,) if path else ())


def test_links_that_lead_elsewhere(tmp_path: Path) -> None:
    sides = [write(tmp_path / name, [layer(File("l", link=name))]) for name in ("a", "b")]
    with Layout(sides[0]) as one, Layout(sides[1]) as other:
        assert only(compare.images(one, other)).causes == ("link",)


def test_what_a_copy_brought_is_laid_to_the_stage_it_is_from(tmp_path: Path) -> None:
    one = only(against(tmp_path, with_layer(2, File("lib/k.so", b"\0elg"))))
    assert (one.stage, one.step) == ("kernel", "COPY /out/ /")
    assert one.detail == "from byte 3 on (4 bytes against 4)"


def test_packing_alone_is_told_from_content(tmp_path: Path) -> None:
    found = against(tmp_path, level=1, layers=LAYERS)
    assert {one.causes for one in found.differences} == {("packing",)}
    assert found.grade is Grade.NAMED
    assert found.files == ()


def test_another_archiver_is_told_from_content(tmp_path: Path) -> None:
    layers = [*LAYERS[:3], layer(File("var/ok", b""), form=tarfile.GNU_FORMAT)]
    assert only(against(tmp_path, layers)).causes == ("framing",)


def test_another_base_is_another_image(tmp_path: Path) -> None:
    found = against(tmp_path, with_layer(0, File("etc/base", b"other")))
    assert only(found).stage == "base"
    assert (found.grade, found.grade.exit_code) == (Grade.DIFFERENT, 3)


def test_another_configuration_is_another_image(tmp_path: Path) -> None:
    found = against(tmp_path, config={"config": {"Labels": {}, "Env": ["A=2"]}})
    assert only(found).detail == "config.Env: ['A=1'] against ['A=2']"
    assert found.grade is Grade.DIFFERENT


def test_time_in_the_configuration_is_named(tmp_path: Path) -> None:
    found = against(tmp_path, config={"created": "2026-01-01T00:00:00Z"})
    assert only(found).causes == ("configuration", "timestamps")
    assert found.grade is Grade.NAMED


def test_another_number_of_layers_is_another_image(tmp_path: Path) -> None:
    found = against(tmp_path, [*LAYERS, layer(File("more"))], history=[*HISTORY, "RUN more"])
    assert ("layers",) in {one.causes for one in found.differences}
    assert found.grade is Grade.DIFFERENT


def test_platforms_are_compared_each(tmp_path: Path) -> None:
    one = write(tmp_path / "one.tar", LAYERS, HISTORY, platforms=("amd64", "arm64"))
    two = write(tmp_path / "two.tar", with_layer(3, File("var/no")), HISTORY,
                platforms=("amd64", "arm64"))  # fmt: skip
    with Layout(one) as first, Layout(two) as second:
        found = compare.images(first, second, STEPS)
    assert {one.platform for one in found.differences} == {"linux/amd64", "linux/arm64"}
    with Layout(one) as first, Layout(write(tmp_path / "3.tar", LAYERS, HISTORY)) as second:
        assert compare.images(first, second, STEPS).grade is Grade.DIFFERENT


def test_more_files_than_one_reads_are_not_named(tmp_path: Path) -> None:
    few = [File(f"f{number}") for number in range(NAMED_AT_MOST)]
    assert against(tmp_path, with_layer(3, File("var/ok"), *few)).grade is Grade.NAMED
    many = [*few, File("one more")]
    assert against(tmp_path, with_layer(3, File("var/ok"), *many)).grade is Grade.DIFFERENT


@pytest.mark.parametrize(
    ("name", "one", "other", "cause", "said"),
    [
        ("built", b"Sun Nov 29 20:01:02 UTC\n", b"Sun Nov 29 20:01:09 UTC\n", "content", "time"),
        ("stamp", b"1764446461\n", b"1764446470\n", "content", "looks like a time"),
        ("RECORD", b"a,1\nb,2\n", b"b,2\na,1\n", "order", "another order"),
        ("a.pyc", b"M" * 8 + b"t" * 8 + b"c", b"M" * 8 + b"u" * 8 + b"c", "byte code", "header"),
        ("a.pyc", b"M" * 16 + b"c", b"M" * 16 + b"d", "byte code", "17 bytes against 17"),
        ("a.gz", gzip.compress(b"a", mtime=1), gzip.compress(b"a", mtime=2), "timestamps", "gzip"),
        ("a", b"a\n", b"b\n", "content", "line 1: 'a' against 'b'"),
    ],
)
def test_contents_explain_themselves(
    name: str, one: bytes, other: bytes, cause: str, said: str
) -> None:
    found = compare.content(name, one, other)
    assert found[0] == cause
    assert said in found[1]
    assert name != "a" or "time" not in found[1]


def test_large_files_are_named_without_being_read(tmp_path: Path) -> None:
    sides = [b"x" * compare.READ_AT_MOST + end for end in (b"a", b"b")]
    images = [write(tmp_path / f"{i}.tar", [layer(File("big", d))]) for i, d in enumerate(sides)]
    with Layout(images[0]) as one, Layout(images[1]) as other:
        found = only(compare.images(one, other))
    assert found.path == "big"
    assert "sha256" in found.detail


def test_a_folder_is_read_like_an_archive(tmp_path: Path) -> None:
    archive = write(tmp_path / "one.tar", LAYERS, HISTORY, plain=True)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "folder", filter="data")
    with Layout(archive) as one, Layout(tmp_path / "folder") as other:
        assert compare.images(one, other, STEPS).grade is Grade.IDENTICAL
        assert one.digest.startswith("sha256:")


def test_what_is_no_image_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x.tar", tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(IntegrityError, match="expected an OCI archive"):
            Layout(path)


def test_folders(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "site").mkdir(parents=True)
        (tmp_path / name / "site" / "a.py").write_text("a\n")
        (tmp_path / name / "layer.tar").write_bytes(layer(File("a.py", b"a")))
    one, other = tmp_path / "one", tmp_path / "other"
    assert compare.folders(one, other, "layer.tar").grade is Grade.IDENTICAL

    (other / "layer.tar").write_bytes(layer(File("a.py", b"a", mtime=5)))
    (other / "site" / "a.py").write_text("b\n")
    (other / "site" / "c").symlink_to("a.py")
    found = compare.folders(one, other, "layer.tar")
    assert {(d.path, d.causes) for d in found.differences} == {
        ("layer.tar/a.py", ("timestamps",)),
        ("site/a.py", ("content",)),
        ("site/c", ("extra",)),
    }
    assert found.grade is Grade.NAMED
