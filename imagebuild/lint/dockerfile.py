"""Rules of our own for Dockerfiles: hidden failures, and fetches whose answer changes with time.

hadolint has the rules of style. These are about what makes an image wrong without a red build. It
reads text alone and asks neither network nor engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.dockerfile import Dockerfile, Instruction, Stage, expand, parse
from imagebuild.lint import shell
from imagebuild.lint.shell import Command, Loop, Script

RULES: Mapping[str, str] = {
    "frontend": "a `# syntax=` line pulls a frontend that may change; take the built-in one",
    "base-unpinned": "name the image by digest: NAME@sha256:...",
    "add-unpinned": "give --checksum=sha256:..., or for git #COMMIT with 40 hex digits",
    "fetch-unchecked": "check it in the same RUN: echo 'SHA256  FILE' | sha256sum --check",
    "git-unpinned": "check out a commit of 40 hex digits in the same RUN",
    "pip-unhashed": "add --require-hashes and a file with hashes",
    "apt": "packages move from day to day: fetch .debs by hash and install them with dpkg",
    "swallowed": "let the command fail, or end with || { echo why; exit 1; }",
    "exit-zero": "leave the last command's status alone",
    "errexit-off": "leave set -e on",
    "loop-swallows": "begin the RUN with set -e, or end each command with || exit 1",
    "sequence-swallows": "join with && or begin the RUN with set -e",
    "pipe-swallows": "begin with set -o pipefail, or SHELL with -o pipefail",
}
_COMMIT = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
_HARMLESS = ("set", "export", "exit", ":", "true", "echo", "printf", "trap", "umask", "unset")
_QUIET = (["true"], [":"], ["exit", "0"], ["return", "0"])
_CHECKS = ("sha256sum", "sha512sum", "shasum", "gpg")
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "dash", "ash")


@dataclass(frozen=True)
class Finding:
    """One fault. `code` is a rule's name, `fix` what to do about it."""

    code: str
    file: str
    line: int
    message: str
    level: str = "error"

    @property
    def fix(self) -> str:
        """What to do."""
        return RULES[self.code]


@dataclass
class _Shell:
    """What a shell does on failure, at some point of a RUN."""

    errexit: bool = False
    pipefail: bool = False

    def set(self, words: list[str]) -> None:
        """Follows one `set`, or the options of a SHELL."""
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if re.fullmatch(r"-[a-zA-Z]*e[a-zA-Z]*", word) or (word, value) == ("-o", "errexit"):
                self.errexit = True
            if re.fullmatch(r"-[a-zA-Z]*o", word) and value == "pipefail":
                self.pipefail = True
            if re.fullmatch(r"\+[a-zA-Z]*e[a-zA-Z]*", word):
                self.errexit = False


def check_file(path: Path, arguments: Mapping[str, str] | None = None) -> list[Finding]:
    """Findings of a file; `arguments` are build arguments, by default those of its head."""
    return check(path.read_text("utf-8"), path.name, arguments)


def check(
    text: str, file: str = "Dockerfile", arguments: Mapping[str, str] | None = None
) -> list[Finding]:
    """Findings of a Dockerfile's text, by line."""
    content = parse(text)
    known = content.defaults(arguments)
    found = [*_head(content, known)]
    for stage in content.stages:
        found += _stage(stage, known)
    faults = {(line, code, message) for code, line, message in found}
    return [Finding(code, file, line, message) for line, code, message in sorted(faults)]


Fault = tuple[str, int, str]


def _head(content: Dockerfile, known: Mapping[str, str]) -> Iterator[Fault]:
    for name, value, line in content.directives:
        if name == "syntax":
            yield "frontend", line, f"expected the built-in frontend, found {value}"
    names = {stage.name for stage in content.stages}
    for stage in content.stages:
        image = expand(stage.image, known)
        is_ours = image in names or image == "scratch"
        if not is_ours and not re.search(r"@sha256:[0-9a-f]{64}$", image):
            yield "base-unpinned", stage.line, f"FROM: expected a digest, found {image!r}"


def _stage(stage: Stage, known: Mapping[str, str]) -> Iterator[Fault]:
    inherited = _Shell()
    for one in stage.instructions:
        if one.word == "SHELL":
            inherited = _Shell()
            inherited.set(_exec_form(one.text) or [])
        elif one.word == "ADD":
            yield from _add(one, known)
        elif one.word == "RUN":
            yield from _run(one, inherited)


def _add(one: Instruction, known: Mapping[str, str]) -> Iterator[Fault]:
    for word in (_exec_form(one.text) or one.text.split())[:-1]:
        source = expand(word, known)
        url = re.match(r"(https?|ftp|git|ssh)://|git@", source)
        if "$" in source:
            yield "add-unpinned", one.line, f"ADD: expected a known source, found {source}"
        elif url and re.search(r"\.git(#|$)|^git(@|://)", source):
            if not re.search(r"#[0-9a-f]{40}(:|$)", source):
                yield "add-unpinned", one.line, f"ADD: expected a whole commit, found {source}"
        elif url and not one.flag("checksum").startswith("sha256:"):
            yield "add-unpinned", one.line, f"ADD: expected --checksum, found none for {source}"


