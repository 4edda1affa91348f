"""Installs the .deb files of a folder, each compared with the folder's SHA256SUMS first.

The folder may hold one for each architecture instead, named as dpkg calls it. Stands alone, so that
its stage depends on this file and the packages only. Without packages it says so and changes
nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUMS = "SHA256SUMS"
ARCHITECTURES = ("amd64", "arm64")
_LINE = re.compile(r"([0-9a-f]{64})[ ]{1,2}\*?([^/\s]+\.deb)")


def main(arguments: Sequence[str]) -> int:
    """`debs FOLDER`: 0, or 4 where a hash is wrong and 5 where dpkg fails."""
    given = Path(arguments[0])
    folder = own(given)
    packages = sorted(folder.glob("*.deb"))
    if not packages and folder == given and not (folder / SUMS).exists():
        sys.stdout.write("debs: none installed: none in the lock, no --build-context debs=DIR\n")
        return 0
    problems = check(folder)
    if problems:
        lines = "".join(f"  - {problem}\n" for problem in problems)
        sys.stderr.write(f"debs: error: {SUMS} does not hold:\n{lines}")
        return 4
    if not packages:
        sys.stdout.write("debs: none to install: the base has them all\n")
        return 0
    command = ["dpkg", "--install", "--force-unsafe-io", *map(str, packages)]
    sys.stdout.write(f"+ {' '.join(command)}\n")
    sys.stdout.flush()
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        environment["SOURCE_DATE_EPOCH"] = epoch  # the day in /etc/shadow, when a user is added
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(f"debs: error: dpkg: expected exit code 0, found {done.returncode}\n"
                         "hint: the folder must hold all that these depend on\n")  # fmt: skip
        return 5
    return 0


def own(folder: Path) -> Path:
    """The folder of this image's architecture, where there is one for any; else `folder`."""
    if not any((folder / name).is_dir() for name in ARCHITECTURES):
        return folder
    asked = ["dpkg", "--print-architecture"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    return folder / done.stdout.strip()


def check(folder: Path) -> list[str]:
    """Sentences on packages that are not listed, missing, or have other bytes."""
    try:
        text = (folder / SUMS).read_text("utf-8")
    except FileNotFoundError:
        return [f"expected {SUMS} beside the packages, found none"]
    matches = [_LINE.fullmatch(line) for line in text.splitlines() if line.strip()]
    wanted = {match[2]: match[1] for match in matches if match}
    problems = [] if all(matches) else [f"a line of {SUMS} is not <sha256>  <name>.deb"]
    there = {path.name: path for path in folder.glob("*.deb")}
    problems += [f"{name}: not listed" for name in sorted(there.keys() - wanted.keys())]
    for name, digest in sorted(wanted.items()):
        if name not in there:
            problems.append(f"{name}: listed, not there")
            continue
        found = hashlib.sha256(there[name].read_bytes()).hexdigest()
        if found != digest:
            problems.append(f"{name}: expected sha256 {digest}, found {found}")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
