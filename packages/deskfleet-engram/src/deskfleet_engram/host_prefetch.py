"""Rows that will be looked up soon, put on their way by a thread of its own: `Prefetcher`.

A hint and nothing more. Lookups go by row id and answer the same without it; what fails here is met again, and
reported, by the lookup. Rows go into the reader's cache, or, where kernels read a mapped file, its pages into the page
cache. Knows no engine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import EngramError
from deskfleet_engram.host import HostRows, HostTable
from deskfleet_engram.host_residency import MappedPages
from deskfleet_engram.native import IoClass, Ticket
from deskfleet_engram.portable import NOT_MINE
from deskfleet_engram.row_cache import PROCESS_CACHE_BYTES

CACHE_SHARE = 10
"""Rows that nobody has looked up yet keep a tenth of a full cache (see cache.h); more of them push each other out."""

_WAITING = 4
"""Calls of `ask` that may wait for the thread; it is behind by whole steps then, and more would be too late."""

_logger = logging.getLogger(__name__)

Ids = NDArray[Any]
_Work = Callable[[], Ids | None]


class Prefetcher:
    """Takes work from one thread; holds the requests of the latest call only, and gives up older ones.

    Where neither a native reader nor a mapped file is at hand, it does nothing.
    """

    def __init__(
        self,
        rows: HostRows,
        pages: Mapping[int, MappedPages] | None = None,
        *,
        cache_bytes: int = PROCESS_CACHE_BYTES,
    ) -> None:
        """`pages` by layer, where kernels read mapped files; it may be filled later. `cache_bytes`: the reader's."""
        self._tables = tuple(rows.tables.values())
        self._pages = {} if pages is None else pages
        row_bytes = self._tables[0].head_dim + self._tables[0].num_scales
        self._most_rows = cache_bytes // row_bytes // CACHE_SHARE // len(self._tables)
        self._tickets: list[Ticket] = []
        self._asked: queue.Queue[_Work | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def ask(self, work: _Work) -> None:
        """Have `work` called on the thread: it returns row ids int [T, layers, columns], or None. This rank's rows are
        put on their way. Left out when the thread is far behind. Never waits."""
        with contextlib.suppress(queue.Full):
            self._running().put_nowait(work)

    def wait(self) -> None:
        """Wait until all that was asked for so far is there, or has failed. For tests."""
        is_done = threading.Event()
        self._running().put(is_done.set)
        is_done.wait()
        for ticket in self._tickets:
            try:
                ticket.wait()
            except EngramError:
                continue

    def start(self, ids: Ids) -> int:
        """Put the rows `ids` int [T, layers, columns] on their way now; return how many that are. Not for several
        threads at once. Raises RowError when the reader is closed."""
        for ticket in self._tickets:
            ticket.release()
        self._tickets = []
        num_rows = 0
        for position, table in enumerate(self._tables):
            own = np.unique(table.own_ids(ids[:, position]))
            own = own[own != NOT_MINE]
            pages = self._pages.get(table.layer)
            if pages is not None:
                pages.will_need(own - table.first_row)
            else:
                own = own[-self._most_rows :]  # of the longest n-grams, which memory has least often
                self._submit(table, own)
            num_rows += own.size
        return num_rows

    def _running(self) -> queue.Queue[_Work | None]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(weakref.ref(self), self._asked), name="engram-prefetch", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self._asked)
        return self._asked

    def _submit(self, table: HostTable, own: Ids) -> None:
        native = table.store.native
        if native is not None and own.size:
            rows = np.empty((own.size, native.place.rows.row_bytes), np.uint8)
            self._tickets.append(native.submit_packed(own, rows, io_class=IoClass.PREFETCH))


def _end(asked: queue.Queue[_Work | None]) -> None:
    with contextlib.suppress(queue.Full):  # then there is work, and the thread will look whose it is
        asked.put_nowait(None)


def _serve(owner: weakref.ref[Prefetcher], asked: queue.Queue[_Work | None]) -> None:
    """Do what is asked for until the prefetcher is gone."""
    while True:
        work = asked.get()
        prefetcher = owner()
        if work is None or prefetcher is None:
            return
        try:
            ids = work()
            if ids is not None:
                prefetcher.start(ids)
        except EngramError as error:
            _logger.warning("deskfleet-engram: rows were not fetched ahead: %s", error)
        del work, prefetcher


__all__ = ["CACHE_SHARE", "Prefetcher"]
