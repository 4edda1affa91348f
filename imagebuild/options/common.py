"""What the verbs' options share: kinds of values, and how a verb is declared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from imagebuild.errors import UsageError
from imagebuild.patching.patch import GPU_ARCHES

Verbs = Any  # argparse's action for subparsers, which is not public


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a wrong call is an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def group(verbs: Verbs, name: str, text: str) -> Verbs:
    """Declares a verb that has verbs of its own."""
    parser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def verb(
    verbs: Verbs,
    name: str,
    run: str,
    text: str,
    formats: Sequence[str] = ("text", "json"),
) -> argparse.ArgumentParser:
    """Declares a verb; `run` is module:function below imagebuild, imported when it is called."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--recipe", metavar="NAME", help="default: the only one")
    parser.add_argument("--format", choices=formats, default="text",
                        help="json goes to stdout alone")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="use the cache alone")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("-v", "--verbose", action="store_true", help="show causes of errors")
    parser.set_defaults(run=run)
    return parser


def arch(parser: argparse.ArgumentParser, text: str = "default: that of this machine") -> None:
    """Adds --arch."""
    parser.add_argument("--arch", choices=GPU_ARCHES, help=text)


def release(text: str) -> str:
    """A release as tags of images and of the repository name it: v0.31.0 is 0.31.0."""
    return text.removeprefix("v")


def count(text: str) -> int:
    """A number of things at a time. Raises what argparse turns into a sentence."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 64, found {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Numbers with commas. Raises what argparse turns into a sentence."""
    counts = tuple(int(word) for word in text.split(",") if word.isdecimal())
    if len(counts) != text.count(",") + 1 or not all(1 <= count <= 1024 for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to 1024, found {text!r}")
    return counts


def positive(text: str) -> int:
    """A number above 0. Raises what argparse turns into a sentence."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return int(text)
