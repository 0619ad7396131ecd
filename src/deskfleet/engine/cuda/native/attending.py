"""Attention of a few rows by the kernels of attention.cu. Owns how a row's list is shared out among blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deskfleet.engine.cuda.native.where import kernel_for

_KEYS = 16  # places of a chunk
_SHARE = 128  # elements of a warp
_MERGING_WARPS = 4
_BLOCKS = 132


@dataclass(frozen=True, slots=True)
class Heads:
    """What one rank attends with: its heads, elements of a head and how many of them turn, window places and picks."""

    heads: int
    width: int
    rope: int
    window: int
    num_picks: int

    @property
    def chunks(self) -> int:
        return -(-self.window // _KEYS) + -(-self.num_picks // _KEYS)

    def is_taken(self) -> bool:
        """Whether the kernels are written for it: records must begin at multiples of 16 bytes."""
        return self.width % 512 == 0

    def splits(self, num_rows: int) -> int:
        """Blocks of a row: one for each processor where chunks are enough, all of as many chunks as each other."""
        blocks = num_rows * -(-self.heads // 16)
        turns = -(-self.chunks * blocks // _BLOCKS)
        return -(-self.chunks // turns)


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
    defines = common | {
        "ATTEND": 1,
        "NUM_WINDOW": shape.window,
        "NUM_PICKS": shape.num_picks,
        "WINDOW_BYTES": window_pages.shape[1],
        "ENTRY_BYTES": 16 if entry_pages is None else entry_pages.shape[1],
        "TURNS": -(-shape.chunks // splits),
        "PICKS_ARE_NEW": picks_are_new,
    }
    warps = shape.width // _SHARE
    kernel_for(query, "attention.cu", "attend", defines).launch(
        (splits, num_rows, head_blocks),
        32 * warps,
        2 * 4 * warps * 256,
        [query, window_pages, entry_pages, *records, *parts, shape.width**-0.5],
        dependent=True,
    )
    kernel_for(query, "attention.cu", "merge", common | {"MERGE": 1}).launch(
        (shape.heads * warps, num_rows),
        32 * _MERGING_WARPS,
        16 * 32 * _MERGING_WARPS,
        [*parts, sink, *rope, out],
        dependent=True,
    )


__all__ = ["Heads", "attend"]
