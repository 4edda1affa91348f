"""Reads how pip is configured by asking pip; it parses no pip.conf and reaches no network.

Order of precedence is pip's own: `global`, then the `install` section, then the environment.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from imagebuild.errors import EngineError, UsageError

DEFAULT_TIMEOUT = 15.0
DEFAULT_RETRIES = 5
_SECTIONS = ("global", "install", ":env:")
# A password that was not quoted may hold "@" and "/": all up to the last "@" goes then, too. What
# follows the colon of a host is a port, and ends the search.
_USERINFO = re.compile(r"(?<=//)(?:[^/\s]*@|[^/\s:]*:(?!\d+(?:[/\s]|$))\S*@)")


@dataclass(frozen=True)
class PipSettings:
    """The part of pip's configuration that decides where packages come from and how.

    Attributes:
        index_url: the simple index; may hold a user and password, so it is kept out of `repr`.
        extra_index_urls: more indexes, asked after `index_url`.
        find_links: folders, HTML files or pages that list distributions.
        no_index: ask no index, only `find_links`.
        cert: PEM file or folder of certificate authorities; None means the system's.
        client_cert: PEM file with the client's key and certificate.
        trusted_hosts: `host` or `host:port` whose certificate is not checked.
        timeout: seconds to wait for a connection, and for each next piece of data.
        retries: how often one request is tried again.
        proxy: proxy URL for all requests; None leaves it to the environment.
    """

    index_url: str = field(repr=False)
    extra_index_urls: tuple[str, ...] = field(default=(), repr=False)
    find_links: tuple[str, ...] = field(default=(), repr=False)
    no_index: bool = False
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = DEFAULT_TIMEOUT
    retries: int = DEFAULT_RETRIES
    proxy: str | None = field(default=None, repr=False)

    @property
    def index_urls(self) -> tuple[str, ...]:
        """Every index to ask, in order; empty with `no_index`."""
        return () if self.no_index else (self.index_url, *self.extra_index_urls)


def read_settings(python: str = sys.executable) -> PipSettings:
    """Reads the configuration that `python -m pip install` would use here and now.

    Raises:
        EngineError: pip cannot be run or its answer cannot be understood.
        UsageError: a value is malformed, such as a timeout that is no number.
    """
    values = _merged(_pip(python, "config", "list"))
    no_index = _flag("no-index", values.get("no-index", ""))
    index_url = values.get("index-url", "")
    if not index_url and not no_index:
        index_url = _default_index(python)
    timeout = values.get("timeout") or values.get("default-timeout")
    return PipSettings(
        index_url=index_url,
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        no_index=no_index,
        cert=values.get("cert") or None,
        client_cert=values.get("client-cert") or None,
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        timeout=_number("timeout", timeout, DEFAULT_TIMEOUT),
        retries=int(_number("retries", values.get("retries"), DEFAULT_RETRIES)),
        proxy=values.get("proxy") or None,
    )


def _pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", *arguments]
    # COLUMNS: the help formatter would otherwise break a long URL at the terminal's width.
    environment = {**os.environ, "COLUMNS": "400", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except OSError as error:
        raise EngineError(f"{python}: expected to run pip, found {error.strerror}") from error
    if done.returncode != 0:
        said = scrub(((done.stderr or done.stdout).strip().splitlines() or ["no word"])[-1])
        raise EngineError(
            f"pip {' '.join(arguments)}: expected pip's configuration, found {said!r}",
            hint=f"make `{' '.join(command)}` work",
        )
    return done.stdout


def _merged(listing: str) -> dict[str, str]:
    """Joins the sections of `pip config list`, whose lines read `section.key='value'`."""
    sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    for line in listing.splitlines():
        name, separator, literal = line.partition("=")
        section, dot, key = name.rpartition(".")
        if not (separator and dot) or section not in sections:
            continue
        try:
            value = ast.literal_eval(literal)
        except (SyntaxError, ValueError) as error:
            raise EngineError(
                f"pip config list: expected {name}='value', found {scrub(literal)!r}"
            ) from error
        sections[section][key] = str(value).strip()
    merged: dict[str, str] = {}
    for section in _SECTIONS:
        merged.update({key: value for key, value in sections[section].items() if value})
    return merged


def _default_index(python: str) -> str:
    # pip prints its built-in index in one public place only: the help of --index-url
    # ("Base URL of the Python Package Index (default URL)"). The other ways are private modules.
    # With an index configured the help shows that one, so this is asked only when there is none.
    text = _pip(python, "help", "install")
    match = re.search(r"--index-url <url>[^()]*\(default\s+(\S+?)\)", text)
    if match is None:
        raise EngineError(
            "pip help install: expected the default of --index-url, found none",
            hint="set one: python -m pip config set global.index-url URL",
        )
    return match[1]


def _flag(key: str, value: str) -> bool:
    lowered = value.lower()
    if lowered in ("1", "true", "yes", "on", "y", "t"):
        return True
    if lowered in ("", "0", "false", "no", "off", "n", "f"):
        return False
    raise UsageError(f"pip configuration, {key}: expected true or false, found {value!r}")


def _number(key: str, value: str | None, default: float) -> float:
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"pip configuration, {key}: expected a number >= 0, found {value!r}")
    return number


def scrub(text: str) -> str:
    """Removes `user:password@` from every URL in `text`, well-formed or not."""
    return _USERINFO.sub("", text)


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Splits a URL into itself without user and password, and those two, decoded.

    Raises:
        UsageError: it is no URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(
            f"{scrub(url)}: expected an address, found that it is malformed ({error})",
            hint="check index-url in `python -m pip config list`",
        ) from error
    if "@" not in parts.netloc:
        return url, None
    userinfo, _, host = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    clean = SplitResult(parts.scheme, host, parts.path, parts.query, parts.fragment)
    return urlunsplit(clean), (unquote(user), unquote(password))
