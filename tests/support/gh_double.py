#!/usr/bin/env python3
"""A test double of `gh`, for `.ci/drift`: it keeps issues in a file and knows four commands.

GH_DOUBLE names the file: {"issues": [...], "calls": [...], "fail": "word"}. It refuses what the
real one would refuse: an unknown option, a label that nobody created, an empty title or body.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

STORE = Path(os.environ.get("GH_DOUBLE", ""))
OPTIONS = {
    "label create": ("--description",),
    "issue list": ("--label", "--state", "--limit", "--json"),
    "issue create": ("--title", "--label", "--body-file"),
    "issue edit": ("--body-file",),
}


def main(arguments: list[str]) -> int:
    """Answers one call."""
    store = json.loads(STORE.read_text())
    command = " ".join(arguments[:2])
    parser = argparse.ArgumentParser(prog="gh", allow_abbrev=False)
    parser.add_argument("name", nargs="?" if command.endswith(("create", "list")) else 1)
    parser.add_argument("--force", action="store_true")
    for option in OPTIONS[command]:
        parser.add_argument(option)
    asked = parser.parse_args(arguments[2:])
    store["calls"].append(command)
    code = answer(command, asked, store)
    STORE.write_text(json.dumps(store))
    return code


def answer(command: str, asked: argparse.Namespace, store: dict) -> int:
    """Does what a command says to the store."""
    if store.get("fail") == command:
        sys.stderr.write("HTTP 403: Resource not accessible by integration\n")
        return 1
    if command == "label create":
        store["labels"] = [asked.name]
    elif command == "issue list":
        fields = asked.json.split(",")
        mine = [one for one in store["issues"] if asked.label in one["labels"]]
        sys.stdout.write(json.dumps([{field: one[field] for field in fields} for one in mine]))
    else:
        body = sys.stdin.read()
        assert asked.body_file == "-"
        assert 0 < len(body) <= 65_536, len(body)
        if command == "issue create":
            assert asked.title
            assert asked.label in store["labels"], "could not add label"
            number = len(store["issues"]) + 1
            store["issues"].append({"number": number, "title": asked.title, "state": "OPEN",
                                    "body": body, "labels": [asked.label]})  # fmt: skip
            sys.stdout.write(f"https://example.org/issues/{number}\n")
        else:
            (number,) = asked.name
            store["issues"][int(number) - 1]["body"] = body
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
