"""Sparse attention over packed records (spec §4.2, §4.3, §4.7, §N.5). Owns three kernels and the address arithmetic.

    latent_kernel    what wq_a and wkv made of a row: the query's low rank normed and quantised, and the window record
                     normed, rotated, quantised and written to its page
    attend_kernel    a part of a row's list, of its window and of its picked entries, straight from the pages
    merge_kernel     the parts of a row and its sinks; takes the query's rotation back

Addresses come from the block tables on the device, so a captured step needs no index from the host. The pages of the
window rows that any row of a step still sees, and those that the step writes, must be different ones: the tables give
every request room for its window and one verify window more. The even and odd dimensions of a record lie in the low
and high half of its bytes or words; they are kept apart, because neither scores nor sums care.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, to_bf16

HEADS = 16
WIDTH = 512
WINDOW = 128
BLOCK_KEYS = 32
_TWO_120 = tl.constexpr(1.329227995784916e36)
_TWO_126 = tl.constexpr(8.507059173023462e37)


@triton.jit
def normed(at, norm, column, width, mask, eps):
    """bf16 [width] at `at` -> float32 of its RMSNorm rounded to bf16 later, and the factor (spec §N.2)."""
    value = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    return tl.load(norm + column, mask=mask, other=0.0) * (value * factor), factor


@triton.jit(do_not_specialize=["table_width"])
def latent_kernel(
    qkv,  # bf16 [T, Q + 512]: wq_a over wkv
    q_norm,  # float32 [Q]
    kv_norm,  # float32 [512]
    cos,  # float32 [T, 32]
    sin,
    codes,  # float8e4nv [T, Q] out
    code_scales,  # uint8 [T, Q/32] out
    pages,  # uint8 [rows, 528] out
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, blocks]: window blocks; block 0 is nobody's and not written
    table_width,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Program 0 of a row: oracle rms_norm, quantize_fp8. Program 1: rms_norm, apply_rope, WINDOW.pack."""
    row = tl.program_id(1)
    source = qkv + row * (Q + 512)
    if tl.program_id(0) == 0:
        store_low_rank(
            source, q_norm, codes + row * Q, code_scales + row * (Q // 32), Q, BLOCK_Q, EPS, BIT_OPS
        )
    else:
        position = tl.load(positions + row)
        block = tl.load(table + tl.load(slots + row) * table_width + position // BLOCK_SIZE)
        at = pages + (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * 528
        store_window_record(source + Q, kv_norm, cos + row * 32, sin + row * 32, at, block > 0, EPS, BIT_OPS)


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
def store_window_record(source, norm, cos, sin, at, has_place, EPS: tl.constexpr, BIT_OPS: tl.constexpr):
    """bf16 [512] at `source` normed, rotated and packed into the record at `at`."""
    column = tl.arange(0, 512)
    value, factor = normed(source, norm, column, 512, column < 512, EPS)
    value = to_bf16(value, BIT_OPS).to(tl.float32)
    partner = column ^ 1
    other = tl.load(norm + partner) * (tl.load(source + partner).to(tl.float32) * factor)
    other = to_bf16(other, BIT_OPS).to(tl.float32)
    turned = to_bf16(turned_tail(value, other, cos, sin, column), BIT_OPS)
    groups = tl.reshape(turned.to(tl.float32), (16, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))
    record = tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (512,)).to(tl.uint8, bitcast=True)
    tl.store(at + column, record, mask=(column >= 0) & has_place)
    group = tl.arange(0, 16)
    tl.store(at + 512 + group, (bits >> 23).to(tl.uint8), mask=(group >= 0) & has_place)


@triton.jit
def turned_tail(value, other, cos, sin, column):
    """value [512] with its last 64 elements rotated; other is each element's partner of its pair (spec §N.7)."""
    turns = column >= 448
    pair = (column - 448) // 2
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    return value * c + tl.where(column % 2 == 0, -other, other) * s


@triton.jit
def window_keys(pages, numbers, valid, HIGH: tl.constexpr, BIT_OPS: tl.constexpr):
    """Even or odd elements of window records `numbers` int64 [N] -> [N, 256], bf16 or float32 in the interpreter."""
    column = tl.arange(0, 256)
    words = pages.to(tl.pointer_type(tl.int16))
    codes = tl.load(words + numbers[:, None] * 264 + column[None, :], mask=valid[:, None], other=0).to(
        tl.int32
    )
    if HIGH:
        codes = codes >> 8
    scale = tl.load(
        pages + numbers[:, None] * 528 + 512 + column[None, :] // 16, mask=valid[:, None], other=127
    ).to(tl.int32)
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    value = (bits.to(tl.float32, bitcast=True) * _TWO_120) * (scale << 23).to(tl.float32, bitcast=True)
    return value if BIT_OPS else value.to(tl.bfloat16)


@triton.jit
def entry_keys(pages, numbers, valid, HIGH: tl.constexpr, BIT_OPS: tl.constexpr):
    """The same of compressed entries of 288 bytes."""
    column = tl.arange(0, 256)
    at = pages + numbers[:, None] * 288
    codes = tl.load(at + column[None, :], mask=valid[:, None], other=0).to(tl.int32)
    if HIGH:
        codes = codes >> 4
    scale = tl.load(at + 256 + column[None, :] // 8, mask=valid[:, None], other=0).to(tl.int32)
    bits = ((codes & 0x8) << 28) | ((codes & 0x7) << 22)
    multiplier = (scale << 20).to(tl.float32, bitcast=True) * _TWO_120
    value = (bits.to(tl.float32, bitcast=True) * _TWO_126) * multiplier
    return value if BIT_OPS else value.to(tl.bfloat16)


@triton.jit
def half_of(words, HIGH: tl.constexpr, BIT_OPS: tl.constexpr):
    """int32 words of two bf16 -> the lower or upper one, bf16 (float32 in the interpreter)."""
    bits = (words & -65536) if HIGH else (words << 16)
    value = bits.to(tl.float32, bitcast=True)
    return value if BIT_OPS else value.to(tl.bfloat16)


@triton.jit(do_not_specialize=["table_width"])
def attend_kernel(
    query,  # bf16 [T, 16, 512] as int32 words
    window_pages,  # uint8 [rows, 528]
    entry_pages,  # uint8 [rows, 288]
    picks,  # int32 [T, NUM_PICKS], ascending, -1 absent at the end
    slots,  # int32 [T]
    positions,  # int32 [T]
    window_table,  # int32 [S, blocks]
    entry_table,  # int32 [S, blocks]
    table_width,
    sums,  # float32 [T, SPLITS, 16, 512] out: even elements first
    maxima,  # float32 [T, SPLITS, 16] out
    denominators,  # float32 [T, SPLITS, 16] out
    scale,
    NUM_PICKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # entries a block
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: every SPLITS-th block of KEYS places of a row's list (oracle: reference.sparse_attention)."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.arange(0, 16)
    column = tl.arange(0, 256)
    words = tl.load(query + row * 4096 + head[:, None] * 256 + column[None, :])
    q_even = half_of(words, False, BIT_OPS)
    q_odd = half_of(words, True, BIT_OPS)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    even = tl.zeros((16, 256), tl.float32)
    odd = tl.zeros((16, 256), tl.float32)
    maximum = tl.full((16,), -1e30, tl.float32)
    denominator = tl.zeros((16,), tl.float32)
    key = tl.arange(0, KEYS)
    for block in range(split, (128 + NUM_PICKS) // KEYS, SPLITS):
        place = block * KEYS + key
        if block < 128 // KEYS:
            at = position - 127 + place
            valid = at >= 0
            page = tl.load(window_table + slot * table_width + at // BLOCK_SIZE, mask=valid, other=0)
            numbers = page.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            k_even = window_keys(window_pages, numbers, valid, False, BIT_OPS)
            k_odd = window_keys(window_pages, numbers, valid, True, BIT_OPS)
        else:
            number = tl.load(picks + row * NUM_PICKS + place - 128)
            valid = number >= 0
            page = tl.load(entry_table + slot * table_width + number // PER_BLOCK, mask=valid, other=0)
            numbers = page.to(tl.int64) * PER_BLOCK + number % PER_BLOCK
            k_even = entry_keys(entry_pages, numbers, valid, False, BIT_OPS)
            k_odd = entry_keys(entry_pages, numbers, valid, True, BIT_OPS)
        scores = (tl.dot(q_even, tl.trans(k_even)) + tl.dot(q_odd, tl.trans(k_odd))) * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp(maximum - highest)
        weights = tl.exp(scores - highest[:, None])
        denominator = denominator * rescale + tl.sum(weights, 1)
        weights = to_bf16(weights, BIT_OPS)
        if BIT_OPS:
            weights = weights.to(tl.float32)
        even = even * rescale[:, None] + tl.dot(weights, k_even)
        odd = odd * rescale[:, None] + tl.dot(weights, k_odd)
        maximum = highest
    part = row * SPLITS + split
    out = sums + (part * 16 + head)[:, None] * 512 + column[None, :]
    tl.store(out, even)
    tl.store(out + 256, odd)
    tl.store(maxima + part * 16 + head, maximum)
    tl.store(denominators + part * 16 + head, denominator)


@triton.jit
def merge_kernel(
    sums,
    maxima,
    denominators,
    sink,  # float32 [16]
    cos,  # float32 [T, 32]
    sin,
    out,  # bf16 [T, 16, 512]
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row and head: the parts with the sink, then the inverse rotation (oracle: apply_rope, inverse)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    inside = split < SPLITS
    first = row * SPLITS * 16 + head
    maximum = tl.load(maxima + first + split * 16, mask=inside, other=-1e30)
    sink_score = tl.load(sink + head)
    highest = tl.maximum(tl.max(maximum, 0), sink_score)
    shares = tl.load(denominators + first + split * 16, mask=inside, other=0.0) * tl.exp(maximum - highest)
    total = tl.sum(shares, 0) + tl.exp(sink_score - highest)
    column = tl.arange(0, 256)
    even = tl.zeros((256,), tl.float32)
    odd = tl.zeros((256,), tl.float32)
    for part in range(SPLITS):
        factor = tl.exp(tl.load(maxima + first + part * 16) - highest)
        at = sums + (first + part * 16) * 512 + column
        even += tl.load(at) * factor
        odd += tl.load(at + 256) * factor
    even = to_bf16(even / total, BIT_OPS).to(tl.float32)
    odd = to_bf16(odd / total, BIT_OPS).to(tl.float32)
    turns = column >= 224
    c = tl.load(cos + row * 32 + column - 224, mask=turns, other=1.0)
    s = tl.load(sin + row * 32 + column - 224, mask=turns, other=0.0)
    at = out + (row * 16 + head) * 512 + 2 * column
    tl.store(at, to_bf16(even * c + odd * s, BIT_OPS))
    tl.store(at + 1, to_bf16(odd * c - even * s, BIT_OPS))


class AttentionBuffers:
    """Parts of a row's attention, of one batch size; all layers share it."""

    def __init__(
        self, num_rows: int, num_picks: int, device: torch.device | str, splits: int | None = None
    ) -> None:
        blocks = (WINDOW + num_picks) // BLOCK_KEYS
        # One program a block of keys while there are few rows, then fewer, so that the parts stay small.
        self.splits = splits or max(min(blocks, 264 // num_rows), 1)
        self.num_rows = num_rows
        self.num_picks = num_picks
        self.sums = torch.zeros(num_rows, self.splits, HEADS, WIDTH, device=device)
        self.maxima = torch.zeros(num_rows, self.splits, HEADS, device=device)
        self.denominators = torch.zeros(num_rows, self.splits, HEADS, device=device)
        self.out = torch.zeros(num_rows, HEADS * WIDTH, dtype=torch.bfloat16, device=device)


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
    """qkv bf16 [T, Q + 512] -> codes FP8 [T, Q] with scales, and window records in `pages`.

    `where`: slots int32 [T], positions int32 [T], window block table int32 [S, B].
    """
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
        Q=width,
        BLOCK_Q=triton.next_power_of_2(width),
        BLOCK_SIZE=block_size,
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def attend(
    query: Tensor,
    window_pages: Tensor,
    entry_pages: Tensor,
    picks: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor],
    sink: Tensor,
    rope: tuple[Tensor, Tensor],
    buffers: AttentionBuffers,
    *,
    block_size: int,
    ratio: int,
    bit_ops: bool,
) -> None:
    """query bf16 [T, 16·512] over its window and its picks int32 [T, L] -> buffers.out bf16 [T, 16·512], unrotated.

    `where`: slots and positions int32 [T], window and entry block tables int32 [S, B]. L is a multiple of 32, 0 where a
    layer has a window alone.
    """
    slots, positions, window_table, entry_table = where
    attend_kernel[(buffers.splits, len(query))](
        query.view(torch.int32),
        window_pages,
        entry_pages,
        picks,
        slots,
        positions,
        window_table,
        entry_table,
        window_table.stride(0),
        buffers.sums,
        buffers.maxima,
        buffers.denominators,
        WIDTH**-0.5,
        NUM_PICKS=buffers.num_picks,
        BLOCK_SIZE=block_size,
        PER_BLOCK=block_size // max(ratio, 1),
        SPLITS=buffers.splits,
        KEYS=BLOCK_KEYS,
        BIT_OPS=bit_ops,
        num_warps=8,
    )
    merge_kernel[(HEADS, len(query))](
        buffers.sums,
        buffers.maxima,
        buffers.denominators,
        sink,
        *rope,
        buffers.out,
        SPLITS=buffers.splits,
        BLOCK_SPLITS=triton.next_power_of_2(buffers.splits),
        BIT_OPS=bit_ops,
        num_warps=4,
    )


__all__ = [
    "BLOCK_KEYS",
    "HEADS",
    "WIDTH",
    "WINDOW",
    "AttentionBuffers",
    "attend",
    "attend_kernel",
    "latent_kernel",
    "merge_kernel",
    "turned_tail",
    "write_latents",
]
