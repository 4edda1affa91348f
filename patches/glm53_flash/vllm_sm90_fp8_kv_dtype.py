"""Plan SM90 sparse MLA with the fp8 type instead of its storage type.

Symptom: `MLA kv_data_type torch.uint8 is not supported` at the first plan, after the weight load,
    when the KV cache is fp8 and the FLASHINFER_MLA_SPARSE_SM90 backend is used.
Cause: `FlashInferMLASparseSM90Builder.__init__` hands `kv_cache_spec.dtype` to `_SM90State`. An
    fp8 cache is stored as uint8, and FlashInfer plans by the logical type.
Change: uint8 becomes float8_e4m3fn, the only fp8 type that this backend accepts; other types pass
    unchanged. Asking the implementation for its own flag would do as well; this is the rule that
    upstream chose, so both releases behave the same.
Upstream: https://github.com/vllm-project/vllm/issues/57713 (also 55221)
Drop when: base is 0.32 or later, which maps the type in `kv_plan_dtype`.
Cost: one comparison at start. Inert for bf16 caches and for every other backend.
"""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Drop, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    NotThere,
    argument,
    assigned,
    function,
    only_call,
    parse,
    resolve,
)
from imagebuild.patching.tree import Tree

_PATH = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
_SCOPE = "FlashInferMLASparseSM90Builder.__init__"


def _planned(tree: Tree, stored: str) -> str:
    """The type that `_SM90State` gets for a cache whose storage type is `stored`."""
    builder = function(tree, _PATH, _SCOPE)
    state = function(tree, _PATH, "_SM90State.__init__")
    given = argument(only_call(builder, "_SM90State"), state, "kv_dtype")
    fp8 = stored == "torch.uint8"
    names = {
        "kv_cache_spec": SimpleNamespace(dtype=Opaque(stored)),
        "impl": SimpleNamespace(use_fp8_kv_cache=fp8, kv_cache_dtype="fp8" if fp8 else "bfloat16"),
    }
    # A local that an `if` sets has two values, and resolve leaves it alone: no guess is made.
    expression = resolve(builder, given)
    value = Interpreter(parse(tree, _PATH), names).value(expression)
    if not isinstance(value, Opaque) or not value.named or assigned(builder, value.text):
        raise NotThere(f"{_SCOPE}: the type that it plans with cannot be evaluated")
    return str(value.text)


def _plans_storage_type(tree: Tree) -> Answer:
    planned = _planned(tree, "torch.uint8")
    return Answer.of(planned == "torch.uint8", f"an fp8 cache is planned as {planned}")


def _plans_logical_type(tree: Tree) -> Answer:
    planned = {stored: _planned(tree, stored) for stored in ("torch.uint8", "torch.bfloat16")}
    wanted = {"torch.uint8": "torch.float8_e4m3fn", "torch.bfloat16": "torch.bfloat16"}
    return Answer.of(planned == wanted, f"planned type by storage type: {planned}")


_LOGICAL = Probe(
    claim="an fp8 cache is planned as float8_e4m3fn and a bf16 cache as bfloat16",
    check=_plans_logical_type,
    paths=(_PATH,),
)

PATCH = Patch(
    name="vllm_sm90_fp8_kv_dtype",
    status="backport",
    upstream="https://github.com/vllm-project/vllm/issues/57713",
    origin="fault reported upstream; the text is ours, the rule is that of vLLM 0.32 (Apache-2.0)",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=(
                Edit(
                    label="logical type",
                    path=_PATH,
                    scope=_SCOPE,
                    anchor="            kv_cache_spec.dtype,\n",
                    text=(
                        "            # patch: vllm_sm90_fp8_kv_dtype\n"
                        "            torch.float8_e4m3fn\n"
                        "            if kv_cache_spec.dtype == torch.uint8\n"
                        "            else kv_cache_spec.dtype,\n"
                    ),
                ),
            ),
            relies_on=(Symbol(_PATH, "_SM90State._plan"),),
        ),
    ),
    reason=Probe(
        claim="an fp8 cache is planned with its storage type uint8",
        check=_plans_storage_type,
        paths=(_PATH,),
    ),
    effect=_LOGICAL,
    absorbed=_LOGICAL,
    drops=(
        Drop(
            versions=">=0.32",
            proof=_LOGICAL,
            sentence="vLLM 0.32 maps the storage type to float8_e4m3fn itself (vllm#57713)",
        ),
    ),
)
