"""What bounds the others: torch's own operations, reading alone, and gathering alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm53_sparse_mla.check.compare import Measures, measure

from kernel.bench.cases import HEAD_DIM, SM_SCALE, TOPK, Case
from kernel.bench.contenders import Call, Contender, Plan
from kernel.bench.inputs import Set

if TYPE_CHECKING:
    from torch import Tensor

READ, READ_VALUES = "read", 1 << 30  # fp32 values, 4 GiB
MATMUL, MATMUL_SIDE = "matmul", 8192
_ONE_BLOCK = 120_000  # bytes of shared memory that keep a second block off an H200's processor
_RING = 98_304


def torch_contender() -> Contender:
    """Attention out of two products, and the two ceilings of the roofline."""

    def plans(case: Case) -> Iterator[Plan]:
        if case.phase == "decode" and case.dtype == "bf16" and case.size <= 64:
            yield Plan(_attention)
        if case.name == "decode bs256 h16 bf16":
            read = _Read()
            yield Plan(read.prepare, READ, proof=read.proof, bytes=4 * READ_VALUES)
        if case.name == "prefill 4096 h64 bf16":
            product = _Matmul()
            yield Plan(product.prepare, MATMUL, proof=product.proof, bytes=6 * MATMUL_SIDE**2)

    return Contender("torch", plans)


def _attention(sets: Sequence[Set]) -> Call:
    import torch

    def call(i: int) -> Tensor:
        rows = sets[i].kv[sets[i].indices.long()]
        scores = torch.bmm(sets[i].q, rows.transpose(1, 2)).float() * SM_SCALE
        return torch.bmm(torch.softmax(scores, -1).bfloat16(), rows)

    return call


class _Read:
    """Adds up 4 GiB: what memory gives to reads alone."""

    def prepare(self, sets: Sequence[Set]) -> Call:
        """Takes none of the sets."""
        import torch

        del sets
        self.values = torch.rand(READ_VALUES, device="cuda")
        return lambda _i: self.values.sum()

    def proof(self, sets: Sequence[Set], call: Call) -> Measures:
        """Against the sum in fp64, made in parts for its memory."""
        del sets
        exact = sum(float(part.double().sum()) for part in self.values.chunk(64))
        return measure(call(0), self.values.new_tensor(exact).double())


class _Matmul:
    """A large product: what the tensor cores give."""

    def prepare(self, sets: Sequence[Set]) -> Call:
        """Takes none of the sets."""
        import torch

        del sets
        self.a, self.b = (torch.randn(MATMUL_SIDE, MATMUL_SIDE, device="cuda").bfloat16()
                          for _ in range(2))  # fmt: skip
        return lambda _i: self.a @ self.b

    def proof(self, sets: Sequence[Set], call: Call) -> Measures:
        """A few rows against fp64."""
        del sets
        return measure(call(0)[:64], self.a[:64].double() @ self.b.double())


def gather_contender(parts: Path) -> Contender:
    """Raises OSError where the library is missing or cannot be loaded."""
    path = parts / "gather.so"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the gather-only kernel, found no file")
    launch = ctypes.CDLL(str(path)).glm53_bench_gather
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p,
                       ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
                       ctypes.c_int, ctypes.c_int, ctypes.c_void_p]  # fmt: skip

    def plans(case: Case) -> Iterator[Plan]:
        size = case.size * TOPK * (HEAD_DIM * case.itemsize + 4)
        one = _Gather(launch, _ONE_BLOCK, 1)
        yield Plan(one.prepare, proof=one.proof, bytes=size)
        two = _Gather(launch, _RING, 2)
        yield Plan(two.prepare, "two_blocks", proof=two.proof, bytes=size)

    return Contender("gather", plans)


class _Gather:
    """Reads the same rows in the same tiles, with one block a multiprocessor as on sm_12x, or two.

    Raises:
        RuntimeError: a launch fails.
    """

    def __init__(self, launch: Callable[..., int], shared: int, blocks: int) -> None:
        self._launch, self._shared, self._blocks = launch, shared, blocks
        self._is_checked = False

    def prepare(self, sets: Sequence[Set]) -> Call:
        """Allocates one sum a token."""
        import torch

        kv = sets[0].kv
        tokens, width = sets[0].indices.shape
        row_bytes = HEAD_DIM * kv.element_size()
        count = torch.cuda.get_device_properties(0).multi_processor_count * self._blocks
        self.sums = torch.zeros(tokens, row_bytes // 4, dtype=torch.int32, device="cuda")

        def call(i: int) -> Tensor:
            one = sets[i]
            stream = torch.cuda.current_stream().cuda_stream
            error = self._launch(
                kv.data_ptr(), row_bytes, row_bytes, one.indices.data_ptr(), width, tokens, width,
                self._is_checked, self.sums.data_ptr(), count, self._shared, stream,
            )  # fmt: skip
            if error:
                raise RuntimeError(f"gather: CUDA error {error}")
            return self.sums

        return call

    def proof(self, sets: Sequence[Set], call: Call) -> Measures:
        """The XOR of some tokens' rows, bit by bit: nothing was left out or read twice."""
        import torch

        self.sums.zero_()
        self._is_checked = True
        found = call(0)
        self._is_checked = False
        tokens = sorted({0, len(found) // 2, len(found) - 1})
        rows = sets[0].kv.view(torch.uint8)[sets[0].indices[tokens].long()].view(torch.int32)
        while rows.shape[1] > 1:  # [tokens, 2048, ...]
            half = rows.shape[1] // 2
            rows = rows[:, :half] ^ rows[:, half:]
        return measure(found[tokens], rows[:, 0])
