"""What layers of one forward pass share. Owns the hand-over from source layers to their consumers.

A KV source fills its cache and any later layer reads it there; an index source leaves its picks here; the
candidate source leaves the positions that re-indexing layers may pick from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from deskfleet.engine.batch import Batch
from deskfleet.engine.cache import KVCache

if TYPE_CHECKING:
    from deskfleet.engine.model.engram import RowRequest

Recorder = Callable[[str, Tensor], None]


@dataclass
class Step:
    """State of one forward pass over `batch`.

    picks[index source]  int64 [T, L]: chosen entries of each row, ascending, -1 absent
    candidates           per segment a bool mask [n, N], or None when every visible entry is a candidate
    rope[uses_yarn]      cos and sin float32 [T, P]
    engram_requests      per Engram layer the rows asked for when the step began
    """

    batch: Batch
    cache: KVCache
    rope: dict[bool, tuple[Tensor, Tensor]]
    engram_requests: dict[int, RowRequest] = field(default_factory=dict)
    picks: dict[int, Tensor] = field(default_factory=dict)
    candidates: list[Tensor] | None = None
    recorder: Recorder | None = None

    def record(self, name: str, tensor: Tensor) -> None:
        """Show an intermediate to whoever watches (tests, oracles); free when nobody does."""
        if self.recorder is not None:
            self.recorder(name, tensor)


__all__ = ["Recorder", "Step"]
