"""Whether the container is well, for Docker's HEALTHCHECK: exit status 0 or 1 and a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from serving import places, state
from serving.supervise import is_healthy


def check(environ: Mapping[str, str]) -> int:
    """Reads the state file, and on the head asks the API itself."""
    if not environ.get("GLM_DEPLOYMENT"):
        return _say(0, "a plain `vllm serve`: nothing is watched")
    folder = Path(environ.get("GLM_STATE_DIR") or state.DEFAULT_DIR)
    found = state.read(folder)
    if found is None:
        return _say(1, f"{folder / state.FILE_NAME} is not there: the start has not begun")
    if not found.get("serving"):
        why = f": {found['error']}" if found.get("error") else ""
        return _say(1, f"{found.get('stage')}{why}")
    knobs = found.get("knobs")
    port = knobs.get("GLM_API_PORT", "8002") if isinstance(knobs, dict) else "8002"
    host = knobs.get("GLM_API_HOST", "") if isinstance(knobs, dict) else ""
    host = "127.0.0.1" if host in ("", *places.EVERYWHERE) else host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if found.get("rank") == 0 and not is_healthy(address):
        return _say(1, f"{address}/health does not answer")
    return _say(0, "serving")


def _say(code: int, sentence: str) -> int:
    sys.stdout.write(sentence + "\n")
    return code
