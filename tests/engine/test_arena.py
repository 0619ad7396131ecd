"""Where weights lie: apart from each other, also where the kernel has no huge pages, and no longer than they live."""

from __future__ import annotations

import platform
import subprocess
import sys
import weakref
from itertools import pairwise

import numpy as np
import pytest

from deskfleet.engine import arena
from deskfleet.engine.arena import Arena, huge_block
from deskfleet.engine.weights import ShardReader
from deskfleet.model.layout import Layout, ShardPlan
from tests.engine.golden import checkpoint

MIB = 1 << 20

# The kernel's answer where it was built without huge pages, by a filter on madvise(…, MADV_HUGEPAGE): EINVAL.
WITHOUT_HUGE_PAGES = """
import ctypes, mmap, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 3, int(sys.argv[1])), (0x20, 0, 0, 32), (0x15, 0, 1, mmap.MADV_HUGEPAGE),
        (0x06, 0, 0, 0x50016), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0, ctypes.get_errno()
try:
    mmap.mmap(-1, 1 << 20).madvise(mmap.MADV_HUGEPAGE)
except OSError as error:
    print(error.errno)
import numpy as np
from deskfleet.engine.arena import Arena
array = Arena().take((1000, 1000), np.dtype(np.float32))
array[...] = 1
print(int(array.sum()))
"""


def test_arrays_lie_apart_at_the_beginning_of_a_line() -> None:
    """Small ones, none, one that ends a block, one larger than a block."""
    whole, rng = Arena(), np.random.default_rng(0)
    shapes = [(3,), (0, 7), (1,), *((int(n),) for n in rng.integers(1, 3 * MIB, 30)), (40 * MIB,), (5, 13)]
    arrays = [whole.take(shape, np.dtype(np.float32 if len(shape) > 1 else np.uint8)) for shape in shapes]
    for number, array in enumerate(arrays):
        assert not array.any()
        assert array.shape == shapes[number]
        assert not array.size or array.ctypes.data % 64 == 0
        array[...] = number + 1
    assert all((array == number + 1).all() for number, array in enumerate(arrays))
    ends = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays if array.size)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_a_kernel_without_huge_pages_gives_ordinary_ones() -> None:
    numbers = {"x86_64": "28", "aarch64": "233"}
    command = [sys.executable, "-c", WITHOUT_HUGE_PAGES, numbers[platform.machine()]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout.split(), result.stderr) == (["22", "1000000"], "")


def test_a_reader_leaves_nothing_but_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor keeps its block alive; with the last one the block goes back to the kernel."""
    blocks = []

    def noted(num_bytes: int) -> np.ndarray:
        block = huge_block(num_bytes)
        blocks.append(weakref.ref(block.base))  # which has the mapping, and all that is cut of it
        return block

    monkeypatch.setattr(arena, "huge_block", noted)
    with ShardReader(checkpoint(), ShardPlan(checkpoint().config, Layout(1)), 0) as reader:
        first, second = reader.fp8("layers.3.attn.wq_b"), reader.f32("layers.3.attn.q_norm.weight")
        experts = reader.experts("layers.3.ffn.experts", ("w1", "w3"), range(16))
    del reader, first, second
    assert [block() is not None for block in blocks] == [True]
    del experts
    assert [block() for block in blocks] == [None]
