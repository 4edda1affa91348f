"""What a knob is, and how the environment becomes settings: known names and typed values.

Empty counts as unset, since compose passes through what is not set as empty. The knobs themselves
are in `table`; what contradicts what is in `rules`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from serving.kinds import Kind, Value
from serving.profiles import PROFILES, Profile

PREFIX = "GLM_"
DEPLOYMENT = "GLM_DEPLOYMENT"
DEPLOYMENTS = tuple(PROFILES)
_SECRET = re.compile(r"KEY|TOKEN(?!S)|SECRET|PASSWORD")
_WITH_SECRET = re.compile(r"api[-_]?key|token(?!s)|secret|password", re.IGNORECASE)


@dataclass(frozen=True)
class Default:
    """A default, as text, with where it is from: "LibertAI", "GX10" or "ours"."""

    text: str
    source: str = "ours"


@dataclass(frozen=True)
class Knob:
    """One knob.

    Attributes:
        name: of the environment variable.
        kind: type of the value.
        defaults: by deployment; "" is unset, where vLLM or the system decides.
        help: a sentence or two.
        group: heading in docs/knobs.md.
        flag: of `vllm serve` that it becomes as it is, or "".
        env: variable that it becomes as it is for vLLM, or "". Set directly, it is taken for the
            knob.
        is_shared: every rank must have the same value: it is part of the fingerprint.
        former: names that older recipes had for it; they are not read, but noticed.
    """

    name: str
    kind: Kind
    defaults: Mapping[str, Default]
    help: str
    group: str = ""
    flag: str = ""
    env: str = ""
    is_shared: bool = True
    former: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Values of all knobs of a deployment.

    Attributes:
        profile: the deployment.
        values: by name; None where a knob is unset.
        given: names that the environment sets.
        notices: sentences for the log.
    """

    profile: Profile
    values: Mapping[str, Value]
    given: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()
    knobs: Mapping[str, Knob] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Value:
        return self.values[PREFIX + name]

    def has(self, name: str) -> bool:
        """Whether the environment sets it."""
        return PREFIX + name in self.given

    def text(self, name: str) -> str:
        """A value that is text; "" when it is unset."""
        value = self[name]
        return "" if value is None else str(value)

    def number(self, name: str) -> int:
        """A value that is a whole number; 0 when it is unset or a word."""
        value = self[name]
        return value if isinstance(value, int) else 0

    def ratio(self, name: str) -> float:
        """A value that is a fraction; 0 when it is unset."""
        value = self[name]
        return value if isinstance(value, float) else 0.0

    def texts(self, name: str) -> tuple[str, ...]:
        """A value that is a list of texts; empty when it is unset."""
        value = self[name]
        return value if isinstance(value, tuple) else ()

    def is_on(self, name: str) -> bool:
        """A switch."""
        return self[name] is True

    def shown(self) -> dict[str, str]:
        """Values as text, for logs and the status page. No knob holds a secret: keys are files."""
        return {name: written(value) for name, value in self.values.items() if value is not None}


def written(value: Value) -> str:
    """A value as text, the same for equal values."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (dict, tuple, list)):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return str(value)


def read(environ: Mapping[str, str], knobs: Mapping[str, Knob], problems: list[str]) -> Settings:
    """Reads all knobs; adds a sentence to `problems` for each that is unknown or malformed.

    A malformed one has its default in what is returned, so that later rules can still be asked.
    """
    profile = _profile(environ, problems)
    problems += _unknown(environ, knobs)
    values: dict[str, Value] = {}
    given: set[str] = set()
    notices = list(_former(environ, knobs.values()))
    for knob in knobs.values():
        default = knob.defaults[profile.name].text
        values[knob.name] = knob.kind.parse(default) if default else None
        name, text = _asked(environ, knob, problems)
        if not text:
            continue
        try:
            values[knob.name] = knob.kind.parse(text)
            given.add(knob.name)
        except ValueError as error:
            if name != DEPLOYMENT:  # of which `_profile` has said it
                problems.append(f"{_shown(name, text)}: expected {error}")
            continue
        if name != knob.name:
            notices.append(f"{name}={text!r} is read as {knob.name}; set {knob.name} instead")
    return Settings(profile, values, frozenset(given), tuple(notices), knobs)


def _profile(environ: Mapping[str, str], problems: list[str]) -> Profile:
    asked = environ.get(DEPLOYMENT, "")
    if asked not in PROFILES:
        found = f"{DEPLOYMENT}={asked!r} is no deployment" if asked else f"{DEPLOYMENT} is unset"
        problems.append(f"{found}; expected one of {', '.join(PROFILES)}")
    return PROFILES.get(asked, PROFILES[DEPLOYMENTS[0]])


def _asked(environ: Mapping[str, str], knob: Knob, problems: list[str]) -> tuple[str, str]:
    """The variable that sets a knob and its text; the variable that it becomes counts, too."""
    own, direct = environ.get(knob.name, ""), environ.get(knob.env, "") if knob.env else ""
    if own and direct and own != direct:
        problems.append(
            f"{knob.name}={own!r} and {knob.env}={direct!r} contradict each other; unset {knob.env}"
        )
    return (knob.name, own) if own or not direct else (knob.env, direct)


def _unknown(environ: Mapping[str, str], knobs: Mapping[str, Knob]) -> Iterator[str]:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in knobs and environ[name]:
            near = difflib.get_close_matches(name, knobs, 1)
            meant = f"did you mean {near[0]}?" if near else "docs/knobs.md has the list"
            yield f"{_shown(name, environ[name])}: there is no such knob; {meant}"


def _shown(name: str, value: str) -> str:
    """A variable and its value, or its name alone: a secret may stand where its file should."""
    has_secret = _SECRET.search(name) or _WITH_SECRET.search(value)
    return name if has_secret else f"{name}={value!r}"


def _former(environ: Mapping[str, str], knobs: Iterable[Knob]) -> Iterator[str]:
    for knob in knobs:
        for name in knob.former:
            if environ.get(name):
                yield f"{name}={environ[name]!r} is not read here; the knob is {knob.name}"
