"""The expansion kernel, run lane by lane without Triton, drops pools that the request lacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.patches.harness import VERSIONS, PatchContract, extract, patched

PATH = "vllm/models/glm5next/nvidia/ops/kpool_compress.py"
SCOPE = "_expand_pools_and_append_tail_kernel"


class TestPidClamp(PatchContract):
    name = "vllm_kpool_pid_clamp"
    upstream_fix = (
        (
            PATH,
            r"tl\.where\(pid >= 0, hist_val, -1\)",
            "tl.where((pid >= 0) & (pid * POOL_SIZE < tail_start), hist_val, -1)",
        ),
    )


class Lane(int):
    """One lane of a Triton block: an int that keeps its kind and can be cast."""

    def __add__(self, other):
        return Lane(int(self) + other)

    def __sub__(self, other):
        return Lane(int(self) - other)

    def __mul__(self, other):
        return Lane(int(self) * other)

    def __floordiv__(self, other):
        return Lane(int(self) // other)

    def __mod__(self, other):
        return Lane(int(self) % other)

    __radd__, __rmul__ = __add__, __mul__

    def to(self, dtype):
        assert dtype == "int32"
        return self


class Pointer:
    """An array and a position in it."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, offset):
        return Pointer(self.array, self.at + int(offset))


def expand(tree, pools, seq_len, pool_size=4):
    """What the kernel writes for one row, column by column; None where it writes nothing."""
    columns = len(pools) * pool_size + pool_size - 1
    out = [None] * columns
    lane = Lane(0)

    def load(pointer, mask=True, other=None):
        return Lane(pointer.array[pointer.at] if mask else other)

    def store(pointer, value, mask=True):
        if mask:
            pointer.array[pointer.at] = int(value)

    tl = SimpleNamespace(
        constexpr=None,
        int32="int32",
        program_id=lambda axis: Lane(0),
        arange=lambda start, end: lane,
        load=load,
        store=store,
        where=lambda test, yes, no: Lane(yes if test else no),
    )
    kernel = extract(tree, PATH, SCOPE, {"tl": tl})
    for column in range(columns + 3):
        lane = Lane(column)
        kernel(Pointer(pools), Pointer([seq_len]), Pointer(out), len(pools) * pool_size, columns,
               pool_size, 128, len(pools), columns)  # fmt: skip
    return out


@pytest.mark.parametrize("version", VERSIONS)
def test_only_pools_of_the_request_become_tokens(real_tree, version):
    tree = patched(TestPidClamp.name, real_tree(version))
    # Ten tokens: pools 0 and 1 are whole, tokens 8 and 9 are the tail.
    assert expand(tree, [1, 2, -1, 0], 10) == [
        *(4, 5, 6, 7), *(-1, -1, -1, -1), *(-1, -1, -1, -1), *(0, 1, 2, 3), *(8, 9, -1),
    ]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_turns_them_into_tokens_of_others(real_tree, version):
    assert expand(real_tree(version), [1, 2, -1, 0], 10)[4:8] == [8, 9, 10, 11]


@pytest.mark.parametrize("version", VERSIONS)
def test_valid_pools_are_untouched(real_tree, version):
    pristine = real_tree(version)
    for seq_len, pools in ((16, [3, 0, 2, 1]), (3, [-1, -1]), (4, [0, -1])):
        tree = patched(TestPidClamp.name, pristine)
        assert expand(tree, pools, seq_len) == expand(pristine, pools, seq_len)


def test_garbage_of_a_short_request(real_tree):
    tree = patched(TestPidClamp.name, real_tree("0.33.0"))
    assert expand(tree, [0, 2**31 - 1], 3) == [*[-1] * 8, 0, 1, 2]
