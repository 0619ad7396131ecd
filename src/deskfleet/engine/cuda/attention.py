"""Sparse attention over packed records (spec §4.2, §4.3, §4.7, §N.5). Owns four kernels and the address arithmetic.

    latent_kernel    what wq_a and wkv made of a row: the query's low rank normed and quantised, and the window record
                     normed, rotated, quantised and written to its page
    window_kernel    where the records of every row's window lie, once a step; the indexer says it of the picked entries
    attend_kernel    a part of a row's list, of its window and of its picked entries, straight from the pages
    merge_kernel     the parts of a row and its sinks, and the query's rotation taken back; where there are few parts,
                     the last program of a row does it

Addresses come from the block tables on the device, so a captured step needs no index from the host. The pages of the
window rows that any row of a step still sees, and those that the step writes, must be different ones: the tables give
every request room for its window and one verify window more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.native import attending, latents, products
from deskfleet.engine.cuda.records import (
    e4m3_scales,
    e8m0_scales,
    fp4_elements,
    fp8_elements,
    half_of,
    load_entries,
    load_window,
    spread,
)
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, to_bf16

BLOCK_HEADS = 16  # heads that one program takes, a side of the tensor core's operand; fewer are filled up
BLOCK_KEYS = 64


@triton.jit
def normed(at, norm, column, width, mask, eps):
    """bf16 [width] at `at` -> float32 of its RMSNorm rounded to bf16 later, and the factor (spec §N.2)."""
    value = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    return tl.load(norm + column, mask=mask, other=0.0) * (value * factor), factor


@triton.jit(do_not_specialize=["table_width", "block_size"])
def latent_kernel(
    qkv,  # bf16 [T, Q + D]: wq_a over wkv
    q_norm,  # float32 [Q]
    kv_norm,  # float32 [D]
    cos,  # float32 [T, ROPE/2]
    sin,
    codes,  # float8e4nv [T, Q] out
    code_scales,  # uint8 [T, 4 * ceil(Q/128)] out
    pages,  # uint8 [rows, BYTES] out
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, blocks]: window blocks; block 0 is nobody's and not written
    table_width,
    block_size,  # no constant: Triton 3.6 takes every record for aligned as the first of its block is
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BYTES: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Program 0 of a row: oracle rms_norm, quantize_fp8. Program 1: rms_norm, apply_rope, WINDOW.pack."""
    row = tl.program_id(1)
    source = qkv + row * (Q + D)
    if tl.program_id(0) == 0:
        own_scales = code_scales + row * (4 * ((Q + 127) // 128))
        store_low_rank(source, q_norm, codes + row * Q, own_scales, Q, BLOCK_Q, EPS, BIT_OPS)
    else:
        position = tl.load(positions + row)
        block = tl.load(table + tl.load(slots + row) * table_width + position // block_size)
        at = pages + (block.to(tl.int64) * block_size + position % block_size) * BYTES
        turn = row * (ROPE // 2)
        store_window_record(source + Q, kv_norm, cos + turn, sin + turn, at, block > 0, D, ROPE, EPS, BIT_OPS)


@triton.jit
def store_low_rank(
    source,
    norm,
    codes,
    scales,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """bf16 [Q] at `source` normed -> FP8 codes [Q] and their scale bytes."""
    column = tl.arange(0, BLOCK_Q)
    value, _ = normed(source, norm, column, Q, column < Q, EPS)
    groups = tl.reshape(to_bf16(value, BIT_OPS).to(tl.float32), (BLOCK_Q // 32, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))
    quantized = tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (BLOCK_Q,))
    tl.store(codes + column, quantized, mask=column < Q)
    group = tl.arange(0, BLOCK_Q // 32)
    tl.store(scales + group, (bits >> 23).to(tl.uint8), mask=group < Q // 32)


@triton.jit
def store_window_record(
    source,
    norm,
    cos,
    sin,
    at,
    has_place,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """bf16 [D] at `source` normed, rotated and packed into the record at `at`."""
    column = tl.arange(0, D)
    value, factor = normed(source, norm, column, D, column < D, EPS)
    value = to_bf16(value, BIT_OPS).to(tl.float32)
    partner = column ^ 1
    other = tl.load(norm + partner) * (tl.load(source + partner).to(tl.float32) * factor)
    other = to_bf16(other, BIT_OPS).to(tl.float32)
    turned = to_bf16(turned_tail(value, other, cos, sin, column, D - ROPE), BIT_OPS)
    groups = tl.reshape(turned.to(tl.float32), (D // 32, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))
    record = tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (D,)).to(tl.uint8, bitcast=True)
    tl.store(at + column, record, mask=(column >= 0) & has_place)
    group = tl.arange(0, D // 32)
    tl.store(at + D + group, (bits >> 23).to(tl.uint8), mask=(group >= 0) & has_place)


@triton.jit
def turned_tail(value, other, cos, sin, column, FIRST: tl.constexpr):
    """value [D] with its elements from FIRST rotated; other is each element's partner of its pair (spec §N.7)."""
    turns = column >= FIRST
    pair = (column - FIRST) // 2
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    return value * c + tl.where(column % 2 == 0, -other, other) * s


@triton.jit(do_not_specialize=["table_width"])
def window_kernel(
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, blocks]: window blocks
    table_width,
    records,  # int32 [T, WINDOW] out, -1 before the first position
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program a row: where the records of its window lie, oldest first."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    number = tl.load(positions + row) - (WINDOW - 1) + place
    exists = (number >= 0) & (place < WINDOW)
    page = tl.load(table + tl.load(slots + row) * table_width + number // BLOCK_SIZE, mask=exists, other=0)
    record = tl.where(exists, page * BLOCK_SIZE + number % BLOCK_SIZE, -1)
    tl.store(records + row * WINDOW + place, record, mask=place < WINDOW)


@triton.jit
def attend_block(
    q_even, q_odd, k_even, k_odd, exists, even, odd, maximum, denominator, scale, BIT_OPS: tl.constexpr
):
    """One block of keys in the running softmax; keys and values are the same rows.

    The denominator is kept apart by place in a block [16, KEYS] until the end: a sum over keys goes through every warp.
    """
    # Scaled one by one: of a plain sum Triton would make one chain of products, twice as long.
    scores = tl.dot(q_even, tl.trans(k_even)) * scale + tl.dot(q_odd, tl.trans(k_odd)) * scale
    scores = tl.where(exists[None, :], scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, 1))
    rescale = tl.exp(maximum - highest)
    weights = tl.exp(scores - highest[:, None])
    denominator = denominator * rescale[:, None] + weights
    weights = to_bf16(weights, BIT_OPS)
    if BIT_OPS:
        weights = weights.to(tl.float32)
    even = tl.dot(weights, k_even, even * rescale[:, None])
    odd = tl.dot(weights, k_odd, odd * rescale[:, None])
    return even, odd, highest, denominator


@triton.jit
def store_heads(
    even,
    odd,
    total,
    cos,
    sin,
    out,
    head,
    exists,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Sums float32 [BLOCK, D/2] over `total` [BLOCK], the last ROPE elements turned back -> out bf16 [.., D]."""
    pair = tl.arange(0, D // 2)
    even = to_bf16(even / total[:, None], BIT_OPS).to(tl.float32)
    odd = to_bf16(odd / total[:, None], BIT_OPS).to(tl.float32)
    first: tl.constexpr = (D - ROPE) // 2
    c = tl.load(cos + pair - first, mask=pair >= first, other=1.0)[None, :]
    s = tl.load(sin + pair - first, mask=pair >= first, other=0.0)[None, :]
    both = tl.join(to_bf16(even * c + odd * s, BIT_OPS), to_bf16(odd * c - even * s, BIT_OPS))
    at = out + head[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, tl.reshape(both, (BLOCK, D)), mask=exists[:, None])


@triton.jit
def merge_parts(
    sums,
    maxima,
    denominators,
    sink,
    row,
    head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """The parts of heads `head` [H] of a row, and its sink -> even, odd float32 [H, D/2], total [H]."""
    PARTS: tl.constexpr = 16 * ((HEADS + 15) // 16)
    split = tl.arange(0, BLOCK_SPLITS)
    inside = (split < SPLITS)[:, None]
    place = (row * SPLITS + split)[:, None] * PARTS + head[None, :]
    # All loads before anything waits for one of them.
    at = sums + place.to(tl.int64)[:, :, None] * D + tl.arange(0, D // 2)[None, None, :]
    even = tl.load(at, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
    odd = tl.load(at + D // 2, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
    maximum = tl.load(maxima + place, mask=inside, other=-1e30, cache_modifier=".cg")
    share = tl.load(denominators + place, mask=inside, other=0.0, cache_modifier=".cg")
    highest = tl.maximum(tl.max(maximum, 0), sink)
    factor = tl.exp(maximum - highest[None, :])
    total = tl.sum(share * factor, 0) + tl.exp(sink - highest)
    even = tl.sum(even * factor[:, :, None], 0)
    odd = tl.sum(odd * factor[:, :, None], 0)
    return even, odd, total


@triton.jit
def attend_kernel(
    query,  # bf16 [T, HEADS, D] as int32 words
    window_pages,  # uint8 [rows, WINDOW_BYTES]
    entry_pages,  # uint8 [rows, ENTRY_BYTES]
    window_records,  # int32 [T, WINDOW], -1 absent
    entry_records,  # int32 [T, NUM_PICKS], -1 absent
    sums,  # float32 [T, SPLITS, H, D] out: even elements first; H is HEADS up to a multiple of 16
    maxima,  # float32 [T, SPLITS, H] out
    denominators,  # float32 [T, SPLITS, H] out
    counters,  # int32 [T, H/16], zero before and after
    sink,  # float32 [HEADS]
    cos,  # float32 [T, ROPE/2]
    sin,
    out,  # bf16 [T, HEADS, D] out, where MERGES
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_PICKS: tl.constexpr,
    WINDOW_BYTES: tl.constexpr,
    ENTRY_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    MERGES: tl.constexpr,  # the last program of a row merges its parts; merge_kernel does otherwise
    BIT_OPS: tl.constexpr,
):
    """16 heads and every SPLITS-th block of KEYS places of a row's list (oracle: reference.sparse_attention).

    Records of the next block, and record numbers of the one after it, are under way while a block is attended to.
    """
    split = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2) * 16 + tl.arange(0, 16)
    pair = tl.arange(0, D // 2)
    key = tl.arange(0, KEYS)
    HEAD_BLOCKS: tl.constexpr = (HEADS + 15) // 16
    NUM_WINDOW: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    NUM_ENTRY: tl.constexpr = (NUM_PICKS + KEYS - 1) // KEYS
    first_entry = (split + SPLITS - NUM_WINDOW % SPLITS) % SPLITS
    window_at = window_records + row * WINDOW
    entry_at = entry_records + row * NUM_PICKS
    place = split * KEYS + key
    own = tl.load(window_at + place, mask=place < WINDOW, other=-1)
    place += SPLITS * KEYS
    after = tl.load(window_at + place, mask=place < WINDOW, other=-1)
    codes, scales = load_window(window_pages, own, D, WINDOW_BYTES)
    multipliers = e8m0_scales(scales)
    if NUM_PICKS > 0:
        entry_place = first_entry * KEYS + key
        own_entries = tl.load(entry_at + entry_place, mask=entry_place < NUM_PICKS, other=-1)
        entry_place += SPLITS * KEYS
        after_entries = tl.load(entry_at + entry_place, mask=entry_place < NUM_PICKS, other=-1)
        if SPLITS > 1:  # before the window; with all of it to come, they would take registers for too long
            entry_codes, entry_bytes = load_entries(entry_pages, own_entries, D, ENTRY_BYTES)
            entry_multipliers = e4m3_scales(entry_bytes)
    at = query + (row * HEADS + head)[:, None] * (D // 2) + pair[None, :]
    words = tl.load(at, mask=(head < HEADS)[:, None], other=0)
    q_even = half_of(words, False, BIT_OPS)
    q_odd = half_of(words, True, BIT_OPS)
    even = tl.zeros((16, D // 2), tl.float32)
    odd = tl.zeros((16, D // 2), tl.float32)
    maximum = tl.full((16,), -1e30, tl.float32)
    place_sums = tl.zeros((16, KEYS), tl.float32)
    for _ in tl.range(split, NUM_WINDOW, SPLITS, num_stages=1):
        next_codes, next_scales = load_window(window_pages, after, D, WINDOW_BYTES)
        place += SPLITS * KEYS
        next_after = tl.load(window_at + place, mask=place < WINDOW, other=-1)
        wide = spread(multipliers, KEYS, D // 32, 16, BIT_OPS)
        k_even, k_odd = fp8_elements(codes, wide, BIT_OPS)
        even, odd, maximum, place_sums = attend_block(
            q_even, q_odd, k_even, k_odd, own >= 0, even, odd, maximum, place_sums, scale, BIT_OPS
        )
        own, after, codes, multipliers = after, next_after, next_codes, e8m0_scales(next_scales)
    if NUM_PICKS > 0:
        if SPLITS == 1:
            entry_codes, entry_bytes = load_entries(entry_pages, own_entries, D, ENTRY_BYTES)
            entry_multipliers = e4m3_scales(entry_bytes)
        for _ in tl.range(first_entry, NUM_ENTRY, SPLITS, num_stages=1):
            next_codes, next_scales = load_entries(entry_pages, after_entries, D, ENTRY_BYTES)
            entry_place += SPLITS * KEYS
            next_after = tl.load(entry_at + entry_place, mask=entry_place < NUM_PICKS, other=-1)
            wide = spread(entry_multipliers, KEYS, D // 16, 8, BIT_OPS)
            k_even, k_odd = fp4_elements(entry_codes, wide, BIT_OPS)
            even, odd, maximum, place_sums = attend_block(
                q_even,
                q_odd,
                k_even,
                k_odd,
                own_entries >= 0,
                even,
                odd,
                maximum,
                place_sums,
                scale,
                BIT_OPS,
            )
            own_entries, after_entries = after_entries, next_after
            entry_codes, entry_multipliers = next_codes, e4m3_scales(next_scales)
    denominator = tl.sum(place_sums, 1)
    sink_score = tl.load(sink + head, mask=head < HEADS, other=0.0)
    exists = head < HEADS
    own_cos = cos + row * (ROPE // 2)
    own_sin = sin + row * (ROPE // 2)
    out += row * (HEADS * D)
    if SPLITS == 1:
        highest = tl.maximum(maximum, sink_score)
        share = tl.exp(maximum - highest)
        total = denominator * share + tl.exp(sink_score - highest)
        even *= share[:, None]
        odd *= share[:, None]
        store_heads(even, odd, total, own_cos, own_sin, out, head, exists, 16, D, ROPE, BIT_OPS)
    else:
        part = (row * SPLITS + split) * (16 * HEAD_BLOCKS) + head
        sums_at = sums + part.to(tl.int64)[:, None] * D + pair[None, :]
        tl.store(sums_at, even)
        tl.store(sums_at + D // 2, odd)
        tl.store(maxima + part, maximum)
        tl.store(denominators + part, denominator)
        if MERGES:
            tl.debug_barrier()  # every thread's part is out before one of them says so
            counter = counters + row * HEAD_BLOCKS + tl.program_id(2)
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                tl.debug_barrier()
                even, odd, total = merge_parts(
                    sums, maxima, denominators, sink_score, row, head, HEADS, D, SPLITS, BLOCK_SPLITS
                )
                store_heads(even, odd, total, own_cos, own_sin, out, head, exists, 16, D, ROPE, BIT_OPS)
                tl.store(counter, 0)


@triton.jit
def merge_kernel(
    sums,
    maxima,
    denominators,
    sink,  # float32 [HEADS]
    cos,  # float32 [T, ROPE/2]
    sin,
    out,  # bf16 [T, HEADS, D]
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a head and row: the parts with the sink, then the inverse rotation (oracle: apply_rope, inverse)."""
    row = tl.program_id(1)
    head = tl.program_id(0) + tl.arange(0, 1)
    even, odd, total = merge_parts(
        sums, maxima, denominators, tl.load(sink + head), row, head, HEADS, D, SPLITS, BLOCK_SPLITS
    )
    own = row * (ROPE // 2)
    store_heads(
        even, odd, total, cos + own, sin + own, out + row * (HEADS * D), head, head >= 0, 1, D, ROPE, BIT_OPS
    )


@dataclass(frozen=True, slots=True)
class AttendTuning:
    """How a row's list is shared out; `merges` says that the last program of a row adds the parts.

    Without a limit to its registers, a processor has one program; with 128 it has two, and they spill.
    """

    splits: int
    merges: bool
    keys: int = BLOCK_KEYS
    warps: int = 8
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one rank attends with: its heads, elements of a head and how many of them turn, window places."""

    heads: int = 16
    width: int = 512
    rope: int = 64
    window: int = 128


def attend_tuning(shape: AttentionShape, num_rows: int, num_picks: int) -> AttendTuning:
    """A program for each of 132 processors where the list has as many blocks, all of as many blocks as each other.

    Blocks of 64 keys cost little more than blocks of 32. The last program of a row reads the parts of all, which is
    slower than a launch of sixteen programs unless there are very few (measured on an H200: decision 0021).
    """
    blocks = -(-shape.window // BLOCK_KEYS) + -(-num_picks // BLOCK_KEYS)
    turns = -(-blocks // max(132 // (num_rows * -(-shape.heads // BLOCK_HEADS)), 1))
    splits = -(-blocks // turns)
    return AttendTuning(splits, merges=splits <= 2)


def native_heads(shape: AttentionShape, num_rows: int, num_picks: int) -> attending.Heads | None:
    """What native/attending.py takes of it, if it does."""
    heads = attending.Heads(shape.heads, shape.width, shape.rope, shape.window, num_picks)
    return heads if num_rows <= products.MOST_ROWS and heads.is_taken() else None


class AttentionBuffers:
    """Parts of a row's attention, of one batch size; all layers share it."""

    def __init__(
        self,
        shape: AttentionShape,
        num_rows: int,
        num_picks: int,
        device: torch.device | str,
        tuning: AttendTuning | None = None,
    ) -> None:
        self.shape = shape
        heads = native_heads(shape, num_rows, num_picks)
        native_splits = 1 if heads is None else heads.splits(num_rows)
        # Tensors of the host are for Triton's interpreter, which is given the same memory.
        self.native = None if torch.device(device).type == "cpu" else heads
        if tuning is None and self.native is not None:
            tuning = AttendTuning(native_splits, merges=False)
        self.tuning = tuning or attend_tuning(shape, num_rows, num_picks)
        self.num_rows = num_rows
        self.num_picks = num_picks
        splits, head_blocks = self.tuning.splits, -(-shape.heads // BLOCK_HEADS)
        most = max(splits, native_splits)
        parts = (most, num_rows, head_blocks * BLOCK_HEADS) if most > 1 else (0, num_rows, 0)

        def of_parts(*size: int) -> Tensor:
            """float32 [T, splits, H, ..], H padded."""
            held = torch.zeros(*parts, *size, device=device)[:splits]
            return held.view(num_rows, len(held), *parts[2:], *size)

        self.sums, self.maxima, self.denominators = of_parts(shape.width), of_parts(), of_parts()
        self.counters = torch.zeros(num_rows, head_blocks, dtype=torch.int32, device=device)
        self.out = torch.zeros(num_rows, shape.heads * shape.width, dtype=torch.bfloat16, device=device)


def locate_window(where: tuple[Tensor, Tensor, Tensor], records: Tensor, *, block_size: int) -> None:
    """Record numbers of every row's window, oldest first -> records int32 [T, window], -1 before the first position.

    `where`: slots int32 [T], positions int32 [T], window block table int32 [S, B].
    """
    slots, positions, table = where
    num_rows, window = records.shape
    window_kernel[(num_rows,)](
        slots, positions, table, table.stride(0), records, WINDOW=window, BLOCK=triton.next_power_of_2(window),
        BLOCK_SIZE=block_size, num_warps=4,
    )  # fmt: skip


def write_latents(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    codes: Tensor,
    scales: Tensor,
    pages: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    *,
    block_size: int,
    eps: float,
    bit_ops: bool,
) -> None:
    """qkv bf16 [T, Q + D] -> codes FP8 [T, Q] with scales, and window records in `pages`; rope float32 [T, ROPE/2].

    `where`: slots int32 [T], positions int32 [T], window block table int32 [S, B].
    """
    if linear.few(qkv, bit_ops=bit_ops):
        latents.write_latents(
            qkv, (q_norm, kv_norm), rope, codes, scales, pages, where,
            block_size=block_size, eps=eps,
        )  # fmt: skip
        return
    slots, positions, table = where
    width = codes.shape[1]
    latent_kernel[(2, len(qkv))](
        qkv,
        q_norm,
        kv_norm,
        *rope,
        codes,
        scales.view(torch.uint8),
        pages,
        slots,
        positions,
        table,
        table.stride(0),
        block_size,
        Q=width,
        BLOCK_Q=triton.next_power_of_2(width),
        D=qkv.shape[1] - width,
        ROPE=2 * rope[0].shape[1],
        BYTES=pages.shape[1],
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def attend(
    query: Tensor,
    window_pages: Tensor,
    entry_pages: Tensor | None,
    records: tuple[Tensor, Tensor | None],
    sink: Tensor,
    rope: tuple[Tensor, Tensor],
    buffers: AttentionBuffers,
    *,
    bit_ops: bool,
    picks_are_new: bool = True,
) -> None:
    """query bf16 [T, H·D] over its window and its picks -> buffers.out bf16 [T, H·D], unrotated.

    `records`: rows of window_pages int32 [T, window] and of entry_pages int32 [T, L], -1 absent; no entries where the
    buffers are for a window alone. `picks_are_new`: the kernel before this one may have written their numbers.
    """
    window_records, entry_records = records
    shape, tuning = buffers.shape, buffers.tuning
    if buffers.native is not None and tuning.splits > 1:
        attending.attend(
            query, (window_pages, entry_pages), records, sink, rope,
            (buffers.sums, buffers.maxima, buffers.denominators), buffers.out, buffers.native,
            splits=tuning.splits, picks_are_new=picks_are_new,
        )  # fmt: skip
        return
    if entry_pages is None or entry_records is None:
        entry_pages, entry_records = window_pages, window_records  # not looked at
    sizes = {
        "HEADS": shape.heads, "D": shape.width, "ROPE": shape.rope, "SPLITS": tuning.splits,
        "BLOCK_SPLITS": triton.next_power_of_2(tuning.splits), "BIT_OPS": bit_ops,
    }  # fmt: skip
    parts = (buffers.sums, buffers.maxima, buffers.denominators)
    attend_kernel[(tuning.splits, len(query), buffers.counters.shape[1])](
        query.view(torch.int32),
        window_pages,
        entry_pages,
        window_records,
        entry_records,
        *parts,
        buffers.counters,
        sink,
        *rope,
        buffers.out,
        shape.width**-0.5,
        **sizes,
        WINDOW=shape.window,
        NUM_PICKS=buffers.num_picks,
        WINDOW_BYTES=window_pages.shape[1],
        ENTRY_BYTES=entry_pages.shape[1],
        KEYS=tuning.keys,
        MERGES=tuning.merges,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
    )
    if tuning.splits > 1 and not tuning.merges:
        merge_kernel[(shape.heads, len(query))](*parts, sink, *rope, buffers.out, **sizes, num_warps=4)


__all__ = [
    "BLOCK_KEYS",
    "AttendTuning",
    "AttentionBuffers",
    "AttentionShape",
    "attend",
    "attend_kernel",
    "attend_tuning",
    "latent_kernel",
    "locate_window",
    "merge_kernel",
    "turned_tail",
    "window_kernel",
    "write_latents",
]
