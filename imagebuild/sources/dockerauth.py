"""Reads the user name and password that `docker login` keeps for a registry; it stores nothing.

What a credential helper prints is never shown or logged.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from imagebuild.errors import EngineError, UsageError

Echo = Callable[[Sequence[str]], None]
# What helpers print when they know nothing of a registry: docker/docker-credential-helpers,
# credentials/error.go.
_NOT_FOUND = "credentials not found"
_TOKEN_USER = "<token>"
_HELPER_TIMEOUT = 60  # seconds; a helper may ask for a fingerprint


def config_file() -> Path:
    """The client's configuration: in DOCKER_CONFIG, else in ~/.docker."""
    folder = os.environ.get("DOCKER_CONFIG", "")
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


class Logins:
    """The logins of one user.

    Attributes:
        path: the configuration; read at the first question.
    """

    def __init__(self, echo: Echo, path: Path | None = None) -> None:
        self.path = path or config_file()
        self._echo = echo
        self._known: dict[tuple[str, ...], tuple[str, str] | None] = {}

    def find(self, *names: str) -> tuple[str, str] | None:
        """User and password under the first of `names` that has any; None for an anonymous user.

        Args:
            names: of the registry, such as its host, as `docker login` may have written it.

        Raises:
            UsageError: the configuration is malformed.
            EngineError: a helper is missing or fails.
        """
        if names not in self._known:
            self._known[names] = self._find(names)
        return self._known[names]

    def _find(self, names: Sequence[str]) -> tuple[str, str] | None:
        content = self._read()
        helpers = self._table(content, "credHelpers")
        auths = self._table(content, "auths")
        store = content.get("credsStore") or ""
        for name in names:
            helper = helpers.get(name, store)
            if helper:
                found = self._ask(str(helper), name)
                if found is not None:
                    return found
        for name in names:
            for key in (name, f"https://{name}", f"http://{name}"):
                entry = auths.get(key)
                if isinstance(entry, dict) and (login := self._stored(entry, key)):
                    return login
        return None

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path}: expected the configuration of docker in JSON, found: "
                             f"{error}") from error  # fmt: skip
        if not isinstance(content, dict):
            raise UsageError(f"{self.path}: expected an object, found {type(content).__name__}")
        return content

    def _table(self, content: dict[str, object], key: str) -> dict[str, object]:
        table = content.get(key) or {}
        if not isinstance(table, dict):
            raise UsageError(f"{self.path}: {key}: expected an object, "
                             f"found {type(table).__name__}")  # fmt: skip
        return table

    def _stored(self, entry: dict[str, object], key: str) -> tuple[str, str] | None:
        if entry.get("identitytoken"):
            raise _token_error(f"{self.path}: auths.{key}")
        if packed := str(entry.get("auth") or ""):
            try:
                text = base64.b64decode(packed, validate=True).decode("utf-8")
            except (binascii.Error, UnicodeDecodeError) as error:
                # The value is a secret, so only the place is told.
                raise UsageError(
                    f"{self.path}: auths.{key}.auth: expected base64 of USER:PASSWORD, "
                    "found something else",
                    hint=f"docker login {key}",
                ) from error
            user, colon, password = text.rstrip("\0").partition(":")
            return (user, password) if colon else None
        if entry.get("username"):
            return str(entry["username"]), str(entry.get("password") or "")
        return None

    def _ask(self, helper: str, name: str) -> tuple[str, str] | None:
        if not helper.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UsageError(f"{self.path}: expected the name of a credential helper, "
                             f"found {helper!r}")  # fmt: skip
        command = [f"docker-credential-{helper}", "get"]
        self._echo(command)
        try:
            done = subprocess.run(command, input=name, capture_output=True, text=True,
                                  timeout=_HELPER_TIMEOUT, check=False)  # fmt: skip
        except FileNotFoundError as error:
            raise EngineError(
                f"{command[0]}: expected the credential helper that {self.path} names, "
                "found none on PATH",
                hint="install it, or take it out of that file",
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{command[0]}: expected a login for {name}, "
                              f"found {type(error).__name__}") from error  # fmt: skip
        if done.returncode:
            # Errors come on stdout, which holds no secret then.
            said = (done.stdout or done.stderr).strip()
            if _NOT_FOUND in said:
                return None
            raise EngineError(f"{command[0]}: expected a login for {name}, found: "
                              f"{said.splitlines()[-1] if said else 'no word'}")  # fmt: skip
        return _answer(done.stdout, command[0], name)


def _answer(text: str, helper: str, name: str) -> tuple[str, str] | None:
    try:
        content = json.loads(text)
        user, secret = str(content["Username"]), str(content["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{helper}: expected JSON with Username and Secret for {name}, "
                          "found something else") from error  # fmt: skip
    if user == _TOKEN_USER:
        raise _token_error(f"{helper}: {name}")
    return (user, secret) if user or secret else None


def _token_error(where: str) -> EngineError:
    return EngineError(f"{where}: expected user and password, found an identity token",
                       hint="docker login with an access token as the password")  # fmt: skip
