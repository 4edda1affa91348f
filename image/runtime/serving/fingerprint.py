"""What every rank must hold alike, in one digest, and in words what differs between two ranks.

A rank with another kernel or another checkpoint does not crash: its numbers are a little wrong. So
all of it is compared before the weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import places
from serving.errors import EnvironmentFault
from serving.knobs import written
from serving.resolve import Plan

SCHEMA = 1
# Files of a checkpoint that decide what its weights mean; the weights themselves are checked by
# `build.py weights verify`, since reading them takes minutes.
_CHECKPOINT_FILES = (
    "config.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
_UNKNOWN = "unknown"
# What cannot be told apart by a rank itself, with what to do about a difference.
_ADVICE = {
    "image": "send the head's image with `build.py ship`",
    "runtime": "send the head's image with `build.py ship`",
    "series": "send the head's image with `build.py ship`",
    "kernel": "send the head's image with `build.py ship`",
    "checkpoint": "compare the folders with `build.py weights verify`",
    "template": "compare the checkpoints' templates, or GLM_CHAT_TEMPLATE_FILE",
}


@dataclass(frozen=True)
class Fingerprint:
    """What a rank holds: a value by name; names of knobs start with GLM_, files have a slash."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """One sha256 over all of it, in hex."""
        data = json.dumps(dict(sorted(self.parts.items())), separators=(",", ":"))
        return hashlib.sha256(data.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """For the state file and the network; `parse` reads it again."""
        return {"schema": SCHEMA, "digest": self.digest, "parts": dict(self.parts)}

    def differences(self, other: Fingerprint, mine: str, theirs: str) -> list[str]:
        """A sentence for each part that differs.

        Args:
            other: what another rank holds.
            mine: name of this rank, such as "rank 0 (10.0.0.1)".
            theirs: name of the other one.
        """
        found = []
        for name in sorted({*self.parts, *other.parts}):
            one, two = self.parts.get(name), other.parts.get(name)
            if one != two:
                advice = _ADVICE.get(name.partition("/")[0], "")
                found.append(
                    f"{name}: {mine} has {_short(one)}, {theirs} has {_short(two)}"
                    + (f"; {advice}" if advice else "")
                )
        return found


def parse(document: object) -> Fingerprint:
    """Reads what `document` made, from another rank.

    Raises:
        ValueError: it is none, or its digest is not that of its parts.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"no fingerprint of schema {SCHEMA}")
    parts = document.get("parts")
    if not isinstance(parts, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in parts.items()
    ):
        raise ValueError("a fingerprint without parts")
    made = Fingerprint(parts)
    if made.digest != document.get("digest"):
        raise ValueError("a fingerprint whose digest is not that of its parts")
    return made


def take(
    plan: Plan, moe_backend: str, template: bytes, *, site: Path, root: Path = places.ROOT,
    kernel: Path = places.KERNEL,
) -> Fingerprint:  # fmt: skip
    """The fingerprint of this rank.

    Args:
        plan: the plan.
        moe_backend: what the checkpoint led to.
        template: the edited chat template.
        site: the folder of packages that holds vLLM, with the build's manifest in it.
        root: the folder of this package and of what goes with it.
        kernel: our CUDA library.

    Raises:
        EnvironmentFault: a file that is there cannot be read.
    """
    manifest = _manifest(site / places.MANIFEST)
    base = manifest.get("base")
    parts = {
        "image": plan.settings.text("IMAGE_ID") or _UNKNOWN,
        "runtime": _folder(root),
        "base": str(base.get("version", _UNKNOWN)) if isinstance(base, dict) else _UNKNOWN,
        "series": str(manifest.get("series", _UNKNOWN)),
        "kernel": _file(kernel),
        "kernel/package": _folder(site / "glm53_sparse_mla"),
        "template": hashlib.sha256(template).hexdigest(),
        "route": plan.route,
        "cluster": plan.cluster,
        "speculation": f"{plan.speculation} {plan.tokens}",
        "moe_backend": moe_backend,
        "arguments": written(plan.extra),
    }
    model = Path(plan.settings.text("MODEL_DIR"))
    parts |= {f"checkpoint/{name}": _file(model / name) for name in _CHECKPOINT_FILES}
    if plan.speculation == "dflash2":
        drafter = Path(plan.settings.text("DRAFTER_DIR"))
        parts["checkpoint/drafter/config.json"] = _file(drafter / "config.json")
    for name, knob in plan.settings.knobs.items():
        # The id of the image stands above under the name that people look for.
        if knob.is_shared and name != "GLM_IMAGE_ID":
            value = plan.settings.values[name]
            parts[name] = "" if value is None else written(value)
    return Fingerprint(parts)


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    is_hash = len(value) == 64 and not set(value) - set("0123456789abcdef")
    return f"sha256:{value[:12]}" if is_hash else value or "nothing"


def _file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "absent"
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}") from error


def _folder(root: Path) -> str:
    """One digest over the Python files below a folder and their names."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} {_file(path)}\n".encode())
    return digest.hexdigest()


def _manifest(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{path}: the build's manifest cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
