"""Gives NVFP4 experts an activation scale where their checkpoint has none; opt-in, per checkpoint.

vLLM allocates the activation scales of ModelOpt's NVFP4 experts without a value. Where a checkpoint
ships none, whatever lay in that memory scales the activations, and the experts vanish or blow up.
GLM_MOE_INPUT_SCALE=NAME=VALUE fills the missing ones of the checkpoint NAME with VALUE. No constant
is right: calibrated scales of this model lie between 5.58e-4 and 3.72e-2, and blocks whose largest
is right: calibrated scales of this model lie between 5.58e-4 and 3.72e-2, and blocks whose largest
for a checkpoint that has calibrated scales, also if only some are missing.

vLLM 0.30 and later see that a checkpoint quantises weights only (no `input_activations` in any
group) and compute with 16-bit activations; no scale is used then, and this setting is not needed.

Standard library only at import: the plug-in loader swallows what an import raises.
"""

# ruff: noqa: ANN401 - methods and layers are of the release, which type checkers do not see

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

VARIABLE = "GLM_MOE_INPUT_SCALE"
# The variable of the recipe before us. Its value was for every checkpoint; its author retracted it.
FORMER = "VLLM_GLM53_MOE_INPUT_SCALE"
PARAMETERS = ("w13_input_scale", "w2_input_scale")
_MARK = "glm53_moe_scale"
_LOG = logging.getLogger("vllm.glm53_moe_scale")


class Setting(NamedTuple):
    """A checkpoint, by the last part of its path or repository, and the scale to fill in."""

    checkpoint: str
    value: float


class Refused(RuntimeError):  # noqa: N818 - it is raised in vLLM, whose log shows the name
    """The setting does not fit the checkpoint; the server must not start."""


def register() -> None:
    """Arms vLLM's method for ModelOpt's NVFP4 experts, where the setting asks for it.

    Raises:
        ValueError: the setting is malformed.
        RuntimeError: this vLLM is none that the fix is for.
    """
    setting = read(os.environ)
    if os.environ.get(FORMER):
        _LOG.warning("%s=%r is not read: one value does not fit every checkpoint, and vLLM 0.30 "
                     "and later need none for checkpoints with quantised weights only; see %s",
                     FORMER, os.environ[FORMER], VARIABLE)  # fmt: skip
    if setting is None:
        return
    from vllm.version import __version__

    from glm53_sparse_mla import releases

    releases.check(__version__)
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

    _LOG.info("%s: vLLM %s detects checkpoints with quantised weights only (W4A16) and uses no "
              "activation scale for them; scales are filled in only where a layer with 4-bit "
              "activations has none", VARIABLE, __version__)  # fmt: skip
    arm(ModelOptNvFp4FusedMoE, setting)


def read(environ: Mapping[str, str]) -> Setting | None:
    """The setting, None where there is none.

    Raises:
        ValueError: it is not NAME=VALUE with a finite value above zero.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{VARIABLE}={text!r}: expected CHECKPOINT=SCALE, such as "
                         "GLM-5.3-Flash-NVFP4=1.6e-3, with a scale above zero")  # fmt: skip
    return Setting(name, value)


def arm(method: Any, setting: Setting) -> None:
    """Wraps two functions of a class, once: scales start as NaN, and are settled after loading."""
    if getattr(method, _MARK, None) is not None:
        return
    method.glm53_moe_scale = state = _State(setting)
    create, process = method.create_weights, method.process_weights_after_loading

    @functools.wraps(create)
    def create_weights(self: Any, layer: Any, *arguments: Any, **named: Any) -> None:
        create(self, layer, *arguments, **named)
        if not _is_unneeded(self):
            state.check_checkpoint()
            for name in PARAMETERS:
                getattr(layer, name).data.fill_(math.nan)

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if _is_unneeded(self):
            state.say_unneeded()
        else:
            for name in PARAMETERS:
                state.settle(name, getattr(layer, name).data)
        process(self, layer)

    method.create_weights = create_weights
    method.process_weights_after_loading = process_weights_after_loading


def _is_unneeded(method: Any) -> bool:
    """Whether experts of this kind use no activation scale of the checkpoint."""
    return bool(method.use_a16 or getattr(method, "per_token_activation", False))


class _State:
    """What is known of the checkpoint so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.filled = ""
        self.calibrated = ""
        self.has_said = False

    def check_checkpoint(self) -> None:
        """Makes sure that the model which is being made is that of the setting. Raises Refused."""
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().model_config
        found = str(config.model) if config is not None else ""
        if self.setting.checkpoint not in (found, PurePath(found).name):
            raise Refused(f"{VARIABLE} is for the checkpoint {self.setting.checkpoint!r}, and this "
                          f"one is {found!r}; unset it, or name this one")  # fmt: skip

    def settle(self, name: str, scales: Any) -> None:
        """Fills in the scales of one parameter, if none of the checkpoint's were loaded.

        Raises:
            Refused: some were loaded, here or in another layer.
        """
        missing = scales.isnan()
        count, total = int(missing.sum()), scales.numel()
        if count < total:
            self.calibrated = self.calibrated or name
        if count:
            self.filled = self.filled or name
        if self.calibrated:
            raise Refused(
                f"{VARIABLE}: the checkpoint has calibrated scales ({self.calibrated}, "
                f"{total - count} of {total} here), beside which no constant is used"
                + (f"; it lacks some ({self.filled}): get a checkpoint with all of them"
                   if self.filled else "; unset it")
            )  # fmt: skip
        scales.fill_(self.setting.value)
        if not self.has_said:
            self.has_said = True
            _LOG.warning("%s: this checkpoint has no activation scales for its experts; %g is used "
                         "for all of them, which is a guess: compare answers before you serve",
                         VARIABLE, self.setting.value)  # fmt: skip

    def say_unneeded(self) -> None:
        """Says once that these experts use no activation scale."""
        if not self.has_said:
            self.has_said = True
            _LOG.info("%s is not needed: the experts compute with 16-bit activations or a scale of "
                      "each token; unset it", VARIABLE)  # fmt: skip
