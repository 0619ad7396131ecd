"""Where a rank's weights lie: large blocks that the kernel backs with huge pages, cut into arrays.

A step of a small model walks through most weights, thousands of ordinary pages; looking those up takes a tenth of its
time. A block goes back to the kernel when the last array in it is gone. Knows nothing of checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable

import numpy as np

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]

_HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 8 * _HUGE_PAGE_BYTES  # what is never touched of them takes no memory
_LINE_BYTES = 64


def huge_block(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] of zeros at the beginning of a huge page, or of an ordinary one where the kernel has none.

    Raises OSError when the kernel gives no more memory.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    skipped = -whole.ctypes.data % _HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel built without them
        # Not of the rest, which would take a huge page for a few bytes.
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return whole[skipped : skipped + num_bytes]


class Arena:
    """Arrays one behind the other in blocks; one that is larger than such a block has one to itself."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of zeros at the beginning of a cache line. Raises OSError as `huge_block`."""
        array: np.ndarray = self._bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        return array

    def _bytes(self, num_bytes: int) -> np.ndarray:
        if num_bytes > _BLOCK_BYTES:
            return huge_block(num_bytes)
        if self._used_bytes + num_bytes > len(self._block):
            self._block, self._used_bytes = huge_block(_BLOCK_BYTES), 0
        part = self._block[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return part


__all__ = ["Allocate", "Arena", "huge_block"]
