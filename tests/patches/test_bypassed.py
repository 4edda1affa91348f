"""Upstream edits that leave every anchor and every patched function alone, and the server goes by.

Each must be a verdict that somebody sees: yellow or red, never green.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from imagebuild.config import load_recipe
from imagebuild.lock import read_lock
from imagebuild.patching.evaluate import evaluate
from imagebuild.patching.tree import OverlayTree, Tree

RECIPE = load_recipe("glm53-flash")
CUDA = "vllm/platforms/cuda.py"
SHM = "vllm/distributed/device_communicators/shm_broadcast.py"


class Case(NamedTuple):
    """An upstream edit: `old` becomes `new` in a file, or `new` is added at its end."""

    patch: str
    path: str
    old: str
    new: str


CASES = {
    "a platform overrides the method": Case(
        "vllm_pdl_off_sm12x",
        CUDA,
        "class NvmlCudaPlatform(CudaPlatformBase):\n",
        "class NvmlCudaPlatform(CudaPlatformBase):\n"
        "    @classmethod\n    def is_arch_support_pdl(cls) -> bool:\n        return True\n\n",
    ),
    "the method is replaced below": Case(
        "vllm_pdl_off_sm12x",
        CUDA,
        "",
        "\nCudaPlatformBase.is_arch_support_pdl = classmethod(lambda cls: True)\n",
    ),
    "a caller decides by itself": Case(
        "vllm_pdl_off_sm12x",
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
        "launch_pdl=current_platform.is_arch_support_pdl()",
        "launch_pdl=torch.cuda.get_device_capability()[0] >= 9",
    ),
    "a constant decides by itself": Case(
        "vllm_pdl_off_sm12x",
        "vllm/model_executor/kernels/mhc/tilelang_kernels.py",
        "ENABLE_PDL = current_platform.is_arch_support_pdl()",
        "ENABLE_PDL = True",
    ),
    "the list comes from elsewhere": Case(
        "vllm_mla_sm90_on_sm12x",
        CUDA,
        "",
        "\nfrom vllm.platforms.priorities import _get_backend_priorities\n",
    ),
    "the registry names another class": Case(
        "vllm_mla_sm90_on_sm12x",
        "vllm/v1/attention/backends/registry.py",
        '"FlashInferMLASparseSM90Backend"',
        '"FlashInferMLASparseSM90BackendV2"',
    ),
    "the layer asks another function": Case(
        "vllm_mla_route_switch",
        "vllm/model_executor/layers/attention/mla_attention.py",
        "normalized_kv_cache_dtype = _canonicalize_sparse_mla_kv_cache_dtype(",
        "normalized_kv_cache_dtype = _canonicalize_kv(",
    ),
    "the selector asks another method": Case(
        "vllm_mla_route_switch",
        "vllm/v1/attention/selector.py",
        "current_platform.get_attn_backend_cls(",
        "current_platform.pick_backend(",
    ),
    "the plan imports another check": Case(
        "flashinfer_mla_fp8_sm12x",
        "flashinfer/mla/_batch_mla/_backends/fa2_backend.py",
        "    _validate_generated_fa_plan,\n",
        "    _validate_strictly as _validate_generated_fa_plan,\n",
    ),
    "the layer calls another indexer": Case(
        "vllm_indexer_topk_init",
        "vllm/models/glm5next/nvidia/sparse_indexer.py",
        "        return sparse_attn_indexer_kpool(",
        "        return sparse_attn_indexer_fused(",
    ),
    "the kernel is replaced below": Case(
        "vllm_kpool_pid_clamp",
        "vllm/models/glm5next/nvidia/ops/kpool_compress.py",
        "",
        "\n_expand_pools_and_append_tail_kernel = _expand_pools_v2_kernel\n",
    ),
    "another worker sets the device": Case(
        "vllm_worker_memory_cap",
        "vllm/v1/worker/gpu_worker.py",
        "",
        "\nclass FastWorker(Worker):\n    def init_device(self):\n        pass\n",
    ),
    "the queue waits in another way": Case(
        "vllm_spin_wait", SHM, "self._spin_condition.wait(", "self._poll("
    ),
    "the condition is another class": Case(
        "vllm_spin_wait", SHM, "", "\nSpinCondition = FastSpinCondition\n"
    ),
    "the predictor builds another layer": Case(
        "vllm_glm53_mtp_bf16",
        "vllm/models/glm5next/common/mtp.py",
        "str(idx): Glm5NextMultiTokenPredictorLayer(",
        "str(idx): Glm5NextLayerV2(",
    ),
    "requests get another parser": Case(
        "vllm_glm53_reasoning_always_parsed",
        "vllm/parser/engine/registered_adapters.py",
        "make_adapters(Glm47MoeParser)",
        "make_adapters(Glm53Parser)",
    ),
    "the parser splits in another method": Case(
        "vllm_glm53_reasoning_always_parsed",
        "vllm/parser/glm47_moe.py",
        "class Glm47MoeParser(ParserEngine):\n",
        "class Glm47MoeParser(ParserEngine):\n"
        "    def extract_reasoning_streaming(self, *given):\n        return None\n\n",
    ),
}


class TestBypassed:
    """On each release that the series supports."""

    versions = ("0.31.0", "0.32.0", "0.33.0")

    @pytest.mark.parametrize("name", CASES)
    def test_is_not_green(self, name: str, version: str, real_base: Callable[[str], Tree]) -> None:
        case, tree = CASES[name], real_base(version)
        text = tree.read(case.path).decode()
        assert case.old in text, f"{case.path} of {version} has no {case.old!r}"
        changed = text.replace(case.old, case.new) if case.old else text + case.new
        lock = read_lock(RECIPE.lock_file)
        identity = lock.identify(tree.identity)
        edited = OverlayTree(tree, {case.path: changed.encode()}, identity)

        found = evaluate(RECIPE.series(), edited, None, lock.fingerprints_for(identity))

        codes = {report.patch.name: report.exit_code for report in found.reports}
        assert codes[case.patch] in (1, 3), f"{case.patch} is green though {name}"
