#!/usr/bin/env python3
"""Starts imagebuild.cli from the .venv beside this file, which it makes where it is missing.

This file must parse under any Python, so that an old one gets a sentence and not a traceback:
no annotations, no f-strings and no import of ours above the version check.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write(
        "build.py: error: this Python: expected 3.11 or newer, found "
        + sys.version.split()[0]
        + " ("
        + sys.executable
        + ")\nhint: start it with a newer one, for example: python3.12 build.py --help\n"
    )
    sys.exit(5)

from pathlib import Path

# Python leaves this folder out under -P and PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from imagebuild import bootstrap

if __name__ == "__main__":
    sys.exit(bootstrap.main(sys.argv[1:]))
