"""Opening a layer's rows: one contract, two backends, and no doubt about which of them answers.

`EngramStore` is what an engine needs; `open_store` chooses native or portable and says why. Knows nothing of hashing;
ids of rows that are not the caller's are replaced by NOT_MINE before they come here (`ownership`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram import _native
from deskfleet_engram.errors import NativeError
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.native import NativeOptions, NativeReader, NativeStore, RowCache
from deskfleet_engram.portable import PortableStore, RowSource
from deskfleet_engram.portable_pack import PackCounters, PortablePack
from deskfleet_engram.source import Source, SourceTable
from deskfleet_engram.tables import TablePlace, place_of_pack, place_of_rows, place_of_table

_logger = logging.getLogger(__name__)

BackendName = Literal["auto", "native", "portable"]


class EngramStore(Protocol):
    """Rows of one layer's table, by id. `gather` is a pure function of ids and files.

    Implementations are safe to use from several threads and give the same bytes for the same ids. A row that exists
    is never answered with zeros: after a RowError the outputs are untouched or hold poison (0x7f) in its place.
    """

    def gather(
        self, row_ids: NDArray[np.int64], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]
    ) -> None:
        """Fill `out_codes` [..., weight_bytes] and `out_scales` [..., scale_bytes] with rows `row_ids` [...].

        NOT_MINE (-1) gives zero codes and scales of one. Raises RowError.
        """

    def close(self) -> None:
        """Close the files, after running lookups ended. Closing twice is allowed."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What answers. `reason` says why this backend; `is_checked`, whether rows carry checksums.

    `details` are the native reader's own lines: backend_reason, direct, depth, cache, cpu, ...
    """

    backend: Literal["native", "portable"]
    reason: str
    is_checked: bool
    details: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        how = f" ({self.details['backend']})" if self.details else ""
        return f"{self.backend}{how}: {self.reason}; rows {'checked' if self.is_checked else 'unchecked'}"


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """What stores did since they were opened.

    `num_rows` rows asked for (NOT_MINE left out), `num_unique` after removing repeats within a request,
    `num_cache_hits` of them from memory, `num_fallback_rows` from the second source; `num_reads` reads of the disk
    brought `read_bytes`. `errors` counts faults by kind, also those that a retry repaired.
    """

    num_rows: int = 0
    num_unique: int = 0
    num_cache_hits: int = 0
    num_fallback_rows: int = 0
    num_reads: int = 0
    read_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class OpenStore:
    """An EngramStore that is open, with its report. `native` has tickets and counters; None when portable."""

    def __init__(
        self,
        store: PortableStore | PortablePack | NativeStore,
        report: StoreReport,
        close: Callable[[], None],
    ) -> None:
        """`close` is called once, when the store is closed."""
        self._store = store
        self._lock = threading.Lock()
        self._close: Callable[[], None] | None = close
        self.report = report
        self.native = store if isinstance(store, NativeStore) else None

    @property
    def counters(self) -> StoreCounters:
        """What was read so far; natively by all stores that were opened together, which share a reader.

        Raises RowError when the native reader is closed.
        """
        if isinstance(self._store, NativeStore):
            native = self._store.reader.counters
            shared = {name: getattr(native, name) for name in StoreCounters.__dataclass_fields__}
            return StoreCounters(**shared)
        counted = self._store.counters
        base = StoreCounters(
            num_rows=counted.num_rows,
            num_unique=counted.num_unique,
            num_reads=counted.num_reads,
            read_bytes=counted.read_bytes,
        )
        if isinstance(counted, PackCounters):
            return replace(base, num_fallback_rows=counted.num_fallback, errors=counted.errors)
        return base

    def gather(
        self, row_ids: NDArray[np.int64], out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]
    ) -> None:
        """See EngramStore."""
        self._store.gather(row_ids, out_codes, out_scales)

    def close(self) -> None:
        """Close the files, after running lookups ended. Closing twice is allowed."""
        with self._lock:
            close, self._close = self._close, None
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lease:
    """Closes a reader when the last of its stores is closed."""

    def __init__(self, reader: NativeReader, num_stores: int) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._num_open = num_stores

    def give_back(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self._reader.close()


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer of a pack to open; the fields are the parameters of PortablePack."""

    pack_dir: Path
    layer: int
    columns: tuple[int, ...] | None = None
    geometry: EngramGeometry | None = None
    token_map_sha256: str | None = None
    second_source: Source | None = None
    zero_for_others: bool = False


