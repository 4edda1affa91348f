"""What a checkpoint says about itself: config, index, headers of its shards. No weight is read.

From that follow the MoE backend and whether the weights fit. Sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.errors import CheckError, raise_all
from serving.profiles import GIB
from serving.resolve import Plan

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ARCHITECTURE = "Glm5Next"
# A header is JSON; the longest of GLM-5.3's shards are a few MiB.
_LONGEST_HEADER = 256 << 20
# Backends that compute with 16-bit activations in vLLM 0.31 to 0.33, as their classes say of
# (kNvfp4Static, None), and the others, which need input scales.
A16_BACKENDS = ("marlin", "humming", "b12x", "flashinfer_b12x")
# Marlin repacks the experts: LibertAI saw about 19 GiB a rank at TP=2.
_MARLIN_REPACK = 38 * GIB
# CUDA context, NCCL, activations and graphs, a rank; ours, generous on purpose.
_RUNTIME = 6 * GIB


@dataclass(frozen=True)
class Checkpoint:
    """What was read.

    Attributes:
        folder: where it is.
        config: of config.json.
        weights: size of all tensors.
        experts: quantised expert matrices.
        scaled: those of them that have a calibrated input scale.
        is_weight_only: the config quantises no activations, so vLLM computes with 16 bits.
    """

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    weights: int
    experts: int
    scaled: int
    is_weight_only: bool

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part about the language model, where the config is nested."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


def read(folder: Path) -> Checkpoint:
    """Reads a checkpoint and makes sure that all of its files are there, whole.

    Raises:
        CheckError: every file that is missing, cut short, or no safetensors file.
    """
    problems: list[str] = []
    config = _object(folder / "config.json", problems)
    if not (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        names: dict[str, str] = dict.fromkeys(_header(folder / SINGLE, problems), SINGLE)
    else:
        weight_map = _object(folder / INDEX, problems).get("weight_map", {})
        names = weight_map if isinstance(weight_map, dict) else {}
    if not names and not problems:
        problems.append(f"{folder / INDEX}: names no tensor")
    weights = 0
    for shard in sorted({str(name) for name in names.values()}):
        if "/" in shard or shard in ("", ".."):
            problems.append(f"{folder / INDEX}: {shard!r} is no file name")
            continue
        weights += _data_size(folder / shard, problems)
    raise_all(CheckError, problems)
    experts, scaled = _experts(names)
    return Checkpoint(folder, config, weights, experts, scaled, _is_weight_only(config))


def _object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path} is not there; is GLM_MODEL_DIR mounted?")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path}: expected a JSON object")
        return {}
    return found


def _header(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The header of a safetensors file: a length of 8 bytes, then JSON, then the tensors' bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                problems.append(f"{path}: is no safetensors file, or is cut short ({size} bytes)")
                return {}
            header = json.loads(file.read(length))
    except FileNotFoundError:
        problems.append(f"{path} is not there; `build.py weights fetch` completes the folder")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: the header cannot be read: {error}")
        return {}
    if not isinstance(header, dict):
        problems.append(f"{path}: the header is no JSON object")
        return {}
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    ends = [_end(value) for value in tensors.values()]
    expected = 8 + length + max(ends, default=0)
    if min(ends, default=0) < 0 or expected != size:
        problems.append(
            f"{path}: expected {expected} bytes, found {size}; `build.py weights verify` has more"
        )
    return tensors


def _end(tensor: object) -> int:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not isinstance(offsets[1], int):
        return -1
    return offsets[1]


def _data_size(path: Path, problems: list[str]) -> int:
    return max((_end(tensor) for tensor in _header(path, problems).values()), default=0)


def _experts(names: Mapping[str, str]) -> tuple[int, int]:
    quantised, scaled = set(), set()
    for name in names:
        if ".experts" not in name:
            continue
        stem, _, last = name.rpartition(".")
        if last in ("weight_scale", "w13_weight_scale", "w2_weight_scale"):
            quantised.add(stem + last.removesuffix("weight_scale"))
        elif last.endswith("input_scale"):
            scaled.add(stem + last.removesuffix("input_scale"))
    return len(quantised), len(quantised & scaled)


def _is_weight_only(config: Mapping[str, Any]) -> bool:
    """The rule of vLLM: NVFP4 without quantised activations in any group is W4A16."""
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return False
    if quantisation.get("quant_algo") == "W4A16_NVFP4":
        return True
    groups = quantisation.get("config_groups")
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(
            isinstance(group, dict) and group.get("input_activations") is None
            for group in groups.values()
        )
    )


def moe_backend(plan: Plan, found: Checkpoint, memory: int) -> str:
    """The MoE backend that computes this checkpoint right and fits.

    Args:
        plan: the plan.
        found: the checkpoint.
        memory: of a GPU, bytes; on unified memory, of the machine.

    Raises:
        CheckError: no backend does, or the one that is asked for does not; says which would.
    """
    asked = plan.settings.text("MOE_BACKEND")
    is_filled = plan.settings["MOE_INPUT_SCALE"] is not None
    if found.is_weight_only:
        return _a16(plan, found, memory, asked)
    if found.experts and found.scaled < found.experts and not is_filled:
        missing = found.experts - found.scaled
        raise CheckError(
            f"{found.folder}: config.json says that activations are quantised, but {missing} of "
            f"{found.experts} expert matrices have no input scale: vLLM would compute with memory "
            "that nobody wrote. Fetch the checkpoint's file of input scales, or use a checkpoint "
            "that declares itself as weight-only"
        )
    chosen = "flashinfer_cutlass" if asked == "auto" else asked
    raise_all(CheckError, list(_too_big(plan, found, memory, chosen)))
    return chosen


def _a16(plan: Plan, found: Checkpoint, memory: int, asked: str) -> str:
    if asked not in ("auto", *A16_BACKENDS):
        raise CheckError(
            f"GLM_MOE_BACKEND={asked} needs calibrated input scales, and {found.folder} is "
            f"weight-only; expected auto or one of {', '.join(A16_BACKENDS)}"
        )
    chosen = "marlin" if asked == "auto" else asked
    problems = list(_too_big(plan, found, memory, chosen))
    if problems and asked == "auto":
        problems.append(
            f"{found.folder} has no input scales, so flashinfer_cutlass cannot run it; "
            "GLM_MOE_BACKEND=flashinfer_b12x or humming repack less (how much is not known to us), "
            "and a calibrated checkpoint needs neither"
        )
    raise_all(CheckError, problems)
    return chosen


def _too_big(plan: Plan, found: Checkpoint, memory: int, backend: str) -> Iterator[str]:
    share = plan.settings.ratio("TORCH_MEMORY_FRACTION") or plan.settings.ratio(
        "GPU_MEMORY_UTILIZATION"
    )
    repack = _MARLIN_REPACK // plan.tp if backend == "marlin" else 0
    parts = {
        f"weights of {found.weights / GIB:.1f} GiB over {plan.tp} ranks": found.weights // plan.tp,
        "repacking by marlin": repack,
        "KV cache": plan.settings.number("KV_CACHE_BYTES"),
        "runtime": _RUNTIME,
    }
    need, limit = sum(parts.values()), int(memory * share)
    if need > limit:
        terms = " + ".join(f"{size / GIB:.1f} ({name})" for name, size in parts.items() if size)
        yield (
            f"{found.folder} with {backend} needs {need / GIB:.1f} GiB a GPU, {terms}; there are "
            f"{limit / GIB:.1f} ({share} of {memory / GIB:.1f})"
        )


def config_problems(plan: Plan, found: Checkpoint) -> Iterator[str]:
    """What the config says against the plan; a sentence each."""
    config, place = found.text_config, found.folder / "config.json"
    architectures = found.config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if not any(name.startswith(_ARCHITECTURE) for name in names):
        yield f"{place}: expected an architecture {_ARCHITECTURE}..., found {names}"
    longest = config.get("max_position_embeddings")
    asked = plan.settings.number("MAX_MODEL_LEN")
    if isinstance(longest, int) and asked > longest:
        yield f"GLM_MAX_MODEL_LEN={asked}, but {place} allows {longest}"
    top = config.get("index_topk")
    if plan.route == "stock" and top is not None and top != 2048:
        yield (
            f"{place}: index_topk is {top}, and the route stock takes 2048 only; set "
            "GLM_MLA_ROUTE=cuda"
        )
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % plan.tp:
        yield f"{place}: {heads} heads cannot be split over GLM_TP={plan.tp}"
