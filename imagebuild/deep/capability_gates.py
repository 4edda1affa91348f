"""Asks vLLM's own gates by device capability: the SM90 backend's, and that of dependent launch."""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.deep.base import About, environment, require

ABOUT = About(
    claim="SM90 is admitted on 9, and on 12 under its route alone; PDL is off on 12 alone",
    patches=("vllm_mla_sm90_on_sm12x", "vllm_pdl_off_sm12x"),
    imports=(
        "vllm.platforms.cuda",
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90",
    ),
)
_CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))


def probe() -> str:
    """Compares both gates on every capability; returns what they admit."""
    for route in (None, "stock", "sm90"):
        admitted = [c for c in _CAPABILITIES if _admits(c, route)]
        wanted = [(9, 0)] + ([(12, 0), (12, 1)] if route == "sm90" else [])
        require(admitted == wanted, f"under route {route or 'unset'} the SM90 backend admits "
                f"{_names(admitted)}, expected {_names(wanted)}")  # fmt: skip
    launching = [c for c in _CAPABILITIES if _uses_pdl(c)]
    require(launching == [(9, 0), (10, 0)],
            f"dependent launch is used on {_names(launching)}, expected 9.0, 10.0")  # fmt: skip
    return f"SM90 on 9.0, under its route also on 12.0 and 12.1; PDL on {_names(launching)}"


def _names(capabilities: list[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "none"


def _admits(capability: tuple[int, int], route: str | None) -> bool:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90 as sm90

    with environment("GLM_MLA_ROUTE", route):
        gate = sm90.FlashInferMLASparseSM90Backend.supports_compute_capability
        return bool(gate(DeviceCapability(*capability)))


def _uses_pdl(capability: tuple[int, int]) -> bool:
    """What the platform answers on such a device; torch is replaced where the module names it."""
    from vllm.platforms import cuda

    devices = SimpleNamespace(
        current_device=lambda: 0, get_device_capability=lambda _device=None: capability
    )
    method = cuda.CudaPlatformBase.__dict__["is_arch_support_pdl"].__func__
    real = cuda.torch
    cuda.torch = SimpleNamespace(cuda=devices)
    try:
        # From 0.33 on the method is memoised; `__wrapped__` is what it runs the first time.
        return bool(getattr(method, "__wrapped__", method)(cuda.CudaPlatformBase))
    finally:
        cuda.torch = real
