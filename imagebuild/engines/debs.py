"""The lock's .deb files as the Dockerfile's context `debs`: a folder for each platform."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imagebuild.lock import BaseLock
from imagebuild.pins import DebPin
from imagebuild.steps.debs import SUMS

# Gives the verified file of a pin.
Fetch = Callable[[DebPin], Path]
Files = Mapping[str, tuple[DebPin, ...]]


def usable(base: BaseLock, digest: str, platforms: Sequence[str]) -> tuple[Files, str]:
    """The files for an image by platform, or none of them and a sentence that says why.

    Args:
        base: the release.
        digest: of the image to build on; "" where that is not known yet.
        platforms: to build for.
    """
    pin = base.debs
    if pin is None or not pin.files:
        return {}, "the lock has none for this base; build.py lock update debs asks the base's apt"
    missing = [platform for platform in platforms if platform not in pin.files]
    if missing:
        return {}, f"the lock has none for {' and '.join(missing)}"
    if digest and digest != pin.base:
        return {}, f"those in the lock are for another base, {pin.base}"
    return {platform: pin.files[platform] for platform in platforms}, ""


def lay_out(files: Files, folder: Path, fetch: Fetch) -> None:
    """Puts the files of each platform, and their sums, where the step looks for them.

    Raises:
        IntegrityError, EngineError: as `fetch`.
    """
    for platform, pins in files.items():
        place = folder / architecture(platform)
        place.mkdir(parents=True)
        for pin in pins:
            _link(fetch(pin), place / pin.filename)
        lines = sorted(f"{pin.sha256}  {pin.filename}\n" for pin in pins)
        (place / SUMS).write_text("".join(lines))


def architecture(platform: str) -> str:
    """What dpkg calls a platform: "linux/arm64" is "arm64"."""
    return platform.split("/")[1]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
