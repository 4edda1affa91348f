"""What the status server tells: state and health, this machine's memory, the other ranks."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import state

PEER_TIMEOUT_S = 2.0
_LARGEST = 1 << 20
_MEMINFO = Path("/proc/meminfo")
_FIELDS = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap_total",
           "SwapFree": "swap_free"}  # fmt: skip


def document(folder: Path, clock: float | None = None) -> dict[str, Any]:
    """The state with `healthy`, `now` and `memory`; before a start has written one, a stage "none".

    Healthy is the head once it serves, and a worker as well: `serving` stands in its state.
    """
    found = dict(state.read(folder) or {})
    found.setdefault("schema", state.SCHEMA)
    found.setdefault("stage", "none")
    found.setdefault("stages", [])
    return {
        **found,
        "healthy": bool(found.get("serving")),
        "now": time.time() if clock is None else clock,
        "memory": memory(),
    }


def memory(file: Path = _MEMINFO) -> dict[str, int]:
    """Bytes of this machine's memory and swap; on GB10 the GPU's as well. Empty where unknown."""
    try:
        text = file.read_text("ascii", "replace")
    except OSError:
        return {}
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {_FIELDS[name]: int(value) * 1024 for name, value in pairs if name in _FIELDS}


def cluster(own: Mapping[str, Any], token: str) -> dict[str, Any]:
    """All ranks in their order, the others asked at once; before they have joined, this one."""
    peers = list(map(str, own.get("peers") or [""]))
    me = own.get("rank") or 0
    others = [(rank, peer) for rank, peer in enumerate(peers) if rank != me]
    with ThreadPoolExecutor(max_workers=16) as pool:
        ranks = list(pool.map(lambda other: _peer(other[0], other[1], token), others))
    mine = {"address": peers[me] if me < len(peers) else "", "healthy": own["healthy"],
            "stage": own["stage"], "rank": own.get("rank"), "error": own.get("error"),
            "fingerprint": _digest(own)}  # fmt: skip
    ranks.insert(me, mine)
    return {"schema": 1, "deployment": own.get("deployment"), "ranks": ranks}


def _peer(rank: int, peer: str, token: str) -> dict[str, Any]:
    host, _, port = peer.rpartition(":")
    entry: dict[str, Any] = {"address": peer, "healthy": False, "stage": "unknown", "rank": rank,
                             "error": None, "fingerprint": None}  # fmt: skip
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PEER_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request("GET", "/status.json", headers=headers)
        reply = connection.getresponse()
        found = json.loads(reply.read(_LARGEST))
        if reply.status != 200 or not isinstance(found, dict):
            raise ValueError(f"status {reply.status}")
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        entry["error"] = (
            f"its status server does not answer ({reason}); it may be on loopback alone"
        )
        return entry
    finally:
        connection.close()
    shown = {name: found.get(name) for name in ("healthy", "stage", "error")}
    return entry | shown | {"fingerprint": _digest(found)}


def _digest(found: Mapping[str, Any]) -> str | None:
    fingerprint = found.get("fingerprint")
    return str(fingerprint.get("digest")) if isinstance(fingerprint, dict) else None


def metrics(found: Mapping[str, Any]) -> str:
    """The state in Prometheus' text form."""
    lines = [
        "# HELP glm53_healthy Whether this rank serves.",
        "# TYPE glm53_healthy gauge",
        f"glm53_healthy {int(found['healthy'])}",
        "# HELP glm53_stage Which stage of the start this rank is at.",
        "# TYPE glm53_stage gauge",
        f'glm53_stage{{stage="{_label(found["stage"])}"}} 1',
        "# HELP glm53_stage_seconds How long a stage took, or has taken so far.",
        "# TYPE glm53_stage_seconds gauge",
    ]
    for stage in found["stages"]:
        if stage.get("started") is not None:
            # A clock that was set back in between makes no negative time.
            seconds = max((stage.get("ended") or found["now"]) - stage["started"], 0.0)
            lines.append(f'glm53_stage_seconds{{stage="{_label(stage["name"])}"}} {seconds:.1f}')
    lines += ["# HELP glm53_memory_bytes This machine's memory.", "# TYPE glm53_memory_bytes gauge"]
    lines += [f'glm53_memory_bytes{{kind="{name}"}} {value}'
              for name, value in found["memory"].items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def _label(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
