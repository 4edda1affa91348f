"""Zstandard, which Python has from 3.14 on; before, it is the same module under another name."""

from __future__ import annotations

import importlib
import sys
from typing import IO, Any, cast

_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def open_stream(blob: IO[bytes]) -> IO[bytes]:
    """What is packed in a stream, to be read."""
    return cast("IO[bytes]", importlib.import_module(_MODULE).open(blob, "rb"))


def compressor(level: int) -> Any:  # noqa: ANN401  a class of a module with two names
    """An object with `compress` and `flush`."""
    return importlib.import_module(_MODULE).ZstdCompressor(level)
