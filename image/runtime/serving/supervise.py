"""From the start of vLLM to its end: what stage it is at, and what ends it.

Everything is asked in turn by one loop, so a signal, a dead process or a lost rank is seen within a
second at any stage.
"""

from __future__ import annotations

import http.client
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serving import places
from serving.cluster import Cluster, Membership
from serving.errors import CheckError, EnvironmentFault
from serving.process import Child, Signals, reap
from serving.resolve import Plan
from serving.state import StateFile

# Lines of vLLM 0.31 to 0.33 after which its weights are in memory.
_LOADED = re.compile(r"Loading weights took|Model loading took|Capturing CUDA graph|init engine")
_STEP_S = 0.2
_ASK_S = 2.0
SELF_TEST = (sys.executable, "-m", "serving.selftest")


@dataclass
class Run:
    """One running rank.

    Attributes:
        plan, membership, cluster, signals, state: of this rank.
        children: vLLM last, and with Ray its agent before it; any end of one ends the run.
        env: for the self-test.
        log: takes a sentence.
        self_test: the command of the self-test.
        is_loaded: whether vLLM's log said that the weights are in memory.
    """

    plan: Plan
    membership: Membership
    cluster: Cluster
    signals: Signals
    state: StateFile
    children: Sequence[Child]
    env: Mapping[str, str]
    log: Callable[[str], object]
    self_test: Sequence[str] = SELF_TEST
    is_loaded: bool = False
    _tester: Child | None = field(default=None, repr=False)
    _failures: list[str] = field(default_factory=list, repr=False)

    def on_line(self, line: str) -> None:
        """Takes vLLM's log, from another thread."""
        if not self.is_loaded and _LOADED.search(line):
            self.is_loaded = True

    def until_signal(self) -> None:
        """Returns when a signal asks for the end.

        Raises:
            CheckError: the self-test failed.
            EnvironmentFault: a process ended, a rank is lost, or the API did not come up in time.
        """
        limit = self.plan.settings.number("LOAD_TIMEOUT_S")
        end = time.monotonic() + limit
        is_up = False
        while not is_up:
            if self._step():
                return
            if self.is_loaded and self.state.stage == "load":
                self.state.begin("warmup")
            if time.monotonic() > end:
                raise EnvironmentFault(
                    f"vLLM did not answer at {self._address()} within GLM_LOAD_TIMEOUT_S={limit}; "
                    "its log says what it waits for"
                )
            is_up = self._answers()
        if self.state.stage == "load":
            self.state.begin("warmup")
        if not self._tested():
            return
        self.state.begin("serving")
        self.log("serving")
        while not self._step():
            pass

    def await_head(self) -> float:
        """On a worker that was asked to end: the head's requests in flight need it still.

        The head ends once it is told. Another signal, or GLM_DRAIN_TIMEOUT_S, ends the wait.

        Returns:
            Seconds that it took.
        """
        start = time.monotonic()
        if self.membership.rank:
            self.cluster.stopping()
            end = start + self.plan.settings.number("DRAIN_TIMEOUT_S")
            while time.monotonic() < end and self.signals.asked < 2 and not self.cluster.lost():
                if any(child.poll() is not None for child in self.children):
                    break
                time.sleep(_STEP_S)
        return time.monotonic() - start

    def stop(self, signals: int = 0, spent: float = 0.0) -> None:
        """Ends all children; more signals than `signals` make it quick.

        Args:
            signals: how many there were.
            spent: seconds of GLM_DRAIN_TIMEOUT_S that are over.
        """
        seconds = max(self.plan.settings.number("DRAIN_TIMEOUT_S") - spent, 0.0) + 10
        if self._tester is not None:
            self._tester.stop(0)
        for child in reversed(self.children):
            child.stop(seconds, lambda: self.signals.asked > signals)

    def _step(self) -> bool:
        """Waits a moment and looks at everything; True when a signal came."""
        if self.signals.asked:
            return True
        time.sleep(_STEP_S)
        for child in self.children:
            code = child.poll()
            if code is not None and not self.signals.asked:
                child.finish()
                how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                raise EnvironmentFault(f"{child.name} {how}; its log has the reason")
        lost = self.cluster.lost()
        if lost:
            raise EnvironmentFault(lost)
        reap()
        return bool(self.signals.asked)

    def _tested(self) -> bool:
        """Runs the self-test on the head; False when a signal came."""
        s = self.plan.settings
        if self.membership.rank or not s.is_on("SELF_TEST"):
            why = "the head's" if self.membership.rank else "GLM_SELF_TEST=0"
            self.state.skip("self_test", why)
            return True
        self.state.begin("self_test")
        command = [*self.self_test, "--base", self._address(), "--model", s.text("SERVED_NAME"),
                   "--drafts", str(self.plan.tokens)]  # fmt: skip
        if s.text("API_KEY_FILE"):
            command += ["--api-key-file", s.text("API_KEY_FILE")]
        if not s.is_on("TOPK_DETERMINISTIC"):
            command.append("--allow-different")
        env = {**self.env, "PYTHONPATH": str(places.ROOT)}
        self._tester = Child("self-test", command, env, on_line=self._on_test_line)
        end = time.monotonic() + s.number("SELF_TEST_TIMEOUT_S")
        while self._tester.poll() is None:
            if self._step():
                return False
            if time.monotonic() > end:
                raise CheckError(
                    f"the self-test did not end within {s.number('SELF_TEST_TIMEOUT_S')} s; the "
                    "API is too slow or hangs"
                )
        code = self._tester.poll()
        self._tester.finish()
        self._tester = None
        if code == CheckError.exit_code and self._failures:
            raise CheckError(*(f"self-test: {failure}" for failure in self._failures))
        if code:
            raise CheckError(f"the self-test ended with {code}; its lines are in the log above")
        return True

    def _on_test_line(self, line: str) -> None:
        if line.startswith("FAIL "):
            self._failures.append(line.removeprefix("FAIL ").strip())
        elif line.startswith("error: "):
            self._failures.append(line.removeprefix("error: "))

    def _address(self) -> str:
        """The head's API. A worker asks it, too: it serves when the head does."""
        host = self.plan.settings.text("API_HOST")
        if self.membership.rank:
            host = self.membership.head_address
        elif host in places.EVERYWHERE:
            host = "127.0.0.1"
        return (
            f"http://{f'[{host}]' if ':' in host else host}:{self.plan.settings.number('API_PORT')}"
        )

    def _answers(self) -> bool:
        return is_healthy(self._address())


def is_healthy(base: str) -> bool:
    """Whether an API says that its engine lives; asked without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base}/health", timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):  # HTTPException: it speaks no HTTP
        return False
