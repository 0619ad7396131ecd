"""How much of a mapped split file is in memory: hints before rows are needed, and pages given back.

A mapping that kernels read grows until all of it is resident: the kernel maps large folios, and never unmaps them by
itself while there is memory. Where that memory is also the device's, it must be bounded. Knows no engine and no CUDA.

NOT verified with a device that reads through the host's page tables: only with reads of the host.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import FormatError
from deskfleet_engram.host_split import SplitFile

RESIDENT_BYTES = 2 << 30
"""By how much the split files of a rank may grow in memory, together, before all of it is given back."""

TRIM_PERIOD_S = 5.0

_SLICE_BYTES = 1 << 30
"""Given back at once: the kernel holds locks that readers wait for."""


class MappedPages:
    """The pages of one split file. Keeps the file open."""

    def __init__(self, split: SplitFile, head_dim: int, num_scales: int) -> None:
        """Raises FormatError when the file cannot be opened."""
        self._split = split
        self._head_dim = head_dim
        self._num_scales = num_scales
        try:
            self._fd = os.open(split.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FormatError(f"{split.path}: cannot open: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._fd)

    def will_need(self, rows: NDArray[Any]) -> int:
        """Ask the kernel to read the pages of `rows`, numbered in this file; return how many pages. Does not wait for
        them."""
        border = self._split.num_rows * self._head_dim
        starts = (rows * self._head_dim, border + rows * self._num_scales)
        pages = np.unique(np.concatenate(starts) // mmap.PAGESIZE)
        for page in pages.tolist():
            os.posix_fadvise(self._fd, page * mmap.PAGESIZE, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)
        return len(pages)

    def give_back(self) -> None:
        """Unmap all pages, and let the page cache drop them. Rows stay readable: they are read again when needed."""
        num_bytes = len(self._split.content)
        for begin in range(0, num_bytes, _SLICE_BYTES):
            length = min(_SLICE_BYTES, num_bytes - begin)
            self._split.mapping.madvise(mmap.MADV_DONTNEED, begin, length)
            os.posix_fadvise(self._fd, begin, length, os.POSIX_FADV_DONTNEED)


class Trimmer:
    """Gives all pages of `files` back when this process has mapped more of files than before, by `most_bytes`.

    Counted is what the process has mapped of any file: asking for these alone means reading a list of all its mappings,
    which stops its threads for longer than a step takes. Pages given back too early are read again.
    """

    def __init__(self, files: Callable[[], Sequence[MappedPages]], most_bytes: int = RESIDENT_BYTES) -> None:
        self._files = files
        self._most_bytes = most_bytes
        self._before_bytes = _mapped_bytes()

    def trim(self) -> bool:
        """Give the pages back if there are too many; say whether."""
        now_bytes = _mapped_bytes()
        self._before_bytes = min(self._before_bytes, now_bytes)  # weights that were loaded are unmapped again
        if now_bytes - self._before_bytes <= self._most_bytes:
            return False
        for file in self._files():
            file.give_back()
        self._before_bytes = _mapped_bytes()
        return True

    def start(self) -> threading.Thread:
        """Trim now and then, on a thread, for as long as the process lives."""

        def run() -> None:
            pause = threading.Event()
            while not pause.wait(TRIM_PERIOD_S):
                self.trim()

        thread = threading.Thread(target=run, name="engram-trim", daemon=True)
        thread.start()
        return thread


def _mapped_bytes() -> int:
    """Return what this process has of files in its page tables, 0 where the kernel does not say."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:")), 0)
    except OSError:
        return 0


__all__ = ["RESIDENT_BYTES", "TRIM_PERIOD_S", "MappedPages", "Trimmer"]
