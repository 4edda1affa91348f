"""What contradicts what: a sentence for each pair of knobs that cannot be meant together.

Only settings are asked here, no machine: what depends on the hardware is preflight's. A rule that
holds of the defaults of a deployment alone would be a fault of the table, and a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from serving.knobs import Settings, written
from serving.speculation import method_of

# vLLM's KV types by route: the packed rows of the stock backend are fp8 whatever is asked, and no
# other backend reads them.
_KV_TYPES: Mapping[str, tuple[str, ...]] = {
    "stock": ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"),
    "sm90": ("auto", "bfloat16", "fp8", "fp8_e4m3"),
    "cuda": ("auto", "bfloat16", "fp8", "fp8_e4m3"),
    "triton": ("auto", "bfloat16", "fp8", "fp8_e4m3"),
}
_PAGE = 256
_UNIFIED_CEILING = 0.88
_PORTS = (
    "API_PORT",
    "STATUS_PORT",
    "RENDEZVOUS_PORT",
    "MASTER_PORT",
    "RAY_PORT",
    "FABRIC_CHECK_PORT",
)


def contradictions(s: Settings, route: str, cluster: str, environ: Mapping[str, str]) -> list[str]:
    """Every contradiction, none left out.

    Args:
        s: the settings.
        route: the sparse-MLA route that they lead to.
        cluster: how the image places ranks.
        environ: for variables of others that bear on ours.
    """
    rules: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _layout(s),
        lambda: _cluster(s, cluster),
        lambda: _ranks(s),
        lambda: _memory(s),
        lambda: _scheduling(s),
        lambda: _graphs(s),
        lambda: _route(s, route, environ),
        lambda: _speculation(s),
        lambda: _ring(s, cluster),
        lambda: _ports(s),
        lambda: _keys(s, environ),
    )
    return [sentence for rule in rules for sentence in rule()]


def _set(s: Settings, name: str) -> str:
    return f"GLM_{name}={written(s[name])}"


def _layout(s: Settings) -> Iterator[str]:
    if s.text("TP") not in s.profile.layouts:
        yield (
            f"{_set(s, 'TP')} does not fit {s.profile.name} ({s.profile.text}); "
            f"expected {' or '.join(s.profile.layouts)}"
        )


def _cluster(s: Settings, cluster: str) -> Iterator[str]:
    asked = s.text("CLUSTER")
    if asked and asked != cluster:
        yield (
            f"GLM_CLUSTER={asked}, but this image was built with {cluster}; unset it, or build "
            f"with --cluster {asked}"
        )
    if s.profile.nodes == 1 and cluster != "none":
        yield (
            f"{s.profile.name} is one machine and needs no cluster, but this image was built with "
            f"{cluster}; build with --cluster none"
        )


def _ranks(s: Settings) -> Iterator[str]:
    role, head, rank, nodes = s.text("ROLE"), s.text("HEAD"), s["RANK"], s.profile.nodes
    if nodes == 1:
        for name in ("HEAD", "PEERS", "RANK"):
            if s.has(name):
                yield f"{_set(s, name)}: {s.profile.name} is one machine; unset it"
        if role == "worker":
            yield f"GLM_ROLE=worker: {s.profile.name} is one machine, which is the head; unset it"
        return
    if role and not head:
        yield f"GLM_ROLE={role} needs GLM_HEAD, the address of the head; or unset both to elect one"
    if rank is not None:
        if not head:
            yield f"{_set(s, 'RANK')} needs GLM_HEAD, the address of the head; or unset it"
        if int(str(rank)) >= nodes:
            yield f"{_set(s, 'RANK')}: {s.profile.name} has ranks 0 to {nodes - 1}"
        if role and (role == "head") != (rank == 0):
            yield f"GLM_ROLE={role} and {_set(s, 'RANK')} contradict each other: rank 0 is the head"
    peers = s.texts("PEERS")
    if peers and len(peers) != nodes:
        yield f"GLM_PEERS names {len(peers)} nodes; {s.profile.name} has {nodes}"
    if peers and head and head not in peers:
        yield f"GLM_HEAD={head} is none of GLM_PEERS={','.join(peers)}"


def _memory(s: Settings) -> Iterator[str]:
    share, cap, pin = (
        s.ratio("GPU_MEMORY_UTILIZATION"),
        s.ratio("TORCH_MEMORY_FRACTION"),
        s.number("KV_CACHE_BYTES"),
    )
    if s.has("GPU_MEMORY_UTILIZATION") and pin:
        yield (
            f"{_set(s, 'GPU_MEMORY_UTILIZATION')} is ignored by vLLM while "
            f"{_set(s, 'KV_CACHE_BYTES')} sets the size of the cache; set GLM_KV_CACHE_BYTES=0, or "
            "unset the former"
        )
    if s.profile.is_unified and share > _UNIFIED_CEILING:
        yield (
            f"{_set(s, 'GPU_MEMORY_UTILIZATION')}: on {s.profile.name} the GPU's memory is the "
            f"machine's, which hangs above {_UNIFIED_CEILING}"
        )
    if cap and cap >= 1:
        yield f"{_set(s, 'TORCH_MEMORY_FRACTION')} caps nothing; expected less than 1"
    if cap and cap <= share:
        yield (
            f"{_set(s, 'TORCH_MEMORY_FRACTION')} must be above "
            f"{_set(s, 'GPU_MEMORY_UTILIZATION')}, else vLLM fails in what it may use"
        )


def _scheduling(s: Settings) -> Iterator[str]:
    step, block = s.number("MAX_NUM_BATCHED_TOKENS"), s.number("BLOCK_SIZE")
    if block % _PAGE:
        yield (
            f"{_set(s, 'BLOCK_SIZE')} is no multiple of {_PAGE}: the indexer's pages would not "
            "hold 64 rows"
        )
    if step < block:
        yield (
            f"{_set(s, 'MAX_NUM_BATCHED_TOKENS')} is less than {_set(s, 'BLOCK_SIZE')}: the linear "
            "attention works in whole blocks"
        )
    if step < s.number("MAX_NUM_SEQS"):
        yield f"{_set(s, 'MAX_NUM_BATCHED_TOKENS')} is less than {_set(s, 'MAX_NUM_SEQS')}"
    piece = s.number("LONG_PREFILL_TOKENS")
    if piece > s.number("MAX_MODEL_LEN"):
        yield f"{_set(s, 'LONG_PREFILL_TOKENS')} is more than {_set(s, 'MAX_MODEL_LEN')}"


def _graphs(s: Settings) -> Iterator[str]:
    if not s.is_on("ENFORCE_EAGER"):
        return
    if s.has("CUDAGRAPH_MAX_SIZE"):
        yield f"GLM_ENFORCE_EAGER=1 makes no graphs; unset {_set(s, 'CUDAGRAPH_MAX_SIZE')}"
    if s.has("BREAKABLE_GRAPHS") and s.is_on("BREAKABLE_GRAPHS"):
        yield "GLM_ENFORCE_EAGER=1 makes no graphs; unset GLM_BREAKABLE_GRAPHS=1"


def _route(s: Settings, route: str, environ: Mapping[str, str]) -> Iterator[str]:
    kv = s.text("KV_CACHE_DTYPE")
    if kv not in _KV_TYPES[route]:
        yield (
            f"{_set(s, 'KV_CACHE_DTYPE')}: the route {route} reads "
            f"{', '.join(_KV_TYPES[route])}; change it or GLM_MLA_ROUTE"
        )
    plugins = environ.get("VLLM_PLUGINS")
    if route in ("cuda", "triton") and plugins and "glm53_sparse_mla" not in plugins.split(","):
        yield (
            f"VLLM_PLUGINS={plugins!r} leaves out glm53_sparse_mla, which the route {route} needs"
        )


def _speculation(s: Settings) -> Iterator[str]:
    method, tokens = method_of(s), s["SPECULATIVE_TOKENS"]
    if s["SPECULATIVE_CONFIG"] is not None:
        for name in ("SPECULATION", "SPECULATIVE_TOKENS", "DRAFTER_DIR"):
            if s.has(name):
                yield f"GLM_SPECULATIVE_CONFIG stands for all of speculation; unset {_set(s, name)}"
    elif method == "none" and tokens is not None:
        yield f"GLM_SPECULATION=none guesses nothing; unset {_set(s, 'SPECULATIVE_TOKENS')}"
    elif method == "dflash2" and tokens not in (None, 7):
        yield (
            f"{_set(s, 'SPECULATIVE_TOKENS')}: the DFlash2 drafter writes blocks of 8, so it must "
            "be 7"
        )
    if method != "dflash2" and s.has("DRAFTER_DIR") and s["SPECULATIVE_CONFIG"] is None:
        yield f"{_set(s, 'DRAFTER_DIR')} is for dflash2, but speculation is {method}"
    if s.is_on("COMMERCIAL") and method == "dflash2":
        yield (
            "GLM_COMMERCIAL=1 and dflash2 contradict each other: the drafter's licence, CC "
            "BY-NC-ND, forbids commercial use; set GLM_SPECULATION=mtp"
        )


def _ring(s: Settings, cluster: str) -> Iterator[str]:
    names = ("RING_PREVIOUS", "RING_NEXT")
    if s.text("TP") != "RING4":
        for name in names:
            if s.has(name):
                yield f"{_set(s, name)} is for GLM_TP=RING4"
        return
    if "RING4" not in s.profile.layouts:
        return
    for name in ("IB_GID_INDEX", "IB_HCA"):
        if s.has(name):
            yield f"{_set(s, name)}: in a ring each port has its own; unset it"
    if cluster == "mentat":
        return
    missing = [f"GLM_{name}" for name in names if not s[name]]
    if missing:
        yield f"GLM_TP=RING4 without mentat needs {' and '.join(missing)}, a network interface each"
    elif s["RING_PREVIOUS"] == s["RING_NEXT"]:
        yield f"GLM_RING_PREVIOUS and GLM_RING_NEXT are both {s.text('RING_NEXT')}"


def _ports(s: Settings) -> Iterator[str]:
    seen: dict[int, str] = {}
    for name in _PORTS:
        port = s.number(name)
        if port in seen:
            yield f"GLM_{seen[port]} and GLM_{name} are both {port}"
        seen.setdefault(port, name)


def _keys(s: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    host = s.text("STATUS_HOST")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if not is_loopback and not s.has("STATUS_TOKEN_FILE"):
        yield (
            f"GLM_STATUS_HOST={host} is no loopback address, so the status page needs "
            "GLM_STATUS_TOKEN_FILE"
        )
    if s.has("API_KEY_FILE") and environ.get("VLLM_API_KEY"):
        yield "GLM_API_KEY_FILE and VLLM_API_KEY are both set; unset VLLM_API_KEY"
    elif environ.get("VLLM_API_KEY") and s.is_on("SELF_TEST"):
        # Ten minutes later it would be refused by the API and end the container.
        yield (
            "VLLM_API_KEY is set, which the self-test does not know; put the key into a file and "
            "set GLM_API_KEY_FILE"
        )
