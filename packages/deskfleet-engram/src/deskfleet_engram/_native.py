"""The native library as ctypes sees it: where it is, its structures, its functions. Mirrors `deskfleet_engram.h`.

Loading is lazy and happens once. Nothing here interprets what the functions answer; `native` does.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, ClassVar

from deskfleet_engram.errors import NativeError

ABI_VERSION = 1
LIBRARY_NAME = "libdeskfleet_engram.so"
LIBRARY_VARIABLE = "DESKFLEET_ENGRAM_LIBRARY"
"""Environment variable: another library file to load, such as one built with sanitizers."""

OK, PENDING, FAILED = 0, 1, 2
E_RANGE, E_FORKED = -2, -8

KINDS = (
    "none",
    "argument",
    "range",
    "open",
    "size",
    "hole",
    "superblock",
    "identity",
    "io",
    "short",
    "checksum",
    "misplaced",
    "deadline",
    "cancelled",
    "backend",
    "missing",
)
"""The words for `es_kind`, in its order."""

NONE32, NONE64 = 2**32 - 1, 2**64 - 1
NUM_WAIT_BUCKETS = 32


class _Sized(ctypes.Structure):
    """A structure that opens with its own size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(ctypes.sizeof(self), **fields)


class Error(ctypes.Structure):
    """`es_error`."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("sys_errno", c_int32),
        ("layer", c_uint32),
        ("column", c_uint32),
        ("row", c_uint64),
        ("column_row", c_uint64),
        ("block", c_uint64),
        ("num_rows", c_uint64),
        ("file", c_char * 512),
        ("message", c_char * 512),
    ]


class Options(ctypes.Structure):
    """`es_options`; filled by `es_options_init`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("backend", c_uint32),
        ("direct", c_uint32),
        ("depth", c_uint32),
        ("prefetch_depth", c_uint32),
        ("decode_hold_ms", c_uint32),
        ("deadline_ms", c_uint32),
        ("retries", c_uint32),
        ("pool_threads", c_uint32),
        ("flags", c_uint32),
        ("cache_bytes", c_uint64),
        ("cache", c_void_p),
        ("faults", c_char_p),
    ]


class Column(ctypes.Structure):
    """`es_column`."""

    _fields_: ClassVar = [
        ("path", c_char_p),
        ("column", c_uint32),
        ("elsewhere", c_uint32),
        ("first_row", c_uint64),
        ("num_rows", c_uint64),
    ]


class Table(_Sized):
    """`es_table`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("layer", c_uint32),
        ("source", c_uint32),
        ("row_format", c_uint32),
        ("weight_bytes", c_uint32),
        ("scale_bytes", c_uint32),
        ("global_scale", c_float),
        ("num_columns", c_uint32),
        ("num_rows", c_uint64),
        ("pack_id", c_uint64),
        ("manifest_sha256", c_char_p),
        ("columns", POINTER(Column)),
        ("weight_path", c_char_p),
        ("scale_path", c_char_p),
        ("weight_offset", c_uint64),
        ("scale_offset", c_uint64),
    ]


class Request(_Sized):
    """`es_request`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("layer", c_uint32),
        ("ids", c_void_p),
        ("num_ids", c_uint64),
        ("id_bytes", c_uint32),
        ("io_class", c_uint32),
        ("format", c_uint32),
        ("deadline_ms", c_uint32),
        ("out", c_void_p),
        ("out_scales", c_void_p),
        ("out_stride_bytes", c_uint64),
        ("scales_stride_bytes", c_uint64),
    ]


class Counters(_Sized):
    """`es_counters`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("reserved", c_uint32),
        ("num_tickets", c_uint64),
        ("num_rows", c_uint64),
        ("num_unique", c_uint64),
        ("num_cache_hits", c_uint64),
        ("num_read_rows", c_uint64),
        ("num_shared_rows", c_uint64),
        ("num_fallback_rows", c_uint64),
        ("num_failed_rows", c_uint64),
        ("num_reads", c_uint64),
        ("read_bytes", c_uint64),
        ("num_retries", c_uint64),
        ("num_decode_reads", c_uint64),
        ("max_prefetch_depth", c_uint64),
        ("errors", c_uint64 * len(KINDS)),
        ("wait_us", c_uint64 * NUM_WAIT_BUCKETS),
        ("num_decode_tickets", c_uint64),
        ("decode_us", c_uint64),
    ]


class CacheCounters(_Sized):
    """`es_cache_counters`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("row_bytes", c_uint32),
        ("capacity_rows", c_uint64),
        ("num_rows", c_uint64),
        ("small_rows", c_uint64),
        ("main_rows", c_uint64),
        ("memory_bytes", c_uint64),
        ("hits", c_uint64),
        ("misses", c_uint64),
        ("inserts", c_uint64),
        ("evictions", c_uint64),
    ]


