"""The code of image/runtime, as build.py asks it: which knobs the entry point would take."""

from __future__ import annotations

import sys
from pathlib import Path


def make_importable(folder: Path) -> None:
    """Puts image/runtime last on `sys.path`: `serving` can be imported, and hides nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
