"""Where the recipes that our values come from disagree, and what we do; for docs/knobs.md."""

from __future__ import annotations

# Where the two recipes disagree, or ours differs from both: (knob, LibertAI, GX10, what we do and
# why).
DISAGREEMENTS = (
    ("GLM_MLA_ROUTE", "its CUDA kernel", "SM90 on capability 12",
     "each as its recipe runs it; both kernels here are our own, and the numeric check decides at "
     "start whether the card agrees"),
    ("GLM_REASONING_PARSER", "deepseek_r1, since glm45 lost every reply on its vLLM",
     "glm45, with a patch and a template", "glm45 everywhere: our patch and edited template go "
     "with it, and vLLM's own parsers confirm the pair for 0.31 to 0.33"),
    ("GLM_TOOL_PARSER", "glm47", "glm47_failclosed", "glm47_failclosed everywhere: a malformed "
     "call goes back to the model instead of to the client"),
    ("GLM_KV_CACHE_DTYPE", "fp8", "fp8_e4m3", "as written: both mean e4m3; with the stock route "
     "vLLM makes either fp8_ds_mla"),
    ("GLM_SPECULATION", "mtp, 3 tokens", "dflash2, 7 tokens; or mtp, 4", "each as its recipe; mtp "
     "everywhere for a company (licence of the drafter)"),
    ("GLM_ENFORCE_EAGER", "1 on GB10 (graphs: 1 %)", "0 on GB10", "each as its recipe: 2 nodes "
     "run 2 requests at once, 4 nodes 32, where graphs pay more"),
    ("GLM_MAX_NUM_SEQS", "2 on two GB10", "4 on two GB10", "2, since seed 000 rules gb10-2x"),
    ("GLM_MAX_MODEL_LEN, GLM_KV_CACHE_BYTES, GLM_BLOCK_SIZE, GLM_MAX_NUM_BATCHED_TOKENS",
     "no figure for two GB10", "163840, 8 GiB, 2304, 8192 for two GB10",
     "GX10's, the only figures there are"),
    ("GLM_GPU_MEMORY_UTILIZATION", "no figure for GB10; 0.94 on RTX", "0.88, the ceiling on GB10",
     "0.88 on GB10, refused above; 0.94 on RTX"),
    ("GLM_TRUST_REMOTE_CODE", "not passed", "passed", "off: vLLM has the model built in"),
    ("GLM_TOPK_BACKEND", "not passed", "per_row, which GB10 needs", "per_row on both GB10, vLLM's "
     "choice on RTX"),
    ("GLM_AUTOTUNE", "not passed; its users report that the autotuner spins with "
                     "flashinfer_cutlass",
     "its cache emptied at each start", "fresh everywhere; `off` is one knob away"),
    ("VLLM_GLM53_MOE_INPUT_SCALE", "1.0", "not set", "not set: its own author withdrew it, and "
     "from vLLM 0.30 on a checkpoint without scales runs with 16-bit activations"),
    ("GLM_CLUSTER", "none (vLLM's own, 2 nodes)", "mentat", "what the image was built with; none "
     "by default, so that a build needs neither"),
    ("GLM_PREFLIGHT", "no checks", "warnings only", "strict: what is found would cost the ten "
     "minutes of a weight load"),
    ("self-test failed", "no self-test", "the head goes on serving", "the container ends with 3"),
)  # fmt: skip
