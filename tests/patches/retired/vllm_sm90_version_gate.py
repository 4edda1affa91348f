"""Reject an old FlashInfer for fp8 rows only.

Symptom: the SM90 sparse MLA backend is refused for bf16 rows because of an fp8 feature.
Cause: `supports_combination` asks `has_flashinfer_sm90_nope_mla` whatever the KV type is.
Change: the gate counts for fp8 rows only.
Upstream: none.
Drop when: every FlashInfer that a base pins passes the gate; true since 0.31, so this patch is not
    in the series. It is kept here to show that the audit says so.
Cost: none.
"""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Variant
from imagebuild.patching.structure import NotThere, function, parse
from imagebuild.patching.tree import Tree

_PATH = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
_SCOPE = "FlashInferMLASparseSM90Backend.supports_combination"
_GATE_PATH = "vllm/utils/flashinfer.py"
_GATE = "has_flashinfer_sm90_nope_mla"
_WRAPPER = "flashinfer/mla/_batch_mla/_wrapper.py"


def _gate_passes(tree: Tree) -> bool:
    """What the gate answers with the FlashInfer in the tree, whose signature it inspects."""
    arguments = function(tree, _WRAPPER, "BatchMLAPagedAttentionWrapper.run").args
    kinds = {item.arg: "POSITIONAL_OR_KEYWORD" for item in arguments.args}
    kinds |= {item.arg: "KEYWORD_ONLY" for item in arguments.kwonlyargs}
    signature = SimpleNamespace(
        parameters={
            name: SimpleNamespace(kind=Opaque(f"inspect.Parameter.{kind}"))
            for name, kind in kinds.items()
        }
    )
    names = {"has_flashinfer": lambda: True, "inspect.signature": lambda run: signature}
    answer = Interpreter(parse(tree, _GATE_PATH), names).call(function(tree, _GATE_PATH, _GATE))
    if isinstance(answer, Opaque):
        raise NotThere(f"{_GATE} returns {answer.text}, which cannot be evaluated")
    return bool(answer)


def _blocks(tree: Tree) -> Answer:
    passes = _gate_passes(tree)
    return Answer.of(not passes, f"{_GATE} with this FlashInfer: {passes}")


def _bf16_is_free(tree: Tree) -> Answer:
    names = {
        _GATE: lambda: False,
        "vllm.config.get_current_vllm_config": lambda: SimpleNamespace(model_config=None),
    }
    answer = Interpreter(parse(tree, _PATH), names).call(
        function(tree, _PATH, _SCOPE), kv_cache_dtype="bfloat16", use_sparse=True
    )
    return Answer.of(answer is None, f"bf16 rows with an old FlashInfer: {answer or 'accepted'}")


PATCH = Patch(
    name="vllm_sm90_version_gate",
    status="inappropriate",
    upstream="",
    origin="idea of MiaAI-Lab (MIT); the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.34",
            edits=(
                Edit(
                    label="gate for fp8 only",
                    path=_PATH,
                    scope=_SCOPE,
                    anchor="        if not has_flashinfer_sm90_nope_mla():\n",
                    text=(
                        "        if kv_cache_dtype in _FP8_KV_DTYPES and (\n"
                        "            not has_flashinfer_sm90_nope_mla()\n"
                        "        ):\n"
                    ),
                ),
            ),
        ),
    ),
    reason=Probe(
        claim="the gate can be false with the pinned FlashInfer",
        check=_blocks,
        paths=(_GATE_PATH, _WRAPPER),
    ),
    effect=Probe(
        claim="bf16 rows are accepted whatever the gate says", check=_bf16_is_free, paths=(_PATH,)
    ),
)
