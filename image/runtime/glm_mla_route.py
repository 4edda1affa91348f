"""Which sparse-MLA path serves capability 12: the one truth table of GLM_MLA_ROUTE.

Imported by the patched vLLM, by the entry point and by the kernel plug-in, so it is standard
library only and imports nothing of theirs. It owns no default of a deployment: unset is stock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GLM_MLA_ROUTE"

ROUTES: Mapping[str, str] = {
    "stock": "FLASHINFER_MLA_SPARSE_SM120, packed rows of 656 bytes",
    "sm90": "FLASHINFER_MLA_SPARSE_SM90 admitted on capability 12, plain bf16 or fp8 rows",
    "cuda": "the glm53_sparse_mla CUDA kernel",
    "triton": "the portable Triton kernel",
}


def active_route(environ: Mapping[str, str] | None = None) -> str:
    """The route that is asked for; unset or empty means "stock".

    Raises:
        ValueError: the variable holds anything else than a route's name, as written here.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not value:
        return "stock"
    if value not in ROUTES:
        raise ValueError(
            f"{VARIABLE}={value!r} names no route; expected one of {', '.join(ROUTES)}, or unset"
        )
    return value
