"""What runs inside a real vLLM tree on a CPU, as a process of its own: choices, stops, scales.

    python inside_vllm.py JOB.json

The job names the patched tree, the installed plug-in, one that does not import, and libraries. The
answer is written beside it; the tests judge it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

KINDS = ("auto", "bfloat16", "fp8", "fp8_e4m3")
ROUTES = ("", "stock", "sm90", "cuda", "triton")
SLOT = "FLASHINFER_MLA_SPARSE_SM120"


def main(job_file):
    path = Path(job_file)
    job = json.loads(path.read_text())
    sys.path[:0] = [job["tree"], job["plugin"]]
    sys.path.append(job["project"])
    os.environ["GLM53_SPARSE_MLA_LIBRARY"] = job["library"]
    from imagebuild.smoke import stubs

    stubs.install()
    vllm = Vllm(job)
    answer = {
        "choices": vllm.choices(),
        "stops": vllm.stops(),
        "backend": vllm.backend(),
        "operators": operators(),
        "scales": scales(),
    }
    path.with_suffix(".answer").write_text(json.dumps(answer))


class Vllm:
    """The modules of the tree, and a platform that says it is capability 12."""

    def __init__(self, job):
        self.job = job
        # With no platform these import; afterwards there is one.
        from vllm import platforms, plugins, triton_utils
        from vllm.config import vllm as config
        from vllm.engine import arg_utils
        from vllm.model_executor.layers.attention import mla_attention
        from vllm.platforms import cuda
        from vllm.platforms.interface import DeviceCapability
        from vllm.utils import flashinfer
        from vllm.v1.attention import selector
        from vllm.v1.attention.backends import registry
        from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90

        for name in (
            "glm53_sparse_mla.backend",
            "vllm.model_executor.layers.quantization.modelopt",
        ):
            importlib.import_module(name)
        self.plugins, self.config, self.cuda, self.selector, self.registry = (
            plugins, config, cuda, selector, registry,
        )  # fmt: skip
        self.engine, self.mla, self.capability_of = arg_utils, mla_attention, DeviceCapability
        # FlashInfer and Triton are in every image, and not here.
        flashinfer.has_flashinfer_sparse_mla_sm120 = lambda: True
        flashinfer_mla_sparse_sm90.has_flashinfer_sm90_nope_mla = lambda: True
        triton_utils.HAS_TRITON = True
        rig = self

        class Platform(cuda.NvmlCudaPlatform):
            device_name = "GPU"

            @classmethod
            def get_device_capability(cls, device_id=0):
                return rig.capability

        self.capability = DeviceCapability(12, 1)
        platforms._current_platform = Platform()

    def start(self, route, library=None):
        """A process that has loaded nothing yet, under this environment."""
        for name in ("GLM_MLA_ROUTE", "VLLM_PLUGINS"):
            os.environ.pop(name, None)
        if route:
            os.environ["GLM_MLA_ROUTE"] = route
        os.environ["GLM53_SPARSE_MLA_LIBRARY"] = library or self.job["library"]
        self.registry._ATTN_OVERRIDES.clear()
        self.plugins.plugins_loaded = False
        self.selector._cached_get_attn_backend.cache_clear()
        self.cuda._get_backend_priorities.cache_clear()
        from glm53_sparse_mla import ops

        ops.library.cache_clear()

    def choose(self, kind="fp8", by_name=False, **text):
        """The class that vLLM takes for a layer of the model, and the KV type it gives it."""
        import torch

        model = {"index_topk": 2048, "index_kpool": 4, "kv_lora_rank": 512,
                 "qk_rope_head_dim": 0, "qk_nope_head_dim": 256} | text  # fmt: skip
        self.config._current_vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(user_specified_block_size=False, cache_dtype=kind),
            kv_transfer_config=None, speculative_config=None,
            attention_config=SimpleNamespace(
                backend=self.registry.AttentionBackendEnum[SLOT] if by_name else None,
                use_non_causal=False, backend_per_kind=None, hisparse_config=None,
            ),
            parallel_config=SimpleNamespace(
                prefill_context_parallel_size=1, decode_context_parallel_size=1
            ),
            # Nested, as the model's own configuration is.
            model_config=SimpleNamespace(
                rswa_window=None, hf_config=SimpleNamespace(),
                hf_text_config=SimpleNamespace(**model),
            ),
        )  # fmt: skip
        found = self.selector.get_attn_backend(
            512, torch.bfloat16, kind, use_mla=True, use_sparse=True, num_heads=16
        )
        kept = self.mla._canonicalize_sparse_mla_kv_cache_dtype(found, kind)
        return [f"{found.__module__}.{found.__qualname__}", kept]

    def choices(self):
        found = {}
        for minor in (0, 1):
            self.capability = self.capability_of(12, minor)
            for route in ROUTES:
                for kind in KINDS:
                    for how in ("list", "flag"):
                        if how == "flag" and route == "sm90":
                            continue
                        name = f"12.{minor} {route or 'unset'} {kind} {how}"
                        self.start(route)
                        found[name] = attempt(self._load_and_choose, kind, how == "flag")
        return found

    def _load_and_choose(self, kind, by_name):
        self.plugins.load_general_plugins()
        return self.choose(kind, by_name)

    def stops(self):
        """What a server says that must not start; "" where it would."""
        broken, absent = self.job["libraries"], self.job["broken_plugin"]
        found = {}
        for name, library in broken.items():
            self.start("cuda", library)
            found[name] = attempt(self.engine.EngineArgs, model="any")
        self.start("nonsense")
        found["unknown route"] = attempt(self.engine.EngineArgs, model="any")
        self.start("cuda")
        keep = importlib.import_module("vllm.version").__version__
        sys.modules["vllm.version"].__version__ = "0.34.1"
        found["unknown release"] = attempt(self.engine.EngineArgs, model="any")
        sys.modules["vllm.version"].__version__ = keep
        table = sys.modules["glm_mla_route"]
        for route in ("cuda", "stock"):
            self.start(route)
            sys.modules["glm_mla_route"] = None
            found[f"unpatched {route}"] = attempt(self.plugins.load_general_plugins)
            sys.modules["glm_mla_route"] = table
        # What the loader swallows: only the choice of a backend can still stop the start.
        self.start("cuda")
        os.environ["VLLM_PLUGINS"] = "another"
        self.plugins.load_general_plugins()
        found["left out"] = attempt(self.choose)
        self.start("cuda")
        sys.path[sys.path.index(self.job["plugin"])] = absent
        self.plugins.load_general_plugins()
        found["does not import"] = attempt(self.choose)
        sys.path[sys.path.index(absent)] = self.job["plugin"]
        for name, text in (
            ("rope", {"qk_rope_head_dim": 64}),
            ("no indexer", {"index_topk": None}),
        ):
            self.start("cuda")
            self.plugins.load_general_plugins()
            found[name] = attempt(lambda text=text: self.choose(**text))
        return found

    def backend(self):
        """What the registered class tells vLLM's planner."""
        import torch
        from glm53_sparse_mla.backend import CudaBackend, MetadataBuilder
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8)
        layouts = CudaBackend.supported_kv_cache_layouts()
        aligned = CudaBackend.customize_spec(spec)
        return {
            "graphs": MetadataBuilder.get_cudagraph_support(None, spec).name,
            "layouts": [layout.name for layout in layouts] if layouts else None,
            "alignment": getattr(aligned, "block_stride_alignment", None),
            "blocks": [CudaBackend.supports_block_size(size) for size in (64, 256, 48)],
            "pcp": CudaBackend.supports_pcp(),
            "dcp": CudaBackend.supports_dcp(),
        }


