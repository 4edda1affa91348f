"""Let a message queue reader stop spinning after 2 ms, by a knob.

Symptom: on a package whose CPU and GPU share power and heat, one core a worker spins at full clock
    all through a generation; the part runs hotter and decodes slower.
Cause: `SpinCondition.wait` yields in a loop for `busy_loop_s` after each message, by default one
    second. Steps are milliseconds apart, so the wait on the socket behind it is never reached.
Change: a reader whose caller names no time takes VLLM_SHM_BROADCAST_BUSY_LOOP_S, else 0.002 s. The
    variable is read when the reader is made, not in the default value: a default is evaluated at
    import, before Ray hands its environment to a worker, and a bad value would surface as an
    import error of whichever module came first. An explicit argument still wins.
Upstream: https://github.com/vllm-project/vllm/pull/52814
Drop when: the variable is upstream; then the entrypoint sets it and nothing is patched.
Cost: one lookup a queue. With spare cores 0 to 2 % decode either way, so it stays a knob: 1 gives
    upstream's behaviour. Until it is upstream, vLLM logs that it does not know the variable (and
    refuses it under --fail-on-environ-validation). VLLM_USE_SPINLOOP_EXT=1 bypasses all of it.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from imagebuild.patching.interpret import Interpreter, Opaque, Raised
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    NotThere,
    calls,
    definition,
    function,
    keyword,
    parse,
)
from imagebuild.patching.tree import Tree

KNOB = "VLLM_SHM_BROADCAST_BUSY_LOOP_S"
_PATH = "vllm/distributed/device_communicators/shm_broadcast.py"
_SCOPE = "SpinCondition.__init__"


def _environ(setting: str | None) -> dict[str, Any]:
    """Names through which code may ask for the knob, with what they say for `setting`."""

    def get(name: str, default: object = None) -> object:
        return setting if name == KNOB and setting is not None else default

    names: dict[str, Any] = {"os.environ.get": get, "os.getenv": get}
    # An attribute of vllm.envs would hold a number. What it holds when unset is not known here.
    with contextlib.suppress(TypeError, ValueError):
        names[f"envs.{KNOB}"] = names[f"vllm.envs.{KNOB}"] = float(setting)  # type: ignore[arg-type]
    return names


def _spin_seconds(tree: Tree, setting: str | None) -> float:
    """How long a reader that the queue makes spins, with the variable at `setting`."""
    module, init = parse(tree, _PATH), function(tree, _PATH, _SCOPE)
    interpreter = Interpreter(module, _environ(setting))
    # The last call in the module is the reader's: a handle is opened after the writer made it.
    made = calls(module, "SpinCondition")
    given = keyword(made[-1], "busy_loop_s") if made else None
    passed = {} if given is None else {"busy_loop_s": interpreter.value(given)}
    reader = SimpleNamespace()
    interpreter.call(init, self=reader, is_reader=True, **passed)
    seconds = getattr(reader, "busy_loop_s", Opaque("self.busy_loop_s"))
    if isinstance(seconds, Opaque) or not isinstance(seconds, int | float):
        raise NotThere(f"{_SCOPE}: how long a reader spins cannot be evaluated")
    return seconds


def _refuses(tree: Tree, setting: str) -> bool:
    try:
        _spin_seconds(tree, setting)
    except Raised:
        return True
    return False


def _spins_long(tree: Tree) -> Answer:
    seconds = _spin_seconds(tree, None)
    return Answer.of(seconds >= 0.1, f"a reader spins {seconds:g} s after each message")


def _short_and_switchable(tree: Tree) -> Answer:
    unset, set_to = _spin_seconds(tree, None), _spin_seconds(tree, "0.25")
    bad = all(_refuses(tree, setting) for setting in ("soon", "-1", "nan", "inf"))
    waits = bool(calls(definition(tree, _PATH, "MessageQueue"), "_spin_condition.wait"))
    return Answer.of(
        (unset, set_to, bad, waits) == (0.002, 0.25, True, True),
        f"a reader spins {unset:g} s; {set_to:g} s with {KNOB}=0.25; bad values refused: {bad}; "
        f"a queue waits so: {waits}",
    )


def _switchable(tree: Tree) -> Answer:
    found = [_spin_seconds(tree, setting) for setting in ("0.25", "0.5")]
    return Answer.of(found == [0.25, 0.5], f"with {KNOB} at 0.25 and 0.5 a reader spins {found} s")


PATCH = Patch(
    name="vllm_spin_wait",
    status="submitted",
    upstream="https://github.com/vllm-project/vllm/pull/52814",
    origin="knob proposed in vllm#52814, 2 ms measured by the GX10 recipe; the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=(
                Edit(
                    label="knob instead of 1 s",
                    path=_PATH,
                    scope=_SCOPE,
                    anchor="        busy_loop_s: float = 1,\n    ):\n",
                    text=(
                        "        busy_loop_s: float | None = None,\n"
                        "    ):\n"
                        "        # patch: vllm_spin_wait\n"
                        "        if busy_loop_s is None:\n"
                        f'            setting = os.environ.get("{KNOB}", "").strip()\n'
                        "            try:\n"
                        '                busy_loop_s = float(setting or "0.002")\n'
                        "            except ValueError:\n"
                        "                busy_loop_s = -1.0\n"
                        "            # Also refuses nan, which compares false with everything.\n"
                        '            if not 0 <= busy_loop_s < float("inf"):\n'
                        "                raise ValueError(\n"
                        f'                    f"{KNOB}={{setting!r}}: expected a "\n'
                        '                    "number of seconds, 0 or more, such as 0.002"\n'
                        "                )\n"
                    ),
                ),
            ),
            relies_on=(Symbol(_PATH, "SpinCondition.wait"),),
        ),
    ),
    reason=Probe(
        claim="a reader spins 0.1 s or longer after each message unless its caller says otherwise",
        check=_spins_long,
        paths=(_PATH,),
    ),
    effect=Probe(
        claim=f"a reader spins 2 ms, or what {KNOB} says; a malformed value is refused",
        check=_short_and_switchable,
        paths=(_PATH,),
    ),
    absorbed=Probe(
        claim=f"upstream reads {KNOB}",
        check=_switchable,
        paths=(_PATH,),
    ),
    knob=KNOB,
)
