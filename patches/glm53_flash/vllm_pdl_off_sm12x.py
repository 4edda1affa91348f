"""Turn programmatic dependent launch off on capability 12.

Symptom: on sm_120 and sm_121 the KDA state kernels now and then read a state that the kernel
    before them has not finished writing; long answers degenerate, with no error in any log.
Cause: `CudaPlatformBase.is_arch_support_pdl` answers yes from capability 9 upwards. Its callers on
    the path of this model (causal_conv1d, gather_initial_states, scatter_states, the fused norm
    gate, the mhc kernels) then launch with PDL, so that a kernel may start before the one that
    wrote the KDA state is done. The model's own KDA kernels never ask.
Change: the method also refuses capability 12; every other capability keeps its answer. The
    tempting alternative, a monkeypatch by a plugin, comes too late: the mhc kernels read the
    answer at import, and from 0.33 on it is memoised.
Upstream: none known.
Drop when: the method answers no on capability 12, or PDL is shown to be safe there.
Cost: one comparison; kernels on capability 12 start a few microseconds later. Inert elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace

from imagebuild.patching.interpret import Interpreter, Opaque
from imagebuild.patching.patch import Answer, Edit, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import NotThere, function, parse
from imagebuild.patching.tree import Tree

_PATH = "vllm/platforms/cuda.py"
_SCOPE = "CudaPlatformBase.is_arch_support_pdl"
_OPS = "vllm/model_executor/layers/mamba/ops/"
# Those on the path of this model that ask; one that decided by itself would go on using PDL.
_CALLERS = (
    Symbol(f"{_OPS}scatter_states.py", "scatter_states"),
    Symbol(f"{_OPS}gather_initial_states.py", "gather_initial_states"),
    Symbol(f"{_OPS}causal_conv1d.py", "causal_conv1d_fn"),
    Symbol(f"{_OPS}causal_conv1d.py", "causal_conv1d_update"),
    # Reads the answer from a constant of its module, as the other kernels there do.
    Symbol("vllm/model_executor/kernels/mhc/tilelang_kernels.py", "mhc_pre_big_fuse_tilelang"),
)


def _uses_pdl(tree: Tree, major: int) -> bool:
    """What the method answers on a device of this major capability."""
    capability = SimpleNamespace(major=major, minor=0, to_int=lambda: major * 10)
    names = {
        "torch.cuda.get_device_capability": lambda device=None: (major, 0),
        "cls.get_device_capability": lambda device=None: capability,
    }
    interpreter = Interpreter(parse(tree, _PATH), names)
    cls = SimpleNamespace(
        get_device_capability=lambda device_id=0: capability,
        is_device_capability_family=lambda value, device_id=0: value // 10 == major,
        has_device_capability=lambda value, device_id=0: major * 10 >= _as_int(value),
    )
    answer = interpreter.call(function(tree, _PATH, _SCOPE), cls=cls)
    if isinstance(answer, Opaque):
        raise NotThere(f"{_SCOPE} returns {answer.text}, which cannot be evaluated")
    return bool(answer)


def _as_int(value: int | tuple[int, int]) -> int:
    return value if isinstance(value, int) else value[0] * 10 + value[1]


def _on_12(tree: Tree) -> Answer:
    return Answer.of(_uses_pdl(tree, 12), f"{_SCOPE} answers {_uses_pdl(tree, 12)} for major 12")


def _off_12_only(tree: Tree) -> Answer:
    answers = {major: _uses_pdl(tree, major) for major in (8, 9, 10, 12)}
    wanted = {8: False, 9: True, 10: True, 12: False}
    return Answer.of(answers == wanted, f"{_SCOPE} by major capability: {answers}")


_EDIT = Edit(
    label="no PDL on 12",
    path=_PATH,
    scope=_SCOPE,
    anchor="        return major >= 9\n",
    text="        # patch: vllm_pdl_off_sm12x\n        return major >= 9 and major != 12\n",
)
_OFF = Probe(
    claim="PDL is used on capability 9 and 10 and not on 12",
    check=_off_12_only,
    paths=(_PATH,),
)

PATCH = Patch(
    name="vllm_pdl_off_sm12x",
    status="pending",
    upstream="",
    origin="fault found by MiaAI-Lab (MIT); the text is ours",
    variants=(
        Variant(
            versions=">=0.31,<0.33",
            edits=(_EDIT,),
            relies_on=_CALLERS,
        ),
        # 0.33 memoises the method (@cache under @classmethod); the edit is inside either way.
        Variant(
            versions=">=0.33,<0.34",
            edits=(_EDIT,),
            relies_on=_CALLERS,
        ),
    ),
    reason=Probe(claim="upstream uses PDL on capability 12", check=_on_12, paths=(_PATH,)),
    effect=_OFF,
    absorbed=_OFF,
)
