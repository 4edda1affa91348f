"""Which symbols a shared library leaves to others, read from its bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from imagebuild.verify import fatbin

_SYMBOL = struct.Struct("<IBBHQQ")


def undefined_symbols(data: bytes) -> list[str]:
    """Names in the dynamic symbol table that the library does not define, sorted.

    Raises:
        NotElfError, FatbinError: as `imagebuild.verify.fatbin.section`.
    """
    return sorted(name for name, is_defined in _symbols(data) if name and not is_defined)


def defined_symbols(data: bytes) -> list[str]:
    """Names that others can take from the library, sorted. Raises as above."""
    return sorted(name for name, is_defined in _symbols(data) if name and is_defined)


def _symbols(data: bytes) -> Iterator[tuple[str, bool]]:
    table = fatbin.section(data, ".dynsym") or b""
    names = fatbin.section(data, ".dynstr") or b""
    for at in range(0, len(table) - _SYMBOL.size + 1, _SYMBOL.size):
        name, _info, _other, section, _value, _size = _SYMBOL.unpack_from(table, at)
        end = names.find(b"\0", name)
        yield names[name:end].decode("ascii", "replace"), section != 0