def operators():
    """What torch traces in place of the kernel, and what is refused before the library is asked."""
    import torch
    from glm53_sparse_mla import ops
    from torch._subclasses.fake_tensor import FakeTensorMode

    def tensors(device):
        return {
            "q": torch.zeros((4, 16, 512), dtype=torch.bfloat16, device=device),
            "kv": torch.zeros((100, 512), dtype=torch.float8_e4m3fn, device=device),
            "indices": torch.zeros((4, 2176), dtype=torch.int32, device=device),
            "out": torch.zeros((4, 16, 512), dtype=torch.bfloat16, device=device),
            "lse": torch.zeros((4, 16), dtype=torch.float32, device=device),
            "workspace": torch.zeros(4096, dtype=torch.uint8, device=device),
        }

    with FakeTensorMode():
        given = tensors("cuda")
        three = given["q"], given["kv"], given["indices"]
        out, lse = torch.ops.glm53_sparse_mla.forward(*three, 0.1, 0.5)
        results = [[list(one.shape), str(one.dtype), one.device.type] for one in (out, lse)]
        nothing = torch.ops.glm53_sparse_mla.forward_out(
            *three, 0.1, 0.5, 0, 0, out, None, given["workspace"]
        )
    wrong = {
        "q": tensors("cpu")["q"].float(),
        "kv": torch.zeros((100, 576), dtype=torch.bfloat16),
        "indices": torch.zeros((4, 2176), dtype=torch.int64),
        "out": torch.zeros((4, 512, 16), dtype=torch.bfloat16).transpose(1, 2),
        "lse": torch.zeros((16, 4)).T,
        "workspace": torch.zeros(4096, dtype=torch.uint8, device="meta"),
    }
    refused = {
        name: attempt(ops._check, **{**tensors("cpu"), name: bad}) for name, bad in wrong.items()
    }
    return {"results": results, "nothing": nothing, "refused": refused,
            "taken": attempt(ops._check, **tensors("cpu"))}  # fmt: skip


