"""Where a position's rows lie: block tables of every running request, the same on each rank.

Owns the tables and their arithmetic. Rank 0's `CacheManager` decides which block goes where (blocks.py); updates
travel with the step that first needs them. Knows nothing of hashes, requests or tensors.
"""

from __future__ import annotations

import msgspec
import numpy as np

NULL_BLOCK = 0
"""Never given to a request: rows whose block it is have no place of their own and are not written."""


class TableUpdate(msgspec.Struct, frozen=True):
    """Blocks of slot `slot` from block number `first` on: little-endian int32 ids, equally many of both kinds."""

    slot: int
    first: int
    global_blocks: bytes
    window_blocks: bytes


class BlockTables:
    """Two block tables per slot: of compressed KV and index keys, and of window rows.

    Window blocks are on every rank. Of `dcp_size` ranks that share out the others, rank r holds those whose id is r
    modulo dcp_size. A place in them is an address, block id times entries per block plus offset, the same on every
    rank; `owned` says which addresses lie here, and in which page row.
    """

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, dcp_rank: int = 0, dcp_size: int = 1
    ) -> None:
        self.block_size = block_size
        self.dcp_rank = dcp_rank
        self.dcp_size = dcp_size
        self.max_model_len = max_model_len
        num_blocks = -(-max_model_len // block_size)
        # np.zeros would leave them without memory until they are used; see cache.py.
        self.global_blocks = np.full((num_slots, num_blocks), NULL_BLOCK, np.int32)
        self.window_blocks = np.full((num_slots, num_blocks), NULL_BLOCK, np.int32)

    def apply(self, update: TableUpdate) -> None:
        """Take over an update of rank 0."""
        for table, ids in (
            (self.global_blocks, update.global_blocks),
            (self.window_blocks, update.window_blocks),
        ):
            blocks = np.frombuffer(ids, "<i4")
            table[update.slot, update.first : update.first + len(blocks)] = blocks

    def window_rows(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """Page rows int64 of the window rows at `positions`; below block_size where there is no place for them."""
        blocks = self.window_blocks[slot, positions // self.block_size].astype(np.int64)
        rows: np.ndarray = blocks * self.block_size + positions % self.block_size
        return rows

    def entry_addresses(self, slots: int | np.ndarray, entries: np.ndarray, ratio: int) -> np.ndarray:
        """Addresses int64 of compressed entries (or index keys) by slot and entry number; the two broadcast."""
        per_block = self.block_size // ratio
        blocks = self.global_blocks[slots, entries // per_block].astype(np.int64)
        addresses: np.ndarray = blocks * per_block + entries % per_block
        return addresses

    def owned(self, addresses: np.ndarray, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the addresses [N] lie on this rank (indices int64 [M], ascending), and their page rows int64 [M]."""
        per_block = self.block_size // ratio
        blocks = addresses // per_block
        mine = np.flatnonzero(blocks % self.dcp_size == self.dcp_rank)
        return mine, blocks[mine] // self.dcp_size * per_block + addresses[mine] % per_block


__all__ = ["NULL_BLOCK", "BlockTables", "TableUpdate"]
