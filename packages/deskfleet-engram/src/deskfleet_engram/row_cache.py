"""Rows kept in memory between lookups: a bounded cache that native readers of a process share.

Evicted by S3-FIFO, in the library. Holds packed rows of any table whose rows are short enough; knows nothing of files.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass

from deskfleet_engram import _native
from deskfleet_engram.errors import NativeError

PROCESS_CACHE_BYTES = 64 << 20
"""Size of the row cache that all readers of a process share unless they are given another."""


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """State of a RowCache. New rows enter the small queue, and reach the main one when they are asked for again."""

    capacity_rows: int
    num_rows: int
    small_rows: int
    main_rows: int
    memory_bytes: int
    hits: int
    misses: int
    inserts: int
    evictions: int


class RowCache:
    """Rows in memory, for the readers it is given to. `num_bytes` bounds all of it; 0 holds nothing."""

    def __init__(self, num_bytes: int, row_bytes: int = 264) -> None:
        """Rows longer than `row_bytes` are not held. Raises NativeError when the library or memory is missing."""
        self.row_bytes = row_bytes
        library = _native.library()
        handle = ctypes.c_void_p()
        if library.es_cache_create(num_bytes, row_bytes, ctypes.byref(handle)) != _native.OK:
            raise NativeError(f"no row cache of {num_bytes} bytes for rows of {row_bytes} bytes")
        self.handle = _native.address(handle)
        self._library = library
        weakref.finalize(self, library.es_cache_release, self.handle)

    @property
    def counters(self) -> CacheCounters:
        """What it holds and did so far."""
        raw = _native.CacheCounters()
        self._library.es_cache_get_counters(self.handle, ctypes.byref(raw))
        return CacheCounters(**{name: getattr(raw, name) for name in CacheCounters.__dataclass_fields__})

    def clear(self) -> None:
        """Forget all rows."""
        self._library.es_cache_clear(self.handle)


_process_caches: dict[int, RowCache] = {}
_process_lock = threading.Lock()


def process_cache(row_bytes: int) -> RowCache:
    """Return the process's cache for rows of that length, 64 MiB, made when first asked for."""
    with _process_lock:
        if row_bytes not in _process_caches:
            _process_caches[row_bytes] = RowCache(PROCESS_CACHE_BYTES, row_bytes)
        return _process_caches[row_bytes]


__all__ = ["PROCESS_CACHE_BYTES", "CacheCounters", "RowCache", "process_cache"]