def scales():
    """vLLM's own create_weights, and our wrapper around what comes after loading."""
    import torch
    from glm53_sparse_mla import moe_scale
    from vllm.config import vllm as config
    from vllm.model_executor.layers.quantization import modelopt

    # No process group is made here.
    parameter = importlib.import_module("vllm.model_executor.parameter")
    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    method = modelopt.ModelOptNvFp4FusedMoE
    seen = []
    # The kernels that it prepares weights for need a GPU.
    method.process_weights_after_loading = lambda _self, layer: seen.append(
        [layer.w13_input_scale.data.clone(), layer.w2_input_scale.data.clone()]
    )
    untouched = method.create_weights
    os.environ.pop("GLM_MOE_INPUT_SCALE", None)
    moe_scale.register()
    found = {"inert when unset": method.create_weights is untouched}
    os.environ["GLM_MOE_INPUT_SCALE"] = "some/where/GLM=3e-3"
    moe_scale.register()
    config._current_vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="GLM"))
    found["other checkpoint"] = attempt(expert, method, torch, "none")
    config._current_vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="some/where/GLM")
    )

    def fresh(load, **named):
        method.glm53_moe_scale.__init__(method.glm53_moe_scale.setting)
        seen.clear()
        said = attempt(expert, method, torch, load, **named)
        values = sorted(
            {float(value) for pair in seen for tensor in pair for value in tensor.flatten()}
        )
        return [said, [f"{value:.4g}" for value in values]]

    for load in ("none", "all", "some"):
        found[load] = fresh(load)
    found["W4A16"] = fresh("none", use_a16=True)[0]
    # A layer without, then one with: the constant of the first was wrong already.
    method.glm53_moe_scale.__init__(method.glm53_moe_scale.setting)
    expert(method, torch, "none")
    found["later layer has them"] = attempt(expert, method, torch, "all")
    return found


def expert(method, torch, load, use_a16=False):
    """One layer of four experts, made by vLLM and loaded with no, all or some scales."""
    one = method.__new__(method)
    one.quant_config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
    one.moe = SimpleNamespace(is_act_and_mul=True)
    one.use_a16, one.use_global_sf, one.per_token_activation = use_a16, False, False
    layer = torch.nn.Module()
    method.create_weights(
        one, layer, num_experts=4, hidden_size=64, intermediate_size_per_partition=32,
        params_dtype=torch.bfloat16, weight_loader=lambda *_arguments: None,
    )  # fmt: skip
    for name in ("w13_input_scale", "w2_input_scale"):
        data = getattr(layer, name).data
        if load == "all":
            data.fill_(1.5e-3)
        elif load == "some":
            data[0] = 1.5e-3
    method.process_weights_after_loading(one, layer)
    return ""


def attempt(call, *arguments, **named):
    """What it gives, as data, or what it raises, as text."""
    try:
        result = call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, list | str) else ""


if __name__ == "__main__":
    main(sys.argv[1])