def _run(one: Instruction, inherited: _Shell) -> Iterator[Fault]:
    words = _exec_form(one.text)
    state = _Shell(inherited.errexit, inherited.pipefail)
    text = one.text
    if words is not None:
        state = _Shell()
        text = ""
        for index, word in enumerate(words):
            if words[0] in _SHELLS and re.fullmatch(r"-[a-z]*c", word) and index + 1 < len(words):
                state.set(words[1 : index + 1])
                text = words[index + 1]
        yield from _fetches(one, shell.Script([Command(words, 0, "")]))
    script = shell.parse(text)
    for code, offset, message in _hidden(script, state):
        yield code, one.line_at(offset), message
    if text:
        yield from _fetches(one, script)


def _hidden(script: Script, state: _Shell) -> Iterator[Fault]:
    """Failures that do not stop the build; the numbers are offsets."""
    loops = {loop.offset: loop for loop in script.loops}
    commands = sorted(script.commands, key=lambda command: command.offset)
    pipes = sorted(script.pipes)
    told: set[int] = set()
    for index, command in enumerate(commands):
        while pipes and pipes[0] < command.offset:
            offset = pipes.pop(0)
            if not state.pipefail:
                yield "pipe-swallows", offset, "a pipe hides the failure of its first command"
        if command.words[:1] == ["set"]:
            if any(re.fullmatch(r"\+[a-z]*e[a-z]*", word) for word in command.words):
                yield "errexit-off", command.offset, "set +e hides what fails after it"
            state.set(command.words[1:])
        yield from _quiet(commands, index)
        inner = command.loops[-1] if command.loops else None
        if inner in loops and inner not in told and _is_hidden(command, loops[inner], state):
            told.add(inner)
            said = " ".join(command.words)
            yield "loop-swallows", command.offset, f"a loop goes on when {said!r} fails"
        elif not command.loops and _goes_on(command, commands[index + 1 :], state):
            said = " ".join(command.words)
            yield "sequence-swallows", command.offset, f"the RUN goes on when {said!r} fails"


def _quiet(commands: list[Command], index: int) -> Iterator[Fault]:
    command = commands[index]
    said = " ".join(command.words)
    is_quiet = command.words in _QUIET or command.words[:1] in (["echo"], ["printf"])
    if command.before == "||" and is_quiet and command.after not in ("&&", "|"):
        yield "swallowed", command.offset, f"'|| {said}' hides a failure"
    elif command.words == ["exit", "0"] and command.before in (";", "\n"):
        yield "exit-zero", command.offset, "'exit 0' hides what failed before it"


def _is_hidden(command: Command, loop: Loop, state: _Shell) -> bool:
    if command.is_condition or command.before == "||" or command.words[0] in _HARMLESS:
        return False
    if command.after == "||":  # judged by what follows it
        return False
    holds = state.errexit and loop.after not in ("&&", "||", "|") and not loop.is_condition
    return not holds


def _goes_on(command: Command, later: list[Command], state: _Shell) -> bool:
    is_bare = re.fullmatch(r"\w+=\S*", command.words[0]) is not None and len(command.words) == 1
    return (
        command.after in (";", "\n", "&")
        and bool(later)
        and not state.errexit
        and not command.is_condition
        and not is_bare
        and command.words[0] not in _HARMLESS
    )


def _fetches(one: Instruction, script: Script) -> Iterator[Fault]:
    commands = sorted(script.commands, key=lambda command: command.offset)
    heads = [_head_of(command.words) for command in commands]
    is_checked = any(head[:1] and head[0] in _CHECKS for head in heads)
    is_checked_out = any(
        head[:1] == ["git"] and {"checkout", "reset", "fetch"} & set(head) and
        _COMMIT.search(" ".join(head)) for head in heads
    )  # fmt: skip
    for command, head in zip(commands, heads, strict=True):
        line = one.line_at(command.offset)
        said = " ".join(head[:4])
        if not head:
            continue
        if head[0] in ("curl", "wget") and not is_checked:
            yield "fetch-unchecked", line, f"expected a hash check after {said!r}, found none"
        elif head[0] == "git" and {"clone", "pull"} & set(head) and not is_checked_out:
            yield "git-unpinned", line, f"expected a whole commit, found {said!r}"
        elif _installs(head) and "--require-hashes" not in head:
            yield "pip-unhashed", line, f"expected --require-hashes, found {said!r}"
        elif head[0] in ("apt-get", "apt", "aptitude") and _fetches_debs(head):
            yield "apt", line, f"expected no package index in a build, found {said!r}"


def _head_of(words: list[str]) -> list[str]:
    """A command without assignments, `env`, `sudo`, `exec` and folders before its name."""
    rest = list(words)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or rest[0] in ("env", "sudo", "exec", "nice")):
        rest.pop(0)
    return [rest[0].rpartition("/")[2], *rest[1:]] if rest else []


def _installs(head: list[str]) -> bool:
    """Whether it is pip's or uv's install."""
    if re.fullmatch(r"python[\d.]*", head[0]) and head[1:3] == ["-m", "pip"]:
        return "install" in head[3:]
    if head[0] == "uv":
        return head[1:3] == ["pip", "install"]
    return bool(re.fullmatch(r"pip[\d.]*", head[0])) and "install" in head


def _fetches_debs(head: list[str]) -> bool:
    return bool({"update", "install", "upgrade", "dist-upgrade", "full-upgrade"} & set(head))


def _exec_form(text: str) -> list[str] | None:
    """The words of a JSON form; None for a shell form."""
    try:
        words = json.loads(text)
    except ValueError:
        return None
    is_list = isinstance(words, list) and words and all(isinstance(word, str) for word in words)
    return [str(word) for word in words] if is_list else None
