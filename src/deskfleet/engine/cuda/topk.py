"""The exact best of bf16 scores, ties to the lower number (spec §4.5, §4.6). Owns the choice, by one program or many.
Where one program is as quick, a GPU runs native/picking.py's kernels, as far as they are written for the scores.

    select_kernel                one program a row looks at all its scores three times
    upper_kernel, lower_kernel   how many scores have each upper byte; of those with the threshold's, each lower byte
    count_kernel                 how many of each chunk lie above the threshold, and on it
    take_kernel                  the places of the chosen: ascending, ties to the lower number

Scores are bf16, so the last pick is found exactly in two histograms, of the upper and of the lower byte. The workspace
of many programs a row exists where more can be visible than one is quick with. Sums are of integers, so no result
depends on which program comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.native import picking

CHUNK = 4096
"""Scores that one of many programs looks at."""
_ALONE = 2 * CHUNK
"""Scores up to which one program a row is as quick."""


@triton.jit
def ordered(scores, number, visible):
    """Scores bf16 as int32 0..65535 that compare alike, 0 where not visible."""
    bits = (
        tl.load(scores + number, mask=number < visible, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        & 0xFFFF
    )
    flipped = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where(number < visible, flipped, 0)


@triton.jit
def bin_of(counts, wanted):
    """counts int32 [256] -> the highest bin with `wanted` or more in it and above, and how many of it are wanted."""
    bins = tl.arange(0, 256)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.max(tl.where(above >= wanted, bins, 0), 0)
    return found, wanted - tl.sum(tl.where(bins > found, counts, 0), 0)


@triton.jit
def threshold_of(histogram, NUM_PICKS: tl.constexpr):
    """Both halves of a row's histogram -> the value of the last pick, and how many that equal it are picked."""
    bins = tl.arange(0, 256)
    upper, wanted = bin_of(tl.load(histogram + bins), NUM_PICKS)
    lower, wanted = bin_of(tl.load(histogram + 256 + bins), wanted)
    return upper * 256 + lower, wanted


