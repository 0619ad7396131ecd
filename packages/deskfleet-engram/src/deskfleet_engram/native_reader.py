"""The native library's store as a Python object: open files of one or more layers, one I/O thread, counters.

`native` has the lookups. Knows nothing of hashing or ranks.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from deskfleet_engram import _native
from deskfleet_engram.errors import EngramError, GeometryError, IdentityError, NativeError, RowError
from deskfleet_engram.row_cache import RowCache, process_cache
from deskfleet_engram.tables import PackPlace, ShardPlace, TablePlace

Backend = Literal["auto", "io_uring", "aio", "pool"]
_BACKENDS: tuple[Backend, ...] = ("auto", "io_uring", "aio", "pool")
Direct = Literal["auto", "require", "never"]
_DIRECTS: tuple[Direct, ...] = ("auto", "require", "never")
_ALLOW_HOLES = 1


class IoClass(enum.IntEnum):
    """Who asks. Decode may use the device's whole depth; prefetch steps back while decode is live, and its rows
    cannot drive decode's out of the cache."""

    DECODE = 0
    PREFETCH = 1


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How a reader reads.

    `backend`: "auto" takes the first of io_uring, aio and pool that works here, any other name only that one.
    `direct`: "auto" reads past the page cache where the file system can, "require" refuses to open otherwise.
    `depth` reads are at the device at once at most, `prefetch_depth` of them for prefetch while decode is live,
    which it is for `decode_hold_s` after its last request. A read unanswered for `deadline_s` has failed; one that
    failed is tried `retries` times again before the second source. `faults` is for tests (see deskfleet_engram.h).
    """

    backend: Backend = "auto"
    direct: Direct = "auto"
    depth: int = 256
    prefetch_depth: int = 16
    decode_hold_s: float = 0.2
    deadline_s: float = 2.0
    retries: int = 2
    pool_threads: int = 32
    allow_holes: bool = False
    faults: str | None = None


@dataclass(frozen=True, slots=True)
class NativeCounters:
    """What a reader did since it was opened.

    `num_rows` rows asked for (NOT_MINE left out), `num_unique` after removing repeats within a request. Once all
    tickets are finished these add up: `num_unique` = `num_cache_hits` + `num_read_rows` + `num_shared_rows` (from a
    read that another request had under way) + `num_fallback_rows` (second source) + `num_failed_rows`. `errors` counts
    faults by kind, also those that a retry repaired. `wait_us[i]` tickets took from 2**(i-1) to 2**i microseconds;
    the `num_decode_tickets` of class DECODE, which somebody waits for, took `decode_us` together.
    """

    num_tickets: int
    num_rows: int
    num_unique: int
    num_cache_hits: int
    num_read_rows: int
    num_shared_rows: int
    num_fallback_rows: int
    num_failed_rows: int
    num_reads: int
    read_bytes: int
    num_retries: int
    num_decode_reads: int
    max_prefetch_depth: int
    num_decode_tickets: int = 0
    decode_us: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wait_us: tuple[int, ...] = ()


class Closeable(Protocol):
    """What a reader closes before itself."""

    def close(self) -> None:
        """Let go of the reader; twice is allowed."""


class NativeReader:
    """Reads the tables of several layers through one I/O thread. Safe to use from several threads.

    `with NativeReader(places) as reader:` or `open()` and `close()`. Not usable after a fork.
    """

    def __init__(
        self,
        places: Sequence[TablePlace],
        options: NativeOptions | None = None,
        cache: RowCache | None = None,
    ) -> None:
        """Keep the description; nothing is opened yet. `cache` None is the process's own of 64 MiB.

        Raises NativeError when there is no native library.
        """
        self.places = {place.layer: place for place in places}
        self.options = NativeOptions() if options is None else options
        if len(self.places) != len(places) or not places:
            raise GeometryError(f"{len(places)} tables of {len(self.places)} layers; one per layer is needed")
        self._library = _native.library()
        self._cache = cache
        self._condition = threading.Condition()
        self._handle: int | None = None
        self._finalizer: weakref.finalize[..., NativeReader] | None = None
        self._num_running = 0
        self._dependents: weakref.WeakSet[Closeable] = weakref.WeakSet()

    def open(self) -> Self:
        """Open and check every file, and start the I/O thread; a no-op when already open.

        Raises RowError with `path` and `kind` for a file that is missing, short, damaged or has holes,
        IdentityError for one of another pack, layer, column or format, and NativeError when no backend works.
        """
        with self._condition:
            if self._handle is None:
                self._handle = self._start()
                self._finalizer = weakref.finalize(self, self._library.es_close, self._handle)
        return self

    def close(self) -> None:
        """Stop, after running calls ended. Unfinished tickets fail. Closing twice is allowed."""
        for dependent in list(self._dependents):
            dependent.close()
        with self._condition:
            self._condition.wait_for(lambda: self._num_running == 0)
            self._handle = None
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counters(self) -> NativeCounters:
        """What was read so far. Raises RowError when closed."""
        raw = _native.Counters()
        with self.running() as handle:
            self._library.es_get_counters(handle, ctypes.byref(raw))
        plain = [name for name in NativeCounters.__dataclass_fields__ if name not in ("errors", "wait_us")]
        named = zip(_native.KINDS, raw.errors, strict=True)
        return NativeCounters(
            **{name: getattr(raw, name) for name in plain},
            errors={name: count for name, count in named if count},
            wait_us=tuple(raw.wait_us),
        )

    @property
    def report(self) -> dict[str, str]:
        """What is in use and why: "backend", "backend_reason", "direct", "cache", ... Raises RowError when closed."""
        with self.running() as handle:
            size = self._library.es_report(handle, None, 0) + 1
            text = ctypes.create_string_buffer(size)
            self._library.es_report(handle, text, size)
        lines = text.value.decode(errors="replace").splitlines()
        return dict(line.split("=", 1) for line in lines)

    @contextmanager
    def running(self) -> Iterator[int]:
        """Keep the reader open for the body, which gets its handle. Raises RowError when closed."""
        with self._condition:
            if self._handle is None:
                raise RowError("the native reader is not open")
            handle = self._handle
            self._num_running += 1
        try:
            yield handle
        finally:
            with self._condition:
                self._num_running -= 1
                self._condition.notify_all()

    def close_with(self, dependent: Closeable) -> None:
        """Close `dependent` before this reader, if it is still there then."""
        self._dependents.add(dependent)

    @property
    def library(self) -> ctypes.CDLL:
        """The loaded library."""
        return self._library

    def _start(self) -> int:
        error = _native.Error()
        handle = ctypes.c_void_p()
        options = self._raw_options()
        result = self._library.es_create(ctypes.byref(options), ctypes.byref(handle), ctypes.byref(error))
        if result != _native.OK:
            raise _open_error(error)
        store = _native.address(handle)
        try:
            for place in self.places.values():
                first, keep_first = _raw_table(place, place.first)
                second, keep_second = (
                    (None, None) if place.second is None else _raw_table(place, place.second)
                )
                result = self._library.es_add_table(
                    store,
                    ctypes.byref(first),
                    None if second is None else ctypes.byref(second),
                    ctypes.byref(error),
                )
                del keep_first, keep_second  # the library has copied what they hold
                if result != _native.OK:
                    raise _open_error(error)
            if self._library.es_start(store, ctypes.byref(error)) != _native.OK:
                raise _open_error(error)
        except BaseException:
            self._library.es_close(store)
            raise
        return store

    def _raw_options(self) -> _native.Options:
        given = self.options
        if given.backend not in _BACKENDS or given.direct not in _DIRECTS:
            raise NativeError(
                f"backend {given.backend!r} or direct {given.direct!r} is unknown; known are "
                f"{', '.join(_BACKENDS)} and {', '.join(_DIRECTS)}"
            )
        raw = _native.Options()
        self._library.es_options_init(ctypes.byref(raw))
        if raw.struct_bytes != ctypes.sizeof(raw):
            raise NativeError(
                f"es_options has {raw.struct_bytes} bytes in the library, {ctypes.sizeof(raw)} here"
            )
        raw.backend = _BACKENDS.index(given.backend)
        raw.direct = _DIRECTS.index(given.direct)
        raw.depth = given.depth
        raw.prefetch_depth = given.prefetch_depth
        raw.decode_hold_ms = round(given.decode_hold_s * 1000)
        raw.deadline_ms = max(1, round(given.deadline_s * 1000))
        raw.retries = given.retries
        raw.pool_threads = given.pool_threads
        raw.flags = _ALLOW_HOLES if given.allow_holes else 0
        if self._cache is None:
            self._cache = process_cache(max(place.rows.row_bytes for place in self.places.values()))
        raw.cache = self._cache.handle
        raw.faults = None if given.faults is None else given.faults.encode()
        return raw


def error_kind(error: _native.Error) -> str:
    """Return the word for what went wrong, the same that verification uses."""
    kind = _native.KINDS[error.kind]
    if kind == "open":
        return "missing" if error.sys_errno == errno.ENOENT else "io"
    return kind


def _open_error(error: _native.Error) -> EngramError:
    message = error.message.decode(errors="replace")
    kind = error_kind(error)
    if kind == "identity":
        return IdentityError(message)
    if kind == "backend":
        return NativeError(message)
    if kind == "argument":
        return GeometryError(message)
    path = Path(error.file.decode(errors="surrogateescape")) if error.file else None
    return RowError(message, path=path, kind=kind)


def _raw_table(place: TablePlace, source: ShardPlace | PackPlace) -> tuple[_native.Table, object]:
    """Return the structure, and what must live as long as it."""
    table = _native.Table(
        layer=place.layer,
        source=0 if isinstance(source, PackPlace) else 1,
        row_format=place.rows.format_id,
        weight_bytes=place.rows.weight_bytes,
        scale_bytes=place.rows.scale_bytes,
        global_scale=place.global_scale,
        num_rows=place.num_rows,
    )
    if isinstance(source, ShardPlace):
        table.weight_path = _path(source.weight_path)
        table.scale_path = _path(source.scale_path)
        table.weight_offset = source.weight_offset_bytes
        table.scale_offset = source.scale_offset_bytes
        return table, None
    columns = (_native.Column * len(source.columns))()
    for raw, column in zip(columns, source.columns, strict=True):
        raw.path = None if column.path is None else _path(column.path)
        raw.column = column.column
        raw.elsewhere = int(column.is_elsewhere)
        raw.first_row = column.first_row
        raw.num_rows = column.num_rows
    table.num_columns = len(columns)
    table.pack_id = source.pack_id
    table.manifest_sha256 = source.identity_sha256
    table.columns = columns
    return table, columns


def _path(path: Path) -> bytes:
    return str(path).encode(errors="surrogateescape")


__all__ = [
    "Backend",
    "Direct",
    "IoClass",
    "NativeCounters",
    "NativeOptions",
    "NativeReader",
    "error_kind",
]
