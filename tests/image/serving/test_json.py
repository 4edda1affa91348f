"""JSON from outside of any depth: Python gives up with an error that is no ValueError."""

from __future__ import annotations

import ast
from pathlib import Path

import serving

from imagebuild import servebench, weights

FOLDERS = [Path(str(package.__file__)).parent for package in (serving, servebench, weights)]
# What the module has written itself.
OWN = {"copied: dict[str, Any] = json.loads(json.dumps(self._document))"}


def unguarded(source: str) -> list[str]:
    """Lines with json.loads or .json() outside of a `try` that takes a RecursionError."""
    tree = ast.parse(source)
    lines = source.splitlines()
    calls = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call)
             and ast.unparse(node.func) in ("json.loads", "json.load", "reply.json")}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(
            handler.type is not None and "RecursionError" in ast.unparse(handler.type)
            for handler in node.handlers
        ):
            inside = (one for statement in node.body for one in ast.walk(statement))
            calls -= {one.lineno for one in inside if hasattr(one, "lineno")}
    return [text for line in sorted(calls) if (text := lines[line - 1].strip()) not in OWN]


def test_every_reader_expects_it():
    found = {
        path.name: lines
        for folder in FOLDERS
        for path in sorted(folder.glob("*.py"))
        if (lines := unguarded(path.read_text("utf-8")))
    }
    assert found == {}


def test_the_check_sees_one():
    assert unguarded("try:\n    x = json.loads(y)\nexcept ValueError:\n    pass\n")
    assert not unguarded("try:\n    x = json.loads(y)\nexcept (RecursionError):\n    pass\n")
