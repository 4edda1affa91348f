"""Every knob, declared once: names, types, defaults of the three deployments, and where they are
from.

docs/knobs.md is generated from here (`python3 -m serving.document`). Sources: "LibertAI" is the
recipe of seed document 000, "GX10" the one of seed document 004 and its newest entry point; "ours"
says that neither has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from serving import kinds
from serving.kinds import Kind
from serving.knobs import DEPLOYMENTS, Default, Knob

_LIB, _GX = "LibertAI", "GX10"
_REST = "ours"


def _same(text: str, source: str = _REST) -> Mapping[str, Default]:
    return {name: Default(text, source) for name in DEPLOYMENTS}


def _each(gb2: str, gb4: str, rtx: str, sources: str = "LGL") -> Mapping[str, Default]:
    """Defaults of the deployments in order; `sources` has a letter each: L, G or o."""
    words = {"L": _LIB, "G": _GX, "o": _REST}
    return {
        name: Default(text, words[letter])
        for name, text, letter in zip(DEPLOYMENTS, (gb2, gb4, rtx), sources, strict=True)
    }


def _group(name: str, *knobs: Knob) -> Iterator[Knob]:
    for knob in knobs:
        yield Knob(**{**knob.__dict__, "group": name})


def _knob(
    name: str,
    kind: Kind,
    defaults: Mapping[str, Default],
    help_text: str,
    *,
    flag: str = "",
    env: str = "",
    is_shared: bool = True,
    former: str = "",
) -> Knob:
    return Knob(
        f"GLM_{name}", kind, defaults, help_text, "", flag, env, is_shared, tuple(former.split())
    )


_DEPLOYMENT = _group(
    "Deployment and model",
    _knob("DEPLOYMENT", kinds.choice(*DEPLOYMENTS), _same(""),
          "Which of the deployments this is; all other defaults follow from it. Unset, the "
          "container is a plain `vllm serve` without any of what is below."),
    _knob("TP", kinds.choice("2", "4", "RING4"), _each("2", "4", "4"),
          "Tensor parallel size; RING4 is 4 with a fabric without a switch.", former="TP"),
    _knob("CLUSTER", kinds.choice("none", "ray", "mentat"), _same(""),
          "How ranks are placed; must be what the image was built with, which is also the "
          "default."),
    _knob("COMMERCIAL", kinds.SWITCH, _same("0"),
          "1: used by a company. The DFlash2 drafter's licence, CC BY-NC-ND, forbids that, so mtp "
          "becomes the default and dflash2 is refused."),
    _knob("MODEL_DIR", kinds.PATH, _same("/models/glm-5.3-flash-nvfp4", _GX),
          "Folder of the checkpoint, on a local disk of every node.", is_shared=False,
          former="MODEL_DIR"),
    _knob("SERVED_NAME", kinds.NAME, _same("glm53", _GX), "Name of the model in the API.",
          flag="--served-model-name", former="SERVED_NAME"),
    _knob("TRUST_REMOTE_CODE", kinds.SWITCH, _same("0", _LIB),
          "1: run Python code from the checkpoint. vLLM has this model built in, so nothing needs "
          "it.",
          flag="--trust-remote-code"),
    _knob("LOAD_STRATEGY", kinds.choice("eager", "lazy", "prefetch"), _each("", "eager", ""),
          "How safetensors files are read.", flag="--safetensors-load-strategy"),
    _knob("CHAT_TEMPLATE_FILE", kinds.PATH, _same(""),
          "Template to edit instead of the checkpoint's own; the same edits must fit it.",
          is_shared=False, former="CHAT_TEMPLATE"),
    _knob("LIMIT_MM", kinds.JSON, _each("", '{"image":16,"video":0}', ""),
          "Images and videos of a request, as JSON.", flag="--limit-mm-per-prompt",
          former="LIMIT_MM"),
    _knob("REASONING_PARSER", kinds.choice("glm45", "deepseek_r1"), _same("glm45", _GX),
          "Splits reasoning from content.", flag="--reasoning-parser"),
    _knob("TOOL_PARSER", kinds.choice("glm47_failclosed", "glm47"), _same("glm47_failclosed", _GX),
          "Reads tool calls. There is no value for none: a server that lost its tool parser looks "
          "healthy.", former="TOOL_PARSER"),
)  # fmt: skip

_MEMORY = _group(
    "Memory and scheduling",
    _knob("MAX_MODEL_LEN", kinds.integer(1024, 1048576), _each("163840", "524288", "262144", "GGL"),
          "Longest context, tokens.", flag="--max-model-len", former="MAX_MODEL_LEN"),
    _knob("MAX_NUM_SEQS", kinds.integer(1, 1024), _each("2", "32", "256"),
          "Requests at once.", flag="--max-num-seqs", former="MAX_NUM_SEQS"),
    _knob("MAX_NUM_BATCHED_TOKENS", kinds.integer(256, 131072),
          _each("8192", "16384", "8192", "GGL"),
          "Tokens of a step.", flag="--max-num-batched-tokens", former="MAX_NUM_BATCHED_TOKENS"),
    _knob("LONG_PREFILL_TOKENS", kinds.integer(0, 131072), _each("", "2304", ""),
          "Longest piece of a prompt in a step; 2304 is one block of the linear attention.",
          flag="--long-prefill-token-threshold", former="LONG_PREFILL_TOKEN_THRESHOLD"),
    _knob("BLOCK_SIZE", kinds.integer(256, 16384), _each("2304", "2304", "256", "GGL"),
          "Tokens of a cache block. A multiple of 256, since the indexer's pages must hold 64 "
          "rows.",
          flag="--block-size", former="BLOCK_SIZE"),
    _knob("KV_CACHE_DTYPE", kinds.choice("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"),
          _each("fp8", "fp8_e4m3", "fp8"),
          "Type of the cache. The route must be able to read it.", flag="--kv-cache-dtype",
          former="KV_CACHE_DTYPE"),
    _knob("KV_CACHE_BYTES", kinds.integer(0, 1 << 42),
          _each("8589934592", "27917287424", "0", "GGL"),
          "Size of the cache of a GPU; 0: vLLM takes what GLM_GPU_MEMORY_UTILIZATION leaves.",
          former="KV_CACHE_MEMORY"),
    _knob("GPU_MEMORY_UTILIZATION", kinds.fraction(0.1, 0.98), _each("0.88", "0.88", "0.94", "GGL"),
          "Part of the memory that vLLM may use. On GB10 0.88 is the ceiling: 0.90 has hung "
          "machines.",
          flag="--gpu-memory-utilization", former="GPU_MEM_UTIL"),
    _knob("TORCH_MEMORY_FRACTION", kinds.fraction(0.1, 1.0), _each("0.92", "0.92", "", "GGo"),
          "Hard limit of a worker's allocator: a request fails instead of the machine.",
          env="TORCH_MEM_FRACTION"),
    _knob("PREFIX_CACHING", kinds.SWITCH, _each("", "1", ""), "Reuse the cache of equal "
                                                              "beginnings.",
          flag="--enable-prefix-caching"),
    _knob("ENFORCE_EAGER", kinds.SWITCH, _each("1", "0", "0"),
          "1: no CUDA graphs. LibertAI measured about 1 % for them on GB10, and 500 % on four RTX.",
          flag="--enforce-eager"),
    _knob("CUDAGRAPH_MAX_SIZE", kinds.integer(1, 4096, "auto"), _each("", "auto", ""),
          "Largest batch with a CUDA graph, tokens; auto: requests at once times tokens of a step "
          "of speculation, up to 512."),
    _knob("BREAKABLE_GRAPHS", kinds.SWITCH, _each("0", "", "0"),
          "1: graphs that may be broken up, which vLLM would choose: no speed, a much smaller "
          "cache.",
          env="VLLM_USE_BREAKABLE_CUDAGRAPH"),
    _knob("ALLOC_CONF", kinds.NAME, _each("", "expandable_segments:True", ""),
          "Settings of torch's allocator.", env="PYTORCH_CUDA_ALLOC_CONF"),
)  # fmt: skip

_KERNELS = _group(
    "Kernels",
    _knob("MLA_ROUTE", kinds.choice("stock", "sm90", "cuda", "triton"),
          _each("cuda", "sm90", "cuda"),
          "Which path serves sparse MLA; exactly one does. VLLM_GLM53_CUDA_SPARSE_MLA=1 is read as "
          "cuda."),
    _knob("MOE_BACKEND",
          kinds.choice(
              "auto", "flashinfer_cutlass", "marlin", "humming", "b12x", "flashinfer_b12x"
          ),
          _same("auto"),
          "auto: by the checkpoint. Calibrated input scales: flashinfer_cutlass, as both recipes "
          "have it; none: marlin, if its repacking fits.", former="MOE_BACKEND"),
    _knob("MOE_INPUT_SCALE", kinds.SCALE, _same(""),
          "CHECKPOINT=SCALE, such as GLM-5.3-Flash-NVFP4=1.6e-3: the input scale of experts that "
          "have none, for that checkpoint. No constant is right for all experts; fetch calibrated "
          "scales instead, if there are any.", env="GLM_MOE_INPUT_SCALE"),
    _knob("TOPK_BACKEND",
          kinds.choice("auto", "per_row", "persistent", "cooperative", "flashinfer", "torch"),
          _each("per_row", "per_row", "", "GGL"),
          "Top-k kernel of the indexer in decode.", flag="--sparse-indexer-topk-backend",
          former="TOPK_BACKEND"),
    _knob("TOPK_DETERMINISTIC", kinds.SWITCH, _same("1", _GX),
          "1: equal requests select equal keys. 0 saves a kernel a layer.",
          env="GLM_TOPK_DETERMINISTIC"),
    _knob("AUTOTUNE", kinds.choice("fresh", "persist", "off"), _same("fresh", _GX),
          "FlashInfer's autotuner. fresh: its cache is emptied at each start where there are "
          "several ranks, since a cache that only some of them hit stops the start for ever. off: "
          "it is not run.", former="AUTOTUNE_CACHE"),
    _knob("SPECULATION", kinds.choice("mtp", "dflash2", "none"), _each("mtp", "dflash2", "mtp"),
          "Speculative decoding: the checkpoint's own layer, the DFlash2 drafter, or none.",
          former="SPEC_METHOD MTP"),
    _knob("SPECULATIVE_TOKENS", kinds.integer(1, 16), _same(""),
          "Tokens guessed in a step. Unset: 3 with mtp (4 on gb10-4x), 7 with dflash2.",
          former="SPEC_LEN"),
    _knob("DRAFTER_DIR", kinds.PATH, _same("/models/glm-5.3-flash-dflash2", _GX),
          "Folder of the DFlash2 drafter.", is_shared=False),
    _knob("SPECULATIVE_CONFIG", kinds.JSON, _same(""),
          "vLLM's own JSON for speculation, instead of the three knobs above.",
          former="SPEC_CONFIG"),
    _knob("MAX_JOBS", kinds.integer(1, 256), _each("4", "4", "", "GGo"),
          "Compilers at once when kernels are built at start.", env="MAX_JOBS", is_shared=False),
)  # fmt: skip

_NETWORK = _group(
    "Network",
    _knob("API_HOST", kinds.HOST, _same("0.0.0.0", _GX), "Address that the API binds to.",  # noqa: S104
          is_shared=False),
    _knob("API_PORT", kinds.PORT, _same("8002", _GX), "Port of the API.", former="API_PORT"),
    _knob("API_KEY_FILE", kinds.PATH, _same(""),
          "File with the key that the API asks for. The key itself is never in arguments or logs.",
          is_shared=False),
    _knob("STATUS_HOST", kinds.HOST, _same("127.0.0.1"),
          "Address that the status page binds to; off loopback it asks for a token.",
          is_shared=False),
    _knob("STATUS_PORT", kinds.PORT, _same("8082", _GX), "Port of the status page.",
          former="STATUS_PORT"),
    _knob("STATUS_TOKEN_FILE", kinds.PATH, _same(""), "File with the token of the status page.",
          is_shared=False),
    _knob("HOST_ADDRESS", kinds.HOST, _same(""),
          "IP address of this node in the ranks' network; unset: found by GLM_CLUSTER_SUBNET.",
          env="VLLM_HOST_IP", is_shared=False),
    _knob("CLUSTER_SUBNET", kinds.SUBNETS, _same(""),
          "Network of the ranks, such as 10.0.1.0/24; unset: that of the first fabric port.",
          former="CLUSTER_SUBNET"),
    _knob("FABRIC_SUBNETS", kinds.SUBNETS, _same(""),
          "Networks of the RDMA ports; unset: every RDMA port that has an IPv4 address.",
          former="FABRIC_SUBNETS"),
    _knob("SOCKET_INTERFACE", kinds.INTERFACE, _same(""),
          "Interface for Gloo and NCCL's sockets; unset: the one that has GLM_HOST_ADDRESS.",
          env="GLOO_SOCKET_IFNAME", is_shared=False),
    _knob("IB_HCA", kinds.HCA, _same(""), "RDMA devices; unset: those of the fabric ports.",
          env="NCCL_IB_HCA", is_shared=False),
    _knob("IB_GID_INDEX", kinds.integer(0, 15), _same(""),
          "Index of the RoCE v2 address; unset: looked up at each start, since it moves.",
          env="NCCL_IB_GID_INDEX", is_shared=False),
    _knob("NCCL_MAX_CHANNELS", kinds.integer(1, 64), _each("8", "8", "", "GGL"),
          "Upper limit of NCCL's channels.", env="NCCL_MAX_NCHANNELS"),
    _knob("NCCL_MIN_CHANNELS", kinds.integer(1, 64), _each("", "", "32"),
          "Lower limit of NCCL's channels.", env="NCCL_MIN_NCHANNELS"),
    _knob("NCCL_P2P_LEVEL", kinds.choice("LOC", "NVL", "PIX", "PXB", "PHB", "SYS"),
          _each("", "", "PXB"), "How far apart two GPUs may be to talk directly.",
          env="NCCL_P2P_LEVEL"),
    _knob("NCCL_DEBUG", kinds.choice("VERSION", "WARN", "INFO"), _each("INFO", "INFO", "", "GGL"),
          "What NCCL writes to the log.", env="NCCL_DEBUG", is_shared=False),
)  # fmt: skip

_CLUSTER = _group(
    "Ranks",
    _knob("ROLE", kinds.choice("head", "worker"), _same(""),
          "This node's part; unset together with GLM_HEAD: the ranks elect.", is_shared=False,
          former="ROLE"),
    _knob("HEAD", kinds.HOST, _same(""), "Address of the head.", former="HEAD_HOST"),
    _knob("RANK", kinds.integer(0, 63), _same(""), "Number of this node; unset: given at joining.",
          is_shared=False),
    _knob("PEERS", kinds.HOSTS, _same(""), "Addresses of all nodes, for an election without "
                                           "mentat.",
          is_shared=False),
    _knob("GROUP", kinds.NAME, _same("glm53", _GX),
          "Name of the cluster, so that two in one network do not mix.", former="SERVICE_NAME"),
    _knob("RENDEZVOUS_PORT", kinds.PORT, _same("8083"),
          "Port of the head on which ranks show their fingerprints."),
    _knob("MASTER_PORT", kinds.PORT, _same("29501"), "Port of torch's rendezvous on the head."),
    _knob("RAY_PORT", kinds.PORT, _same("6379", _GX), "Port of Ray or mentat on the head."),
    _knob("JOIN_TIMEOUT_S", kinds.SECONDS, _same("1800"),
          "How long ranks wait for each other, seconds.", former="WORKER_WAIT_S"),
    _knob("RING_PREVIOUS", kinds.INTERFACE, _same(""),
          "With RING4: the interface to the previous node. With mentat its "
          "MENTAT_FABRIC_PREV_IFACE does as well.", is_shared=False),
    _knob("RING_NEXT", kinds.INTERFACE, _same(""),
          "With RING4: the interface to the next node. With mentat its MENTAT_FABRIC_NEXT_IFACE "
          "does as well.", is_shared=False),
    _knob("FABRIC_CHECK", kinds.SWITCH, _each("1", "1", "0"),
          "1: measure the fabric before the weights are loaded.", former="FABRIC_CHECK"),
    _knob("FABRIC_CHECK_PORT", kinds.PORT, _same("29511", _GX), "Port of that on the head."),
    _knob("FABRIC_CHECK_TIMEOUT_S", kinds.SECONDS, _same("120", _GX), "How long it may take, "
                                                                      "seconds."),
    _knob("FABRIC_GBPS", kinds.integer(1, 3200), _same("95", _GX),
          "Gbit/s expected of one RDMA device; 80 % of it must be reached."),
)  # fmt: skip

_START = _group(
    "Start and stop",
    _knob("CACHE_DIR", kinds.PATH, _same("/root/.cache", _GX),
          "Folder of compiled kernels and graphs, kept between starts.", is_shared=False,
          former="CACHE_ROOT"),
    _knob("LOG_DIR", kinds.PATH, _same("/logs", _GX),
          "Folder of vLLM's log and the one before it, of 256 MiB at most.", is_shared=False),
    _knob("STATE_DIR", kinds.PATH, _same("/run/glm53"), "Folder of the state file.",
          is_shared=False),
    _knob("PREFLIGHT", kinds.choice("strict", "warn"), _same("strict"),
          "warn: what preflight finds is only logged.", is_shared=False, former="PREFLIGHT"),
    _knob("NUMERIC_CHECK", kinds.SWITCH, _same("1"),
          "1: compare our kernels with their reference on this card first.", is_shared=False),
    _knob("NUMERIC_CHECK_TIMEOUT_S", kinds.SECONDS, _same("180"), "How long it may take, seconds.",
          is_shared=False),
    _knob("LOAD_TIMEOUT_S", kinds.SECONDS, _same("3600", _GX),
          "How long vLLM may take until it answers, seconds.", env="VLLM_ENGINE_READY_TIMEOUT_S"),
    _knob("SELF_TEST", kinds.SWITCH, _same("1", _GX),
          "1: talk to the API before the container is healthy; a failure stops it.",
          is_shared=False, former="SELF_TEST"),
    _knob("SELF_TEST_TIMEOUT_S", kinds.SECONDS, _same("900"), "How long it may take, seconds.",
          is_shared=False),
    _knob("DRAIN_TIMEOUT_S", kinds.SECONDS, _same("60"),
          "How long requests in flight may take after a signal, seconds. Give the container's own "
          "stop timeout 30 more.", flag="--shutdown-timeout"),
    _knob("IMAGE_ID", kinds.NAME, _same(""),
          "Id of the image, which a container cannot know by itself; compose and ship pass it."),
    _knob("EXTRA_ARGS", kinds.WORDS, _same(""),
          "More arguments of `vllm serve`, as a JSON list; also the container's own arguments. A "
          "flag that a knob sets is refused here.", former="EXTRA_ARGS"),
)  # fmt: skip

KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for group in (_DEPLOYMENT, _MEMORY, _KERNELS, _NETWORK, _CLUSTER, _START)
    for knob in group
}
