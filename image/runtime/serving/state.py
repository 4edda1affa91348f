"""The state file: what this rank is doing, for the status server, the health check and people.

One JSON object at `$GLM_STATE_DIR/state.json`, replaced in one step, so that a reader never sees
half of it. Only `main` writes it; everybody may read it with `read`.

    {"schema": 1, "deployment", "rank", "ranks", "stage", "stages": [{"name", "state", "started",
     "ended", "message"}], "route", "fingerprint", "knobs", "serving", "error", "peers"}

Times are seconds since the epoch or null; `rank` is null until it is known; `stage` is one of
STAGES or ENDS; `fingerprint` is null or `Fingerprint.document()`; `error` is null or a sentence;
`peers` is empty until the ranks have joined, then has HOST:PORT of each rank's status server in
their order.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
FILE_NAME = "state.json"
DEFAULT_DIR = "/run/glm53"
STAGES = (
    "preflight",
    "discover",
    "join",
    "numeric_check",
    "load",
    "warmup",
    "self_test",
    "serving",
    "draining",
)
ENDS = ("stopped", "failed")


class StateFile:
    """The state, and the file that shows it. Safe under threads."""

    def __init__(
        self, folder: Path, deployment: str, clock: Callable[[], float] = time.time
    ) -> None:
        """Makes the folder and writes a first state, in which every stage waits.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.path = folder / FILE_NAME
        self._clock = clock
        self._lock = threading.RLock()
        self._document: dict[str, Any] = {
            "schema": SCHEMA,
            "deployment": deployment,
            "rank": None,
            "ranks": None,
            "stage": STAGES[0],
            "stages": [
                {"name": name, "state": "waiting", "started": None, "ended": None, "message": ""}
                for name in STAGES
            ],
            "route": None,
            "fingerprint": None,
            "knobs": {},
            "serving": False,
            "error": None,
            "peers": [],
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def stage(self) -> str:
        """The stage that runs now, or how it ended."""
        return str(self._document["stage"])

    def update(self, **fields: object) -> None:
        """Sets fields of the document, such as `rank` or `route`."""
        unknown = sorted(set(fields) - set(self._document) | {"stages", "stage"} & set(fields))
        if unknown:
            raise ValueError(f"the state has no such fields: {', '.join(unknown)}")
        with self._lock:
            self._document.update(fields)
            self._write()

    def begin(self, stage: str, message: str = "") -> None:
        """Ends the running stage as done and starts another."""
        with self._lock:
            self._end("done")
            entry = self._entry(stage)
            entry.update(state="running", started=self._clock(), ended=None, message=message)
            self._document["stage"] = stage
            self._document["serving"] = stage == "serving"
            self._write()

    def skip(self, stage: str, why: str) -> None:
        """Says that a stage is not for this rank."""
        with self._lock:
            self._entry(stage).update(state="done", message=f"not run: {why}")
            self._write()

    def note(self, message: str) -> None:
        """Says in words what the running stage is at."""
        with self._lock:
            for entry in self._running():
                entry["message"] = message
            self._write()

    def stop(self) -> None:
        """The end that was asked for."""
        self._finish("stopped", "done", None)

    def fail(self, sentence: str) -> None:
        """The end with an error, which stands at the running stage too."""
        self._finish("failed", "failed", sentence)

    def document(self) -> dict[str, Any]:
        """A copy of the state."""
        with self._lock:
            copied: dict[str, Any] = json.loads(json.dumps(self._document))
            return copied

    def _finish(self, end: str, state: str, error: str | None) -> None:
        with self._lock:
            if error:
                for entry in self._running():
                    entry["message"] = error
            self._end(state)
            self._document.update(stage=end, serving=False, error=error)
            self._write()

    def _end(self, state: str) -> None:
        for entry in self._running():
            entry.update(state=state, ended=self._clock())

    def _running(self) -> list[dict[str, Any]]:
        return [entry for entry in self._document["stages"] if entry["state"] == "running"]

    def _entry(self, stage: str) -> dict[str, Any]:
        return next(entry for entry in self._document["stages"] if entry["name"] == stage)

    def _write(self) -> None:
        data = json.dumps(self._document, indent=1, sort_keys=True).encode()
        replace_file(self.path, data)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old bytes or the new ones, also after a kill."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(folder: Path) -> Mapping[str, Any] | None:
    """The state that a folder holds; None where there is none or it is of another schema."""
    try:
        document = json.loads((folder / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return None
    return document