@triton.jit
def num_visible(position, RATIO: tl.constexpr, UNIT: tl.constexpr):
    """Units of UNIT entries of RATIO positions that a row at `position` sees, the last perhaps in part."""
    return ((position + 1) // RATIO + UNIT - 1) // UNIT


@triton.jit(do_not_specialize=["max_entries"])
def upper_kernel(
    scores,  # bf16 [T, max_entries]
    positions,  # int32 [T]
    histogram,  # int32 [T, 2, 256]: zero before
    max_entries,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a chunk of a row: adds its upper bytes to the row's first histogram."""
    row = tl.program_id(1)
    visible = num_visible(tl.load(positions + row), RATIO, UNIT)
    start = tl.program_id(0) * CHUNK
    if (visible > NUM_PICKS) & (start < visible):
        number = start + tl.arange(0, CHUNK)
        value = ordered(scores + row.to(tl.int64) * max_entries, number, visible)
        counts = tl.histogram(value >> 8, 256, mask=number < visible)
        tl.atomic_add(histogram + row * 512 + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["max_entries"])
def lower_kernel(
    scores,
    positions,
    histogram,
    max_entries,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The same of the lower bytes of those whose upper byte is the threshold's."""
    row = tl.program_id(1)
    visible = num_visible(tl.load(positions + row), RATIO, UNIT)
    start = tl.program_id(0) * CHUNK
    if (visible > NUM_PICKS) & (start < visible):
        bins = tl.arange(0, 256)
        upper, _ = bin_of(tl.load(histogram + row * 512 + bins), NUM_PICKS)
        number = start + tl.arange(0, CHUNK)
        value = ordered(scores + row.to(tl.int64) * max_entries, number, visible)
        counts = tl.histogram(value & 0xFF, 256, mask=(number < visible) & ((value >> 8) == upper))
        tl.atomic_add(histogram + row * 512 + 256 + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["max_entries"])
def count_kernel(
    scores,
    positions,
    histogram,
    counts,  # int32 [T, chunks, 2] out: scores above the threshold, and on it
    max_entries,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a chunk of a row."""
    row = tl.program_id(1)
    visible = num_visible(tl.load(positions + row), RATIO, UNIT)
    start = tl.program_id(0) * CHUNK
    if (visible > NUM_PICKS) & (start < visible):
        threshold, _ = threshold_of(histogram + row * 512, NUM_PICKS)
        number = start + tl.arange(0, CHUNK)
        value = ordered(scores + row.to(tl.int64) * max_entries, number, visible)
        inside = number < visible
        at = counts + (row * tl.num_programs(0) + tl.program_id(0)) * 2
        tl.store(at, tl.sum(((value > threshold) & inside).to(tl.int32), 0))
        tl.store(at + 1, tl.sum(((value == threshold) & inside).to(tl.int32), 0))


@triton.jit(do_not_specialize=["max_entries", "table_width"])
def take_kernel(
    scores,
    slots,  # int32 [T]
    positions,
    table,  # int32 [S, table_width], where LOCATES
    table_width,
    histogram,
    counts,
    picks,  # int32 [T, NUM_PICKS] out
    records,  # int32 [T, NUM_PICKS] out, where LOCATES: where the entries of the picks lie
    max_entries,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # entries a block of the table
    LOCATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program a chunk of a row (oracle: reference.top_positions)."""
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    visible = num_visible(tl.load(positions + row), RATIO, UNIT)
    start = chunk * CHUNK
    own_table = table + tl.load(slots + row) * table_width
    own_picks = picks + row * NUM_PICKS
    own_records = records + row * NUM_PICKS
    if visible <= NUM_PICKS:
        if chunk == 0:
            place = tl.arange(0, NUM_PICKS)
            tl.store(own_picks + place, tl.where(place < visible, place, -1))
            if LOCATES:
                page = tl.load(own_table + place // PER_BLOCK, mask=place < visible, other=0)
                record = tl.where(place < visible, page * PER_BLOCK + place % PER_BLOCK, -1)
                tl.store(own_records + place, record)
    elif start < visible:
        threshold, wanted = threshold_of(histogram + row * 512, NUM_PICKS)
        before = tl.arange(0, BLOCK_CHUNKS)
        at = counts + (row * tl.num_programs(0) + before) * 2
        above = tl.sum(tl.load(at, mask=before < chunk, other=0), 0)
        on_it = tl.sum(tl.load(at + 1, mask=before < chunk, other=0), 0)
        number = start + tl.arange(0, CHUNK)
        inside = number < visible
        value = ordered(scores + row.to(tl.int64) * max_entries, number, visible)
        equal = ((value == threshold) & inside).to(tl.int32)
        rank = on_it + tl.cumsum(equal, 0) - equal
        take = ((value > threshold) & inside).to(tl.int32) + ((equal > 0) & (rank < wanted)).to(tl.int32)
        place = above + tl.minimum(on_it, wanted) + tl.cumsum(take, 0) - take
        tl.store(own_picks + place, number, mask=take > 0)
        if LOCATES:
            page = tl.load(own_table + number // PER_BLOCK, mask=take > 0, other=0)
            tl.store(own_records + place, page * PER_BLOCK + number % PER_BLOCK, mask=take > 0)


@triton.jit(do_not_specialize=["max_entries", "table_width"])
def select_kernel(
    scores,  # bf16 [T, max_entries]
    slots,
    positions,
    table,
    table_width,
    picks,  # int32 [T, NUM_PICKS] out
    records,  # int32 [T, NUM_PICKS] out, where LOCATES: where the entries of the picks lie
    max_entries,
    RATIO: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # entries a block of the table
    LOCATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row (oracle: reference.top_positions); scores of UNIT entries each."""
    row = tl.program_id(0)
    visible = num_visible(tl.load(positions + row), RATIO, UNIT)
    place = tl.arange(0, NUM_PICKS)
    own_picks = picks + row * NUM_PICKS
    if visible <= NUM_PICKS:
        tl.store(own_picks + place, tl.where(place < visible, place, -1))
    else:
        own = scores + row.to(tl.int64) * max_entries
        number = tl.arange(0, BLOCK)
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, visible, BLOCK):
            value = ordered(own, start + number, visible)
            counts += tl.histogram(value >> 8, 256, mask=start + number < visible)
        upper, wanted = bin_of(counts, NUM_PICKS)
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, visible, BLOCK):
            value = ordered(own, start + number, visible)
            counts += tl.histogram(
                value & 0xFF, 256, mask=(start + number < visible) & ((value >> 8) == upper)
            )
        lower, wanted = bin_of(counts, wanted)  # so many of those that equal the threshold
        threshold = upper * 256 + lower
        taken = 0
        equal_before = 0
        for start in range(0, visible, BLOCK):
            inside = start + number < visible
            value = ordered(own, start + number, visible)
            equal = ((value == threshold) & inside).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0) - equal
            take = ((value > threshold) & inside).to(tl.int32) + ((equal > 0) & (rank < wanted)).to(tl.int32)
            at = taken + tl.cumsum(take, 0) - take
            tl.store(own_picks + at, start + number, mask=take > 0)
            taken += tl.sum(take, 0)
            equal_before += tl.sum(equal, 0)
    if LOCATES:
        tl.debug_barrier()
        number = tl.load(own_picks + place)
        at = table + tl.load(slots + row) * table_width + number // PER_BLOCK
        page = tl.load(at, mask=number >= 0, other=0)
        record = tl.where(number >= 0, page * PER_BLOCK + number % PER_BLOCK, -1)
        tl.store(records + row * NUM_PICKS + place, record)


class TopkBuffers:
    """Workspace of many programs that choose among up to `max_entries`, of one batch size."""

    def __init__(self, num_rows: int, max_entries: int, device: torch.device | str) -> None:
        self.num_chunks = -(-max_entries // CHUNK)
        self.histogram = torch.zeros(num_rows, 2, 256, dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_rows, self.num_chunks, 2, dtype=torch.int32, device=device)

    @classmethod
    def where_needed(cls, num_rows: int, max_entries: int, device: torch.device | str) -> TopkBuffers | None:
        """None where one program a row is as quick."""
        return cls(num_rows, max_entries, device) if max_entries > _ALONE else None


def select(
    scores: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    picks: Tensor,
    buffers: TopkBuffers | None = None,
    records: Tensor | None = None,
    *,
    ratio: int,
    block_size: int,
    unit: int = 1,
) -> None:
    """scores bf16 [T, max entries] of `unit` entries each -> picks int32 [T, L], L a power of two, -1 absent.

    `records` int32 [T, L]: the rows of the entries' pages that the picks of single entries lie in, -1 absent. `where`:
    slots and positions int32 [T], entry block table int32 [S, B].
    """
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    same = {"RATIO": ratio, "UNIT": unit, "NUM_PICKS": picks.shape[1], "num_warps": 8}
    out = {"PER_BLOCK": block_size // ratio, "LOCATES": records is not None}
    lies = picks if records is None else records
    # Tensors of the host are for Triton's interpreter.
    is_few = linear.few(scores, bit_ops=scores.device.type == "cpu")
    if buffers is None and is_few and picking.selection_taken(scores, per_block=block_size // ratio):
        picking.select(scores, where, picks, records, ratio=ratio, block_size=block_size, unit=unit)
        return
    if buffers is None and records is None and scores.is_cuda and picking.rows_taken(scores):
        picking.select_rows(scores, positions, picks, ratio=ratio, unit=unit)
        return
    if buffers is None:
        select_kernel[(num_rows,)](
            scores,
            slots,
            positions,
            table,
            table.stride(0),
            picks,
            lies,
            max_entries,
            BLOCK=2048,
            **same,
            **out,
        )
        return
    grid = (buffers.num_chunks, num_rows)
    buffers.histogram.zero_()
    upper_kernel[grid](scores, positions, buffers.histogram, max_entries, CHUNK=CHUNK, **same)
    lower_kernel[grid](scores, positions, buffers.histogram, max_entries, CHUNK=CHUNK, **same)
    count_kernel[grid](scores, positions, buffers.histogram, buffers.counts, max_entries, CHUNK=CHUNK, **same)
    take_kernel[grid](
        scores,
        slots,
        positions,
        table,
        table.stride(0),
        buffers.histogram,
        buffers.counts,
        picks,
        lies,
        max_entries,
        CHUNK=CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(buffers.num_chunks),
        **same,
        **out,
    )


__all__ = [
    "CHUNK",
    "TopkBuffers",
    "count_kernel",
    "lower_kernel",
    "select",
    "select_kernel",
    "take_kernel",
    "upper_kernel",
]
