"""The C library of csrc/glm53_sparse_mla.h, loaded and checked. Standard library only, no torch.

Tensors are passed as addresses and strides; `Arguments` has the header's names and meanings.
Nothing is loaded when this module is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ABI = 1
WIDTH = 512
MAX_HEADS = 64
MAX_SPLITS = 64
KV_BF16, KV_E4M3 = 0, 1

# Where the image has it; a wheel has it beside this module.
VARIABLE = "GLM53_SPARSE_MLA_LIBRARY"
INSTALLED = Path("/usr/local/lib/glm53/libglm53_kernel.so")
_RUNTIME = "libcudart.so.13"
_FUNCTIONS = (
    "glm53_sparse_mla_abi",
    "glm53_error_string",
    "glm53_sparse_mla_is_debug",
    "glm53_sparse_mla_query",
    "glm53_sparse_mla_workspace",
    "glm53_sparse_mla_forward",
)


class LibraryError(RuntimeError):
    """The library is missing, is another one, or cannot run on this GPU."""


class CallError(RuntimeError):
    """A function of the library refused its arguments, or CUDA failed.

    Attributes:
        code: the header's GLM53_ERROR_*, or 1000 plus a cudaError_t.
    """

    def __init__(self, what: str, code: int, words: str) -> None:
        super().__init__(f"{what}: error {code}: {words}")
        self.code = code


class _Device(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("capability", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("shared_memory", ctypes.c_int32),
        ("needed", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("is_supported", ctypes.c_int32),
        ("reason", ctypes.c_char * 256),
    )


class Arguments(ctypes.Structure):
    """glm53_sparse_mla_args. `size` is filled in; every other field starts as zero."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("kv_dtype", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("kv", ctypes.c_void_p),
        ("kv_rows", ctypes.c_int64),
        ("kv_row_stride", ctypes.c_int64),
        ("kv_page_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int32),
        ("kv_scale", ctypes.c_float),
        ("indices", ctypes.c_void_p),
        ("index_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("expected_width", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("splits", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )

    def __init__(self, **fields: int | float | None) -> None:
        super().__init__(size=ctypes.sizeof(Arguments), **fields)


@dataclass(frozen=True)
class Device:
    """A GPU, as the library sees it.

    Attributes:
        capability: such as 120 for 12.0.
        sm_count: multiprocessors.
        shared_memory: bytes that a block may ask for.
        needed: bytes that the largest kernel asks for.
        code: capability of the machine code that would run; 0 for none.
        reason: why it is not supported, as a sentence; "" when it is.
    """

    capability: int
    sm_count: int
    shared_memory: int
    needed: int
    code: int
    reason: str

    @property
    def is_supported(self) -> bool:
        """Whether the library can run there."""
        return not self.reason


class Library:
    """One loaded library.

    Raises:
        LibraryError: the file is missing, does not load, lacks a function, or has another ABI.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path else find()
        self._library = _load(self.path)
        self._bind()
        found = int(self._library.glm53_sparse_mla_abi())
        if found != ABI:
            raise LibraryError(f"{self.path}: expected ABI {ABI}, as this package has it, found "
                               f"{found}; install library and package of one build")  # fmt: skip

    def _bind(self) -> None:
        missing = [name for name in _FUNCTIONS if not hasattr(self._library, name)]
        if missing:
            raise LibraryError(f"{self.path}: expected all that the header has, found no "
                               f"{', '.join(missing)}; run build.py kernel build")  # fmt: skip
        library = self._library
        for name in _FUNCTIONS:
            getattr(library, name).restype = ctypes.c_int32
        library.glm53_error_string.restype = ctypes.c_char_p
        library.glm53_error_string.argtypes = (ctypes.c_int32,)
        library.glm53_sparse_mla_query.argtypes = (ctypes.c_int32, ctypes.POINTER(_Device))
        library.glm53_sparse_mla_workspace.argtypes = (
            ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
            ctypes.POINTER(ctypes.c_uint64),
        )  # fmt: skip
        library.glm53_sparse_mla_forward.argtypes = (ctypes.POINTER(Arguments),)

    @property
    def is_debug(self) -> bool:
        """Whether the library traps on rows that are out of range."""
        return bool(self._library.glm53_sparse_mla_is_debug())

    def query(self, device: int = -1) -> Device:
        """What a CUDA device offers; -1 is the current one. Raises CallError where CUDA fails."""
        found = _Device(size=ctypes.sizeof(_Device))
        code = self._library.glm53_sparse_mla_query(device, ctypes.byref(found))
        self._raise(f"device {device}", code)
        return Device(found.capability, found.sm_count, found.shared_memory, found.needed,
                      found.code, found.reason.decode())  # fmt: skip

    def require(self, device: int = -1) -> Device:
        """`query`, for a device that must be usable.

        Raises:
            LibraryError: it is not; the message says why.
        """
        found = self.query(device)
        if not found.is_supported:
            raise LibraryError(f"{self.path}: device {device}: {found.reason}")
        return found

    def workspace_bytes(self, tokens: int, heads: int, splits: int, sm_count: int) -> int:
        """Bytes that are enough for every call with up to `tokens` tokens and these `splits`."""
        size = ctypes.c_uint64()
        code = self._library.glm53_sparse_mla_workspace(
            tokens, heads, splits, sm_count, ctypes.byref(size)
        )
        self._raise(f"workspace of {tokens} tokens, {heads} heads, {splits} splits", code)
        return size.value

    def forward(self, arguments: Arguments) -> None:
        """Enqueues the attention on `arguments.stream`. Raises CallError; then nothing is run."""
        code = self._library.glm53_sparse_mla_forward(ctypes.byref(arguments))
        if code:  # tested here: this is called for every layer of every step
            self._raise(f"sparse MLA of {arguments.tokens} tokens, {arguments.heads} heads", code)

    def _raise(self, what: str, code: int) -> None:
        if code:
            words = self._library.glm53_error_string(code)
            raise CallError(what, code, words.decode())


def find() -> Path:
    """The library: GLM53_SPARSE_MLA_LIBRARY, else beside this module, else the image's.

    Raises:
        LibraryError: there is none.
    """
    asked = os.environ.get(VARIABLE)
    if asked:
        return Path(asked)
    places = (Path(__file__).parent / INSTALLED.name, INSTALLED)
    for place in places:
        if place.is_file():
            return place
    raise LibraryError(f"{INSTALLED.name}: expected it in {' or '.join(map(str, places))}, found "
                       f"none; build it (build.py kernel build) and set {VARIABLE}")  # fmt: skip


def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise LibraryError(f"{path}: expected the kernel library, found no file; build it: "
                           "build.py kernel build")  # fmt: skip
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if _RUNTIME not in str(error):
            raise LibraryError(f"{path}: expected a library that loads, found: {error}") from error
        reason = error
    # The loader does not know of it where torch brought it and is not imported yet.
    for runtime in _runtimes():
        try:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = error
    raise LibraryError(f"{path}: expected the CUDA runtime {_RUNTIME}, found: {reason}; install "
                       "CUDA 13's runtime, or import torch first") from reason  # fmt: skip


def _runtimes() -> Iterator[Path]:
    """Where a CUDA runtime may lie that the loader does not search: wheels, then toolkits."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) / "cu13" / "lib" for place in (spec.submodule_search_locations or ())
               ] if spec else []  # fmt: skip
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"]
    yield from (folder / _RUNTIME for folder in folders if (folder / _RUNTIME).is_file())
