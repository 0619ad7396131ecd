"""One step's tensors, built in one place. Owns row, ring and entry indices; knows nothing of weights.

A step is a list of segments: consecutive new positions of one request each. All indices are computed here
once and shared by every layer. Read-only during the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.cache import num_open_rows
from deskfleet.engine.tables import NULL_BLOCK, BlockTables
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet_engram import hashing, native_functions
from deskfleet_engram.geometry import EngramGeometry

_HASHED_IN_NUMPY = 64  # ids; handing fewer to the library takes longer than numpy
_HAS_LIBRARY = native_functions.is_available()


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request.

    `token_ids` are positions start..start+n-1; `image_mask` marks positions inside an image span;
    `compressed_history` holds the compressed ids (DEAD at image positions) of the up to max_ngram-1 positions
    before `start`; `compressed_ids` those of the new positions. No window rows exist before `window_from`. The first
    `num_replayed` tokens are run for their window rows alone: their entries are in the cache and stay as they are.
    With `in_full`, every token goes through every layer, also under decoder replay.
    """

    slot: int
    start: int
    token_ids: np.ndarray  # int64 (n,)
    compressed_ids: np.ndarray  # int64 (n,)
    compressed_history: np.ndarray  # int64 (<= max_ngram - 1,)
    image_mask: np.ndarray  # bool (n,)
    window_from: int = 0
    num_replayed: int = 0
    in_full: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """Where a row's window lies: rows of cat(page rows named by `previous`, this step's rows).

    previous int64 [P] page rows; index int64 [T, W] into the concatenation, -1 absent, positions ascending;
    write_rows / write_pages int64 [M]: which new rows go to which page rows afterwards.
    """

    previous: Tensor
    index: Tensor
    write_rows: Tensor
    write_pages: Tensor


@dataclass(frozen=True, slots=True)
class CompressionIndex:
    """Groups completed by this step at one ratio.

    open_rows int64 [S] flat rows of the open-group state that are needed; members int64 [N, ratio] rows of
    cat(open rows, this step's rows); entry_positions int64 [N] position of each group's first token; own int64 [M]
    those groups whose entries lie on this rank, entry_pages int64 [M] their page rows; open_write_rows /
    open_write_state int64 [M]: new rows kept as open state.
    """

    ratio: int
    open_rows: Tensor
    members: Tensor
    entry_positions: Tensor
    own: Tensor
    entry_pages: Tensor
    open_write_rows: Tensor
    open_write_state: Tensor


@dataclass(frozen=True, slots=True)
class Tail:
    """The rows of a step that go through the decoder (spec §3.3): `rows` int64 [T'] of the step, and they as a
    batch."""

    rows: Tensor
    batch: Batch


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of one step. `row_starts` has one more element than segments."""

    segments: tuple[Segment, ...]
    row_starts: tuple[int, ...]
    token_ids: Tensor  # int64 (T,)
    positions: Tensor  # int64 (T,)
    slots: np.ndarray  # int64 (T,)
    tables: BlockTables
    image_mask: Tensor  # bool (T,)
    has_images: bool  # whether any is set
    window: WindowIndex
    compression: dict[int, CompressionIndex]
    num_visible: dict[int, Tensor]  # ratio -> int64 (T,): entries visible to each row
    engram_ids: np.ndarray  # int64 (T, Engram layers, columns)
    image_embeddings: Tensor | None = field(default=None)  # bf16 (image rows, M), in row order
    tail: Tail | None = field(default=None)  # None: every row goes through every layer

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def entry_addresses(self, entries: Tensor, ratio: int) -> np.ndarray:
        """Addresses int64 [T, L] of entry numbers [T, L] of each row's own request; -1 stays -1."""
        numbers = entries.numpy()
        addresses = self.tables.entry_addresses(self.slots[:, None], np.maximum(numbers, 0), ratio)
        return np.where(numbers < 0, -1, addresses)

    @property
    def last_rows(self) -> list[int]:
        """The last row of each segment."""
        return [stop - 1 for stop in self.row_starts[1:]]


