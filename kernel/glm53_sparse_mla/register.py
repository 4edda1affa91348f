"""Puts our attention backend into its slot of vLLM, or stops the server.

vLLM calls `register` once in every process. It logs and forgets what importing a plug-in raises,
but not what the call raises; so this module imports the standard library only, and all that can
fail is tried in the call. If even this module does not import, the patched vLLM notices: it asks
glm_mla_route whether the class that it chose is that of the route.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "GLM_MLA_ROUTE"
SLOT = "FLASHINFER_MLA_SPARSE_SM120"
BACKENDS = {
    "cuda": "glm53_sparse_mla.backend.CudaBackend",
    "triton": "glm53_sparse_mla.backend.TritonBackend",
}


def register() -> None:
    """Registers the backend of the route that is asked for; does nothing for any other route.

    Raises:
        RuntimeError: a route of ours is asked for and cannot be served. The message says what was
            expected, what was found, and what to do.
        ValueError: GLM_MLA_ROUTE names no route.
    """
    route = _route()
    if route not in BACKENDS:
        return
    try:
        what = _prepare(route)
    except Exception as error:
        raise RuntimeError(
            f"{VARIABLE}={route}: the server must not start without the backend that was asked "
            f"for: {error}. Mend that, or set {VARIABLE} to sm90 or stock"
        ) from error
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[SLOT], BACKENDS[route])
    logging.getLogger("vllm.glm53_sparse_mla").info("%s=%s: %s", VARIABLE, route, what)


def _route() -> str:
    """The route that is asked for, by the table of the patched vLLM."""
    try:
        from glm_mla_route import active_route
    except ImportError:
        # Without our patches vLLM would hand fp8 rows over in a format that we cannot read.
        asked = os.environ.get(VARIABLE, "")
        if asked in ("", "stock", "sm90"):
            return "stock"
        raise RuntimeError(
            f"{VARIABLE}={asked!r} needs the patched vLLM, and this one has no glm_mla_route; use "
            f"the image or the tree that build.py makes, or unset {VARIABLE}"
        ) from None
    return active_route()


def _prepare(route: str) -> str:
    """Tries all that the backend will need later; a sentence about what serves. Raises anything."""
    from vllm.version import __version__

    from glm53_sparse_mla import releases

    releases.check(__version__)
    if route == "triton":
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            raise RuntimeError("expected Triton with a driver, found none that vLLM can use")
        return "the portable Triton kernel will serve sparse MLA"
    from glm53_sparse_mla import ops

    return f"{ops.library().path} will serve sparse MLA"
