"""Rows of a prompt, asked for when the scheduler has formed the batch and the step before it still runs.

Hashes the batch's tokens on the host with SGLang's own hasher and windows, and puts the rows on their way into the
reader's cache. A hint and nothing more: lookups go by row id, and answer the same without it.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from deskfleet_engram.host import HostRows
from deskfleet_engram.native import IoClass, NativeStore, Ticket
from deskfleet_engram.portable import NOT_MINE


class Prefetcher:
    """Holds the requests under way, of the last batch only."""

    def __init__(self, rows: HostRows) -> None:
        self._rows = rows
        self._tickets: list[Ticket] = []

    def start(self, hasher: Any, batch: Any) -> int:
        """Ask for the rows of a batch that extends prompts; return how many. 0: nothing is known on the host.

        Raises RowError for ids that are none of the table's.
        """
        for ticket in self._tickets:
            ticket.release()
        self._tickets = []
        ids = hashed(hasher, batch)
        if ids is None:
            return 0
        num_rows = 0
        for position, table in enumerate(self._rows.tables.values()):
            native = table.store.native
            if native is not None:
                own = np.unique(table.own_ids(ids[:, position]))
                own = own[own != NOT_MINE]
                self._tickets.append(_submit(native, own))
                num_rows += own.size
        return num_rows


def hashed(hasher: Any, batch: Any) -> Any:
    """Return the row ids int64 [T, layers, columns] of a batch whose tokens are all on the host, else None."""
    if not batch.forward_mode.is_extend_without_speculative():
        return None
    stager = importlib.import_module("sglang.srt.layers.engram_staging").EngramRowStager
    windows = stager._windows(SimpleNamespace(hasher=hasher), batch)
    return None if windows is None else hasher.hash_windows(*windows)[0].numpy()


def _submit(native: NativeStore, ids: Any) -> Ticket:
    packed = np.empty((ids.size, native.place.rows.row_bytes), np.uint8)
    return native.submit_packed(ids, packed, io_class=IoClass.PREFETCH)


__all__ = ["Prefetcher", "hashed"]
