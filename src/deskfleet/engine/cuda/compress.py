"""Compressed KV and index keys of a source layer (spec §4.4, §4.5). Owns two kernels and the FP4 packing.

    pool_kernel   keeps the pooled inputs of a row and, where it completes a group, makes its latent and its entry
    key_kernel    norm, rotation and packing of the index key that linear.bf16_kernel made of the latent

A row whose group stays open leaves no entry; its latent is zero and its key is written nowhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.native import entries
from deskfleet.engine.cuda.tiles import to_bf16, to_fp8


@triton.jit
def fp4_nibbles(value):
    """float32 within ±6 -> int32 codes with the sign in bit 3; ties to the even code (spec §N.3.3)."""
    m = tl.abs(value)
    code = (
        (m > 0.25).to(tl.int32)
        + (m >= 0.75).to(tl.int32)
        + (m > 1.25).to(tl.int32)
        + (m >= 1.75).to(tl.int32)
    )
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    sign = (value.to(tl.int32, bitcast=True) >> 28) & 8
    return code | sign


@triton.jit
def e8m0_scale(amax):
    """float32 -> bits of the power of two of an FP4 group of this greatest magnitude (spec §N.3.3)."""
    wanted = tl.maximum(amax, 7.052966104933725e-38) * 0.1666666716337204
    return (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000


@triton.jit
def packed_e8m0(even, odd, GROUPS: tl.constexpr):
    """even, odd float32 [16·GROUPS], bf16 values -> bytes int32 [16·GROUPS], scale bits int32 [GROUPS]."""
    e = tl.reshape(even, (GROUPS, 16))
    o = tl.reshape(odd, (GROUPS, 16))
    bits = e8m0_scale(tl.maximum(tl.max(tl.abs(e), 1), tl.max(tl.abs(o), 1)))
    # 2**-e by way of two exact factors: the exponent of a tiny group has no float32 inverse.
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
    low = fp4_nibbles(tl.minimum(tl.maximum(e * inverse, -6.0), 6.0))
    high = fp4_nibbles(tl.minimum(tl.maximum(o * inverse, -6.0), 6.0))
    return tl.reshape(low | (high << 4), (16 * GROUPS,)), bits


@triton.jit
def packed_e4m3(even, odd, GROUPS: tl.constexpr, BIT_OPS: tl.constexpr):
    """even, odd float32 [8·GROUPS], bf16 values -> bytes int32 [8·GROUPS], scales float8e4nv [GROUPS]."""
    e = tl.reshape(even, (GROUPS, 8))
    o = tl.reshape(odd, (GROUPS, 8))
    amax = tl.maximum(tl.maximum(tl.max(tl.abs(e), 1), tl.max(tl.abs(o), 1)), 0.01171875)
    scale = to_fp8(tl.minimum(tl.div_rn(amax, 6.0), 448.0), BIT_OPS)
    byte = scale.to(tl.uint8, bitcast=True).to(tl.int32)
    # Normal or not: the bits of an E4M3 number in float32's place are its value times 2**-120.
    wide = ((byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36)[:, None]
    low = fp4_nibbles(tl.minimum(tl.maximum(tl.div_rn(e, wide), -6.0), 6.0))
    high = fp4_nibbles(tl.minimum(tl.maximum(tl.div_rn(o, wide), -6.0), 6.0))
    return tl.reshape(low | (high << 4), (8 * GROUPS,)), scale


@triton.jit
def pooled(current, previous, at, gate, RATIO: tl.constexpr, BIT_OPS: tl.constexpr):
    """Channels `at` of a group, pooled and rounded to bf16; `gate` is where gates begin after values."""
    new = tl.load(current + at)
    if RATIO == 1:
        return to_bf16(new, BIT_OPS).to(tl.float32)
    old = tl.load(previous + at)
    weight = tl.sigmoid(tl.load(current + gate + at) - tl.load(previous + gate + at))  # softmax of two
    return to_bf16(old * (1.0 - weight) + new * weight, BIT_OPS).to(tl.float32)


@triton.jit(do_not_specialize=["stride", "table_width", "per_block"])
def pool_kernel(
    projected,  # float32 [T, stride]: values [D], then gates [D] where RATIO is 2
    stride,
    open_rows,  # float32 [S * NUM_OPEN, 2 * D]: values and gates of the latest positions of each slot
    norm,  # float32 [D]
    cos,  # float32 [T, ROPE/2]: of the group's first position
    sin,
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, blocks]
    table_width,
    per_block,  # entries a block; with a constant, Triton 3.6 takes all for aligned as the first of a block is
    pages,  # uint8 [rows, BYTES] out
    latents,  # bf16 [T, D] out
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BYTES: tl.constexpr,
    RATIO: tl.constexpr,
    NUM_OPEN: tl.constexpr,
    KEEPS: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row (oracle: compress_pairs, rms_norm, apply_rope, ENTRY.pack); RATIO is 1 or 2.

    With KEEPS, a row leaves its pooled inputs for later steps: where a request has fewer than NUM_OPEN rows in a step,
    or they would overwrite each other's, and what the first of them still reads.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    pair = tl.arange(0, D // 2)
    current = projected + row * stride
    previous = current
    if RATIO == 2:
        if KEEPS:
            whole = tl.arange(0, 2 * D)
            kept = open_rows + (slot * NUM_OPEN + position % NUM_OPEN).to(tl.int64) * (2 * D)
            tl.store(kept + whole, tl.load(current + whole))
        if position % 2 == 0:
            tl.store(latents + row * D + 2 * pair, tl.zeros((D // 2,), tl.bfloat16))
            tl.store(latents + row * D + 2 * pair + 1, tl.zeros((D // 2,), tl.bfloat16))
            return
        # The group's first member came with this step, in the row before, or is kept from an earlier one.
        before = tl.maximum(row - 1, 0)
        beside = (row > 0) & (tl.load(slots + before) == slot) & (tl.load(positions + before) == position - 1)
        if beside:
            previous = projected + before * stride
        else:
            previous = open_rows + (slot * NUM_OPEN + (position - 1) % NUM_OPEN).to(tl.int64) * (2 * D)
    even = pooled(current, previous, 2 * pair, D, RATIO, BIT_OPS)
    odd = pooled(current, previous, 2 * pair + 1, D, RATIO, BIT_OPS)
    factor = tl.rsqrt((tl.sum(even * even, 0) + tl.sum(odd * odd, 0)) / D + EPS)
    even = to_bf16(tl.load(norm + 2 * pair) * (even * factor), BIT_OPS)
    odd = to_bf16(tl.load(norm + 2 * pair + 1) * (odd * factor), BIT_OPS)
    tl.store(latents + row * D + 2 * pair, even)
    tl.store(latents + row * D + 2 * pair + 1, odd)
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    FIRST: tl.constexpr = (D - ROPE) // 2
    turn = row * (ROPE // 2) + pair - FIRST
    c = tl.load(cos + turn, mask=pair >= FIRST, other=1.0)
    s = tl.load(sin + turn, mask=pair >= FIRST, other=0.0)
    turned_even = to_bf16(even * c - odd * s, BIT_OPS).to(tl.float32)
    turned_odd = to_bf16(even * s + odd * c, BIT_OPS).to(tl.float32)
    codes, scales = packed_e4m3(turned_even, turned_odd, D // 16, BIT_OPS)
    number = position // RATIO
    block = tl.load(table + slot * table_width + number // per_block)
    at = pages + (block.to(tl.int64) * per_block + number % per_block) * BYTES
    group = tl.arange(0, D // 16)
    tl.store(at + pair, codes.to(tl.uint8), mask=(pair >= 0) & (block > 0))
    tl.store(at + D // 2 + group, scales.to(tl.uint8, bitcast=True), mask=(group >= 0) & (block > 0))


@triton.jit(do_not_specialize=["table_width", "per_block"])
def key_kernel(
    projected,  # float32 [T, D]: wk times the latent
    norm,  # float32 [D]
    cos,
    sin,
    slots,
    positions,
    table,
    table_width,
    per_block,  # as in pool_kernel
    pages,  # uint8 [rows, BYTES] out
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BYTES: tl.constexpr,
    RATIO: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row (oracle: rms_norm, apply_rope, INDEX_KEY.pack); nothing where the group is open."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position % RATIO != RATIO - 1:
        return
    pair = tl.arange(0, D // 2)
    at = projected + row * D + 2 * pair
    even = to_bf16(tl.load(at), BIT_OPS).to(tl.float32)
    odd = to_bf16(tl.load(at + 1), BIT_OPS).to(tl.float32)
    factor = tl.rsqrt((tl.sum(even * even, 0) + tl.sum(odd * odd, 0)) / D + EPS)
    even = to_bf16(tl.load(norm + 2 * pair) * (even * factor), BIT_OPS).to(tl.float32)
    odd = to_bf16(tl.load(norm + 2 * pair + 1) * (odd * factor), BIT_OPS).to(tl.float32)
    FIRST: tl.constexpr = (D - ROPE) // 2
    turn = row * (ROPE // 2) + pair - FIRST
    c = tl.load(cos + turn, mask=pair >= FIRST, other=1.0)
    s = tl.load(sin + turn, mask=pair >= FIRST, other=0.0)
    turned_even = to_bf16(even * c - odd * s, BIT_OPS).to(tl.float32)
    turned_odd = to_bf16(even * s + odd * c, BIT_OPS).to(tl.float32)
    codes, bits = packed_e8m0(turned_even, turned_odd, D // 32)
    number = position // RATIO
    slot = tl.load(slots + row)
    block = tl.load(table + slot * table_width + number // per_block)
    out = pages + (block.to(tl.int64) * per_block + number % per_block) * BYTES
    group = tl.arange(0, D // 32)
    tl.store(out + pair, codes.to(tl.uint8), mask=(pair >= 0) & (block > 0))
    tl.store(out + D // 2 + group, (bits >> 23).to(tl.uint8), mask=(group >= 0) & (block > 0))


def pool(
    projected: Tensor,
    open_rows: Tensor,
    norm: Tensor,
    rope: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    pages: Tensor,
    latents: Tensor,
    *,
    ratio: int,
    num_open: int,
    block_size: int,
    eps: float,
    bit_ops: bool,
    keeps: bool = True,
) -> None:
    """projected float32 [T, D or more] -> latents bf16 [T, D] and entries in `pages`.

    `where`: slots and positions int32 [T], block table int32 [S, B]; rope of each row's group (spec §4.4). Without
    `keeps`, `open_rows` stays as it is.
    """
    if linear.few(projected, bit_ops=bit_ops) and entries.pool_taken(projected):
        entries.pool(
            projected, open_rows, norm, rope, where, pages, latents,
            ratio=ratio, num_open=num_open, block_size=block_size, eps=eps, keeps=keeps,
        )  # fmt: skip
        return
    slots, positions, table = where
    pool_kernel[(len(projected),)](
        projected,
        projected.stride(0),
        open_rows,
        norm,
        *rope,
        slots,
        positions,
        table,
        table.stride(0),
        block_size // ratio,
        pages,
        latents,
        D=latents.shape[1],
        ROPE=2 * rope[0].shape[1],
        BYTES=pages.shape[1],
        RATIO=ratio,
        NUM_OPEN=num_open,
        KEEPS=keeps,
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def write_keys(
    projected: Tensor,
    norm: Tensor,
    rope: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    pages: Tensor,
    *,
    ratio: int,
    block_size: int,
    eps: float,
    bit_ops: bool,
) -> None:
    """projected float32 [T, D] -> index key records in `pages`."""
    if linear.few(projected, bit_ops=bit_ops) and entries.keys_taken(projected):
        entries.write_keys(projected, norm, rope, where, pages, ratio=ratio, block_size=block_size, eps=eps)
        return
    slots, positions, table = where
    key_kernel[(len(projected),)](
        projected,
        norm,
        *rope,
        slots,
        positions,
        table,
        table.stride(0),
        block_size // ratio,
        pages,
        D=projected.shape[1],
        ROPE=2 * rope[0].shape[1],
        BYTES=pages.shape[1],
        RATIO=ratio,
        EPS=eps,
        BIT_OPS=bit_ops,
        num_warps=1,
    )


__all__ = [
    "e8m0_scale",
    "fp4_nibbles",
    "key_kernel",
    "packed_e4m3",
    "packed_e8m0",
    "pool",
    "pool_kernel",
    "write_keys",
]
