"""Folders of compiled kernels and graphs, and the rule for FlashInfer's autotuner.

Kernels are kept by their own content, so one folder serves all settings. vLLM's graphs are not
always, so each set of shared knobs has a folder of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from serving.errors import EnvironmentFault
from serving.fingerprint import Fingerprint
from serving.resolve import Plan

_KEPT = 4
_AUTOTUNE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"


def prepare(plan: Plan, fingerprint: Fingerprint) -> dict[str, str]:
    """Makes the folders and gives the variables that name them.

    Raises:
        EnvironmentFault: one cannot be made or emptied.
    """
    root = Path(plan.settings.text("CACHE_DIR"))
    arch = plan.profile.arch
    graphs = root / f"vllm-{arch}-{fingerprint.digest[:12]}"
    places = {
        "VLLM_CACHE_ROOT": graphs,
        "TRITON_CACHE_DIR": root / f"triton-{arch}",
        # Its own default is ~/.tilelang, outside of any volume.
        "TILELANG_CACHE_DIR": root / f"tilelang-{arch}",
        # FlashInfer puts .cache/flashinfer/VERSION/ARCH below it.
        "FLASHINFER_WORKSPACE_BASE": root / "flashinfer",
        _AUTOTUNE: root / f"autotune-{arch}-{fingerprint.digest[:12]}",
    }
    try:
        if plan.settings.text("AUTOTUNE") == "fresh" and plan.tp > 1:
            # A cache that only some ranks hit makes the others wait for them for ever (vllm#57423).
            shutil.rmtree(places[_AUTOTUNE], ignore_errors=True)
            if places[_AUTOTUNE].exists():
                raise EnvironmentFault(f"{places[_AUTOTUNE]} cannot be emptied")
        for folder in places.values():
            folder.mkdir(parents=True, exist_ok=True)
            folder.touch()
        _prune(root, f"vllm-{arch}-*")
        _prune(root, f"autotune-{arch}-*")
    except OSError as error:
        raise EnvironmentFault(
            f"GLM_CACHE_DIR={root} cannot be written to: {error.strerror}"
        ) from error
    return {name: str(folder) for name, folder in places.items()}


def _prune(root: Path, pattern: str) -> None:
    """Leaves the folders of the last few settings; each can take a GiB."""
    folders = sorted(root.glob(pattern), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)
