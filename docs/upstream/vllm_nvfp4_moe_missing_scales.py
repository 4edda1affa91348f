"""Shows that vLLM's NVFP4 experts take unwritten memory for activation scales: python3 THIS.

Needs vLLM and no GPU. Exits 1 where scales that no checkpoint gave are used without a word.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

EXPERTS, GARBAGE, CALIBRATED = 4, 3e30, 1.5e-3


def main() -> int:
    """Prints what is used."""
    try:
        import torch
        from vllm.model_executor import parameter
        from vllm.model_executor.layers.quantization import modelopt
        from vllm.model_executor.layers.quantization.utils import quant_utils
    except ImportError as error:
        sys.stderr.write(f"vLLM: expected it with torch, found: {error}\n")
        return 2
    method = modelopt.ModelOptNvFp4FusedMoE.__new__(modelopt.ModelOptNvFp4FusedMoE)
    method.quant_config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
    method.moe = SimpleNamespace(is_act_and_mul=True)
    method.use_a16, method.use_global_sf, method.per_token_activation = False, False, False
    # As on one GPU, without the process group that a server would have.
    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    layer = torch.nn.Module()
    empty = torch.empty

    def visible(*shape: object, **options: object) -> object:
        """Memory that held something else before."""
        made = empty(*shape, **options)
        return made.fill_(GARBAGE) if made.dtype == torch.float32 else made

    torch.empty = visible
    try:
        method.create_weights(
            layer, num_experts=EXPERTS, hidden_size=64, intermediate_size_per_partition=32,
            params_dtype=torch.bfloat16, weight_loader=lambda *_arguments: None,
        )  # fmt: skip
    finally:
        torch.empty = empty
    layer.w13_input_scale.data[:-1] = CALIBRATED  # what the checkpoint has: all but the last
    scales = layer.w13_input_scale.data
    unwritten = int((scales == GARBAGE).sum())
    total = scales.numel()
    sys.stdout.write(f"w13_input_scale: {unwritten} of {total} numbers were never written, "
                     "and nothing was said\n")  # fmt: skip
    used = float(quant_utils.amax_for_moe_activation_quant(scales, False))
    sys.stdout.write("scale of every expert, by amax_for_moe_activation_quant: "
                     f"{used:.1e}; calibrated: {CALIBRATED:g}\n")  # fmt: skip
    return 1 if unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
