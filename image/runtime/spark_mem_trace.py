"""Caps the CUDA memory of one worker, and on request records where it goes.

The patched vLLM worker calls `arm` once its device is set. Standard library only; torch is
imported inside `arm`, and nothing happens unless one of the variables below is set. An empty
variable counts as unset, since compose files pass empty values.

- TORCH_MEM_FRACTION: share of the device's memory that this process may take, over 0 up to 1.
- TORCH_MEM_STATS_DIR: folder for `mem-stats-pid<PID>.json`, rewritten every
  TORCH_MEM_STATS_INTERVAL seconds (15).
- TORCH_MEM_TRACE_DIR: folder for one `mem-snapshot-pid<PID>.pickle`, taken at the first failed
  allocation; TORCH_MEM_TRACE_ENTRIES (100000) bounds the recorded history.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.spark_mem_trace")

_GIB = 1 << 30
_DEFAULT_INTERVAL = 15.0
_DEFAULT_ENTRIES = 100_000


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; None where a part is off. Seconds and entries are positive."""

    fraction: float | None
    stats_dir: Path | None
    interval: float
    trace_dir: Path | None
    entries: int


def _number(environ: Mapping[str, str], name: str, expected: str) -> float | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={text!r}: expected {expected}")
    return value


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}={text!r}: expected a folder to write into: {error}") from error
    return path


def settings(environ: Mapping[str, str]) -> Settings:
    """Reads and checks every variable, whether or not its part is on.

    Raises:
        ValueError: a value is malformed or its folder cannot be made; the message is one sentence.
    """
    share = "a share over 0 and up to 1, such as 0.9"
    fraction = _number(environ, "TORCH_MEM_FRACTION", share)
    if fraction is not None and fraction > 1:
        raise ValueError(f"TORCH_MEM_FRACTION={fraction:g}: expected {share}")
    interval = _number(environ, "TORCH_MEM_STATS_INTERVAL", "a positive number of seconds")
    whole = "a positive whole number of entries"
    entries = _number(environ, "TORCH_MEM_TRACE_ENTRIES", whole)
    if entries is not None and entries != int(entries):
        raise ValueError(f"TORCH_MEM_TRACE_ENTRIES={entries:g}: expected {whole}")
    return Settings(
        fraction=fraction,
        stats_dir=_folder(environ, "TORCH_MEM_STATS_DIR"),
        interval=_DEFAULT_INTERVAL if interval is None else interval,
        trace_dir=_folder(environ, "TORCH_MEM_TRACE_DIR"),
        entries=_DEFAULT_ENTRIES if entries is None else int(entries),
    )


def arm(device: Any) -> None:  # noqa: ANN401 - a torch.device, whose type is not at hand here
    """Applies the settings of the environment to this process and `device`.

    Raises:
        ValueError: a variable is malformed: the worker must not start uncapped in silence.
    """
    wanted = settings(os.environ)
    if wanted.fraction is None and wanted.stats_dir is None and wanted.trace_dir is None:
        return
    import torch

    if wanted.fraction is not None:
        torch.cuda.set_per_process_memory_fraction(wanted.fraction, device)
        logger.info("memory of %s capped at a share of %g", device, wanted.fraction)
    if wanted.stats_dir is not None:
        threading.Thread(
            target=_write_for_ever,
            args=(torch.cuda, device, wanted.stats_dir, wanted.interval, time.sleep),
            name="spark-mem-stats",
            daemon=True,
        ).start()
    if wanted.trace_dir is not None:
        torch.cuda.memory._record_memory_history(max_entries=wanted.entries)
        observer = _observer(torch.cuda, wanted.trace_dir)
        torch._C._cuda_attach_out_of_memory_observer(observer)


def stats(cuda: Any, device: Any) -> dict[str, int | float]:  # noqa: ANN401 - torch.cuda
    """The memory of this process and of its device, in bytes; `ts` in seconds since the epoch."""
    free, total = cuda.mem_get_info(device)
    return {
        "pid": os.getpid(),
        "ts": time.time(),
        "allocated": cuda.memory_allocated(device),
        "reserved": cuda.memory_reserved(device),
        "max_reserved": cuda.max_memory_reserved(device),
        "device_free": free,
        "device_total": total,
    }


def write_stats(cuda: Any, device: Any, folder: Path) -> Path:  # noqa: ANN401 - torch.cuda
    """Writes one statistics file beside itself and renames it, so that no reader sees a part."""
    path = folder / f"mem-stats-pid{os.getpid()}.json"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(stats(cuda, device)) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _write_for_ever(
    cuda: Any,  # noqa: ANN401 - torch.cuda
    device: Any,  # noqa: ANN401
    folder: Path,
    interval: float,
    sleep: Callable[[float], None],
) -> None:
    # Statistics must never take a worker down, and a full disk must not fill the log as well.
    complained = False
    while True:
        try:
            write_stats(cuda, device, folder)
            complained = False
        except Exception as error:
            if not complained:
                logger.warning("memory statistics not written to %s: %s", folder, error)
            complained = True
        sleep(interval)


def _observer(cuda: Any, folder: Path) -> Callable[[Any, int, int, int], None]:  # noqa: ANN401
    """What torch calls at a failed allocation: says how much was asked for, and by whom."""
    dumped = threading.Event()

    def observe(device: Any, requested: int, total: int, free: int) -> None:  # noqa: ANN401
        stack = "".join(traceback.format_stack(limit=40))
        logger.error(
            "out of memory on device %s: asked for %.2f GiB, %.2f of %.2f GiB free\n%s",
            device, requested / _GIB, free / _GIB, total / _GIB, stack,
        )  # fmt: skip
        if dumped.is_set():
            return
        dumped.set()
        path = folder / f"mem-snapshot-pid{os.getpid()}.pickle"
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            cuda.memory._dump_snapshot(str(temporary))
            temporary.replace(path)
            logger.error("memory snapshot written to %s", path)
        except Exception as error:
            logger.error("memory snapshot not written to %s: %s", path, error)

    return observe
