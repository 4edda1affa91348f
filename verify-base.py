#!/usr/bin/env python3
"""Starts imagebuild.verify beside this file with the base's own Python; it changes nothing."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write("verify-base.py: error: expected Python 3.11 or newer, found "
                     + sys.version.split()[0] + "\n")  # fmt: skip
    sys.exit(5)
sys.dont_write_bytecode = True  # a check leaves nothing behind in the image

from pathlib import Path  # noqa: E402

# Python leaves this folder out under -P and PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from imagebuild.verify.script import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
