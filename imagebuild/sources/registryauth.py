"""Answers a registry's question who asks: bearer tokens, or user and password.

It sends a password only to the registry itself or to the token service that the registry names, and
only over TLS or to this machine.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from imagebuild.errors import EngineError
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.http import Http
from imagebuild.sources.imageref import is_loopback

DEFAULT_LIFE = 60  # seconds; source: distribution, docs/spec/auth/token.md, "expires_in"
_EARLY = 5  # seconds before its end at which a token is not used any more
_PARAMETER = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


@dataclass(frozen=True)
class Place:
    """A repository as it is asked for.

    Attributes:
        api: address of the registry, such as "https://registry.example".
        repository: in that registry.
        logins: names under which `docker login` may keep the registry's password.
    """

    api: str
    repository: str
    logins: tuple[str, ...]


class Authorizer:
    """Keeps what was granted, by repository, for as long as it holds."""

    def __init__(self, http: Http, logins: Logins) -> None:
        self._http = http
        self._logins = logins
        self._granted: dict[tuple[str, str], tuple[str, float]] = {}

    def headers(self, place: Place) -> dict[str, str]:
        """What a request carries; nothing before the registry has asked."""
        value, end = self._granted.get((place.api, place.repository), ("", 0.0))
        return {"Authorization": value} if time.monotonic() < end else {}

    def answer(self, place: Place, challenge: str) -> bool:
        """Does what a WWW-Authenticate header asks for.

        Returns:
            Whether there is now something to ask again with.

        Raises:
            EngineError: the token service cannot be reached, refuses, or answers something else.
            UsageError: the login is malformed.
        """
        key = (place.api, place.repository)
        self._granted.pop(key, None)
        scheme = _scheme(challenge)
        login = self._logins.find(*place.logins)
        if scheme == "basic":
            if login is None or not _is_private(place.api):
                return False
            self._granted[key] = (_basic(login), float("inf"))
            return True
        if scheme != "bearer":
            return False
        self._granted[key] = self._token(place, challenge, login)
        return True

    def _token(
        self, place: Place, challenge: str, login: tuple[str, str] | None
    ) -> tuple[str, float]:
        asked = _parameters(challenge)
        realm = asked.get("realm", "")
        host = urlsplit(place.api).netloc
        if urlsplit(realm).scheme not in ("http", "https"):
            raise EngineError(f"{host}: expected the address of its token service, found {realm!r}")
        query = {"service": asked["service"]} if "service" in asked else {}
        query["scope"] = asked.get("scope") or f"repository:{place.repository}:pull"
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        headers = {}
        if login is not None:
            if not _is_private(realm):
                raise EngineError(
                    f"{host}: expected a token service that takes passwords over TLS, found {realm}"
                )
            headers["Authorization"] = _basic(login)
        started = time.monotonic()
        what = f"a token to read {place.repository}"
        reply = self._http.get(url, what=what, headers=headers, accept=(200,), unread=(401, 403),
                               own_auth=True)  # fmt: skip
        if reply.status != 200:
            who = f"user {login[0]}" if login else "an anonymous user"
            raise EngineError(f"{host}: expected {what}, found that {who} is refused",
                              hint=f"docker login {place.logins[0]}")  # fmt: skip
        try:
            content = json.loads(reply.body)
            token = content.get("token") or content["access_token"]
            life = float(content.get("expires_in") or DEFAULT_LIFE)
            if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
                raise ValueError(token)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where = urlsplit(realm).netloc
            raise EngineError(f"{where}: expected {what} in JSON, found "
                              f"{len(reply.body)} bytes that are none") from error  # fmt: skip
        return f"Bearer {token}", started + life - _EARLY


def _scheme(challenge: str) -> str:
    """Of several schemes the one that we prefer."""
    found = {word.lower() for word in re.findall(r"(?:^|,)\s*(\w+)(?=\s|$)(?!\s*=)", challenge)}
    return next((one for one in ("bearer", "basic") if one in found), "")


def _parameters(challenge: str) -> dict[str, str]:
    start = challenge.lower().find("bearer")
    pairs = _PARAMETER.findall(challenge[start:])
    return {name.lower(): re.sub(r"\\(.)", r"\1", quoted) or bare for name, quoted, bare in pairs}


def _is_private(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or is_loopback(parts.netloc)


def _basic(login: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()
