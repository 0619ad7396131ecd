"""One step's tensors, built in one place. Owns row, ring and entry indices; knows nothing of weights.

A step is a list of segments: consecutive new positions of one request each. All indices are computed here
once and shared by every layer. Read-only during the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet_engram.geometry import EngramGeometry
from deskfleet_engram.hashing import hash_ids


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one request.

    `token_ids` are positions start..start+n-1; `image_mask` marks positions inside an image span;
    `compressed_history` holds the compressed ids (DEAD at image positions) of the up to max_ngram-1 positions
    before `start`; `compressed_ids` those of the new positions.
    """

    slot: int
    start: int
    token_ids: np.ndarray  # int64 (n,)
    compressed_ids: np.ndarray  # int64 (n,)
    compressed_history: np.ndarray  # int64 (<= max_ngram - 1,)
    image_mask: np.ndarray  # bool (n,)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """Where a row's window lies: rows of cat(ring rows named by `previous`, this step's rows).

    previous int64 [P] flat ring rows; index int64 [T, W] into the concatenation, -1 absent, positions ascending;
    write_rows / write_ring int64 [M]: which new rows go to which flat ring rows afterwards.
    """

    previous: Tensor
    index: Tensor
    write_rows: Tensor
    write_ring: Tensor


@dataclass(frozen=True, slots=True)
class CompressionIndex:
    """Groups completed by this step at one ratio.

    open_rows int64 [S] flat rows of the open-group state that are needed; members int64 [N, ratio] rows of
    cat(open rows, this step's rows); entry_rows int64 [N] flat cache rows; entry_positions int64 [N] position of
    each group's first token; open_write_rows / open_write_state int64 [M]: new members left open.
    """

    ratio: int
    open_rows: Tensor
    members: Tensor
    entry_rows: Tensor
    entry_positions: Tensor
    open_write_rows: Tensor
    open_write_state: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of one step. `row_starts` has one more element than segments."""

    segments: tuple[Segment, ...]
    row_starts: tuple[int, ...]
    token_ids: Tensor  # int64 (T,)
    positions: Tensor  # int64 (T,)
    slots: Tensor  # int64 (T,)
    image_mask: Tensor  # bool (T,)
    window: WindowIndex
    compression: dict[int, CompressionIndex]
    num_visible: dict[int, Tensor]  # ratio -> int64 (T,): entries visible to each row
    engram_ids: np.ndarray  # int64 (T, Engram layers, columns)
    image_embeddings: Tensor | None = field(default=None)  # bf16 (image rows, M), in row order

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def last_rows(self) -> list[int]:
        """The last row of each segment."""
        return [stop - 1 for stop in self.row_starts[1:]]


class BatchBuilder:
    """Builds batches for one configuration and cache size."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: EngramGeometry | None,
        *,
        pad_compressed_id: int,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._pad_id = pad_compressed_id
        self._max_model_len = max_model_len
        self._ratios = sorted({r for r in config.compress_ratios[: config.num_hidden_layers] if r > 0})

    def build(self, segments: Sequence[Segment], image_embeddings: Tensor | None = None) -> Batch:
        """Raises EngineError when a segment would leave its slot."""
        for segment in segments:
            if segment.start + segment.num_tokens > self._max_model_len:
                raise EngineError(
                    f"segment {segment.start}+{segment.num_tokens} exceeds the cache of {self._max_model_len}"
                )
        starts = np.concatenate(([0], np.cumsum([s.num_tokens for s in segments]))).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in segments])
        return Batch(
            segments=tuple(segments),
            row_starts=tuple(int(x) for x in starts),
            token_ids=_tensor(np.concatenate([s.token_ids for s in segments])),
            positions=_tensor(positions),
            slots=_tensor(np.repeat([s.slot for s in segments], np.diff(starts))),
            image_mask=torch.from_numpy(np.concatenate([s.image_mask for s in segments]).astype(bool)),
            window=_window_index(segments, starts, self._config.sliding_window),
            compression={
                ratio: _compression_index(segments, starts, ratio, max(self._max_model_len // ratio, 1))
                for ratio in self._ratios
            },
            num_visible={ratio: _tensor((positions + 1) // ratio) for ratio in self._ratios},
            engram_ids=np.concatenate([self._hash(segment) for segment in segments]),
            image_embeddings=image_embeddings,
        )

    def _hash(self, segment: Segment) -> np.ndarray:
        if self._geometry is None:
            return np.zeros((segment.num_tokens, 0, 0), np.int64)
        ids = np.concatenate((segment.compressed_history, segment.compressed_ids)).astype(np.int64)
        history = len(segment.compressed_history)
        return hash_ids(
            self._geometry, ids, start=history, position=segment.start - history, pad_id=self._pad_id
        )


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _window_index(segments: Sequence[Segment], starts: np.ndarray, size: int) -> WindowIndex:
    previous, index, write_rows, write_ring = [], [], [], []
    num_previous = [min(s.start, size - 1) for s in segments]
    total_previous = sum(num_previous)
    offset = 0
    for segment, row_start, count in zip(segments, starts, num_previous, strict=False):
        first = segment.start - count
        previous.append(segment.slot * size + np.arange(first, segment.start) % size)
        rows = np.arange(segment.num_tokens)
        position = segment.start + rows[:, None]
        seen = np.maximum(position - size + 1, 0) + np.arange(size)  # (n, W), ascending from the oldest
        source = np.where(
            seen >= segment.start, total_previous + row_start + seen - segment.start, offset + seen - first
        )
        index.append(np.where(seen <= position, source, -1))
        kept = rows[-size:]  # older rows of this step would be overwritten by newer ones
        write_rows.append(row_start + kept)
        write_ring.append(segment.slot * size + (segment.start + kept) % size)
        offset += count
    return WindowIndex(*(_tensor(np.concatenate(x)) for x in (previous, index, write_rows, write_ring)))


def _compression_index(
    segments: Sequence[Segment], starts: np.ndarray, ratio: int, capacity: int
) -> CompressionIndex:
    open_rows, members, entry_rows, entry_positions = [], [], [], []
    open_write_rows, open_write_state = [], []
    num_open = [s.start % ratio for s in segments]
    total_open = sum(num_open)
    offset = 0
    for segment, row_start, count in zip(segments, starts, num_open, strict=False):
        stop = segment.start + segment.num_tokens
        open_rows.append(segment.slot * (ratio - 1) + np.arange(count))
        groups = np.arange(segment.start // ratio, stop // ratio)
        token = groups[:, None] * ratio + np.arange(ratio)  # positions of each group's members
        chunk_row = total_open + row_start + token - segment.start
        members.append(np.where(token >= segment.start, chunk_row, offset + token % ratio))
        entry_rows.append(segment.slot * capacity + groups)
        entry_positions.append(groups * ratio)
        left = np.arange(max(stop // ratio * ratio, segment.start), stop)
        open_write_rows.append(row_start + left - segment.start)
        open_write_state.append(segment.slot * (ratio - 1) + left % ratio)
        offset += count
    parts = (open_rows, members, entry_rows, entry_positions, open_write_rows, open_write_state)
    return CompressionIndex(ratio, *(_tensor(np.concatenate(x)) for x in parts))


__all__ = ["Batch", "BatchBuilder", "CompressionIndex", "Segment", "WindowIndex"]
