"""Reads a file that must be small: a path that leads to weights or to a device costs nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

KEY_BYTES = 4096
TEMPLATE_BYTES = 4 << 20


def read(path: Path, limit: int) -> bytes:
    """The whole of a file of at most `limit` bytes. Raises OSError, also for a larger one."""
    # O_NONBLOCK: a named pipe that nobody writes to is empty, and does not hold up the start.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data