class HashPlan(_Sized):
    """`es_hash_plan`."""

    _fields_: ClassVar = [
        ("struct_bytes", c_uint32),
        ("num_layers", c_uint32),
        ("max_ngram_size", c_uint32),
        ("num_heads", c_uint32),
        ("id_bytes", c_uint32),
        ("reserved", c_uint32),
        ("vocab_size", c_int64),
        ("pad_id", c_int64),
        ("multipliers", c_void_p),
        ("primes", c_void_p),
        ("offsets", c_void_p),
    ]


# Result and arguments of each function that Python calls.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "es_abi_version": (c_uint32, ()),
    "es_cpu_features": (c_char_p, ()),
    "es_options_init": (None, (POINTER(Options),)),
    "es_create": (c_int32, (POINTER(Options), POINTER(c_void_p), POINTER(Error))),
    "es_add_table": (c_int32, (c_void_p, POINTER(Table), POINTER(Table), POINTER(Error))),
    "es_start": (c_int32, (c_void_p, POINTER(Error))),
    "es_close": (None, (c_void_p,)),
    "es_report": (c_size_t, (c_void_p, c_char_p, c_size_t)),
    "es_get_counters": (None, (c_void_p, POINTER(Counters))),
    "es_submit": (c_int32, (c_void_p, POINTER(Request), POINTER(c_uint64), POINTER(Error))),
    "es_poll": (c_int32, (c_void_p, c_uint64, POINTER(Error))),
    "es_wait": (c_int32, (c_void_p, c_uint64, c_int64, POINTER(Error))),
    "es_release": (c_int32, (c_void_p, c_uint64)),
    "es_gather": (c_int32, (c_void_p, POINTER(Request), POINTER(Error))),
    "es_work_create": (
        c_int32,
        (c_void_p, POINTER(Request), c_void_p, c_void_p, POINTER(c_void_p), POINTER(Error)),
    ),
    "es_hostfn": (None, (c_void_p,)),
    "es_hostfn_submit": (None, (c_void_p,)),
    "es_hostfn_wait": (None, (c_void_p,)),
    "es_work_result": (c_int32, (c_void_p, POINTER(Error))),
    "es_work_failures": (c_uint64, (c_void_p,)),
    "es_work_destroy": (None, (c_void_p,)),
    "es_cache_create": (c_int32, (c_uint64, c_uint32, POINTER(c_void_p))),
    "es_cache_release": (None, (c_void_p,)),
    "es_cache_get_counters": (None, (c_void_p, POINTER(CacheCounters))),
    "es_cache_clear": (None, (c_void_p,)),
    "es_hash": (c_int32, (POINTER(HashPlan), c_void_p, c_uint64, c_uint64, c_void_p, POINTER(c_uint64))),
    "es_crc32c": (c_uint32, (c_uint32, c_void_p, c_size_t)),
    "es_decode_bf16": (
        c_int32,
        (c_uint32, c_uint32, c_uint32, c_uint32, c_float, c_void_p, c_uint64, c_void_p),
    ),
}


def library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises NativeError, every time, when there is none that this process can load.
    """
    path = _find()
    if path is None:
        raise NativeError(
            f"{LIBRARY_NAME} is not installed beside {__package__}",
            hint='install the package from a wheel, or with g++ present; backend="portable" does without',
        )
    return _load(str(path))


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path}: cannot be used: {error}") from error
    found = loaded.es_abi_version()
    if found != ABI_VERSION:
        raise NativeError(
            f"{path}: speaks version {found} of the interface, not {ABI_VERSION}",
            hint="library and Python files come from different versions; install the package again",
        )
    return loaded


def _find() -> Path | None:
    """Return the library's file. An editable installation keeps it in another directory than the sources."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return Path(given)
    import deskfleet_engram

    for directory in deskfleet_engram.__path__:
        path = Path(directory) / LIBRARY_NAME
        if path.exists():
            return path
    return None


def address(pointer: c_uint8 | c_void_p) -> int:
    """Return the number in a pointer that must not be null."""
    value = pointer.value
    if value is None:
        raise NativeError("the native library gave a null pointer")
    return int(value)


__all__ = [
    "ABI_VERSION",
    "E_FORKED",
    "E_RANGE",
    "FAILED",
    "KINDS",
    "LIBRARY_NAME",
    "LIBRARY_VARIABLE",
    "NONE32",
    "NONE64",
    "NUM_WAIT_BUCKETS",
    "OK",
    "PENDING",
    "CacheCounters",
    "Column",
    "Counters",
    "Error",
    "HashPlan",
    "Options",
    "Request",
    "Table",
    "address",
    "library",
]
