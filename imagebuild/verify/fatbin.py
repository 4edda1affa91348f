"""Which GPU code a shared library carries, read from its bytes; no CUDA tool is needed.

Layout, found by reading real libraries and checked against cuobjdump 13.4 and files that
fatbinary 13.0 made for each target: `.nv_fatbin` holds containers (magic, version u16, header
size u16, content size u64), each with entries (kind u16, version u16, header size u32, padded
payload size u64, stored size u32 or 0 where the payload is not compressed, options offset u32,
minor u16, major u16, architecture u32, name offset u32, name length u32, flags u64, u64,
uncompressed size u64). Payloads are zstd-compressed as a rule and are never unpacked here.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAGIC = 0xBA55ED50
_KINDS = {1: "ptx", 2: "elf"}
_MACHINES = {62: "x86_64", 183: "aarch64"}
# Flags that cuobjdump and fatbinary show as the letter behind the number.
_ARCH_SPECIFIC, _FAMILY = 0x100000, 0x200000


class NotElfError(ValueError):
    """The bytes are no 64-bit little-endian ELF file, so no Linux that we serve loads them."""


class FatbinError(ValueError):
    """The file is an ELF, but its GPU code cannot be read."""


@dataclass(frozen=True)
class Code:
    """One piece of GPU code.

    Attributes:
        kind: "elf" for machine code, "ptx", or "kind N" for anything newer.
        target: such as "sm_120a", "sm_120f" or "sm_120"; "compute_..." for PTX.
        number: 120 for all of these.
        digest: SHA-256 of the payload as stored.
        size: stored bytes.
    """

    kind: str
    target: str
    number: int
    digest: str
    size: int


def machine(data: bytes) -> str:
    """The processor that an ELF file is for, such as "x86_64". Raises NotElfError."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise NotElfError("no 64-bit little-endian ELF file")
    (number,) = struct.unpack_from("<H", data, 18)
    return _MACHINES.get(number, f"machine {number}")


def section(data: bytes, name: str) -> bytes | None:
    """Content of the section of that name, None when there is none.

    Raises:
        NotElfError: not an ELF file.
        FatbinError: its section table is cut off.
    """
    machine(data)
    try:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
        headers = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
        if not headers:
            return None
        names = _slice(data, headers[names_index][4], headers[names_index][5])
        for header in headers:
            if names[header[0] :].split(b"\0", 1)[0] == name.encode():
                return _slice(data, header[4], header[5])
    except (struct.error, IndexError, OverflowError) as error:
        raise FatbinError(f"the section table cannot be read: {error}") from error
    return None


def device_code(data: bytes) -> tuple[Code, ...]:
    """Every piece of GPU code in a shared library, in file order.

    Raises:
        NotElfError: not an ELF file.
        FatbinError: `.nv_fatbin` has another layout, or is cut off.
    """
    content = section(data, ".nv_fatbin") or b""
    found: list[Code] = []
    at = 0
    while at < len(content):
        if not any(content[at : at + 8]):
            at += 8  # padding between containers
            continue
        start, end = _container(content, at)
        while start < end:
            code, start = _entry(content, start, end)
            found.append(code)
        at = (end + 7) & ~7
    return tuple(found)


def _container(content: bytes, at: int) -> tuple[int, int]:
    """Where the entries of the container at `at` start and end."""
    if at + _CONTAINER.size > len(content):
        raise FatbinError(f"a container at {at} is cut off")
    magic, _version, header, size = _CONTAINER.unpack_from(content, at)
    if magic != _MAGIC or header < _CONTAINER.size:
        raise FatbinError(f"expected a container at {at}, found magic {magic:#010x}")
    end = at + header + size
    if end > len(content):
        raise FatbinError(f"the container at {at} is cut off")
    return at + header, end


def _entry(content: bytes, at: int, end: int) -> tuple[Code, int]:
    """The entry at `at`, and where the next one starts."""
    if at + _ENTRY.size > end:
        raise FatbinError(f"an entry at {at} is cut off")
    kind, _, header, padded, stored, _, _, _, number, _, _, flags, _, _ = _ENTRY.unpack_from(
        content, at
    )
    begin, size = at + header, stored or padded
    if header < _ENTRY.size or size > padded or begin + padded > end:
        raise FatbinError(f"the entry at {at} has sizes that do not fit")
    letter = "f" if flags & _FAMILY else "a" if flags & _ARCH_SPECIFIC else ""
    name = _KINDS.get(kind, f"kind {kind}")
    prefix = "compute_" if name == "ptx" else "sm_"
    digest = hashlib.sha256(content[begin : begin + size]).hexdigest()
    return Code(name, f"{prefix}{number}{letter}", number, digest, size), begin + padded


def runs_on(codes: tuple[Code, ...], gpu_arch: str) -> bool:
    """Whether some machine code of these runs on a card of that architecture.

    Code for X.y runs on X.z with z >= y, when it is plain or for the family (f); code with the
    letter a runs on its own number alone. PTX is not counted: nothing here may depend on a
    compilation at start.
    """
    wanted = int(gpu_arch.removeprefix("sm_"))
    for code in codes:
        if code.kind != "elf":
            continue
        is_family = code.number // 10 == wanted // 10 and code.number <= wanted
        if code.number == wanted or (is_family and not code.target.endswith("a")):
            return True
    return False


def _slice(data: bytes, start: int, size: int) -> bytes:
    if start + size > len(data):
        raise FatbinError(f"a section of {size} bytes at {start} is cut off")
    return data[start : start + size]
