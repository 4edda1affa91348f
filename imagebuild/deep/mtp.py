"""Runs vLLM's ModelOpt exclusion on a made-up checkpoint whose MTP layer has no scales.

The tree must be first on `sys.path` and patched; vLLM, torch and huggingface_hub are imported.
The checkpoint is a temporary folder with an index only, as a folder and as a hub snapshot.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from imagebuild.deep.base import About

ABOUT = About(
    claim="an MTP layer without scales in the checkpoint's index is left unquantised",
    patches=("vllm_glm53_mtp_bf16",),
    imports=("glm53_mtp_bf16", "vllm.model_executor.layers.quantization.modelopt"),
)
_INDEX = "model.safetensors.index.json"
_REPO, _COMMIT = "example/checkpoint", "0123456789abcdef0123456789abcdef01234567"
_LAYER = "model.layers.45"
_PARTS = ("mlp.experts", "mlp.shared_experts.gate_up_proj", "self_attn.o_proj", "eh_proj")
# Names that a careless pattern would take along.
_OTHERS = ("model.layers.4.mlp.experts", "model.layers.44.mlp.experts",
           "model.layers.450.mlp.experts", "lm_head")  # fmt: skip


def probe() -> str:
    """Exclusion for a bf16 and a quantised MTP layer; returns what was seen in one line.

    Raises:
        RuntimeError: with the sentence that says what is wrong.
    """
    seen = []
    with tempfile.TemporaryDirectory() as root:
        for kind in ("folder", "hub"):
            for is_quantised in (False, True):
                base = Path(root, kind, str(is_quantised))
                model, cache = _checkpoint(base, kind, is_quantised)
                excluded = _excluded(model, cache)
                wanted = [] if is_quantised else list(_PARTS)
                if excluded != wanted:
                    what = "with scales" if is_quantised else "without scales"
                    raise RuntimeError(
                        f"an MTP layer {what} in a {kind} checkpoint: expected {wanted} to be "
                        f"left unquantised, found {excluded}"
                    )
        missing = _excluded(str(Path(root)), None)
        if missing:
            raise RuntimeError(f"without an index, {missing} were left unquantised")
        seen.append(f"{len(_PARTS)} parts of a bf16 MTP layer excluded, folder and hub snapshot")
    return "; ".join([*seen, "a quantised layer, other layers and a lost index untouched"])


def _checkpoint(base: Path, kind: str, is_quantised: bool) -> tuple[str, str | None]:
    """Writes an index; returns (what vLLM calls the model, its download_dir)."""
    names = [f"model.language_model.layers.45.mlp.experts.{i}.up_proj.weight" for i in range(3)]
    if is_quantised:
        names += [f"{name}_scale" for name in names]
    names.append("model.language_model.layers.44.mlp.experts.0.up_proj.weight_scale")
    folder = base
    if kind == "hub":
        repo = base / f"models--{_REPO.replace('/', '--')}"
        folder = repo / "snapshots" / _COMMIT
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(_COMMIT)
    folder.mkdir(parents=True, exist_ok=True)
    table = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": table}))
    return (str(folder), None) if kind == "folder" else (_REPO, str(base))


def _excluded(model: str, cache: str | None) -> list[str]:
    """The parts of the MTP layer that are left unquantised."""
    quant: Any = importlib.import_module("vllm.model_executor.layers.quantization.modelopt")
    ours: Any = importlib.import_module("glm53_mtp_bf16")
    config = quant.ModelOptNvFp4Config(
        is_checkpoint_nvfp4_serialized=True,
        kv_cache_quant_algo=None,
        exclude_modules=["model.layers.3.self_attn*"],
    )
    draft = SimpleNamespace(model=model, revision=None)
    vllm_config = SimpleNamespace(
        quant_config=config,
        speculative_config=SimpleNamespace(draft_model_config=draft),
        load_config=SimpleNamespace(download_dir=cache),
    )
    for _twice in range(2):
        ours.exclude_unscaled_layer(vllm_config, _LAYER)
    wrong = [name for name in _OTHERS if config.is_layer_excluded(name)]
    if wrong:
        raise RuntimeError(f"{wrong} are no parts of {_LAYER}, yet left unquantised")
    if len(config.exclude_modules) > 2:
        raise RuntimeError(f"asked twice, the list became {config.exclude_modules}")
    return [part for part in _PARTS if config.is_layer_excluded(f"{_LAYER}.{part}")]
