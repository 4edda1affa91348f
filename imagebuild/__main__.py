"""Lets `python -m imagebuild` do what build.py does once the .venv is there."""

from __future__ import annotations

import sys

from imagebuild.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
