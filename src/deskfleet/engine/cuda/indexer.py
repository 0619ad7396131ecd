"""Which entries a row attends to (spec §4.5). Owns scoring over the paged FP4 keys and candidate blocks.

    score_kernel    bf16 scores of a row's visible entries, rounded as the publisher rounds; programs stride over them
    block_kernel, allow_kernel
                    where there are more than 2048 blocks of 8 entries: how blocks rank, and a map of the best 2048,
                    which later layers' scores are restricted to (spec §4.6)

topk.py chooses, the best entries and the best blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.compress import e8m0_scale, fp4_nibbles
from deskfleet.engine.cuda.native import picking
from deskfleet.engine.cuda.records import e8m0_scales, fp4_elements, half_of, spread
from deskfleet.engine.cuda.tiles import to_bf16
from deskfleet.engine.cuda.topk import TopkBuffers, select

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


@triton.jit
def load_keys(pages, page, number, valid, PER_BLOCK: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr):
    """Keys `number` int32 [N] in blocks `page` -> uint8 [N, D/2] bytes of two codes, uint8 [N, D/32] scales."""
    # Left to itself, Triton 3.6 takes every key for aligned as the first of its block is.
    place = tl.multiple_of(page * PER_BLOCK + number % PER_BLOCK, 1)
    at = pages + place.to(tl.int64)[:, None] * BYTES
    codes = tl.load(at + tl.arange(0, D // 2)[None, :], mask=valid[:, None], other=0)
    return codes, tl.load(at + D // 2 + tl.arange(0, D // 32)[None, :], mask=valid[:, None], other=0)


@triton.jit(
    do_not_specialize=[
        "weight_stride",
        "table_width",
        "max_entries",
        "max_blocks",
        "num_picks",
    ]
)
def score_kernel(
    query,  # bf16 [T, HEADS, D] as int32 words, rotated, not quantised
    weights,  # float32 [T, weight_stride]: the last projection, not yet rounded
    weight_stride,
    pages,  # uint8 [rows, BYTES]
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
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # keys a block
    RATIO: tl.constexpr,
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
    HALF: tl.constexpr = D // 2
    head = tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, HALF)
    own = query + row * (HEADS * HALF) + head[:, None] * HALF + column[None, :]
    words = tl.load(own, mask=(head < HEADS)[:, None], other=0)
    even = half_of(words, False, BIT_OPS).to(tl.float32)
    odd = half_of(words, True, BIT_OPS).to(tl.float32)
    e = tl.reshape(even, (BLOCK_HEADS, D // 32, 16))
    o = tl.reshape(odd, (BLOCK_HEADS, D // 32, 16))
    bits = e8m0_scale(tl.maximum(tl.max(tl.abs(e), 2), tl.max(tl.abs(o), 2)))[:, :, None]
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    q_even = tl.reshape(faked(e, inverse, scale), (BLOCK_HEADS, HALF))
    q_odd = tl.reshape(faked(o, inverse, scale), (BLOCK_HEADS, HALF))
    if not BIT_OPS:
        q_even = q_even.to(tl.bfloat16)
        q_odd = q_odd.to(tl.bfloat16)
    weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0)
    weight = to_bf16(to_bf16(weight, BIT_OPS).to(tl.float32) * weight_scale, BIT_OPS).to(tl.float32)
    own_table = table + tl.load(slots + row) * table_width
    number = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    step = tl.num_programs(0) * KEYS
    # Keys of the next block, and the pages of the one after it, are under way while a block is scored.
    page = tl.load(own_table + number // PER_BLOCK, mask=number < visible, other=0)
    after = tl.load(own_table + (number + step) // PER_BLOCK, mask=number + step < visible, other=0)
    codes, scales = load_keys(pages, page, number, number < visible, PER_BLOCK, D, BYTES)
    multipliers = e8m0_scales(scales)
    for _ in tl.range(tl.program_id(0) * KEYS, visible, step, num_stages=1):
        following = number + step
        next_codes, next_scales = load_keys(pages, after, following, following < visible, PER_BLOCK, D, BYTES)
        after = tl.load(own_table + (following + step) // PER_BLOCK, mask=following + step < visible, other=0)
        wide = spread(multipliers, KEYS, D // 32, 16, BIT_OPS)
        k_even, k_odd = fp4_elements(codes, wide, BIT_OPS)
        valid = number < visible
        dots = tl.dot(q_even, tl.trans(k_even)) + tl.dot(q_odd, tl.trans(k_odd))
        dots = tl.maximum(to_bf16(dots, BIT_OPS).to(tl.float32), 0.0)
        weighted = to_bf16(dots * weight[:, None], BIT_OPS).to(tl.float32)
        total = to_bf16(tl.sum(weighted, 0), BIT_OPS).to(tl.float32)
        if RESTRICTS:
            counts = valid & (visible > UNIT * TOP_BLOCKS)
            candidate = tl.load(allowed + row * max_blocks + number // UNIT, mask=counts, other=1)
            total = tl.where(candidate != 0, total, float("-inf"))
        tl.store(scores + row * max_entries + number, to_bf16(total, BIT_OPS), mask=valid)
        number, codes, multipliers = following, next_codes, e8m0_scales(next_scales)


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
        self.choice = TopkBuffers.where_needed(num_rows, self.max_blocks, device)


def narrow(
    scores: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    candidates: Candidates,
    *,
    ratio: int,
    block_size: int,
) -> None:
    """scores bf16 [T, max entries] of the candidate source -> `candidates`; `where` as in `topk.select`."""
    positions = where[1]
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
    select(c.best, where, c.picks, c.choice, ratio=ratio, block_size=block_size, unit=c.unit)
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
    """query bf16 [T, H·D] and weights float32 [T, H] (a view of a wider row) -> scores bf16 [T, max entries].

    Entries outside of the blocks of `among` score minus infinity.
    """
    if linear.few(query, bit_ops=bit_ops) and picking.scores_taken(query, weights):
        picking.score(
            query, weights, pages, where, scores,
            None if among is None else picking.Allowed(among.allowed, among.unit, among.top_blocks),
            num_picks=num_picks, weight_scale=weight_scale, ratio=ratio, block_size=block_size,
        )  # fmt: skip
        return
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    heads = weights.shape[1]
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
        HEADS=heads,
        BLOCK_HEADS=max(triton.next_power_of_2(heads), 16),
        D=query.shape[1] // heads,
        BYTES=pages.shape[1],
        PER_BLOCK=block_size // ratio,
        RATIO=ratio,
        UNIT=8 if among is None else among.unit,
        TOP_BLOCKS=0 if among is None else among.top_blocks,
        RESTRICTS=among is not None,
        KEYS=64,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


__all__ = [
    "Candidates",
    "allow_kernel",
    "block_kernel",
    "narrow",
    "score",
    "score_kernel",
]
