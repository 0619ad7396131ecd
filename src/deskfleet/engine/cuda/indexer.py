"""Which entries a row attends to (spec §4.5). Owns scoring over the paged FP4 keys and the exact choice.

    score_kernel    bf16 scores of a row's visible entries, rounded as the publisher rounds; programs stride over them
    select_kernel   the best 512 of them, ties to the lower number, ascending

    block_kernel, allow_kernel
                    where there are more than 2048 blocks of 8 entries: how blocks rank, and a map of the best 2048,
                    which later layers' scores are restricted to (spec §4.6)

Scores are bf16, so the 512th best is found exactly in two histograms, of the upper and of the lower byte. Blocks are
chosen by the same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.compress import e8m0_scale, fp4_nibbles
from deskfleet.engine.cuda.tiles import to_bf16

INDEX_HEADS = 32
_TWO_126 = tl.constexpr(8.507059173023462e37)


@triton.jit
def nibble_value(code):
    """int32 nibbles -> float32."""
    bits = ((code & 0x8) << 28) | ((code & 0x7) << 22)
    return bits.to(tl.float32, bitcast=True) * _TWO_126


@triton.jit
def faked(value, inverse, scale):
    """float32 -> its FP4 value on the grid of `scale`."""
    return nibble_value(fp4_nibbles(tl.minimum(tl.maximum(value * inverse, -6.0), 6.0))) * scale


@triton.jit(do_not_specialize=["weight_stride", "table_width", "max_entries", "max_blocks", "num_picks"])
def score_kernel(
    query,  # bf16 [T, 32, 128] as int32 words, rotated, not quantised
    weights,  # float32 [T, weight_stride]: the last projection, not yet rounded
    weight_stride,
    pages,  # uint8 [rows, 68]
    slots,
    positions,
    table,
    table_width,
    scores,  # bf16 [T, max_entries] out
    allowed,  # uint8 [T, max_blocks], where RESTRICTS
    max_entries,
    max_blocks,
    num_picks,
    weight_scale,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,  # entries a candidate block
    TOP_BLOCKS: tl.constexpr,
    RESTRICTS: tl.constexpr,
    KEYS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Every n-th block of KEYS visible entries of a row; nothing where all of them are taken anyway."""
    row = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    if visible <= num_picks:
        return
    head = tl.arange(0, 32)
    column = tl.arange(0, 64)
    words = tl.load(query + row * 2048 + head[:, None] * 64 + column[None, :])
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    e = tl.reshape(even, (32, 4, 16))
    o = tl.reshape(odd, (32, 4, 16))
    bits = e8m0_scale(tl.maximum(tl.max(tl.abs(e), 2), tl.max(tl.abs(o), 2)))[:, :, None]
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    q_even = tl.reshape(faked(e, inverse, scale), (32, 64))
    q_odd = tl.reshape(faked(o, inverse, scale), (32, 64))
    if not BIT_OPS:
        q_even = q_even.to(tl.bfloat16)
        q_odd = q_odd.to(tl.bfloat16)
    weight = tl.load(weights + row * weight_stride + head)
    weight = to_bf16(to_bf16(weight, BIT_OPS).to(tl.float32) * weight_scale, BIT_OPS).to(tl.float32)
    slot = tl.load(slots + row)
    key = tl.arange(0, KEYS)
    for block in range(tl.program_id(0), (visible + KEYS - 1) // KEYS, tl.num_programs(0)):
        number = block * KEYS + key
        valid = number < visible
        page = tl.load(table + slot * table_width + number // (BLOCK_SIZE // RATIO), mask=valid, other=0)
        at = (
            pages + (page.to(tl.int64) * (BLOCK_SIZE // RATIO) + number % (BLOCK_SIZE // RATIO))[:, None] * 68
        )
        codes = tl.load(at + column[None, :], mask=valid[:, None], other=0).to(tl.int32)
        key_scale = tl.load(at + 64 + column[None, :] // 16, mask=valid[:, None], other=0).to(tl.int32)
        key_scale = (key_scale << 23).to(tl.float32, bitcast=True)
        k_even = nibble_value(codes) * key_scale
        k_odd = nibble_value(codes >> 4) * key_scale
        if not BIT_OPS:
            k_even = k_even.to(tl.bfloat16)
            k_odd = k_odd.to(tl.bfloat16)
        dots = tl.dot(q_even, tl.trans(k_even)) + tl.dot(q_odd, tl.trans(k_odd))
        dots = tl.maximum(to_bf16(dots, BIT_OPS).to(tl.float32), 0.0)
        weighted = to_bf16(dots * weight[:, None], BIT_OPS).to(tl.float32)
        total = to_bf16(tl.sum(weighted, 0), BIT_OPS).to(tl.float32)
        if RESTRICTS:
            counts = valid & (visible > UNIT * TOP_BLOCKS)
            candidate = tl.load(allowed + row * max_blocks + number // UNIT, mask=counts, other=1)
            total = tl.where(candidate != 0, total, float("-inf"))
        tl.store(scores + row * max_entries + number, to_bf16(total, BIT_OPS), mask=valid)


@triton.jit
def ordered(scores, number, visible):
    """Scores bf16 as int32 0..65535 that compare alike, 0 where not visible."""
    bits = (
        tl.load(scores + number, mask=number < visible, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        & 0xFFFF
    )
    flipped = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where(number < visible, flipped, 0)


@triton.jit(do_not_specialize=["max_entries"])
def select_kernel(
    scores,  # bf16 [T, max_entries]
    positions,
    picks,  # int32 [T, NUM_PICKS] out
    max_entries,
    RATIO: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row (oracle: reference.top_positions); scores of UNIT entries each."""
    row = tl.program_id(0)
    visible = ((tl.load(positions + row) + 1) // RATIO + UNIT - 1) // UNIT
    place = tl.arange(0, NUM_PICKS)
    if visible <= NUM_PICKS:
        tl.store(picks + row * NUM_PICKS + place, tl.where(place < visible, place, -1))
        return
    own = scores + row.to(tl.int64) * max_entries
    bins = tl.arange(0, 256)
    number = tl.arange(0, BLOCK)
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, visible, BLOCK):
        value = ordered(own, start + number, visible)
        counts += tl.histogram(value >> 8, 256, mask=start + number < visible)
    # How many lie in this bin or above; the bin of the 512th best is the highest with 512 or more.
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    upper = tl.max(tl.where(above >= NUM_PICKS, bins, 0), 0)
    wanted = NUM_PICKS - tl.sum(tl.where(bins > upper, counts, 0), 0)
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, visible, BLOCK):
        value = ordered(own, start + number, visible)
        counts += tl.histogram(value & 0xFF, 256, mask=(start + number < visible) & ((value >> 8) == upper))
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    lower = tl.max(tl.where(above >= wanted, bins, 0), 0)
    wanted -= tl.sum(tl.where(bins > lower, counts, 0), 0)  # so many of those that equal the threshold
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
        tl.store(picks + row * NUM_PICKS + at, start + number, mask=take > 0)
        taken += tl.sum(take, 0)
        equal_before += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["max_entries", "max_blocks"])
def block_kernel(
    scores,  # bf16 [T, max_entries]
    positions,
    best,  # bf16 [T, max_blocks] out
    max_entries,
    max_blocks,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    TOP_BLOCKS: tl.constexpr,
):
    """The greatest score of each block, infinite for the newest (oracle: reference.candidate_scores)."""
    row = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    if visible <= UNIT * TOP_BLOCKS:
        return
    blocks = (visible + UNIT - 1) // UNIT
    inside = tl.arange(0, UNIT)
    own = scores + row.to(tl.int64) * max_entries
    for start in range(tl.program_id(0) * 128, blocks, tl.num_programs(0) * 128):
        number = start + tl.arange(0, 128)
        entry = number[:, None] * UNIT + inside[None, :]
        value = tl.load(own + entry, mask=entry < visible, other=float("-inf")).to(tl.float32)
        value = tl.where(number == (visible - 1) // UNIT, float("inf"), tl.max(value, 1))
        tl.store(best + row * max_blocks + number, value.to(tl.bfloat16), mask=number < blocks)


@triton.jit(do_not_specialize=["max_blocks"])
def allow_kernel(
    picks,  # int32 [T, TOP_BLOCKS]: chosen blocks
    positions,
    allowed,  # uint8 [T, max_blocks] out
    max_blocks,
    RATIO: tl.constexpr,
    UNIT: tl.constexpr,
    TOP_BLOCKS: tl.constexpr,
):
    """One program a row: 1 for the chosen blocks, 0 for the others (oracle: reference.block_mask)."""
    row = tl.program_id(0)
    visible = (tl.load(positions + row) + 1) // RATIO
    if visible <= UNIT * TOP_BLOCKS:
        return
    number = tl.arange(0, 1024)
    for start in range(0, max_blocks, 1024):
        at = allowed + row * max_blocks + start + number
        tl.store(at, tl.zeros((1024,), tl.uint8), mask=start + number < max_blocks)
    tl.debug_barrier()
    block = tl.load(picks + row * TOP_BLOCKS + tl.arange(0, TOP_BLOCKS))
    tl.store(allowed + row * max_blocks + block, tl.full((TOP_BLOCKS,), 1, tl.uint8), mask=block >= 0)


class Candidates:
    """Blocks of entries that re-indexing layers may pick from, of one batch size."""

    def __init__(
        self, num_rows: int, max_entries: int, unit: int, top_blocks: int, device: torch.device | str
    ) -> None:
        self.unit = unit
        self.top_blocks = top_blocks
        self.max_blocks = -(-max_entries // unit)
        self.best = torch.zeros(num_rows, self.max_blocks, dtype=torch.bfloat16, device=device)
        self.picks = torch.zeros(num_rows, top_blocks, dtype=torch.int32, device=device)
        self.allowed = torch.zeros(num_rows, self.max_blocks, dtype=torch.uint8, device=device)


def narrow(scores: Tensor, positions: Tensor, candidates: Candidates, *, ratio: int) -> None:
    """scores bf16 [T, max entries] of the candidate source -> `candidates`."""
    num_rows, max_entries = scores.shape
    c = candidates
    programs = min(triton.cdiv(c.max_blocks, 128), max(264 // num_rows, 1))
    block_kernel[(programs, num_rows)](
        scores,
        positions,
        c.best,
        max_entries,
        c.max_blocks,
        RATIO=ratio,
        UNIT=c.unit,
        TOP_BLOCKS=c.top_blocks,
    )
    select(c.best, positions, c.picks, ratio=ratio, unit=c.unit)
    allow_kernel[(num_rows,)](
        c.picks,
        positions,
        c.allowed,
        c.max_blocks,
        RATIO=ratio,
        UNIT=c.unit,
        TOP_BLOCKS=c.top_blocks,
    )


def score(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    *,
    num_picks: int,
    weight_scale: float,
    ratio: int,
    block_size: int,
    bit_ops: bool,
    among: Candidates | None = None,
) -> None:
    """query bf16 [T, 4096] and weights float32 [T, 32] (a view of a wider row) -> scores bf16 [T, max entries].

    Entries outside of the blocks of `among` score minus infinity.
    """
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    programs = min(triton.cdiv(max_entries, 64), max(528 // num_rows, 1))
    score_kernel[(programs, num_rows)](
        query.view(torch.int32),
        weights,
        weights.stride(0),
        pages,
        slots,
        positions,
        table,
        table.stride(0),
        scores,
        scores if among is None else among.allowed,
        max_entries,
        0 if among is None else among.max_blocks,
        num_picks,
        weight_scale,
        RATIO=ratio,
        BLOCK_SIZE=block_size,
        UNIT=8 if among is None else among.unit,
        TOP_BLOCKS=0 if among is None else among.top_blocks,
        RESTRICTS=among is not None,
        KEYS=64,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def select(scores: Tensor, positions: Tensor, picks: Tensor, *, ratio: int, unit: int = 1) -> None:
    """scores bf16 [T, max entries] of `unit` entries each -> picks int32 [T, L], L a power of two."""
    select_kernel[(len(scores),)](
        scores,
        positions,
        picks,
        scores.shape[1],
        RATIO=ratio,
        NUM_PICKS=picks.shape[1],
        UNIT=unit,
        BLOCK=2048,
        num_warps=8,
    )


__all__ = [
    "INDEX_HEADS",
    "Candidates",
    "allow_kernel",
    "block_kernel",
    "narrow",
    "score",
    "score_kernel",
    "select",
    "select_kernel",
]