def open_store(
    place: RowSource | SourceTable | PackedLayer,
    *,
    backend: BackendName = "auto",
    options: NativeOptions | None = None,
    cache: RowCache | None = None,
) -> OpenStore:
    """Open one layer's rows. `backend` "auto" is native where its library is installed and can read here, else
    portable, which is logged as a warning; `report` of the result says which and why.

    Raises NativeError for "native" without a library or a way to read, and for the rest what the backends raise.
    """
    return open_stores([place], backend=backend, options=options, cache=cache)[0]


def open_stores(
    places: Iterable[RowSource | SourceTable | PackedLayer],
    *,
    backend: BackendName = "auto",
    options: NativeOptions | None = None,
    cache: RowCache | None = None,
) -> list[OpenStore]:
    """Open several layers, in the order given. Natively they share one I/O thread, which sees the requests of all
    and ends with the last of them. Otherwise as `open_store`."""
    wanted = list(places)
    reason = "as asked"
    if backend != "portable":
        try:
            return _open_native(wanted, backend, options, cache)
        except NativeError as error:
            if backend == "native":
                raise
            reason = error.message
            _logger.warning("engram rows are read by the slow portable backend: %s", error.message)
    opened: list[OpenStore] = []
    try:
        for place in wanted:
            report = StoreReport("portable", reason, isinstance(place, PackedLayer))
            store = _open_portable(place, allow_holes=options is not None and options.allow_holes)
            opened.append(OpenStore(store, report, store.close))
    except BaseException:
        for done in opened:
            done.close()
        raise
    return opened


def sum_counters(stores: Iterable[OpenStore]) -> StoreCounters:
    """Return what stores that were opened by one call of `open_stores` did together."""
    opened = list(stores)
    if opened and opened[0].native is not None:
        return opened[0].counters  # one reader for all
    total = StoreCounters()
    for store in opened:
        more = store.counters
        plain = {name: getattr(total, name) + getattr(more, name) for name in _PLAIN_COUNTERS}
        total = StoreCounters(**plain, errors=dict(Counter(total.errors) + Counter(more.errors)))
    return total


_PLAIN_COUNTERS = [name for name in StoreCounters.__dataclass_fields__ if name != "errors"]


def _open_native(
    wanted: list[RowSource | SourceTable | PackedLayer],
    backend: BackendName,
    options: NativeOptions | None,
    cache: RowCache | None,
) -> list[OpenStore]:
    _native.library()  # first, for a clear error before any file is looked at
    places = [_place(place, position) for position, place in enumerate(wanted)]
    reader = NativeReader(places, options, cache).open()
    details = reader.report
    reason = "as asked" if backend == "native" else "the native library works here"
    _logger.info("engram rows are read natively: %s", details)
    lease = _Lease(reader, len(places))
    return [
        OpenStore(
            NativeStore(reader, place.layer),
            StoreReport("native", reason, isinstance(given, PackedLayer), details),
            lease.give_back,
        )
        for given, place in zip(wanted, places, strict=True)
    ]


def _place(place: RowSource | SourceTable | PackedLayer, position: int) -> TablePlace:
    if isinstance(place, RowSource):
        return place_of_rows(place, layer=position if place.layer is None else place.layer)
    if isinstance(place, SourceTable):
        return place_of_table(place)
    return place_of_pack(
        place.pack_dir,
        place.layer,
        columns=place.columns,
        geometry=place.geometry,
        token_map_sha256=place.token_map_sha256,
        second_source=place.second_source,
        zero_for_others=place.zero_for_others,
    )


def _open_portable(
    place: RowSource | SourceTable | PackedLayer, *, allow_holes: bool
) -> PortableStore | PortablePack:
    if not isinstance(place, PackedLayer):
        source = place.row_source() if isinstance(place, SourceTable) else place
        return PortableStore(source, allow_holes=allow_holes).open()
    return PortablePack(
        place.pack_dir,
        place.layer,
        columns=place.columns,
        geometry=place.geometry,
        token_map_sha256=place.token_map_sha256,
        second_source=place.second_source,
        zero_for_others=place.zero_for_others,
    ).open()


__all__ = [
    "BackendName",
    "EngramStore",
    "OpenStore",
    "PackedLayer",
    "StoreCounters",
    "StoreReport",
    "open_store",
    "open_stores",
    "sum_counters",
]
