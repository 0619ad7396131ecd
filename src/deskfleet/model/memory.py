"""What one rank of the native engine holds, as data: `RankMemory`. Owns the names of its lines.

The engine counts what it holds, the planner predicts it, and both speak of the same lines. Knows neither of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class TensorLine(StrEnum):
    """The lines that every array of a rank is counted in, each array in exactly one.

    Weights go by their class in the checkpoint (`model.names.TensorClass`), as the rank holds them: decoded and padded.
    """

    routed_experts = "weights.routed_expert"
    dense = "weights.dense"
    vocabulary = "weights.other"
    draft = "weights.draft"
    vision = "weights.vision"
    windows = "kv.windows"
    entries = "kv.entries"
    index_keys = "kv.index_keys"
    open_groups = "kv.open_groups"
    block_tables = "kv.block_tables"
    rope = "buffers.rope"
    engram = "buffers.engram"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process as the kernel sees it, in bytes of resident pages.

    `anon_bytes` are its own, `file_bytes` those of mapped files (libraries, mostly), `shared_bytes` shared memory;
    `peak_bytes` is the most that all of them ever were.
    """

    anon_bytes: int
    file_bytes: int
    shared_bytes: int
    peak_bytes: int

    @property
    def resident_bytes(self) -> int:
        """All resident pages."""
        return self.anon_bytes + self.file_bytes + self.shared_bytes


class DeviceLine(StrEnum):
    """The lines of what a rank holds on a GPU. Weights are packed in tiles there, padding included."""

    routed_experts = "gpu.weights.routed_expert"
    dense = "gpu.weights.dense"
    vocabulary = "gpu.weights.other"
    draft = "gpu.weights.draft"
    windows = "gpu.kv.windows"
    entries = "gpu.kv.entries"
    index_keys = "gpu.kv.index_keys"
    open_groups = "gpu.kv.open_groups"
    block_tables = "gpu.kv.block_tables"
    workspace = "gpu.buffers.steps"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a GPU by line, every line present, and what torch's allocator has given out in all; None without a
    GPU."""

    tensor_bytes: Mapping[DeviceLine, int]
    allocated_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank held when it was loaded.

    `tensor_bytes` by line, every line present. `before` is the process when it had met the group and held no tensor,
    `after` when it was ready, free heap given back. `device` is what lies on a GPU.
    """

    rank: int
    tensor_bytes: Mapping[TensorLine, int]
    before: ProcessMemory
    after: ProcessMemory
    device: DeviceMemory | None = None

    @property
    def total_tensor_bytes(self) -> int:
        """All tensors and arrays."""
        return sum(self.tensor_bytes.values())


__all__ = ["DeviceLine", "DeviceMemory", "ProcessMemory", "RankMemory", "TensorLine"]
