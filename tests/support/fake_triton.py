"""Runs Triton kernels in plain Python: lanes are lists, programs run one after the other.

Only what glm_topk uses, and stricter than a GPU: an access outside a tensor, or an int32 that does
not fit, is an error. A stand-in for torch goes with it, whose tensors cannot wait for the device.
"""

from __future__ import annotations

import math
import operator
import random
import struct
from types import SimpleNamespace
from typing import ClassVar

INT32 = range(-(2**31), 2**31)


def bits_of(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


def float_of(bits):
    return struct.unpack("<f", struct.pack("<i", bits))[0]


class Lanes:
    """A scalar, or one value a lane."""

    def __init__(self, data):
        self.data = data

    @staticmethod
    def raw(value):
        return value.data if isinstance(value, Lanes) else value

    def _apply(self, other, op, swap=False):
        left, right = self.data, Lanes.raw(other)
        if swap:
            left, right = right, left
        sizes = {len(side) for side in (left, right) if isinstance(side, list)}
        assert len(sizes) <= 1, f"lanes of {sizes}"
        if not sizes:
            return Lanes(op(left, right))
        (size,) = sizes
        left = left if isinstance(left, list) else [left] * size
        right = right if isinstance(right, list) else [right] * size
        return Lanes([op(a, b) for a, b in zip(left, right, strict=True)])

    def __bool__(self):
        assert not isinstance(self.data, list), "a branch on lanes"
        return bool(self.data)

    def __index__(self):
        assert isinstance(self.data, int)
        return int(self.data)

    def to(self, kind, bitcast=False):
        def one(value):
            if bitcast:
                return bits_of(value) if kind == "int32" else float_of(value)
            assert kind != "int32" or int(value) in INT32
            return int(value)

        return Lanes([one(v) for v in self.data] if isinstance(self.data, list) else one(self.data))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "rshift"):
    _op = getattr(operator, _name)
    _plain = _name.rstrip("_")
    setattr(Lanes, f"__{_plain}__", lambda self, other, op=_op: self._apply(other, op))
    setattr(Lanes, f"__r{_plain}__", lambda self, other, op=_op: self._apply(other, op, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _op = getattr(operator, _name)
    setattr(Lanes, f"__{_name}__", lambda self, other, op=_op: self._apply(other, op))
Lanes.__hash__ = None


class Pointer:
    """Places in a tensor's storage."""

    def __init__(self, storage, offset):
        self.storage, self.offset = storage, offset

    def __add__(self, other):
        return Pointer(self.storage, Lanes(0) + self.offset + other)


class Tensor:
    """Strided view of a list; knows what the module may ask of a tensor without waiting."""

    def __init__(self, storage, shape, strides=None, offset=0, dtype="float32"):
        if strides is None:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self.storage, self.shape, self.strides = storage, tuple(shape), tuple(strides)
        self.offset, self.dtype, self.device, self.is_cuda = offset, dtype, "cuda:0", True

    def __add__(self, other):
        return Pointer(self.storage, Lanes(self.offset)) + other

    def stride(self, axis):
        return self.strides[axis]

    def numel(self):
        return math.prod(self.shape)

    def is_contiguous(self):
        return self.strides == Tensor([], self.shape).strides

    def rows(self):
        (rows, columns), (down, right) = self.shape, self.strides
        return [
            [self.storage[self.offset + r * down + c * right] for c in range(columns)]
            for r in range(rows)
        ]


class Kernel:
    """What `triton.jit` makes: callable from kernels, and launched over a grid."""

    launches: ClassVar[list[str]] = []

    def __init__(self, body):
        self.body = body

    def __call__(self, *args):
        return self.body(*args)

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **words):
            Kernel.launches.append(self.body.__name__)
            programs = [(x, y) for x in range(grid[0]) for y in range((*grid, 1)[1])]
            random.shuffle(programs)  # a result must not depend on who comes first
            for program in programs:
                tl.program = program
                # Lanes, as Triton has it for numbers that are not constants of the kernel.
                self.body(*(Lanes(a) if isinstance(a, int) else a for a in args), **words)

        return launch


def _jit(*bodies, **_options):
    return Kernel(bodies[0]) if bodies else Kernel


def _pairs(pointer, mask):
    offsets = Lanes.raw(pointer.offset)
    count = len(offsets) if isinstance(offsets, list) else 0
    masks = Lanes.raw(mask)
    if not count:
        return [(offsets, masks)]
    return list(zip(offsets, masks if isinstance(masks, list) else [masks] * count, strict=True))


def _load(pointer, mask=True, other=0):
    def one(offset, wanted):
        if not wanted:
            return other
        assert 0 <= offset < len(pointer.storage), f"load at {offset}"
        return pointer.storage[offset]

    found = [one(*pair) for pair in _pairs(pointer, mask)]
    return Lanes(found if isinstance(Lanes.raw(pointer.offset), list) else found[0])


def _store(pointer, value, mask=True):
    pairs = _pairs(pointer, mask)
    values = Lanes.raw(value)
    values = values if isinstance(values, list) else [values] * len(pairs)
    for (offset, wanted), item in zip(pairs, values, strict=True):
        if wanted:
            assert 0 <= offset < len(pointer.storage), f"store at {offset}"
            pointer.storage[offset] = item


def _where(test, yes, no):
    left = Lanes(Lanes.raw(test))._apply(yes, lambda t, y: (bool(t), y))
    return left._apply(no, lambda pair, n: pair[1] if pair[0] else n)


def _cumsum(lanes, axis):
    total, found = 0, []
    for value in lanes.data:
        total += value
        found.append(total)
    assert all(value in INT32 for value in found)
    return Lanes(found)


tl = SimpleNamespace(
    constexpr=None,
    int32="int32",
    int64="int64",
    float32="float32",
    program=(0, 0),
    program_id=lambda axis: Lanes(tl.program[axis]),
    arange=lambda start, stop: Lanes(list(range(start, stop))),
    full=lambda shape, value, kind: Lanes(value),
    load=_load,
    store=_store,
    where=_where,
    sum=lambda lanes: Lanes(sum(lanes.data)),
    min=lambda lanes: Lanes(min(lanes.data)),
    max=lambda lanes: Lanes(max(lanes.data)),
    minimum=lambda a, b: Lanes(Lanes.raw(a))._apply(b, min),
    cumsum=_cumsum,
    sort=lambda lanes: Lanes(sorted(lanes.data)),
    debug_barrier=lambda: None,
)
triton = SimpleNamespace(jit=_jit)


def _empty(shape, dtype, device):
    shape = (shape,) if isinstance(shape, int) else shape
    return Tensor([random.randrange(2**20) for _ in range(math.prod(shape))], shape, dtype=dtype)


def fake_torch(stock):
    """torch with `stock` as vLLM's prefill kernel."""
    return SimpleNamespace(
        Tensor=Tensor,
        float32="float32",
        int32="int32",
        empty=_empty,
        ops=SimpleNamespace(_C=SimpleNamespace(top_k_per_row_prefill=stock)),
    )
