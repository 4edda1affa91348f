"""Whether a checkpoint holds its MTP layer without quantisation, read from its index alone.

Called by the patched `vllm/models/glm5next/common/mtp.py`. Standard library, and the
huggingface_hub of vLLM's own environment for the local cache; it never uses the network and
never stops a start: what it cannot read is logged, and the layer is built as the config says.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
# Last parts of tensor names that only a quantised weight has. Scales of other things (KV cache,
# hyper-connections) are no sign of one, so a bare "scale" in the name does not count.
_QUANTISED = frozenset(
    ["weight_scale", "weight_scale_2", "weight_scale_inv", "weight_packed", "input_scale"]
)
# Below the logger that vLLM sets up, so that the lines reach its handlers.
_log = logging.getLogger("vllm.glm53_mtp_bf16")


def exclude_unscaled_layer(vllm_config: Any, prefix: str) -> None:  # noqa: ANN401 - vLLM's own
    """Adds a layer to the modules that ModelOpt leaves alone, if the checkpoint holds no scale.

    Args:
        vllm_config: of the model that is being built; its quant_config is changed.
        prefix: dotted name of the layer, such as "model.layers.45".
    """
    exclude = getattr(vllm_config.quant_config, "exclude_modules", None)
    pattern = f"{prefix}.*"
    if not isinstance(exclude, list) or pattern in exclude:
        return
    draft = vllm_config.speculative_config.draft_model_config
    try:
        index = find_index(draft.model, draft.revision, vllm_config.load_config.download_dir)
        names = layer_tensors(read_index(index), prefix)
    except (OSError, ValueError, ImportError, RecursionError) as error:
        _log.warning(
            "%s: cannot tell whether the checkpoint %r holds it quantised (%s); "
            "it is built as the quantisation config says.", prefix, draft.model, error,
        )  # fmt: skip
        return
    if is_unscaled(names):
        vllm_config.quant_config.exclude_modules = [*exclude, pattern]
        _log.info(
            "%s: the checkpoint %r holds its %d tensors without scales; it is left unquantised.",
            prefix, draft.model, len(names),
        )  # fmt: skip
    elif not names:
        _log.warning("%s: the checkpoint %r holds no tensor of it.", prefix, draft.model)


def find_index(model: str, revision: str | None, cache_dir: str | None) -> Path:
    """The index of a local folder, or of a hub id's snapshot in the local cache.

    Raises:
        FileNotFoundError: there is none.
        ValueError: `model` is neither a folder nor a hub id.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(f"the folder has no {INDEX}")
        return folder / INDEX
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, INDEX, cache_dir=cache_dir, revision=revision)
    if not isinstance(found, str):
        raise FileNotFoundError(f"no {INDEX} of revision {revision or 'main'} in the local cache")
    return Path(found)


def read_index(path: Path) -> list[str]:
    """Names of all tensors of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no index.
    """
    content = json.loads(path.read_text("utf-8"))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"{path.name} has no table weight_map")
    return list(weights)


def layer_tensors(names: Iterable[str], prefix: str) -> list[str]:
    """The tensors of a layer of the language model, whatever the checkpoint's own prefix is."""
    layer = prefix.rpartition(".")[2]
    if not layer.isdecimal():
        raise ValueError(f"{prefix!r} does not end with the number of a layer")
    # "model.layers.45.", "model.language_model.layers.45.": not the layers of a vision tower.
    of_layer = re.compile(rf"(?:(?:model|language_model)\.)*layers\.{layer}\.")
    return [name for name in names if of_layer.match(name)]


def is_unscaled(names: list[str]) -> bool:
    """Whether there are tensors, and none that only a quantised weight has."""
    return bool(names) and not any(name.rpartition(".")[2] in _QUANTISED for name in names)
