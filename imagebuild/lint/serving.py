"""Lint of what starts the image: compose files and env files, before a container reads them.

Faults that people met: JSON that lost its quotes on the way through a shell, a folded `command:`
with a line end in it, knobs that nobody reads, and knobs that contradict each other. It reads files
only; what a knob means is asked of the entry point's own code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from imagebuild.config import ROOT
from imagebuild.runtime import make_importable

_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")
_DEFAULTED = re.compile(r"\$\{(\w+):?-([^}]+)\}")
_LATEST = re.compile(r"[^:@]+(:latest)?")
_PREFIX = "GLM_"
_DEPLOYMENT = "GLM_DEPLOYMENT"
_RUNTIME = ROOT / "image" / "runtime"


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        level: error or warning.
        code: of the rule.
        file: as it was named.
        line: from 1.
        message: what was expected and found.
        fix: what to do, or "".
    """

    level: str
    code: str
    file: str
    line: int
    message: str
    fix: str = ""

    def document(self) -> dict[str, object]:
        """For JSON, in the words that all verbs share."""
        return {**vars(self), "fix": self.fix or None}


def check_env(text: str, file: str) -> list[Finding]:
    """Findings of an env file, by line."""
    found: list[Finding] = []
    values: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            found.append(Finding("error", "env-line", file, number,
                                 f"expected NAME=VALUE, found {line.strip()!r}"))  # fmt: skip
            continue
        name, raw = match.groups()
        if name in values:
            message = f"{name}: expected once, also in line {values[name][1]}"
            found.append(Finding("error", "env-twice", file, number, message))
        by_compose, by_shell = compose_value(raw), shell_value(raw)
        if by_shell != by_compose:
            said = "an error" if by_shell is None else repr(by_shell)
            found.append(Finding(
                "error", "env-quotes", file, number,
                f"{name}: compose reads {by_compose!r}, and `source` in a shell {said}",
                "put single quotes around the whole value",
            ))  # fmt: skip
        values[name] = (by_compose, number)
    knobs = {name: pair for name, pair in values.items() if name.startswith(_PREFIX)}
    return found + _knobs(knobs, file)


def compose_value(raw: str) -> str:
    """A value of an env file as compose reads it."""
    text = raw.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        inner = text[1:-1]
        return inner if text[0] == "'" else re.sub(r'\\(["\\$])', r"\1", inner)
    return re.split(r"\s+#", text, maxsplit=1)[0].rstrip()


def shell_value(raw: str) -> str | None:
    """The same after `source`; None where the shell would fail or run something."""
    if re.match(r"\s+\S", raw):
        return None  # NAME= VALUE runs VALUE
    try:
        words = shlex.split(raw, comments=True)
    except ValueError:
        return None
    return None if len(words) > 1 else "".join(words)


def check_compose(text: str, file: str) -> list[Finding]:
    """Findings of a compose file, by line."""
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "is no YAML"
        return [Finding("error", "yaml", file, mark.line + 1 if mark else 1, str(problem))]
    found: list[Finding] = []
    for _name, service in _pairs(_get(document, "services")):
        found += _service(service, file)
    return sorted(found, key=lambda one: (one.line, one.code))


def _service(service: Any, file: str) -> Iterator[Finding]:  # noqa: ANN401 - a node of PyYAML's
    for key in ("command", "entrypoint"):
        node = _get(service, key)
        if isinstance(node, yaml.ScalarNode) and "\n" in node.value.strip():
            yield Finding(
                "error", "command-newline", file, node.start_mark.line + 1,
                f"{key}: one string with a line end in it, which cuts the command in two",
                "write it as a list",
            )  # fmt: skip
    image = _get(service, "image")
    if isinstance(image, yaml.ScalarNode) and _moves(image.value):
        message = f"{image.value}: expected a tag or digest that does not move"
        yield Finding("warning", "image-latest", file, image.start_mark.line + 1, message)
    entries = [one for one in _environment(_get(service, "environment"))
               if one[0].startswith(_PREFIX)]  # fmt: skip
    # An override is there to set something; the file that names the deployment is not.
    if any(name == _DEPLOYMENT for name, _value, _line in entries):
        yield from _defaults(entries, file)
    values = {name: ("" if "$" in value else value, line) for name, value, line in entries}
    yield from _knobs(values, file)


def _defaults(entries: list[tuple[str, str, int]], file: str) -> Iterator[Finding]:
    for name, value, line in entries:
        default = _DEFAULTED.search(value)
        if default:
            yield Finding(
                "warning", "knob-default", file, line,
                f"{name}: a second default, {default[2]!r}; the entry point owns it",
                "pass it through without one",
            )  # fmt: skip


def _moves(image: str) -> bool:
    is_named = "$" not in image and "@" not in image
    return is_named and bool(_LATEST.fullmatch(image.rpartition("/")[2]))


def _environment(node: Any) -> Iterator[tuple[str, str, int]]:  # noqa: ANN401
    """(name, value, line) of both forms that compose takes."""
    for name, value in _pairs(node):
        yield name.value, getattr(value, "value", "") or "", name.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            name, _, value = str(item.value).partition("=")
            yield name, value, item.start_mark.line + 1


def _get(node: Any, key: str) -> Any:  # noqa: ANN401
    return next((value for name, value in _pairs(node) if name.value == key), None)


def _pairs(node: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _knobs(values: Mapping[str, tuple[str, int]], file: str) -> list[Finding]:
    """What the entry point would say; each sentence at the line of the first knob that it names."""
    if not values:
        return []
    given = {name: value for name, (value, _line) in values.items() if value}
    found = []
    for sentence in _sentences(given):
        named = [name for name in re.findall(r"GLM_[A-Z0-9_]+", sentence) if name in values]
        line = values[named[0]][1] if named else min(line for _value, line in values.values())
        found.append(Finding("error", "knob", file, line, sentence))
    return found


def _sentences(given: Mapping[str, str]) -> tuple[str, ...]:
    make_importable(_RUNTIME)
    from serving.errors import KnobError
    from serving.resolve import IMAGE_CLUSTER, resolve

    environ = {**given, IMAGE_CLUSTER: given.get("GLM_CLUSTER", "none")}
    # A part of a configuration: the deployment, and what it contradicts, may be in another file.
    is_part = _DEPLOYMENT not in given
    try:
        resolve({_DEPLOYMENT: "rtx6000-4x", **environ} if is_part else environ)
    except KnobError as error:
        kept = error.problems
        if is_part:
            kept = tuple(p for p in kept if "no such knob" in p or ": expected " in p)
        return kept
    return ()


def check_file(path: Path) -> list[Finding]:
    """Findings of a file, by its name: compose for YAML, else an env file.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml"):
        return check_compose(text, str(path))
    return check_env(text, str(path))
