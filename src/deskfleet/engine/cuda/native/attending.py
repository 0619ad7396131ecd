"""Attention of a few rows by the kernels of attention.cu and attention_ring.cu. Owns how a row's list is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_KEYS = 16  # places of a chunk
_RING_KEYS = 32  # of attention_ring.cu
_RING_WIDTH = 512  # whose ring and registers a processor has twice
_STAGES = 4  # chunks of the ring
_FEW = 1  # chunks of a block that attention.cu takes
_SHARE = 128  # elements of a warp
_MERGING_WARPS = 4
_FEW_ROWS = 8  # whose parts are added up by all warps of a block
_BLOCKS = 132
_RESIDENT = 2  # of those blocks, on a processor


@dataclass(frozen=True, slots=True)
class Heads:
    """What one rank attends with: its heads, elements of a head and how many of them turn, window places and picks."""

    heads: int
    width: int
    rope: int
    window: int
    num_picks: int

    def chunks(self, keys: int) -> int:
        """Chunks of so many places: none has places of both window and picks."""
        return -(-self.window // keys) + -(-self.num_picks // keys)

    def is_taken(self) -> bool:
        """Whether the kernels are written for it: records must begin at multiples of 16 bytes."""
        return self.width % 512 == 0

    def splits(self, num_rows: int) -> int:
        """Blocks of a row, all of as many chunks as each other: one for each processor, or two where chunks are many.

        A part costs as much as several chunks, so that a block has at least two of those that are longer.
        """
        blocks = num_rows * -(-self.heads // 16)
        turns = -(-self.chunks(_KEYS) * blocks // _BLOCKS)
        if turns <= _FEW or self.width != _RING_WIDTH:
            return -(-self.chunks(_KEYS) // turns)
        chunks = self.chunks(_RING_KEYS)
        return -(-chunks // max(2, -(-chunks * blocks // (_RESIDENT * _BLOCKS))))

    def takes_ring(self, splits: int) -> bool:
        """Whether blocks have so many chunks that attention_ring.cu is faster."""
        return self.width == _RING_WIDTH and -(-self.chunks(_KEYS) // splits) > _FEW


def _ring_bytes(warps: int, turns: int, record_bytes: list[int]) -> int:
    """Shared memory of a block of attention_ring.cu: chunks, scores, scales, list."""
    pitch = max((size // 16 | 1) * 16 for size in record_bytes)
    return _RING_KEYS * (min(turns, _STAGES) * pitch + warps * 2 * 4 * 16 + warps * 16 + turns * 4)


def attend(
    query: Tensor,
    pages: tuple[Tensor, Tensor | None],
    records: tuple[Tensor, Tensor | None],
    sink: Tensor,
    rope: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    shape: Heads,
    *,
    splits: int,
    picks_are_new: bool,
) -> None:
    """As attention.attend, with sums, maxima and denominators of `splits` parts of a row in `parts`.

    Of what is read, only the query may come from the kernel before this one, and, where `picks_are_new`, the numbers of
    the picked records; the records themselves are older.
    """
    num_rows, head_blocks = len(query), -(-shape.heads // 16)
    window_pages, entry_pages = pages
    common = {"HEADS": shape.heads, "D": shape.width, "ROPE": shape.rope, "SPLITS": splits}
    rings, warps = shape.takes_ring(splits), shape.width // _SHARE
    turns = -(-shape.chunks(_RING_KEYS if rings else _KEYS) // splits)
    defines = common | {
        "NUM_WINDOW": shape.window,
        "NUM_PICKS": shape.num_picks,
        "WINDOW_BYTES": window_pages.shape[1],
        "ENTRY_BYTES": 16 if entry_pages is None else entry_pages.shape[1],
        "TURNS": turns,
        "PICKS_ARE_NEW": picks_are_new,
    }
    record_bytes = [held.shape[1] for held in pages if held is not None][: 1 + (shape.num_picks > 0)]
    file = "attention_ring.cu" if rings else "attention.cu"
    own = {"STAGES": _STAGES, "RESIDENT": _RESIDENT} if rings else {"ATTEND": 1}
    kernel_for(query, file, "attend", defines | own).launch(
        (splits, num_rows, head_blocks),
        32 * warps,
        _ring_bytes(warps, turns, record_bytes) if rings else 2 * 4 * warps * 256,
        [query, window_pages, entry_pages, *records, *parts, shape.width**-0.5],
        dependent=True,
    )
    # Of more rows there are warps enough for one to add up all parts of an output.
    together = _MERGING_WARPS if num_rows <= _FEW_ROWS else 1
    kernel_for(query, "attention.cu", "merge", common | {"MERGE": 1, "TOGETHER": together}).launch(
        (shape.heads * warps * together // _MERGING_WARPS, num_rows),
        32 * _MERGING_WARPS,
        16 * 32 * _MERGING_WARPS if together > 1 else 0,
        [*parts, sink, *rope, out],
        dependent=True,
    )


__all__ = ["Heads", "attend"]
