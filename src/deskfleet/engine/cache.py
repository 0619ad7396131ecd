"""The pages: what requests leave behind in each layer, packed, in blocks. Owns the buffers of one rank.

Rows are uint8 records (ops/records.py); which block is whose is not known here (tables.py). A block needs no clearing
between requests, because positions say which rows are valid and stale ones are never named by an index.

torch.zeros writes what it returns, so every page has its memory from the start: too little of it ends the launch, not
a request hours later. A gibibyte takes about a second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.model.cache_formats import CacheFormats


class PagedCache:
    """Pages of every layer and the open groups of every slot.

    windows[layer]      uint8 [window blocks · block size, record]: draft stages follow the backbone
    entries[source]     uint8 [blocks · entries per block, record]: compressed KV of a source layer
    index_keys[source]  uint8 [blocks · entries per block, record]
    open_values / open_gates[source]  float32 [S · open_rows[ratio], D]: pooled inputs of the latest positions,
        position p of slot s in row s · open_rows + p mod open_rows; kept long enough to take back a whole verify window
    """

    def __init__(
        self,
        formats: CacheFormats,
        *,
        num_slots: int,
        num_blocks: int,
        num_window_blocks: int,
        dcp_size: int = 1,
    ) -> None:
        """Block counts without the null block, which is added; each rank holds 1/dcp_size of the `num_blocks`."""
        config = formats.config
        self.formats = formats
        self.num_slots = num_slots
        num_window_rows = (num_window_blocks + 1) * formats.block_size
        self.windows = [
            torch.zeros(num_window_rows, formats.window_record_bytes, dtype=torch.uint8)
            for _ in range(formats.num_window_layers)
        ]
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.open_values: dict[int, Tensor] = {}
        self.open_gates: dict[int, Tensor] = {}
        self.open_rows: dict[int, int] = {}
        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            num_rows = -(-(num_blocks + 1) // dcp_size) * formats.entries_per_block(ratio)
            self.entries[source] = torch.zeros(num_rows, formats.entry_record_bytes, dtype=torch.uint8)
            self.index_keys[source] = torch.zeros(num_rows, formats.index_key_record_bytes, dtype=torch.uint8)
            if ratio > 1:
                self.open_rows[ratio] = num_open_rows(ratio, config.dspark_block_size)
                shape = (num_slots * self.open_rows[ratio], config.head_dim)
                self.open_values[source] = torch.zeros(shape)
                self.open_gates[source] = torch.zeros(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        groups = (self.entries, self.index_keys, self.open_values, self.open_gates)
        return sum(t.nbytes for t in self.windows) + sum(t.nbytes for g in groups for t in g.values())


def num_open_rows(ratio: int, num_drafts: int) -> int:
    """Rows of open-group state per slot: the open members before a verify window, and the window itself."""
    return ratio + num_drafts


__all__ = ["PagedCache", "num_open_rows"]
