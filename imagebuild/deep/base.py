"""What a deep probe says about itself, and the few helpers that several share.

Standard library only, and nothing of the tree at import: build.py reads `ABOUT` in its own process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class ClaimError(RuntimeError):
    """The tree does not do what the probe claims; the message is a sentence."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The head of a probe module, its constant `ABOUT`.

    Attributes:
        claim: what `probe` asserts, as a sentence.
        patches: patches or upstream fixes that it speaks for; empty for a fact of the base alone.
        versions: the vLLM releases that it is for.
        imports: modules of the tree that are imported before `probe` is called, each of which
            must come from the tree.
        seconds: how long it may take, imports included.
    """

    claim: str
    patches: tuple[str, ...] = ()
    versions: str = ">=0.31,<0.34"
    imports: tuple[str, ...] = ()
    seconds: float = 180.0


def tree() -> Path:
    """The site-packages under test: the runner puts it first on the path."""
    return Path(sys.path[0])


def require(holds: bool, sentence: str) -> None:
    """Raises ClaimError with `sentence` unless it holds."""
    if not holds:
        raise ClaimError(sentence)


@contextlib.contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Sets, or with None unsets, one variable for the block."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
