"""What a request leaves behind in each layer. Owns the buffers; knows nothing of scheduling.

One slot per running request, sized for max_model_len: simple, and exact. All contents are the publisher's
fake-quantised values in bf16. A slot needs no clearing between requests, because positions say which rows
are valid and stale ones are never named by an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deskfleet.model.config import ModelConfig


class KVCache:
    """Per-slot state of every layer.

    windows[layer]      bf16 [S, W, D]: ring, position p in slot p % W; draft stages follow the backbone
    entries[source]     bf16 [S, N, D]: compressed KV of a source layer, entry j at row j
    index_keys[source]  bf16 [S, N, Dᵢ]
    open_values / open_gates[source]  float32 [S, ratio-1, D]: members of a group not yet complete
    """

    def __init__(self, config: ModelConfig, *, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.window_size = config.sliding_window
        num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
        self.windows = [
            torch.zeros(num_slots, self.window_size, config.head_dim, dtype=torch.bfloat16)
            for _ in range(num_layers)
        ]
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.open_values: dict[int, Tensor] = {}
        self.open_gates: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            ratio = config.compress_ratios[source]
            capacity = self.num_entries(ratio)
            self.entries[source] = torch.zeros(num_slots, capacity, config.head_dim, dtype=torch.bfloat16)
            self.index_keys[source] = torch.zeros(
                num_slots, capacity, config.index_head_dim, dtype=torch.bfloat16
            )
            if ratio > 1:
                self.open_values[source] = torch.zeros(num_slots, ratio - 1, config.head_dim)
                self.open_gates[source] = torch.zeros(num_slots, ratio - 1, config.head_dim)

    def num_entries(self, ratio: int) -> int:
        """Rows of a slot's compressed cache at this ratio."""
        return max(self.max_model_len // ratio, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        groups = (self.entries, self.index_keys, self.open_values, self.open_gates)
        return sum(t.nbytes for t in self.windows) + sum(t.nbytes for g in groups for t in g.values())


__all__ = ["KVCache"]
