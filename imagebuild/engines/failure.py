"""What a build that failed says: the step's own last lines, and the next command."""

from __future__ import annotations

import re
from collections.abc import Mapping

from imagebuild.engines.progress import Progress, Vertex
from imagebuild.errors import (
    BrokenError,
    BuildError,
    EngineError,
    IntegrityError,
    ReviewError,
    UsageError,
)

_HELP = re.compile(r"(Run|See) 'docker")
_STEP_ERRORS: Mapping[int, type[BuildError]] = {
    1: ReviewError,
    2: UsageError,
    3: BrokenError,
    4: IntegrityError,
}


def failure(progress: Progress) -> BuildError:
    """What a failed build says: the step's own last lines, and the next command."""
    failed = progress.failed
    if failed is not None and failed.exit_code is not None:
        return _step_failure(failed, failed.exit_code)
    text = "\n".join(progress.tail)
    said = failed.error if failed else next(
        (line for line in reversed(progress.tail) if line.startswith("ERROR: ")), last_line(text)
    )  # fmt: skip
    return EngineError(f"docker buildx build: {said.removeprefix('ERROR: ')}", hint=hint_of(text))


def _step_failure(failed: Vertex, code: int) -> BuildError:
    lines = [line for line in failed.log if line.strip()]
    hint = None
    if lines and lines[-1].startswith("hint: "):
        hint = lines.pop().removeprefix("hint: ")
    kind = _STEP_ERRORS.get(code, EngineError)
    said = "\n".join(lines[-8:]) or "nothing"
    name = failed.stage or failed.name
    return kind(f"stage {name}: expected the step to succeed, found exit code {code}:\n{said}",
                hint=hint)  # fmt: skip


def hint_of(text: str) -> str | None:
    """The next command for what BuildKit itself complains about."""
    for pattern, hint in (
        ("no space left on device", "docker system prune, or give the engine a larger disk"),
        ("exec format error", "install emulation for that platform: qemu-user-binfmt"),
        ("failed to resolve source metadata|pull access denied|not found: manifest",
         "docker login, or a mirror of the base: --base MIRROR/NAME@sha256:..."),
        ("unable to access|failed to fetch remote",
         "no network to the git host: --build-context flashkda-src=DIR"),
        ("http: server gave HTTP response to HTTPS|connection refused",
         "the registry does not answer, or the engine must know it as insecure"),
    ):  # fmt: skip
        if re.search(pattern, text):
            return hint
    return None


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    # The client ends many an error with an advice to read its help.
    return next((one for one in lines if one and not _HELP.match(one)), "nothing")
