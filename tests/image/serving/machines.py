"""A machine, a checkpoint and a patched tree of a few bytes, for the entry point's tests."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.machine import Gpu, Machine, MachineError
from serving.profiles import GIB, PROFILES

from imagebuild.deep.glm_stand_in import template

RTX = PROFILES["rtx6000-4x"]
CONFIG = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {
        "max_position_embeddings": 1048576,
        "num_attention_heads": 64,
        "index_topk": 2048,
    },
    "quantization_config": {
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"input_activations": {"num_bits": 4}, "weights": {}}},
    },
}
EXPERTS = tuple(
    f"model.layers.3.mlp.experts.{number}.{part}_proj"
    for number in range(2)
    for part in ("gate", "up", "down")
)


@dataclass
class FakeMachine(Machine):
    """All is well, unless a test says otherwise."""

    cards: Sequence[Gpu] = ()
    busy: Sequence[str] = ()
    limits: Mapping[int, int] = field(default_factory=dict)
    meminfo: Mapping[str, int] = field(default_factory=dict)
    shm: int = 8 * GIB
    space: int = 500 * GIB
    taken: frozenset[int] = frozenset()
    filesystem_type: str = "ext4"
    error: str = ""
    forgotten: list[Path] = field(default_factory=list)
    commands: frozenset[str] = frozenset({"vllm"})
    root: Path = Path("/")

    def gpus(self):
        if self.error:
            raise MachineError(self.error)
        return list(self.cards)

    def gpu_processes(self):
        return list(self.busy)

    def memory(self):
        return dict(self.meminfo)

    def filesystem(self, folder):
        return self.filesystem_type

    def soft_limit(self, which):
        return self.limits.get(which, 0 if which == resource.RLIMIT_CORE else -1)

    def size(self, folder):
        return self.shm

    def free(self, folder):
        return self.space

    def is_free(self, host, port):
        return port not in self.taken

    def which(self, name):
        return f"/usr/bin/{name}" if name in self.commands else ""

    def forget(self, files):
        self.forgotten += files


def gpus(deployment: str, **changed: object) -> list[Gpu]:
    profile = PROFILES[deployment]
    fields = {
        "name": f"NVIDIA {profile.gpu_names[0]}",
        "capability": "{}.{}".format(*profile.capability),
        "memory": 0 if profile.is_unified else 96 * GIB,
        "driver": "580.95.05",
    } | changed
    return [Gpu(str(index), **fields) for index in range(profile.gpus)]  # type: ignore[arg-type]


def machine(deployment: str, **changed: object) -> FakeMachine:
    total = {"MemTotal": int(121.69 * GIB), "MemFree": 115 * GIB}
    return FakeMachine(**{"cards": gpus(deployment), "meminfo": total} | changed)  # type: ignore[arg-type]


def safetensors(path: Path, tensors: Mapping[str, int]) -> None:
    """Writes a file of empty tensors; sizes in bytes. The data is a hole, so it takes no space."""
    header, end = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    os.truncate(path, 8 + len(data) + end)


def checkpoint(
    folder: Path,
    *,
    config: Mapping[str, object] = CONFIG,
    scales: Sequence[str] = EXPERTS,
    size: int = 4096,
    opening: str = "own",
) -> Path:
    """A checkpoint of two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    one = {f"{name}.{part}": 16 for name in EXPERTS for part in ("weight", "weight_scale")}
    two = {f"{name}.input_scale": 4 for name in scales} | {"lm_head.weight": size}
    for number, tensors in enumerate((one, two), 1):
        safetensors(folder / f"model-{number:05}-of-00002.safetensors", tensors)
    names = dict.fromkeys(one, "model-00001-of-00002.safetensors")
    names |= dict.fromkeys(two, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "chat_template.jinja").write_text(template(opening))
    return folder


def site(folder: Path) -> Path:
    """A patched tree: one module, its manifest, and the package of our kernels."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "glm53_sparse_mla").mkdir()
    text = b"answer = 42\n"
    (folder / "vllm" / "patched.py").write_bytes(text)
    (folder / ".imagebuild").mkdir()
    files = {"vllm/patched.py": {"before": None, "after": hashlib.sha256(text).hexdigest()}}
    manifest = {"base": {"version": "0.31.0"}, "series": "5e21", "files": files}
    (folder / ".imagebuild" / "manifest.json").write_text(json.dumps(manifest))
    return folder


def environ(deployment: str, folder: Path, **knobs: str) -> dict[str, str]:
    """An environment in which every folder is below `folder`."""
    places = {
        "GLM_DEPLOYMENT": deployment,
        "GLM_MODEL_DIR": str(folder / "model"),
        "GLM_DRAFTER_DIR": str(folder / "drafter"),
        "GLM_CACHE_DIR": str(folder / "cache"),
        "GLM_LOG_DIR": str(folder / "logs"),
        "GLM_STATE_DIR": str(folder / "state"),
    }
    if deployment != "gb10-4x" and "GLM_SPECULATION" not in knobs:
        del places["GLM_DRAFTER_DIR"]
    return places | knobs
