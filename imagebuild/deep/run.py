"""Runs deep probes on a tree, each in a process of its own. Standard library only.

It works with any Python that can import the tree: that of the smoke environment (with stubs for
what no CPU loads) or the image's own. A probe that dies, hangs or prints garbage is one bad result
and touches no other; the tree is not written to.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from imagebuild import deep
from imagebuild.deep.base import About
from imagebuild.patching.versions import VersionRange, is_release_known

PROJECT = Path(__file__).resolve().parent.parent.parent
CHILD = Path(__file__).with_name("child.py")
Result = Literal["ok", "failed", "crashed", "timeout", "skipped"]
# Knobs of a deployment, and whatever would change what Python or a library does at import.
_DROPPED = ("VLLM_", "GLM_", "TORCH_", "PYTHON", "FLASHINFER_", "HF_", "TRANSFORMERS_", "RAY_")
_TAIL = 400  # characters of a dead probe's output


@dataclass(frozen=True)
class Probe:
    """One probe module: its short name, its dotted name, what it says about itself, its digest."""

    name: str
    module: str
    about: About
    digest: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one probe found; `torch` is the version it ran with, "" where it did not get far."""

    probe: Probe
    result: Result
    evidence: str
    seconds: float = 0.0
    torch: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the claim was not shown."""
        return self.result not in ("ok", "skipped")


@dataclass(frozen=True)
class Where:
    """What runs the probes.

    Attributes:
        python: the interpreter.
        stubs: replace native modules; never in an image, where they are real.
        cached_code: byte code of the tree is kept in memory of this run alone. False in an image,
            whose own byte code is what will serve.
    """

    python: Path
    stubs: bool = True
    cached_code: bool = True


def probes(package: ModuleType = deep) -> list[Probe]:
    """Every module of `package` that has a `probe`, by name; nothing of a tree is imported."""
    found = []
    for info in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{info.name}"
        module = importlib.import_module(name)
        if callable(getattr(module, "probe", None)):
            about = getattr(module, "ABOUT", None) or About(claim=_first_line(module))
            digest = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
            found.append(Probe(info.name, name, about, digest))
    return sorted(found, key=lambda probe: probe.name)


def why_skipped(probe: Probe, version: str, names: Collection[str]) -> str:
    """Why a probe says nothing about a tree, "" where it does.

    Args:
        probe: the probe.
        version: the vLLM release.
        names: the patches and upstream fixes of the series.
    """
    if is_release_known(version) and version not in VersionRange.parse(probe.about.versions):
        return f"it is for vLLM {probe.about.versions}"
    if probe.about.patches and not set(probe.about.patches) & set(names):
        return f"{', '.join(probe.about.patches)} is not in this series"
    return ""


def run(
    root: Path,
    chosen: Iterable[Probe],
    where: Where,
    skipped: Callable[[Probe], str] = lambda _probe: "",
    step: Callable[[str], None] = lambda _text: None,
) -> list[Outcome]:
    """Runs the probes on the tree, a few at a time; the outcomes are in the order of the probes.

    Raises:
        OSError: no process can be started or no temporary folder made.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-deep-") as folder:
        runner = _Runner(root.absolute(), where, Path(folder), step)
        # Each takes about a gigabyte, and importing vLLM is what takes the time.
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(runner.one, probe, skipped(probe)) for probe in chosen]
            try:
                return [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                runner.stop()
                raise


class _Runner:
    """The processes of one run."""

    def __init__(self, root: Path, where: Where, folder: Path, step: Callable[[str], None]) -> None:
        self.root = root
        self.where = where
        self.folder = folder
        self.step = step
        self._running: set[subprocess.Popen[bytes]] = set()

    def one(self, probe: Probe, why_not: str) -> Outcome:
        """Runs one probe to its end, or to its time limit."""
        if why_not:
            return Outcome(probe, "skipped", why_not)
        self.step(f"deep probe {probe.name}")
        home = self.folder / probe.name
        home.mkdir()
        job = home / "job.json"
        job.write_text(json.dumps({
            "module": probe.module,
            "imports": probe.about.imports,
            "tree": str(self.root),
            "project": str(PROJECT),
            "stubs": self.where.stubs,
        }), "utf-8")  # fmt: skip
        start = time.monotonic()
        with (home / "output").open("wb") as output:
            code = self._run(self._command(job), home, output.fileno(), probe.about.seconds)
        seconds = time.monotonic() - start
        return _judge(probe, code, job, _tail(home / "output"), seconds)

    def stop(self) -> None:
        """Ends every process of this run."""
        for process in list(self._running):
            _kill(process)

    def _command(self, job: Path) -> list[str]:
        # -I: no variable and no folder of the caller decides what is imported. -B: see `Where`.
        command = [str(self.where.python), "-I", "-B", "-W", "ignore"]
        if self.where.cached_code:
            # Outside of the tree, whose byte code may be stale: see docs/design.md.
            command += ["-X", f"pycache_prefix={self.folder / 'pycache'}"]
            command.remove("-B")
        return [*command, str(CHILD), str(job)]

    def _run(self, command: Sequence[str], home: Path, output: int, limit: float) -> int | None:
        """The exit code, or None after the time limit."""
        process = subprocess.Popen(
            command, cwd=home, env=_environment(home), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._running.add(process)
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what the probe started and left behind.
            _kill(process)
            self._running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(home: Path) -> dict[str, str]:
    """The caller's, without what would change the answer, and with a home of the probe's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return kept | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "CUDA_VISIBLE_DEVICES": "",
        "FLASHINFER_WORKSPACE_BASE": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _judge(probe: Probe, code: int | None, job: Path, tail: str, seconds: float) -> Outcome:
    if code is None:
        limit = f"no answer within {probe.about.seconds:g} s"
        return Outcome(probe, "timeout", f"{limit}{tail}", seconds)
    try:
        answer = json.loads(job.with_suffix(".answer").read_text("utf-8"))
    except FileNotFoundError:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(probe, "crashed", f"the process ended with {how}{tail}", seconds)
    result: Result = "ok" if answer["ok"] else "failed"
    return Outcome(probe, result, answer["evidence"], seconds, answer.get("torch", ""))


def _tail(path: Path) -> str:
    """The end of the output as part of a sentence, "" where there is none."""
    text = path.read_bytes()[-4 * _TAIL :].decode("utf-8", "replace")
    printable = "".join(c if c.isprintable() else " " for c in text)
    last = " ".join(printable.split())[-_TAIL:]
    return f"; it said: {last}" if last else ""


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or module.__name__).strip().split("\n", 1)[0]