class BatchBuilder:
    """Builds batches for one configuration over the block tables of its rank."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: EngramGeometry | None,
        tables: BlockTables,
        *,
        pad_compressed_id: int,
        decoder_replay: bool = False,
    ) -> None:
        """With `decoder_replay`, only the rows of a chunk that later ones see go through the decoder layers."""
        self._config = config
        self._decoder_replay = decoder_replay
        self._geometry = geometry
        self._tables = tables
        self._pad_id = pad_compressed_id
        self._ratios = sorted({r for r in config.compress_ratios[: config.num_hidden_layers] if r > 0})

    def build(self, segments: Sequence[Segment], image_embeddings: Tensor | None = None) -> Batch:
        """Raises EngineError when a segment would leave its slot."""
        for segment in segments:
            if segment.start + segment.num_tokens > self._tables.max_model_len:
                raise EngineError(
                    f"segment {segment.start}+{segment.num_tokens} exceeds the {self._tables.max_model_len} positions "
                    "of a slot"
                )
        batch = self._build(segments, self.engram_ids(segments))
        tail = self._tail(batch) if self._decoder_replay else None
        if image_embeddings is None and tail is None:
            return batch
        return replace(batch, image_embeddings=image_embeddings, tail=tail)

    def engram_ids(self, segments: Sequence[Segment]) -> np.ndarray:
        """Table rows int64 [T, Engram layers, columns] of all positions of the segments."""
        if len(segments) == 1 or self._geometry is None:
            return _joined([self._hash(segment) for segment in segments])
        # All in one stretch, in which each has its own history before it, DEAD where its sequence has not begun: no
        # n-gram of one reaches another, and rows of the history are for nobody.
        before = self._geometry.spec.max_ngram_size - 1
        size = sum(before + segment.num_tokens for segment in segments)
        ids, is_row = np.full(size, hashing.DEAD, np.int64), np.zeros(size, bool)
        first = 0
        for segment in segments:
            row, stop = first + before, first + before + segment.num_tokens
            ids[row - len(segment.compressed_history) : row] = segment.compressed_history
            ids[row:stop] = segment.compressed_ids
            is_row[row:stop] = True
            first = stop
        rows = hash_ids(self._geometry, ids, start=before, position=before, pad_id=self._pad_id)
        return rows[is_row[before:]]

    def _build(self, segments: Sequence[Segment], engram_ids: np.ndarray) -> Batch:
        row_starts = tuple(accumulate((s.num_tokens for s in segments), initial=0))
        starts = np.array(row_starts)
        positions = _joined([np.arange(s.start, s.start + s.num_tokens) for s in segments])
        image_mask = _joined([s.image_mask for s in segments]).astype(bool)
        return Batch(
            segments=tuple(segments),
            row_starts=row_starts,
            token_ids=_tensor(_joined([s.token_ids for s in segments])),
            positions=_tensor(positions),
            slots=_joined([np.full(s.num_tokens, s.slot) for s in segments]),
            tables=self._tables,
            image_mask=torch.from_numpy(image_mask),
            has_images=bool(image_mask.any()),
            window=_window_index(segments, starts, self._tables, self._config.sliding_window),
            compression={
                ratio: _compression_index(
                    segments,
                    starts,
                    self._tables,
                    ratio,
                    num_open_rows(ratio, self._config.dspark_block_size),
                )
                for ratio in self._ratios
            },
            num_visible={ratio: _tensor((positions + 1) // ratio) for ratio in self._ratios},
            engram_ids=engram_ids,
        )

    def _tail(self, batch: Batch) -> Tail | None:
        """The rows from the first that a window block is kept of; earlier ones no later step sees in the decoder."""
        cut = [self.tail_start(segment) for segment in batch.segments]
        if all(start == segment.start for start, segment in zip(cut, batch.segments, strict=True)):
            return None
        segments, rows = [], []
        for segment, row_start, start in zip(batch.segments, batch.row_starts, cut, strict=False):
            first = start - segment.start
            rows.append(row_start + np.arange(first, segment.num_tokens))
            segments.append(
                segment
                if first == 0
                else replace(
                    segment,
                    start=start,
                    token_ids=segment.token_ids[first:],
                    image_mask=segment.image_mask[first:],
                    window_from=max(start, segment.window_from),  # rows before it have none in the decoder
                )
            )
        kept = np.concatenate(rows)
        return Tail(_tensor(kept), self._build(segments, batch.engram_ids[kept]))

    def tail_start(self, segment: Segment) -> int:
        """The first position of a segment that goes through the decoder (spec §3.3)."""
        if segment.in_full or not self._decoder_replay:
            return segment.start
        stop, size = segment.start + segment.num_tokens, self._tables.block_size
        return max(
            segment.start, ((stop - 1) // size * size - self._config.sliding_window + 1) // size * size
        )

    def _hash(self, segment: Segment) -> np.ndarray:
        if self._geometry is None:
            return np.zeros((segment.num_tokens, 0, 0), np.int64)
        ids = np.concatenate((segment.compressed_history, segment.compressed_ids)).astype(np.int64)
        history = len(segment.compressed_history)
        return hash_ids(
            self._geometry, ids, start=history, position=segment.start - history, pad_id=self._pad_id
        )


def hash_ids(
    geometry: EngramGeometry, ids: np.ndarray, *, start: int, position: int, pad_id: int
) -> np.ndarray:
    """`hashing.hash_ids`, by whichever of its twins is quicker."""
    twin = native_functions if _HAS_LIBRARY and len(ids) > _HASHED_IN_NUMPY else hashing
    rows: np.ndarray = twin.hash_ids(geometry, ids, start=start, position=position, pad_id=pad_id)
    return rows


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _window_index(
    segments: Sequence[Segment], starts: np.ndarray, tables: BlockTables, size: int
) -> WindowIndex:
    previous, index, write_rows, write_pages = [], [], [], []
    first = [max(s.start - size + 1, s.window_from, 0) for s in segments]
    first = [min(f, s.start) for f, s in zip(first, segments, strict=True)]
    total_previous = sum(s.start - f for f, s in zip(first, segments, strict=True))
    offset = 0
    for segment, row_start, oldest in zip(segments, starts, first, strict=False):
        previous.append(tables.window_rows(segment.slot, np.arange(oldest, segment.start)))
        position = segment.start + np.arange(segment.num_tokens)
        seen = np.maximum(position[:, None] - size + 1, oldest) + np.arange(size)  # (n, W), from the oldest
        source = np.where(
            seen >= segment.start, total_previous + row_start + seen - segment.start, offset + seen - oldest
        )
        index.append(np.where(seen <= position[:, None], source, -1))
        pages = tables.window_rows(segment.slot, position)
        kept = np.flatnonzero(pages >= (NULL_BLOCK + 1) * tables.block_size)
        write_rows.append(row_start + kept)
        write_pages.append(pages[kept])
        offset += segment.start - oldest
    return WindowIndex(*(_tensor(_joined(x)) for x in (previous, index, write_rows, write_pages)))


def _compression_index(
    segments: Sequence[Segment], starts: np.ndarray, tables: BlockTables, ratio: int, num_open_rows: int
) -> CompressionIndex:
    open_rows, members, addresses, entry_positions = [], [], [], []
    open_write_rows, open_write_state = [], []
    first_new = [s.start + s.num_replayed for s in segments]
    num_open = [new % ratio for new in first_new]  # members that came with an earlier step
    total_open = sum(num_open)
    offset = 0
    for segment, row_start, new, count in zip(segments, starts, first_new, num_open, strict=False):
        stop, state = segment.start + segment.num_tokens, segment.slot * num_open_rows
        open_rows.append(state + np.arange(new - count, new) % num_open_rows)
        groups = np.arange(new // ratio, stop // ratio)
        token = groups[:, None] * ratio + np.arange(ratio)  # positions of each group's members
        chunk_row = total_open + row_start + token - segment.start
        members.append(np.where(token >= new, chunk_row, offset + token % ratio))
        addresses.append(tables.entry_addresses(segment.slot, groups, ratio))
        entry_positions.append(groups * ratio)
        kept = np.arange(max(segment.start, stop - num_open_rows), stop)
        open_write_rows.append(row_start + kept - segment.start)
        open_write_state.append(state + kept % num_open_rows)
        offset += count
    own, pages = tables.owned(_joined(addresses), ratio)
    parts = [_joined(x) for x in (open_rows, members, entry_positions)]
    writes = [_joined(x) for x in (open_write_rows, open_write_state)]
    return CompressionIndex(ratio, *map(_tensor, (*parts, own, pages, *writes)))


__all__ = ["Batch", "BatchBuilder", "CompressionIndex", "Segment", "WindowIndex"]
