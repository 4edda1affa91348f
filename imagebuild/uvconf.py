"""Reads what the user configured for pip and says it in uv's words; standard library only.

uv does not read pip's files, and before the first .venv there may be no pip to ask. Once there is
one, `imagebuild.sources.pipconf` asks it.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from pathlib import Path

# Settings that change nothing about what is fetched, or from where; a constraint does not either,
# where every version is pinned, and uv refuses one beside hashes.
_HARMLESS = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "disable-pip-version-check",
        "no-cache-dir",
        "no-color",
        "no-input",
        "no-python-version-warning",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "root-user-action",
        "user",
        "verbose",
        "config-file",
        "constraint",
        "log",
        "exists-action",
        "no-warn-conflicts",
        "retries",
    }
)


SYSTEM_FILE = Path("/etc/pip.conf")


def _words(value: str) -> str:
    return " ".join(value.split())


def _commas(value: str) -> str:
    return ",".join(value.split())


# pip's setting -> uv's variable. Variables, not flags: an index URL may hold a password, and the
# commands are echoed; and an older uv ignores a variable that it does not know.
_IN_UV: dict[str, tuple[str, Callable[[str], str]]] = {
    "index-url": ("UV_DEFAULT_INDEX", _words),
    "extra-index-url": ("UV_INDEX", _words),
    "find-links": ("UV_FIND_LINKS", _commas),
    "trusted-host": ("UV_INSECURE_HOST", _words),
    "cert": ("SSL_CERT_FILE", str),
    "timeout": ("UV_HTTP_TIMEOUT", _words),
    "default-timeout": ("UV_HTTP_TIMEOUT", _words),
    "proxy": ("ALL_PROXY", _words),
}


def uv_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The variables that make uv use the user's indexes and certificates.

    What the user said to uv itself is kept. Returns None where pip is configured in a way that uv
    has no word for; pip has to be used then.
    """
    wanted = {
        # pip trusts the system's certificates; uv does so when asked (two names, by its age).
        "UV_NATIVE_TLS": "true",
        "UV_SYSTEM_CERTS": "true",
        # pip takes the best of all indexes; the hashes make that safe.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    for name, value in settings(environ).items():
        if name in _IN_UV:
            variable, convert = _IN_UV[name]
            wanted[variable] = convert(value)
        elif name not in _HARMLESS:
            return None
    if "UV_SYSTEM_CERTS" in environ:
        del wanted["UV_NATIVE_TLS"]
    return {name: value for name, value in wanted.items() if name not in environ}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What pip is told for `install`, by long name: files first, then PIP_* variables.

    Source: pip's documentation, "Configuration": global, user, then PIP_CONFIG_FILE; the section
    of the command wins over [global].
    """
    found: dict[str, str] = {}
    for path in _files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            # pip has the better words for it.
            return {"unreadable": str(path)}
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update({_name(key): value for key, value in parser.items(section)})
    for key, value in environ.items():
        if key.startswith("PIP_") and value:
            found[_name(key.removeprefix("PIP_"))] = value
    return found


def _name(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")


def _files(environ: Mapping[str, str]) -> list[Path]:
    """Lists pip's configuration files that may exist on a Unix, weakest first."""
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path("~").expanduser())
    system = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    folders = [Path(folder) / "pip" for folder in reversed(system.split(":")) if folder]
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip"
    files = [folder / "pip.conf" for folder in folders]
    files += [SYSTEM_FILE, home / ".pip" / "pip.conf", user / "pip.conf"]
    return files + ([Path(chosen)] if chosen else [])
