"""Scores of many rows' entries (spec §4.5). Owns one kernel: indexer.score_kernel for rows that see the same keys.

A key is decoded once for several rows that follow each other; their queries, a head a column, are one operand of the
tensor core. Where rows of two requests meet in a program, it takes one row after another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.compress import e8m0_scale
from deskfleet.engine.cuda.indexer import Candidates, faked, load_keys
from deskfleet.engine.cuda.records import e8m0_scales, fp4_elements, half_of, spread
from deskfleet.engine.cuda.tiles import to_bf16

_COLUMNS = 128  # heads of all rows of a program


@triton.jit(
    do_not_specialize=["weight_stride", "table_width", "max_entries", "max_blocks", "num_picks", "num_rows"]
)
def score_rows_kernel(
    query,  # bf16 [T, HEADS, D] as int32 words, rotated, not quantised
    weights,  # float32 [T, weight_stride]: the last projection, not yet rounded
    weight_stride,
    pages,  # uint8 [rows, BYTES]
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, table_width]
    table_width,
    scores,  # bf16 [T, max_entries] out
    allowed,  # uint8 [T, max_blocks], where RESTRICTS
    max_entries,
    max_blocks,
    num_picks,
    weight_scale,
    num_rows,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
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
    """Every n-th block of KEYS entries of ROWS rows (oracle: reference.index_scores); nothing where all rows take all
    that they see."""
    HALF: tl.constexpr = D // 2
    COLUMNS: tl.constexpr = ROWS * BLOCK_HEADS
    first = tl.program_id(1) * ROWS
    member = tl.arange(0, ROWS)
    rows = first + member
    inside = rows < num_rows
    visible = (tl.load(positions + rows, mask=inside, other=-1) + 1) // RATIO
    if tl.max(visible, 0) <= num_picks:
        return
    place = tl.arange(0, COLUMNS)
    row = first + place // BLOCK_HEADS
    head = place % BLOCK_HEADS
    exists = (row < num_rows) & (head < HEADS)
    column = tl.arange(0, HALF)
    words = tl.load(
        query + (row * HEADS + head)[:, None] * HALF + column[None, :], mask=exists[:, None], other=0
    )
    e = tl.reshape(half_of(words, False, BIT_OPS).to(tl.float32), (COLUMNS, D // 32, 16))
    o = tl.reshape(half_of(words, True, BIT_OPS).to(tl.float32), (COLUMNS, D // 32, 16))
    bits = e8m0_scale(tl.maximum(tl.max(tl.abs(e), 2), tl.max(tl.abs(o), 2)))[:, :, None]
    scale = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    q_even = tl.reshape(faked(e, inverse, scale), (COLUMNS, HALF))
    q_odd = tl.reshape(faked(o, inverse, scale), (COLUMNS, HALF))
    if not BIT_OPS:
        q_even = q_even.to(tl.bfloat16)
        q_odd = q_odd.to(tl.bfloat16)
    weight = tl.load(weights + row * weight_stride + head, mask=exists, other=0.0)
    weight = to_bf16(to_bf16(weight, BIT_OPS).to(tl.float32) * weight_scale, BIT_OPS).to(tl.float32)
    slot = tl.load(slots + rows, mask=inside, other=0)
    leader = tl.load(slots + first)
    is_alone = tl.sum((inside & (slot != leader)).to(tl.int32), 0) == 0  # one request
    for turn in range(tl.where(is_alone, 1, ROWS)):
        stores = inside & (is_alone | (member == turn))
        own_table = table + tl.load(slots + tl.minimum(first + turn, num_rows - 1)) * table_width
        most = tl.max(tl.where(stores, visible, 0), 0)
        for start in tl.range(tl.program_id(0) * KEYS, most, tl.num_programs(0) * KEYS, num_stages=1):
            number = start + tl.arange(0, KEYS)
            page = tl.load(own_table + number // PER_BLOCK, mask=number < most, other=0)
            codes, scales = load_keys(pages, page, number, number < most, PER_BLOCK, D, BYTES)
            wide = spread(e8m0_scales(scales), KEYS, D // 32, 16, BIT_OPS)
            k_even, k_odd = fp4_elements(codes, wide, BIT_OPS)
            dots = tl.dot(k_even, tl.trans(q_even)) + tl.dot(k_odd, tl.trans(q_odd))
            dots = tl.maximum(to_bf16(dots, BIT_OPS).to(tl.float32), 0.0)
            weighted = to_bf16(dots * weight[None, :], BIT_OPS).to(tl.float32)
            total = tl.sum(tl.reshape(weighted, (KEYS, ROWS, BLOCK_HEADS)), 2)
            total = to_bf16(total, BIT_OPS).to(tl.float32)
            mask = stores[None, :] & (number[:, None] < visible[None, :])
            if RESTRICTS:
                counts = mask & (visible > UNIT * TOP_BLOCKS)[None, :]
                at = allowed + rows.to(tl.int64)[None, :] * max_blocks + (number // UNIT)[:, None]
                total = tl.where(tl.load(at, mask=counts, other=1) != 0, total, float("-inf"))
            at = scores + rows.to(tl.int64)[None, :] * max_entries + number[:, None]
            tl.store(at, to_bf16(total, BIT_OPS), mask=mask)


def score_rows(
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
    """As `indexer.score`: query bf16 [T, H·D] and weights float32 [T, H] (a view of a wider row) -> scores bf16
    [T, max entries]."""
    slots, positions, table = where
    num_rows, max_entries = scores.shape
    heads = weights.shape[1]
    block_heads = max(triton.next_power_of_2(heads), 16)
    rows = max(_COLUMNS // block_heads, 1)
    blocks = triton.cdiv(num_rows, rows)
    score_rows_kernel[(min(triton.cdiv(max_entries, 64), max(528 // blocks, 1)), blocks)](
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
        num_rows,
        HEADS=heads,
        BLOCK_HEADS=block_heads,
        ROWS=rows,
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


__all__ = ["score_rows", "score_rows_kernel"]
