"""Names of images as FROM takes them: `[HOST/]REPOSITORY[:TAG][@DIGEST]`. Asks nobody."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from imagebuild.errors import UsageError

# Source: distribution/reference, the grammar in its package documentation.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]+){3}|\[::1\])(?::[0-9]+)?")


@dataclass(frozen=True)
class Reference:
    """One image. `host` is "" where the name has none; `tag` and `digest` may be "" too."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        text = f"{self.host}/{self.repository}" if self.host else self.repository
        text += f":{self.tag}" if self.tag else ""
        return f"{text}@{self.digest}" if self.digest else text

    @property
    def asked(self) -> str:
        """What a manifest is asked for by: the digest where there is one."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> Reference:
        """The image of that digest in the same repository."""
        return replace(self, digest=digest)


def parse_reference(text: str) -> Reference:
    """Reads a name. Raises UsageError when it is none."""
    name, at, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    is_host = bool(slash) and (bool(re.search(r"[.:]", first)) or first == "localhost")
    host, path = (first, rest) if is_host else ("", name)
    repository, colon, tag = path.partition(":")
    is_right = (
        _REPOSITORY.fullmatch(repository) is not None
        and (not host or re.fullmatch(_HOST, host) is not None)
        and (not colon or _TAG.fullmatch(tag) is not None)
        and (not at or DIGEST.fullmatch(digest) is not None)
    )
    if not is_right:
        raise UsageError(f"image {text!r}: expected [HOST/]REPOSITORY[:TAG][@sha256:...], "
                         "found another form")  # fmt: skip
    return Reference(host, repository, tag, digest)


def is_loopback(host: str) -> bool:
    """Whether a host, with or without port, is this machine, which is asked without TLS."""
    return _LOOPBACK.fullmatch(host) is not None
