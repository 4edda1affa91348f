"""Asks vLLM's own list which MLA backends it would try, by capability and by route."""

from __future__ import annotations

import inspect

from imagebuild.deep.base import About, environment, require

ABOUT = About(
    claim="route sm90 replaces SM120 by SM90 on capability 12 alone; without it the list is stock",
    patches=("vllm_mla_sm90_on_sm12x",),
    imports=("vllm.platforms.cuda",),
)
_ROUTE = "GLM_MLA_ROUTE"
_ON_12 = ["TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120"]
_BY_SM90 = ["TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM90"]


def probe() -> str:
    """Compares the lists for 12.1, 12.0 and 9.0 under every route; returns those of 12.1."""
    for minor in (0, 1):
        for route in (None, "stock"):
            found = offered((12, minor), route)
            require(found == _ON_12, f"12.{minor} under route {route or 'unset'} offers {found}, "
                    f"stock vLLM {_ON_12}")  # fmt: skip
        found = offered((12, minor), "sm90")
        require(found == _BY_SM90, f"12.{minor} under route sm90 offers {found}, not {_BY_SM90}")
        for route in ("cuda", "triton"):
            found = offered((12, minor), route)
            require("FLASHINFER_MLA_SPARSE_SM90" not in found,
                    f"12.{minor} under route {route} offers SM90: {found}")  # fmt: skip
    hopper = offered((9, 0), None)
    for route in ("stock", "sm90", "cuda", "triton"):
        found = offered((9, 0), route)
        require(found == hopper, f"9.0 under route {route} offers {found}, without one {hopper}")
    _refuses_unknown()
    return (f"12.0 and 12.1 offer {'+'.join(_ON_12)}, under sm90 {'+'.join(_BY_SM90)}; "
            f"9.0 always the same {len(hopper)}")  # fmt: skip


def offered(capability: tuple[int, int], route: str | None) -> list[str]:
    """Names of the backends that vLLM would try for this model, in order."""
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    asked = {
        "use_mla": True,
        "device_capability": DeviceCapability(*capability),
        "num_heads": 16,
        "kv_cache_dtype": "fp8",
        "head_size": 512,
    }
    # It is memoised, by arguments that the route is none of; a process keeps to one route.
    ask = inspect.unwrap(cuda._get_backend_priorities)
    known = inspect.signature(ask).parameters
    with environment(_ROUTE, route):
        found = ask(**{name: value for name, value in asked.items() if name in known})
        return [backend.name for backend in found]


def _refuses_unknown() -> None:
    try:
        found = offered((12, 1), "sm9O")
    except ValueError:
        return
    require(False, f"an unknown route is taken, and offers {found}")
