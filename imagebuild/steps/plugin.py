"""Installs the vLLM plug-in of kernel/ beside vLLM; the library lies elsewhere in the image."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from imagebuild import plugin
from imagebuild.errors import EngineError
from imagebuild.steps.run import finish, say
from imagebuild.verify.script import own_root


def main(arguments: Sequence[str]) -> int:
    """`plugin --source kernel [--root DIR]`; the exit codes are build.py's."""
    parser = argparse.ArgumentParser(prog="plugin")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--root", help="default: this interpreter's site-packages with vLLM in it")
    asked = parser.parse_args(arguments)
    return finish("plugin", lambda: _run(asked.source, asked.root))


def _run(source: Path, root: str | None) -> None:
    site = Path(root).absolute() if root else own_root()
    found = plugin.read(source)
    try:
        written = plugin.write(found, site)
    except OSError as error:
        raise EngineError(f"{site}: cannot be written: {error}") from error
    say(f"{site}: {plugin.PROJECT} {found.version}, {len(written)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
