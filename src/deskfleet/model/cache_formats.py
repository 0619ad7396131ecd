"""Bytes of what one token leaves in a cache (spec §4.9): pure numbers, for the engine and the planner alike.

Owns the record sizes and the sizes of a block. Knows nothing of tensors or of who holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from deskfleet.model.config import ModelConfig

WINDOW_SCALE_BLOCK = 32  # FP8 codes per E8M0 scale
ENTRY_SCALE_BLOCK = 16  # FP4 codes per E4M3 scale
INDEX_KEY_SCALE_BLOCK = 32  # FP4 codes per E8M0 scale


@dataclass(frozen=True, slots=True)
class CacheFormats:
    """Record and block sizes of one configuration.

    A block is `block_size` consecutive tokens of one request. A global block holds the compressed KV and the index keys
    of every source; a window block the window rows of every layer, draft stages included when they are served.
    """

    config: ModelConfig
    block_size: int
    with_drafts: bool

    @property
    def window_record_bytes(self) -> int:
        """One window row of one layer: FP8 codes, then scales."""
        return self.config.head_dim + self.config.head_dim // WINDOW_SCALE_BLOCK

    @property
    def entry_record_bytes(self) -> int:
        """One compressed entry: two FP4 codes a byte, then scales."""
        return self.config.head_dim // 2 + self.config.head_dim // ENTRY_SCALE_BLOCK

    @property
    def index_key_record_bytes(self) -> int:
        """One index key: two FP4 codes a byte, then scales."""
        return self.config.index_head_dim // 2 + self.config.index_head_dim // INDEX_KEY_SCALE_BLOCK

    @property
    def num_window_layers(self) -> int:
        """Layers that keep window rows."""
        drafts = self.config.num_nextn_predict_layers if self.with_drafts else 0
        return self.config.num_hidden_layers + drafts

    def entries_per_block(self, ratio: int) -> int:
        """Compressed entries that one block's tokens make in a source of this ratio."""
        return self.block_size // ratio

    @property
    def global_block_bytes(self) -> int:
        """Compressed KV and index keys of one block, all sources; replicated on every rank."""
        ratios = [self.config.compress_ratios[source] for source in self.config.kv_source_layer_ids]
        record = self.entry_record_bytes + self.index_key_record_bytes
        return sum(self.entries_per_block(ratio) for ratio in ratios) * record

    @property
    def window_block_bytes(self) -> int:
        """Window rows of one block, all layers."""
        return self.block_size * self.num_window_layers * self.window_record_bytes

    @property
    def window_blocks_per_tail(self) -> int:
        """Window blocks that let a request go on at any position of the block after them."""
        return -(-(self.config.sliding_window - 1) // self.block_size) + 1


__all__ = [
    "ENTRY_SCALE_BLOCK",
    "INDEX_KEY_SCALE_BLOCK",
    "WINDOW_SCALE_BLOCK",
    "CacheFormats",
]
