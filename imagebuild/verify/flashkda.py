"""Whether a tree's FlashKDA is the fixed one, has the operators that vLLM calls and fits the card.

The broken one rounds the recurrent state to bf16 after every tile and so forgets what arrives in
small steps. Both import and answer alike, so only the device code (or a run on a GPU) tells.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.patching.patch import GpuArch
from imagebuild.verify import fatbin
from imagebuild.verify.report import Group

LIBRARY = "vllm/_flashkda_C.abi3.so"
# The calls in vllm/models/glm5next/common/kda.py of 0.31.0 to 0.33.0 fit these, and no compiler
# or import checks that: a library with 14 arguments fails at the first prefill.
SCHEMAS = (
    "get_workspace_size(int T_total, int H, int N=1) -> int",
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
    "Tensor(c!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound, "
    "Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, "
    "Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()",
)
_GPU_CHECK = (
    "run `build.py kernel check` on a GPU: its tests T2 (captured share of small increments) and "
    "T3 (state error at a slow gate) tell the fixed one from the broken one"
)
_BROKEN = "it rounds the recurrent state to bf16 after every tile and loses small increments"
_NEWER_BASE = "use a base of vLLM 0.31.0 or newer, which holds the fixed one"


@dataclass(frozen=True)
class Known:
    """One FlashKDA library whose numerics are known.

    Attributes:
        wheels: vLLM releases that ship it.
        machine: processor.
        file: SHA-256 of the file.
        code: SHA-256 of its sm_120 device code as stored (see `code_digest`).
        is_fixed: whether it keeps the state in fp32 between tiles.
    """

    wheels: str
    machine: str
    file: str
    code: str
    is_fixed: bool


# From the wheels of the package index, 2026-11-29. The pins in their source: 0.30.0 b59532f
# (broken), from 0.31.0 on 17a037d (fixed); 0.33.0 differs from 0.31.0 in host code only. The two
# processors' device code disassembles to the same, but is not the same to the byte.
KNOWN = (
    Known(
        wheels="0.31.0 and 0.32.0",
        machine="x86_64",
        file="94fed636cc610e199b7b486f97c790d0919ae384f80d264e380566196dcdb862",
        code="951dad2e1f2b12503fb873d2f66b8b3c8e99d35ee4a70336d5798aa5770636b3",
        is_fixed=True,
    ),
    Known(
        wheels="0.33.0",
        machine="x86_64",
        file="2f10bcce0114256411e18a70c64ce61cdb80fd54ada49dcc65a7f7994736f047",
        code="951dad2e1f2b12503fb873d2f66b8b3c8e99d35ee4a70336d5798aa5770636b3",
        is_fixed=True,
    ),
    Known(
        wheels="0.31.0 and 0.32.0",
        machine="aarch64",
        file="8945a7e7b9e52e833208ef0c56753e3e1cd0c2d49e91fb9e31bf95e43d87ff1f",
        code="59113ead6d703e5e1470ed56306e8bc1c7d9d46623e9348692e4dfd0c9a7d451",
        is_fixed=True,
    ),
    Known(
        wheels="0.33.0",
        machine="aarch64",
        file="412e9c8eb9c4b69b8bc93de39cad7470f831fc205e6d44930a30d8d0e9982e08",
        code="59113ead6d703e5e1470ed56306e8bc1c7d9d46623e9348692e4dfd0c9a7d451",
        is_fixed=True,
    ),
    Known(
        wheels="0.30.0",
        machine="x86_64",
        file="321a64a3ae3d14c173bf1e890dd770513b61bc3e86bca1e9abf92dd4819c2351",
        code="69ab93edd93099f580c0878e3c3fe3cc2517d12c2e396029c9bc4fd2f6d5d4b6",
        is_fixed=False,
    ),
    Known(
        wheels="0.30.0",
        machine="aarch64",
        file="39583b3027ee922459d5870643198f1d25bb7676050ae99b6757235c7a30b5fc",
        code="4072d3984aa93e1a314251ba6f0bc15ea42df2941224061887d3dca88d58f93a",
        is_fixed=False,
    ),
)


def check(
    found: Group,
    root: Path,
    gpu_arch: GpuArch | None,
    platforms: Mapping[GpuArch, str],
    known: tuple[Known, ...] | None = None,
) -> None:
    """Judges the library of the tree at `root`.

    Args:
        found: takes the findings.
        root: site-packages.
        gpu_arch: whose code must be in it; None asks for none.
        platforms: docker's platform of each gpu_arch.
        known: the table, `KNOWN` unless given.
    """
    try:
        data = (root / LIBRARY).read_bytes()
    except OSError as error:
        found.error("flashkda-missing", f"expected {LIBRARY}, found: {error.strerror}",
                    file=LIBRARY, fix="install the base's vLLM wheel again")  # fmt: skip
        return
    try:
        machine = fatbin.machine(data)
    except fatbin.NotElfError as error:
        found.error("flashkda-unreadable", f"expected a shared library, found {error}",
                    file=LIBRARY, fix="install the base's vLLM wheel again")  # fmt: skip
        return
    _check_schemas(found, data)
    _check_machine(found, machine, gpu_arch, platforms)
    codes: tuple[fatbin.Code, ...] | None = None
    try:
        codes = fatbin.device_code(data)
    except fatbin.FatbinError as error:
        found.warning("flashkda-device-code", f"its GPU code cannot be read: {error}",
                      file=LIBRARY, fix=_GPU_CHECK)  # fmt: skip
    if codes is not None and gpu_arch is not None and not fatbin.runs_on(codes, gpu_arch):
        found.error("flashkda-arch", f"expected machine code that runs on {gpu_arch}, "
                    f"found {_targets(codes)}", file=LIBRARY, fix=_NEWER_BASE)  # fmt: skip
    _judge(found, data, codes, KNOWN if known is None else known)


def code_digest(codes: tuple[fatbin.Code, ...]) -> str:
    """SHA-256 of the sm_120 machine code; of the sorted digests where there are several pieces."""
    digests = sorted(code.digest for code in codes if code.kind == "elf" and code.number == 120)
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def _judge(
    found: Group, data: bytes, codes: tuple[fatbin.Code, ...] | None, known: tuple[Known, ...]
) -> None:
    digest = hashlib.sha256(data).hexdigest()
    code = code_digest(codes or ())
    by_file = next((one for one in known if one.file == digest), None)
    by_code = next((one for one in known if code and one.code == code), None)
    match = by_file or by_code
    if match is None:
        found.summary = f"sha256 {digest[:12]}, {_targets(codes or ())}"
        found.warning(
            "flashkda-unknown",
            f"neither the file (sha256 {digest[:12]}) nor its sm_120 device code "
            f"(sha256 {code[:12] or 'none'}) is one that we know, so it is open whether it is "
            "the fixed one",
            file=LIBRARY,
            fix=_GPU_CHECK,
        )
        return
    how = "file" if by_file else "sm_120 device code"
    same = f"the {how} of vLLM {match.wheels} ({match.machine})"
    if match.is_fixed:
        found.summary = f"the fixed one, {same}; {_targets(codes or ())}"
        return
    found.summary = f"{same}"
    found.error("flashkda-broken", f"this is {same}: {_BROKEN}", file=LIBRARY,
                fix=_NEWER_BASE)  # fmt: skip


def _check_schemas(found: Group, data: bytes) -> None:
    for schema in SCHEMAS:
        if schema.encode() + b"\0" in data:
            continue
        name = schema.partition("(")[0]
        there = re.findall(rb"\b%s\([ -~]*\) -> [ -~]*" % name.encode(), data)
        what = " and ".join(repr(text.decode("ascii")) for text in there[:2]) or "none"
        found.error(
            "flashkda-schema",
            f"operator {name}: expected {schema!r}, found {what}",
            file=LIBRARY,
            fix="vLLM calls it with these arguments: use the library of the same release",
        )


def _check_machine(
    found: Group, machine: str, gpu_arch: GpuArch | None, platforms: Mapping[GpuArch, str]
) -> None:
    names = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
    expected = names.get(platforms.get(gpu_arch, "")) if gpu_arch else None
    if expected is not None and machine != expected:
        found.error(
            "flashkda-machine",
            f"expected a library for {expected}, as {gpu_arch} needs, found one for {machine}",
            file=LIBRARY,
            fix="use the base of the other platform, or verify for the right GPU",
        )


def _targets(codes: tuple[fatbin.Code, ...]) -> str:
    names = list(dict.fromkeys(code.target for code in codes if code.kind == "elf"))
    return "code for " + ", ".join(names) if names else "no machine code for any GPU"
