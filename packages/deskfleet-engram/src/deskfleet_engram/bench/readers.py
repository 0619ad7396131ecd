"""Ways of reading rows, side by side on one pack: ours, and those that people use today.

`native` is this package's reader without its row cache (with it where rows are asked for again). `direct96` is what
compiled readers in the field do, 96 threads that each read one block past the page cache; it is the thread pool of this
package, and kinder than they are, for it removes repeats. `preadv32` reads single rows through the page cache from 32
Python threads, 16 rows to a task; `memmap` copies them out of a mapping. Neither of the last two checks what it reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import RowError
from deskfleet_engram.format import BLOCK_BYTES, RowFormat
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.host_work import HostWork
from deskfleet_engram.manifest import read_manifest
from deskfleet_engram.native import NativeOptions, NativeReader, NativeStore, RowCache
from deskfleet_engram.tables import place_of_pack

_TASK_ROWS = 16


class Lookup(Protocol):
    """Fetches rows named by int64 [N] into memory of its own. `num_reads`: reads of the disk so far, if it counts."""

    def __call__(self, row_ids: NDArray[np.int64]) -> None:
        """Return when the rows are there."""

    @property
    def num_reads(self) -> int:
        """Reads sent to the disk since the start, 0 where they are not counted."""


class NativeLookup:
    """A repeated request of the native reader, as a CUDA host node runs it: no Python inside a lookup."""

    def __init__(self, store: NativeStore, max_rows: int) -> None:
        """Fix the buffers."""
        rows = store.place.rows
        self._reader = store.reader
        self._ids = np.zeros(max_rows, dtype=np.int64)
        self._count = np.zeros(1, dtype=np.uint32)
        self.out = np.empty((max_rows, rows.row_bytes), dtype=np.uint8)
        self._work = HostWork(store, self._ids, (self.out,), num_ids=self._count)
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._work.run_address)

    def __call__(self, row_ids: NDArray[np.int64]) -> None:
        """See Lookup."""
        self._ids[: len(row_ids)] = row_ids
        self._count[0] = len(row_ids)
        self._run(self._work.argument)

    @property
    def num_reads(self) -> int:
        """See Lookup."""
        return self._reader.counters.num_reads

    def check(self) -> None:
        """Raise RowError if any lookup so far left poison."""
        self._work.check()
        if self._work.num_failures:
            raise RowError(f"{self._work.num_failures} lookups of the benchmark could not be answered")


class _Columns:
    """Where a row lies in the files of a pack."""

    def __init__(self, geometry: EngramGeometry, rows: RowFormat) -> None:
        self._offsets = geometry.offsets[0]
        self._rows = rows

    def place(self, row_ids: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Return column and byte offset of each row."""
        column = np.searchsorted(self._offsets, row_ids, side="right") - 1
        block, slot = np.divmod(row_ids - self._offsets[column], self._rows.rows_per_block)
        offset = (block + 1) * BLOCK_BYTES + slot * self._rows.row_bytes
        return column.tolist(), offset.tolist()


class PreadvLookup:
    """A pool of Python threads that read single rows through the page cache."""

    num_reads = 0

    def __init__(
        self, files: Files, geometry: EngramGeometry, max_rows: int, pool: ThreadPoolExecutor
    ) -> None:
        """The pool belongs to the caller."""
        self._fds = files.fds
        self._columns = _Columns(geometry, files.rows)
        self._pool = pool
        self.out = np.empty((max_rows, files.rows.row_bytes), dtype=np.uint8)

    def __call__(self, row_ids: NDArray[np.int64]) -> None:
        """See Lookup."""
        columns, offsets = self._columns.place(row_ids)

        def read(begin: int) -> None:
            for i in range(begin, min(begin + _TASK_ROWS, len(columns))):
                os.preadv(self._fds[columns[i]], [self.out[i].data], offsets[i])

        list(self._pool.map(read, range(0, len(columns), _TASK_ROWS)))


class MemmapLookup:
    """Copies rows out of mappings of the files."""

    num_reads = 0

    def __init__(
        self, files: Files, geometry: EngramGeometry, max_rows: int, maps: list[NDArray[np.uint8]]
    ) -> None:
        """`maps`: one mapping for each column."""
        self._columns = _Columns(geometry, files.rows)
        self._maps = maps
        self.out = np.empty((max_rows, files.rows.row_bytes), dtype=np.uint8)

    def __call__(self, row_ids: NDArray[np.int64]) -> None:
        """See Lookup."""
        width = self.out.shape[1]
        for i, (column, offset) in enumerate(zip(*self._columns.place(row_ids), strict=True)):
            self.out[i] = self._maps[column][offset : offset + width]


class Files:
    """The open files of a layer of a pack, for reading through the page cache, and for emptying it."""

    def __init__(self, pack_dir: Path, layer: int, stack: ExitStack) -> None:
        """Open them until the stack ends. Raises OSError."""
        self._maps: list[mmap.mmap] = []
        manifest = read_manifest(pack_dir)
        identity = manifest.identity
        self.rows = identity.rows
        self.paths = [
            pack_dir / identity.layout(layer, column).file_name for column in manifest.columns(layer)
        ]
        self.fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self.paths]
        for fd in self.fds:
            stack.callback(os.close, fd)
            os.posix_fadvise(
                fd, 0, 0, os.POSIX_FADV_RANDOM
            )  # else each read of a row fetches its neighbours too

    def mapped(self, stack: ExitStack) -> list[NDArray[np.uint8]]:
        """Map them all until the stack ends. Raises OSError."""
        self._maps = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in self.fds]
        for mapping in self._maps:
            mapping.madvise(mmap.MADV_RANDOM)
        stack.callback(self._maps.clear)
        return [np.frombuffer(mapping, dtype=np.uint8) for mapping in self._maps]

    def drop(self) -> None:
        """Forget what the page cache has of them. Pages that are mapped would stay."""
        for mapping in self._maps:
            mapping.madvise(mmap.MADV_DONTNEED)
        for fd in self.fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def native_reader(
    pack_dir: Path, layer: int, *, backend: str, threads: int, cache_bytes: int
) -> NativeReader:
    """Return a reader of one layer, not yet open."""
    place = place_of_pack(pack_dir, layer)
    options = NativeOptions(backend="pool" if backend == "pool" else "auto", pool_threads=threads)
    return NativeReader([place], options, RowCache(cache_bytes, place.rows.row_bytes))


@contextmanager
def lookups(
    pack_dir: Path, geometry: EngramGeometry, max_rows: int, *, cache_bytes: int
) -> Iterator[tuple[dict[str, Lookup], Files]]:
    """Open every way of reading the first layer, by name, and the files they read."""
    layer = geometry.spec.layer_ids[0]
    with ExitStack() as stack:
        files = Files(pack_dir, layer, stack)
        found: dict[str, Lookup] = {}
        for name, backend, threads in (("native", "auto", 32), ("direct96", "pool", 96)):
            reader = stack.enter_context(
                native_reader(pack_dir, layer, backend=backend, threads=threads, cache_bytes=cache_bytes)
            )
            found[name] = NativeLookup(NativeStore(reader, layer), max_rows)
        pool = stack.enter_context(ThreadPoolExecutor(32))
        found["preadv32"] = PreadvLookup(files, geometry, max_rows, pool)
        found["memmap"] = MemmapLookup(files, geometry, max_rows, files.mapped(stack))
        yield found, files


__all__ = ["Files", "Lookup", "MemmapLookup", "NativeLookup", "PreadvLookup", "lookups", "native_reader"]
