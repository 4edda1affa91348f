"""Asks git hosts for refs and commits through the git on this machine; it clones nothing.

Every call is echoed. No prompt, no hook and no helper of another transport is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from imagebuild.errors import EngineError
from imagebuild.sources.http import UnreachableError
from imagebuild.sources.pipconf import scrub

TIMEOUT = 120  # seconds for one call
_LINE = re.compile(r"([0-9a-f]{40})\t(\S+)")
# What git says of a commit that the host does not have; source: git, upload-pack.c.
_NOT_OURS = "not our ref"


class NoCommitError(EngineError):
    """The host answers, and its repository has no such commit."""


class Git:
    """One git, asked with a clean environment.

    Attributes:
        offline: nothing but `file://` is asked.
    """

    def __init__(self, echo: Callable[[Sequence[str]], None], *, offline: bool = False) -> None:
        self.offline = offline
        self._echo = echo

    def refs(self, url: str) -> dict[str, str]:
        """Commit of each ref; for an annotated tag that of the commit it names.

        Raises:
            EngineError: no git, or the host cannot be reached or refuses.
        """
        found = dict[str, str]()
        for line in self._run(url, "ls-remote", "--", url).splitlines():
            if match := _LINE.fullmatch(line):
                found[match[2]] = match[1]
        peeled = {name.removesuffix("^{}"): commit for name, commit in found.items()
                  if name.endswith("^{}")}  # fmt: skip
        return {name: commit for name, commit in found.items() if not name.endswith("^{}")} | peeled

    def require_commit(self, url: str, commit: str) -> None:
        """Fetches one commit without its files into a folder that goes at once.

        Raises:
            NoCommitError: the repository has no such commit.
            EngineError: as `refs`.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-git-") as folder:
            self._run(url, "init", "--quiet", "--bare", folder)
            self._run(url, "-C", folder, "fetch", "--quiet", "--depth=1", "--filter=tree:0",
                      "--no-tags", "--", url, commit)  # fmt: skip

    def _run(self, url: str, *arguments: str) -> str:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2] or parts.path
        if self.offline and parts.scheme != "file":
            raise EngineError(f"{host}: expected to ask it, found that --offline is set",
                              hint="run the same command once without --offline")  # fmt: skip
        command = ["git", *arguments]
        self._echo([scrub(word) for word in command])
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith("GIT_") or name.startswith("GIT_SSL")}  # fmt: skip
        environment |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C",
                        "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}  # fmt: skip
        try:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, text=True,
                                  capture_output=True, timeout=TIMEOUT, errors="replace",
                                  check=False)  # fmt: skip
        except FileNotFoundError as error:
            hint = "install it, on Debian: apt-get install git"
            raise UnreachableError("git: expected it on PATH, found none", hint=hint) from error
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"{host}: expected an answer within {TIMEOUT} s, found none"
            ) from error
        if done.returncode:
            said = _telling(done.stderr)
            kind = NoCommitError if _NOT_OURS in done.stderr else UnreachableError
            raise kind(f"git: expected {host} to answer, found: {scrub(said)}",
                       hint="check the network and the proxy, or git's http.proxy")  # fmt: skip
        return done.stdout


def _telling(text: str) -> str:
    """The line of git's complaint that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = (line for line in lines if line.startswith(("fatal:", "error:")))
    return next(first, lines[-1] if lines else "no word").partition(": ")[2] or "no word"
