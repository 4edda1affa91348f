"""Let FlashInfer's FA2 MLA kernels take fp8 rows on capability 12.

Symptom: on the SM90 route an fp8 KV cache stops at the first plan, after the weight load: `FP8
    kv_data_type for MLA requires an SM90 (Hopper) device, got SM121.`
Cause: three or four places in FlashInfer that agree with each other. `_validate_generated_fa_plan`
    admits fp8 on capability 9 alone. `BatchMLAPagedAttention` (mla.cuh) picks tiles of 16 KV rows
    where an SM has less than 147,968 bytes of shared memory, and then takes 32 for fp8 all the
    same: with q [64, 512] bf16, the fp8 tile and its bf16 copy that is 117,312 bytes a block, and
    capability 12 has 101,376. FlashInfer 0.7.2 computes the same number in Python
    (`_generated_fa_shared_bytes`) and refuses by it, and it has the tile a third time in
    `_validate_fa_causal_tile_bound`.
Change: capability 12 is admitted for FA2 and rows without rope; the fp8 tile is 32 or what the
    device's table says, whichever is less, in the kernel and in each copy. 16 rows need 65,536 of
    q, 8,192 + 1,024 of fp8 rows and p, 16,384 + 32 of bf16 copy and 512 of softmax state: 91,680.
    Rows with rope stay refused: they need 101,888, half a KiB more than there is. Changing the
    gate and the kernel alone looks right in every diff and is refused by 0.7.2 at the first plan.
    The causal check must follow although sparse MLA is never causal: with a tile too large it
    lets pass what the kernel then computes without the last visible key.
    Upstream never builds the fp8 kernel with 16 rows. It compiles for sm_120a and sm_121a, and on
    an H200 made to take that tile (2026-11-29, nvcc 13.0, 1 to 64 tokens, 0 to 2,051 rows) it
    agrees with a float64 reference as the stock tile does: cosine 0.999996 or better, equal bits
    in two runs, nothing found by memcheck and racecheck. It was not run on capability 12.
Upstream: none found.
Drop when: FlashInfer plans fp8 MLA for FA2 on capability 12 itself, or no deployment takes the
    SM90 route.
Cost: half of the tile, so twice the loop steps, on that route only. Inert for bf16, for fp8 on any
    other capability and for the stock route, which has its own kernels; FlashInfer's `auto`
    choice may take FA2 for fp8 on capability 12 now, which vLLM never asks for. These kernels are
    compiled on first use from site-packages, and ninja compares the times of the headers with
    those of the object in the user's cache. No old object can stand in: the prebuilt kernel
    packages hold bf16 and fp16 MLA with rope only ("fp8 kv not supported in MLA", aot.py), and a
    stock tree refuses before it compiles. A cache that was filled by a tree with the gate alone
    fails at the launch and wants deleting.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import NamedTuple

from imagebuild.patching import cpp
from imagebuild.patching.interpret import Interpreter, Opaque, Raised
from imagebuild.patching.patch import Answer, Edit, Outcome, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import Function, NotThere, assignments, find, function, parse
from imagebuild.patching.tree import Tree

_FA = "flashinfer/mla/_batch_mla/_backends/_fa_common.py"
_GATE = "_validate_generated_fa_plan"
_MIRROR = "_generated_fa_shared_bytes"
_CAUSAL = "_validate_fa_causal_tile_bound"
_KERNEL = "flashinfer/data/include/flashinfer/attention/mla.cuh"
_LAUNCH = "BatchMLAPagedAttention"
_STOCK = "flashinfer/data/include/flashinfer/attention/sparse_mla_sm120/model/model_type.h"
_CKV, _TILE_Q = 512, 64


class _Device(NamedTuple):
    """Shared memory in bytes: of an SM, and what one block may opt into."""

    capability: tuple[int, int]
    per_sm: int
    per_block: int


_BLACKWELL = tuple(_Device((12, minor), 102400, 101376) for minor in (0, 1))  # CUDA guide, 12.x
_OTHERS = (
    _Device((8, 0), 167936, 166912),
    _Device((8, 9), 102400, 101376),
    _Device((9, 0), 233472, 232448),
    _Device((10, 0), 233472, 232448),
)


def _kernel_tile(tree: Tree, device: _Device, *, fp8: bool) -> tuple[int, int]:
    """Stages and KV rows a tile of the kernel that a device launches."""
    launch = cpp.tokens(tree, _KERNEL, _LAUNCH)
    table = cpp.macro(cpp.tokens(tree, _KERNEL), "DISPATCH_SMEM_CONFIG")
    known: dict[str, cpp.Value] = {"smem_limit_per_sm": device.per_sm}
    chosen = [body for test, body in cpp.branches(table) if cpp.evaluate(test, known)]
    if not chosen:
        raise NotThere(f"{_KERNEL} has no tile for {device.per_sm} bytes an SM")
    names: dict[str, cpp.Value] = {
        name: cpp.evaluate(value, {}) for name, value in cpp.constants(chosen[0]).items()
    }
    names["std::is_same_v<DTypeKV,__nv_fp8_e4m3>"] = fp8
    for name, value in cpp.constants(launch).items():
        if name.startswith("EFF_"):
            names[name] = cpp.evaluate(value, {**names, "std::min": min})
    parameters = cpp.template_arguments(cpp.tokens(tree, _KERNEL, "KernelTraits"), "template")
    given = cpp.template_arguments(launch, "KernelTraits")
    position = {part[-1]: at for at, part in enumerate(parameters)}
    try:
        stages, tile = (given[position[name]] for name in ("NUM_STAGES_", "CTA_TILE_KV_"))
    except (KeyError, IndexError) as error:
        raise NotThere(f"KernelTraits in {_KERNEL} has no stages or KV tile") from error
    return int(cpp.evaluate(stages, names)), int(cpp.evaluate(tile, names))


def _shared_bytes(stages: int, tile: int, kpe: int, *, fp8: bool) -> int:
    """Size of SharedStorageQKVO for bf16 queries; nvcc's sizeof agrees for sm_120a."""
    element = 1 if fp8 else 2
    query = _TILE_Q * (_CKV + kpe) * 2
    rows = stages * tile * (_CKV + max(kpe, _TILE_Q)) * element
    copies = (_CKV * 2, max(kpe, 1) * 2) if fp8 else ()
    copied = sum(-(-stages * tile * width // 16) * 16 for width in copies) if fp8 else 32
    return max(query + rows + copied + 2 * _TILE_Q * 4, _TILE_Q * _CKV * 2)


def _needed(tree: Tree, device: _Device, kpe: int, *, fp8: bool) -> int:
    stages, tile = _kernel_tile(tree, device, fp8=fp8)
    return _shared_bytes(stages, tile, kpe, fp8=fp8)


def _interpreter(tree: Tree, device: _Device) -> Interpreter:
    return Interpreter(
        parse(tree, _FA),
        {
            "get_compute_capability": lambda _device: device.capability,
            "_get_fa_shared_memory_limits": lambda _device: (device.per_sm, device.per_block),
            "is_sm90a_supported": lambda _device: device.capability == (9, 0),
            # torch's types are names here; a name of torch is what it is asked to be.
            "isinstance": lambda value, kind: isinstance(kind, Opaque) or isinstance(value, kind),
        },
    )


def _refusal(tree: Tree, device: _Device, kpe: int, *, fp8: bool, backend: str = "fa2") -> str:
    """What the plan check raises for a device, "" when it accepts."""
    offsets = SimpleNamespace(dtype=Opaque("torch.int32"), numel=lambda: 3)
    lengths = SimpleNamespace(dtype=Opaque("torch.int32"), numel=lambda: 2)
    try:
        _interpreter(tree, device).call(
            function(tree, _FA, _GATE),
            backend=backend,
            device=SimpleNamespace(),
            qo_indptr=offsets,
            kv_indptr=offsets,
            kv_indices=offsets,
            kv_len_arr=lengths,
            head_dim_ckv=_CKV,
            head_dim_kpe=kpe,
            q_data_type=Opaque("torch.bfloat16"),
            kv_data_type=Opaque("torch.float8_e4m3fn" if fp8 else "torch.bfloat16"),
            output_dtype=Opaque("torch.bfloat16"),
            scale_mode="kv-per-tensor" if fp8 else "default",
        )
    except Raised as error:
        return str(error)
    return ""


def _copies(tree: Tree, device: _Device, *, fp8: bool) -> list[str]:
    """How the copies in Python differ from the kernel on a device."""
    stages, tile = _kernel_tile(tree, device, fp8=fp8)
    found: list[str] = []
    where = f"capability {device.capability[0]}.{device.capability[1]}, {'fp8' if fp8 else 'bf16'}"
    mirror, bound = (find(parse(tree, _FA), name) for name in (_MIRROR, _CAUSAL))
    interpreter = _interpreter(tree, device)
    if isinstance(mirror, Function):
        for kpe in (0, 64):
            wanted = _shared_bytes(stages, tile, kpe, fp8=fp8)
            words = {"backend": "fa2", "ckv": _CKV, "kpe": kpe, "fp8_kv": fp8}
            bytes_ = interpreter.call(mirror, **words, smem_per_sm=device.per_sm)
            if isinstance(bytes_, Opaque):
                raise NotThere(f"{_MIRROR} cannot be evaluated")
            if bytes_ != wanted:
                found.append(f"{where}: {_MIRROR} says {bytes_}, the kernel takes {wanted}")
    if isinstance(bound, Function):
        choices = [node for node in bound.body if _binds(node, "tile_kv")]
        if len(choices) != 1:
            raise NotThere(f"{_CAUSAL} does not choose tile_kv in one statement")
        body = [*choices, ast.Return(ast.Name("tile_kv", ast.Load()))]
        kind = Opaque("torch.float8_e4m3fn" if fp8 else "torch.bfloat16")
        asked = ast.FunctionDef(_CAUSAL, bound.args, body, [])
        checked = interpreter.call(
            asked, backend="fa2", kv_data_type=kind, device=SimpleNamespace()
        )
        if checked != tile:
            found.append(f"{where}: {_CAUSAL} takes tiles of {checked}, the kernel of {tile}")
    return found


def _binds(node: ast.stmt, name: str) -> bool:
    block = ast.Module(body=[node], type_ignores=[])
    return isinstance(node, ast.If) and bool(assignments(block, name))


def _refused(tree: Tree) -> Answer:
    device = _BLACKWELL[1]
    refusal = _refusal(tree, device, 0, fp8=True)
    needed = _needed(tree, device, 0, fp8=True)
    return Answer.of(
        bool(refusal) or needed > device.per_block,
        f"the check on 12.1: {refusal or 'accepted'}; the kernel takes {needed} bytes a block",
    )


def _served(tree: Tree) -> Answer:
    refusals = [(device, _refusal(tree, device, 0, fp8=True)) for device in _BLACKWELL]
    faults = [f"12.{device.capability[1]}: {text}" for device, text in refusals if text]
    needed = _needed(tree, _BLACKWELL[0], 0, fp8=True)
    if needed > _BLACKWELL[0].per_block:
        faults.append(f"the kernel takes {needed} bytes a block")
    for device in (*_BLACKWELL, *_OTHERS):
        for fp8 in (True, False):
            faults += _copies(tree, device, fp8=fp8)
    return Answer.of(
        not faults, "; ".join(faults) or f"accepted on 12.0 and 12.1 at {needed} bytes a block"
    )


def _serves_only_that(tree: Tree) -> Answer:
    served = _served(tree)
    if served.outcome is not Outcome.HOLDS:
        return served
    # 8.9 has the small tiles of capability 12, but no fp8 plan ever gets there.
    others = [
        f"{device.capability} takes tiles of {tile} for fp8"
        for device in _OTHERS
        if (tile := _kernel_tile(tree, device, fp8=True)[1]) != 32 and device.capability != (8, 9)
    ]
    for device in (*_BLACKWELL, *_OTHERS):
        for kpe in (0, 64):
            if _refusal(tree, device, kpe, fp8=False):
                others.append(f"{device.capability} refuses bf16 with {kpe} rope columns")
            stock = device.capability == (9, 0)
            wanted = stock or (device in _BLACKWELL and kpe == 0)
            if bool(_refusal(tree, device, kpe, fp8=True)) is wanted:
                others.append(f"{device.capability} does not get {wanted} for fp8, rope {kpe}")
    if not _refusal(tree, _BLACKWELL[0], 0, fp8=True, backend="fa3"):
        others.append("fa3 is accepted on 12")
    return Answer.of(False, "; ".join(others)) if others else served


def _stock_family(tree: Tree) -> Answer:
    words = cpp.tokens(tree, _STOCK, "ModelType")
    return Answer.of("GLM53_NOPE" in words, f"the SM120 sparse kernels have {' '.join(words)}")


_TILE = Edit(
    label="tile of fp8 rows",
    path=_KERNEL,
    scope=_LAUNCH,
    anchor=(
        "    constexpr uint32_t EFF_CTA_TILE_KV = "
        "std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 : CTA_TILE_KV;\n"
    ),
    text=(
        "    // patch: flashinfer_mla_fp8_sm12x\n"
        "    constexpr uint32_t EFF_CTA_TILE_KV =\n"
        "        std::is_same_v<DTypeKV, __nv_fp8_e4m3> && CTA_TILE_KV > 32 ? 32 : CTA_TILE_KV;\n"
    ),
)
_ADMITTED = Edit(
    label="fp8 gate",
    path=_FA,
    scope=_GATE,
    anchor="        if major != 9:\n",
    text=(
        "        # patch: flashinfer_mla_fp8_sm12x\n"
        '        is_served = major == 12 and backend == "fa2" and head_dim_kpe == 0\n'
        "        if major != 9 and not is_served:\n"
    ),
)
_MIRRORED = Edit(
    label="shared memory in Python",
    path=_FA,
    scope=_MIRROR,
    anchor="    if fp8_kv:\n        tile_kv = 32\n",
    text=(
        "    # patch: flashinfer_mla_fp8_sm12x\n"
        "    if fp8_kv:\n"
        "        tile_kv = min(tile_kv, 32)\n"
    ),
)
_BOUNDED = Edit(
    label="tile of the causal check",
    path=_FA,
    scope=_CAUSAL,
    anchor="        tile_kv = 32\n",
    text=(
        "        # patch: flashinfer_mla_fp8_sm12x\n"
        "        tile_kv = 32 if _get_fa_shared_memory_limits(device)[0] >= 147968 else 16\n"
    ),
)
# The union whose size the probes compute, and where the launch's template arguments go.
_STRUCTS = (Symbol(_KERNEL, "SharedStorageQKVO"), Symbol(_KERNEL, "KernelTraits"))
# Who asks the gate.
_PLAN = Symbol(
    "flashinfer/mla/_batch_mla/_backends/fa2_backend.py", "_BatchMLAPagedAttentionFa2Backend.plan"
)

PATCH = Patch(
    name="flashinfer_mla_fp8_sm12x",
    status="pending",
    upstream="",
    origin="gate and tile: idea of MiaAI-Lab (MIT); the text and the Python copies are ours",
    variants=(
        Variant(versions=">=0.31,<0.33", edits=(_ADMITTED, _TILE), relies_on=(*_STRUCTS, _PLAN)),
        Variant(
            versions=">=0.33,<0.34",
            edits=(_ADMITTED, _TILE, _MIRRORED, _BOUNDED),
            relies_on=(*_STRUCTS, _PLAN, Symbol(_FA, "_get_fa_shared_memory_limits")),
        ),
    ),
    reason=Probe(
        claim="FA2 MLA refuses fp8 rows on capability 12, or has no shared memory for them",
        check=_refused,
        paths=(_FA, _KERNEL),
    ),
    effect=Probe(
        claim="FA2 MLA plans and fits fp8 rows without rope on capability 12, all else is stock",
        check=_serves_only_that,
        paths=(_FA, _KERNEL),
    ),
    absorbed=Probe(
        claim="FlashInfer plans and fits fp8 rows without rope on capability 12",
        check=_served,
        paths=(_FA, _KERNEL),
    ),
    notes=(
        Probe(
            claim="capability 12 has stock sparse kernels for rows without rope",
            check=_stock_family,
            paths=(_STOCK,),
        ),
    ),
)
