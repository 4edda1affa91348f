"""Opens a zip as a wheel and refuses what no honest wheel holds; it fetches and writes nothing.

The zip format itself is left to the standard library; names, sizes, places and hashes are judged.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import hashlib
import lzma
import re
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from imagebuild.errors import EngineError, IntegrityError
from imagebuild.sources.disk import BLOCK

MAX_MEMBER = 2 << 30  # bytes, unpacked
MAX_RATIO = 1000  # unpacked to packed, for members of more than RATIO_FROM bytes
RATIO_FROM = 64 << 20
_LOCAL_HEADER = 30  # bytes, before the name
_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")


# What zipfile and its decompressors are known to raise over bytes that are no intact zip.
_BAD_BYTES = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OverflowError,
    RuntimeError,  # encrypted; NotImplementedError: an unknown compression
    ValueError,
)


class Entry(NamedTuple):
    """What RECORD says of a file: sha256 in hex and size in bytes."""

    sha256: str
    size: int


@contextlib.contextmanager
def zip_errors(source: str, member: str = "") -> Iterator[None]:
    """Turns what zipfile and zlib raise over bad bytes into an IntegrityError."""
    where = f"{source}, {member}" if member else source
    try:
        yield
    except _BAD_BYTES as error:
        raise IntegrityError(
            f"{where}: expected an intact wheel, found: {error or type(error).__name__}",
            hint="the file is damaged or was changed; fetch it again",
        ) from error
    except OSError as error:
        raise EngineError(
            f"{where}: expected to read it, found {error.strerror or error}"
        ) from error


def open_archive(
    file: IO[bytes] | Path, source: str
) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    """Opens a zip and returns it with its files by name, all checked.

    Args:
        file: a path, or a seekable file that stays the caller's.
        source: how messages name it.

    Raises:
        IntegrityError: no zip, or one with names, sizes or places that are refused.
    """
    with zip_errors(source):
        archive = zipfile.ZipFile(file)
    try:
        members = archive.infolist()
        _check_names(members, source)
        for member in members:
            _check_size(member, source)
        _check_places(archive, members, source)
    except BaseException:
        archive.close()
        raise
    return archive, {member.filename: member for member in members if not member.is_dir()}


def spans_of(archive: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """First byte and one past the last of each member, header and trailer included."""
    ordered = sorted(archive.infolist(), key=lambda member: member.header_offset)
    starts = [member.header_offset for member in ordered] + [archive.start_dir]
    return {m.filename: place for m, place in zip(ordered, pairwise(starts), strict=True)}


def find_record(names: Mapping[str, object], source: str) -> str:
    """The name of RECORD.

    Raises:
        IntegrityError: there is none, or more than one.
    """
    found = [name for name in names if _RECORD.fullmatch(name)]
    if len(found) != 1:
        raise IntegrityError(f"{source}: expected one .dist-info/RECORD, found {len(found)}")
    return found[0]


def parse_record(data: bytes, source: str) -> dict[str, Entry]:
    """Reads RECORD; files that it lists without a hash (itself, signatures) are left out.

    Raises:
        IntegrityError: it is malformed, lists a file twice, or uses another hash than sha256.
    """
    entries: dict[str, Entry] = {}
    try:
        for path, digest, size in csv.reader(data.decode("utf-8").splitlines()):
            if not digest:
                continue
            if path in entries or not digest.startswith("sha256="):
                raise ValueError(path)
            text = digest.removeprefix("sha256=")
            sha256 = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True).hex()
            entries[path] = Entry(sha256, int(size))
    except (ValueError, csv.Error, binascii.Error) as error:
        raise IntegrityError(
            f"{source}, RECORD: expected one line a file, with sha256 and size, found: {error}"
        ) from error
    return entries


def check_member(
    path: str, sha256: str, size: int, record: Mapping[str, Entry], source: str
) -> None:
    """Compares a file's sha256 and size with what RECORD says.

    Raises:
        IntegrityError: RECORD has another hash or size, or does not list it.
    """
    entry = record.get(path)
    if entry is None:
        raise IntegrityError(f"{source}, {path}: expected a line with a hash in RECORD, found none")
    if entry != (sha256, size):
        raise IntegrityError(
            f"{source}, {path}: expected {entry.size} bytes of sha256 {entry.sha256} by RECORD, "
            f"found {size} bytes of sha256 {sha256}",
            hint="the wheel is damaged or was changed; fetch it again",
        )


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, source: str) -> bytes:
    """Unpacks one member; zipfile checks its CRC.

    Raises:
        IntegrityError: the bytes are not those that were packed.
    """
    with zip_errors(source, member.filename):
        return archive.read(member)


def blocks_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo, source: str) -> Iterator[bytes]:
    """Unpacks one member in pieces; raises as `read_member`, at the latest after the last piece."""
    with zip_errors(source, member.filename), archive.open(member) as packed:
        while block := packed.read(BLOCK):
            yield block


def sha256_of(data: bytes) -> str:
    """Hex digits."""
    return hashlib.sha256(data).hexdigest()


def _check_names(members: list[zipfile.ZipInfo], source: str) -> None:
    for name, times in Counter(member.filename for member in members).items():
        if times > 1:
            raise IntegrityError(f"{source}: expected each name once, found {name!r} {times} times")
    names = {member.filename.rstrip("/") for member in members if not member.is_dir()}
    folders: set[str] = set()
    for member in members:
        # orig_filename: zipfile cuts `filename` at a NUL.
        name = member.orig_filename
        parts = name.removesuffix("/").split("/")
        if (
            {"", ".", ".."} & set(parts)
            or "\\" in name
            or "\0" in name
            or re.match(r"[A-Za-z]:", name)
        ):
            raise IntegrityError(f"{source}: expected paths inside the wheel, found {name!r}")
        folder = name.removesuffix("/").rpartition("/")[0]
        while folder and folder not in folders:  # a folder is looked at once
            if folder in names:
                raise IntegrityError(f"{source}: expected a folder above {name!r}, found a file")
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        if stat.S_ISLNK(member.external_attr >> 16):
            raise IntegrityError(f"{source}: expected plain files, found the link {name!r}")


def _check_size(member: zipfile.ZipInfo, source: str) -> None:
    size = member.file_size
    if size > MAX_MEMBER:
        found = f"{size} bytes"
    elif size > RATIO_FROM and size > MAX_RATIO * member.compress_size:
        found = f"{size} bytes packed into {member.compress_size}"
    else:
        return
    raise IntegrityError(
        f"{source}, {member.filename}: expected at most {MAX_MEMBER} bytes, packed at most "
        f"{MAX_RATIO}:1, found {found}"
    )


def _check_places(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], source: str) -> None:
    places = spans_of(archive)
    for member in members:
        start, end = places[member.filename]
        if start < 0 or start + _LOCAL_HEADER + member.compress_size > end:
            raise IntegrityError(
                f"{source}, {member.filename}: expected members one after another, "
                "found that it overlaps the next"
            )
