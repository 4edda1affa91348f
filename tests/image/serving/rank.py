"""One rank as a process of its own: the real `main` on a machine of a few bytes.

python rank.py FOLDER DEPLOYMENT [ARG...]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "image" / "runtime")]

from serving.cluster import Membership, Place  # noqa: E402
from serving.errors import MismatchError  # noqa: E402
from serving.main import Tools, main  # noqa: E402

from tests.image.serving.machines import machine  # noqa: E402


class TwoRanks:
    """A cluster whose other rank does what a file in the folder says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def discover(self, plan):
        return Place(True, "127.0.0.1", "127.0.0.1")

    def join(self, plan, fingerprint):
        if (self.folder / "mismatch").exists():
            raise MismatchError("kernel: rank 0 has sha256:1, rank 1 has sha256:2")
        while (self.folder / "wait").exists():
            time.sleep(0.02)
        rank = int((self.folder / "worker").exists())
        return Membership(rank, 2, "127.0.0.1", ("127.0.0.1", "::1"))

    def lost(self):
        return "rank 1 is lost: it was killed" if (self.folder / "lost").exists() else ""

    def stopping(self):
        (self.folder / "stopping").touch()

    def leave(self, reason):
        (self.folder / "left").write_text(reason)


def run() -> int:
    folder, deployment, *arguments = sys.argv[1:]
    place = Path(folder)
    tools = Tools(
        machine=machine(deployment),
        site=place / "site",
        self_test=[str(place / "bin" / "selftest")],
        fabric=[str(place / "bin" / "fabric")],
        numeric=[str(place / "bin" / "numeric")],
        settle=0.0,
    )
    if deployment != "rtx6000-4x":
        tools.cluster = lambda plan: TwoRanks(place)
    return main(arguments, dict(os.environ), tools)


if __name__ == "__main__":
    sys.exit(run())
