"""One start of one rank, from the environment to the exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving import caches, cluster, command, fingerprint, network, numeric, places, preflight, ring
from serving.cluster import Cluster, Membership, Place
from serving.errors import CheckError, EnvironmentFault, ServingError
from serving.machine import Machine
from serving.process import Child, Signals, Stopped, adopt_orphans, end_all
from serving.resolve import Plan, resolve
from serving.state import DEFAULT_DIR, StateFile, replace_file
from serving.status import Options, StatusServer, read_token
from serving.supervise import SELF_TEST, Run

_INTERRUPTED = 130
# Addresses of fabric ports can come up a while after the machine has.
_SETTLE_S = 60.0
_RETRY_S = 5.0
_FABRIC = (sys.executable, "-m", "serving.fabric")
_RAY_SETTLE_S = 2.0
_LOG = "vllm.log"


@dataclass
class Tools:
    """What `main` uses of the world; tests give others."""

    machine: Machine = field(default_factory=Machine)
    cluster: Callable[[Plan], Cluster] = cluster.of
    site: Path | None = None
    self_test: Sequence[str] = SELF_TEST
    fabric: Sequence[str] = _FABRIC
    numeric: Sequence[str] | None = None
    settle: float = _SETTLE_S


@dataclass(frozen=True)
class Prepared:
    """What the stages before the weights have found out; `made` are variables for vLLM."""

    membership: Membership
    place: Place
    found: command.Found
    made: Mapping[str, str]


def log(sentence: str) -> None:
    """A line of the entry point's own in the container's log."""
    with contextlib.suppress(OSError, ValueError):
        # What another rank or a file says must not look like a line of ours, or be a terminal's.
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
        sys.stderr.write(f"glm53: {shown}\n")
        sys.stderr.flush()


def main(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, tools: Tools | None = None
) -> int:
    """Starts one rank and returns the exit code once it has ended."""
    signals = Signals()
    signals.install()
    adopt_orphans()
    start = Start(environ, tools or Tools(), signals)
    try:
        with signals.raising():
            plan = resolve(environ, arguments)
        start.run(plan)
        code = 0
    except Stopped:
        code = 0
    except ServingError as error:
        start.failed(error)
        code = error.exit_code
    except OSError as error:
        # Whatever of the machine gave way in a place that did not expect it.
        fault = EnvironmentFault(f"{error.filename or 'the system'}: {error.strerror or error}")
        start.failed(fault)
        code = fault.exit_code
    except Exception as error:
        start.failed(_own_fault(error))
        code = EnvironmentFault.exit_code
    start.end()
    return _INTERRUPTED if signals.asked > 1 else code


class Start:
    """The stages in order. Whatever it has started is ended by `end`, which never raises."""

    def __init__(self, environ: Mapping[str, str], tools: Tools, signals: Signals) -> None:
        self._environ = environ
        self._tools = tools
        self._signals = signals
        self._state: StateFile | None = None
        self._cluster: Cluster | None = None
        self._status: StatusServer | None = None
        self._run: Run | None = None
        self._reason = ""

    def run(self, plan: Plan) -> None:
        """Returns when a signal has asked for the end. Raises ServingError or Stopped."""
        for notice in plan.notices:
            log(notice)
        self._state = state = _state_file(plan.settings.text("STATE_DIR"), plan.profile.name)
        state.update(route=plan.route, knobs=plan.settings.shown(), ranks=plan.nodes)
        log(f"{plan.profile.name}: {plan.profile.text}; route {plan.route}, speculation "
            f"{plan.speculation} {plan.tokens or ''}".rstrip())  # fmt: skip
        self._start_status(plan)
        with self._signals.raising():
            prepared = self._prepare(plan, state)
        self._serve(plan, state, prepared)

    def _prepare(self, plan: Plan, state: StateFile) -> Prepared:
        """All that comes before the weights."""
        tools = self._tools
        _begin(state, "preflight")
        site = tools.site or _site()
        ready = preflight.check(plan, tools.machine, site=site)
        for notice in ready.notices:
            log(f"preflight: {notice}")
        template = Path(plan.settings.text("STATE_DIR")) / places.TEMPLATE
        replace_file(template, ready.template)
        found = command.Found(ready.moe_backend, template)
        mine = fingerprint.take(plan, ready.moe_backend, ready.template, site=site)
        state.update(fingerprint=mine.document())
        log(f"fingerprint {mine.digest}")
        _begin(state, "discover")
        self._cluster = tools.cluster(plan)
        place = self._cluster.discover(plan)
        net = self._network(plan, place)
        _begin(state, "join")
        membership = self._cluster.join(plan, mine)
        port = plan.settings.number("STATUS_PORT")
        peers = [_host_and_port(address, port) for address in membership.addresses]
        state.update(rank=membership.rank, ranks=membership.ranks, peers=peers)
        log(f"rank {membership.rank} of {membership.ranks}, head {membership.head_address}")
        parts = (net.variables, caches.prepare(plan, mine))
        made = command.environment(plan, *parts, member=membership)
        self._check_fabric(plan, membership, made)
        _begin(state, "numeric_check")
        if plan.settings.is_on("NUMERIC_CHECK"):
            env = command.child_environment(self._environ, made)
            numeric.check(plan, env, log, *([tools.numeric] if tools.numeric else []))
        else:
            log("numeric check: not run, GLM_NUMERIC_CHECK=0")
        return Prepared(membership, place, found, made)

    def _network(self, plan: Plan, place: Place) -> network.Network:
        derive = ring.derive if plan.is_ring else network.derive
        end = time.monotonic() + self._tools.settle
        while True:
            try:
                found = derive(plan, place.own_address, self._environ)
            except EnvironmentFault as error:
                if time.monotonic() + _RETRY_S > end:
                    raise
                log(f"waiting for the network: {error}")
                time.sleep(_RETRY_S)
                continue
            for notice in found.notices:
                log(f"network: {notice}")
            return found

    def _check_fabric(self, plan: Plan, membership: Membership, made: Mapping[str, str]) -> None:
        s = plan.settings
        if plan.nodes == 1 or not s.is_on("FABRIC_CHECK"):
            return
        env = command.child_environment(self._environ, made) | {"PYTHONPATH": str(places.ROOT)}
        limit = s.number("FABRIC_CHECK_TIMEOUT_S")
        said: list[str] = []
        child = Child(
            "fabric check",
            [*self._tools.fabric, "--rank", str(membership.rank), "--ranks", str(membership.ranks),
             "--head", membership.head_address, "--port", s.text("FABRIC_CHECK_PORT"),
             "--timeout", str(limit), "--gbps", s.text("FABRIC_GBPS")],
            env, on_line=said.append,
        )  # fmt: skip
        try:
            end = time.monotonic() + 3 * limit
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            code = child.poll()
        finally:
            child.stop(0)
        if code:
            kind = CheckError if code == CheckError.exit_code else EnvironmentFault
            raise kind(
                f"the fabric check ended with {code}: {said[-1] if said else 'without a word'}; "
                "GLM_FABRIC_CHECK=0 starts without it"
            )
        if code is None:
            raise EnvironmentFault(f"the fabric check did not end in {3 * limit} s")

    def _serve(self, plan: Plan, state: StateFile, prepared: Prepared) -> None:
        membership = prepared.membership
        env = command.child_environment(self._environ, prepared.made, preflight.api_key(plan))
        logs = Path(plan.settings.text("LOG_DIR"))
        children: list[Child] = []
        self._run = run = Run(
            plan, membership, self._cluster or cluster.SingleNode(), self._signals, state, children,
            env, log, self._tools.self_test,
        )  # fmt: skip
        state.begin("load")
        if plan.cluster != "none":
            agent = command.ray_start(plan, membership, prepared.place.own_address)
            log(" ".join(agent))
            children.append(Child("ray", agent, env, log=logs / "ray.log"))
            time.sleep(_RAY_SETTLE_S)
        if plan.cluster == "none" or membership.rank == 0:
            argv = command.serve(plan, membership, prepared.found)
            log(f"starting {argv!r}")
            children.append(Child("vLLM", argv, env, log=logs / _LOG, on_line=run.on_line))
        run.until_signal()
        with contextlib.suppress(OSError):  # a full disk costs no request
            state.begin("draining")
        log("draining: requests in flight end")
        spent = run.await_head()
        # The one that asked for it, and no more.
        run.stop(signals=1, spent=spent)

    def _start_status(self, plan: Plan) -> None:
        s = plan.settings
        try:
            token = read_token(Path(s.text("STATUS_TOKEN_FILE"))) if s["STATUS_TOKEN_FILE"] else ""
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EnvironmentFault(
                f"GLM_STATUS_TOKEN_FILE={s.text('STATUS_TOKEN_FILE')} cannot be used: {reason}"
            ) from error
        try:
            options = Options(
                s.text("STATUS_HOST"), s.number("STATUS_PORT"), Path(s.text("STATE_DIR")),
                Path(s.text("LOG_DIR")) / _LOG, token,
            )  # fmt: skip
            self._status = StatusServer(options)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"the status server cannot be started: {error}") from error
        self._status.start()

    def failed(self, error: ServingError) -> None:
        """Says what went wrong, in the log and in the state."""
        for problem in error.problems:
            log(f"error: {problem}")
        self._reason = str(error)
        if self._state is None:
            folder = self._environ.get("GLM_STATE_DIR") or DEFAULT_DIR
            name = self._environ.get("GLM_DEPLOYMENT", "")
            with contextlib.suppress(ServingError):
                self._state = _state_file(folder, name)
                self._state.begin("preflight")
        if self._state is not None:
            with contextlib.suppress(OSError):
                self._state.fail(self._reason)

    def end(self) -> None:
        """Ends all that runs, tells the other ranks, and writes the last state."""
        if self._run is not None:
            # One signal asks for what is happening already; the next does not wait.
            self._run.stop(signals=1)
        if self._cluster is not None:
            self._cluster.leave(self._reason)
        if self._status is not None:
            self._status.stop()
        end_all()
        if self._state is not None and self._state.stage != "failed":
            with contextlib.suppress(OSError):
                self._state.stop()


def _own_fault(error: Exception) -> EnvironmentFault:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "unknown place"
    return EnvironmentFault(
        f"a fault of the entry point itself, {type(error).__name__} at {place}: {error}; please "
        "report it with this line"
    )


def _host_and_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _begin(state: StateFile, stage: str) -> None:
    state.begin(stage)
    log(stage.replace("_", " "))


def _state_file(folder: str, deployment: str) -> StateFile:
    try:
        return StateFile(Path(folder), deployment)
    except OSError as error:
        raise EnvironmentFault(
            f"GLM_STATE_DIR={folder} cannot be written to: {error.strerror}"
        ) from error


def _site() -> Path:
    """The folder of packages that holds vLLM, which is not imported for that."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise EnvironmentFault("the package vllm is not installed; is this the serving image?")
    return Path(folders[0]).parent
