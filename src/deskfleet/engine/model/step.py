"""What layers of one forward pass share. Owns the hand-over from source layers to their consumers.

A KV source fills its cache and any later layer reads it there; an index source leaves its picks here; the
candidate source leaves the positions that re-indexing layers may pick from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine import ops
from deskfleet.engine.batch import Batch
from deskfleet.engine.cache import PagedCache
from deskfleet.engine.distributed import Communicator

if TYPE_CHECKING:
    from deskfleet.engine.model.engram import RowRequest

Recorder = Callable[[str, Tensor], None]


@dataclass
class Step:
    """State of one forward pass over `batch`.

    picks[index source]  int64 [T, L]: chosen entries of each row, ascending, -1 absent
    candidates           per segment the candidate blocks int64 [n, K]; None, for one or for all, when every visible
                         entry is a candidate
    dcp                  the ranks that share out compressed KV and index keys
    rope[uses_yarn]      cos and sin float32 [T, P]
    entry_rope[ratio]    the same of the entries that this step completes
    tail                 the step of the decoder's rows, when they are fewer
    engram_requests      per Engram layer the rows asked for when the step began
    """

    batch: Batch
    cache: PagedCache
    dcp: Communicator
    rope: dict[bool, tuple[Tensor, Tensor]]
    entry_rope: dict[int, tuple[Tensor, Tensor]]
    engram_requests: dict[int, RowRequest] = field(default_factory=dict)
    picks: dict[int, Tensor] = field(default_factory=dict)
    candidates: list[Tensor | None] | None = None
    recorder: Recorder | None = None
    tail: Step | None = None
    _entries: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _places: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def picked_entries(self, kv_source: int, index_source: int) -> tuple[Tensor, Tensor]:
        """Entries bf16 [R, D] of `kv_source` that `index_source` picked, each once, and the index int64 [T, L] into
        them.

        Fetched and unpacked once for all layers that share both sources. Ranks that share out the cache hand each other
        the records: each lies on one of them, so that adding them up is exact.
        """
        found = self._entries.get((kv_source, index_source))
        if found is None:
            pool, picks = self.cache.entries[kv_source], self.picks[index_source]
            ratio, tables = self._ratio(kv_source), self.batch.tables
            if tables.dcp_size == 1:
                slots, blocks = torch.from_numpy(self.batch.slots), torch.from_numpy(tables.global_blocks)
                found = ops.ENTRY.pick(pool, picks, slots, blocks, tables.block_size // ratio)
            else:
                found = self._gathered_entries(pool, picks, ratio)
            self._entries[kv_source, index_source] = found
        return found

    def _gathered_entries(self, pool: Tensor, picks: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """The same from the ranks that share out the cache."""
        tables = self.batch.tables
        addresses = self.batch.entry_addresses(picks, ratio)
        used, index = np.unique(addresses, return_inverse=True)
        absent = int((used < 0).sum())  # 1 when any place is empty: -1 sorts first
        own, pages = tables.owned(used[absent:], ratio)
        records = torch.zeros(len(used) - absent, pool.shape[1], dtype=torch.uint8)
        records[own] = pool[pages]
        self.dcp.all_reduce(records.view(torch.int32))
        return ops.ENTRY.unpack(records), torch.from_numpy(index.reshape(addresses.shape) - absent)

    def index_keys(self, source: int, segment: int, count: int) -> tuple[Tensor, Tensor]:
        """Those of the first `count` index keys of a segment's request that lie on this rank: bf16 [m, Dᵢ], and their
        entry numbers int64 [m], ascending. Unpacked once a step."""
        found = self._keys.get((source, segment))
        if found is None:
            own, pages = self._owned(segment, count, self._ratio(source))
            keys = ops.INDEX_KEY.unpack_rows(self.cache.index_keys[source], pages)
            found = self._keys[source, segment] = (keys, own)
        return found

    def _owned(self, segment: int, count: int, ratio: int) -> tuple[Tensor, Tensor]:
        """Which of a segment's first `count` entries lie on this rank, and in which page rows.

        Sources of one ratio share them.
        """
        found = self._places.get((segment, count, ratio))
        if found is None:
            tables, slot = self.batch.tables, self.batch.segments[segment].slot
            own, pages = tables.owned(tables.entry_addresses(slot, np.arange(count), ratio), ratio)
            found = self._places[segment, count, ratio] = torch.from_numpy(own), torch.from_numpy(pages)
        return found

    def _ratio(self, source: int) -> int:
        return self.cache.formats.config.compress_ratios[source]

    def record(self, name: str, tensor: Tensor) -> None:
        """Show an intermediate to whoever watches (tests, oracles); free when nobody does."""
        if self.recorder is not None:
            self.recorder(name, tensor)


__all__ = ["Recorder", "Step"]
