"""Device functions that the matrix kernels share: decoding, scales, quantisation, and the accumulation loop.

Weights are the first operand of the tensor core (64 or 128 of their rows), activations the second: a step of one row
wastes no more than the fifteen others of a 16-row operand. A dot covers 32 columns, the length that shares a scale, and
its result is scaled into the accumulator: sums of 32 products of FP8 codes lose nothing of note in the tensor core's
narrow accumulator, longer ones would.

With BIT_OPS the decoding is plain arithmetic, which is all that Triton's interpreter has; without, it is the same in
PTX on four codes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_CODES = "and.b32 $0, $1, 0x9c9c9c9c;"
"""E4M3 numbers (value times 2**-6) of the first codes of four bytes."""

# The second code of a byte: sign in bit 5 and two low bits in 1 and 0 move up by two, the bit in 6 down by two.
SECOND_CODES = (
    "{ .reg .b32 up, down; shl.b32 up, $1, 2; shr.b32 down, $1, 2;"
    " lop3.b32 up, up, down, 0x10101010, 0xd8; and.b32 $0, up, 0x9c9c9c9c; }"
)
"""The same of the second codes."""

_FIRST = tl.constexpr(FIRST_CODES)
_SECOND = tl.constexpr(SECOND_CODES)


@triton.jit
def first_codes(packed, BIT_OPS: tl.constexpr):
    """uint8 -> float8e4nv of the same shape: the first code of each byte, times 2**-6 (packing.py)."""
    if BIT_OPS:
        codes = packed & 0x9C
    else:
        codes = tl.inline_asm_elementwise(_FIRST, "=r,r", [packed], dtype=tl.uint8, is_pure=True, pack=4)
    return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def second_codes(packed, BIT_OPS: tl.constexpr):
    """uint8 -> float8e4nv of the same shape: the second code of each byte, times 2**-6."""
    if BIT_OPS:
        codes = ((packed << 2) & 0x8C) | ((packed >> 2) & 0x10)
    else:
        codes = tl.inline_asm_elementwise(_SECOND, "=r,r", [packed], dtype=tl.uint8, is_pure=True, pack=4)
    return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def scale_of(words, INDEX: tl.constexpr):
    """Scale `INDEX` of four in int32 words -> float32 2**(byte - 127); a zero byte gives 0."""
    if INDEX == 3:
        bits = (words >> 1) & 0x7F800000
    else:
        bits = (words << (23 - 8 * INDEX)) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_dot(acc, weights, x, weight_scales, x_scales, INDEX: tl.constexpr):
    """acc [N, M] += weights [N, 32] · x [32, M], times both scales of group INDEX."""
    scales = scale_of(weight_scales, INDEX)[:, None] * scale_of(x_scales, INDEX)[None, :]
    return acc + tl.dot(weights, x) * scales


@triton.jit
def accumulate(
    acc,
    codes,
    scales,
    x,
    x_scales,
    tile,
    rows,
    live,
    begin,
    end,
    K: tl.constexpr,
    IS_FP4: tl.constexpr,
    BN: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """acc float32 [BN, M] += tile `tile` of a weight times rows of x, over blocks begin..end of 128 columns.

    codes and scales as Fp4Tiles or Fp8Tiles of one matrix; x float8e4nv [T, K] with x_scales int32 [T, ceil(K/128)];
    rows int32 [M], those not `live` count as zero. With BN 64 tile is counted in halves of a packed tile. For FP4 the
    result is 2**-6 times the product.
    """
    row = tl.arange(0, BN)
    column = tl.arange(0, 32)
    x_at = x + rows[None, :] * K + column[:, None] + begin * 128
    x_scale_at = x_scales + rows * ((K + 127) // 128) + begin
    packed_tile = tile * BN // 128
    inside = tile * BN % 128 + row
    if IS_FP4:
        code_at = (
            codes + (packed_tile * (K // 64) + begin * 2) * 4096 + inside[:, None] * 32 + column[None, :]
        )
        scale_at = scales + (packed_tile * ((K + 127) // 128) + begin) * 128 + inside
    else:
        code_at = (
            codes + (packed_tile * (K // 32) + begin * 4) * 4096 + inside[:, None] * 32 + column[None, :]
        )
        scale_at = scales + (tile * BN + row) // 32 * ((K + 127) // 128) + begin
    for block in tl.range(begin, end, num_stages=STAGES):
        weight_words = tl.load(scale_at)
        x_words = tl.load(x_scale_at, mask=live, other=0)
        # The last block is a partial one where 128 does not divide K; columns beyond K are neither read nor counted.
        if IS_FP4:
            plane = tl.load(code_at)
            acc = scaled_dot(
                acc, first_codes(plane, BIT_OPS), tl.load(x_at, mask=live[None, :], other=0.0),
                weight_words, x_words, 0,
            )  # fmt: skip
            acc = scaled_dot(
                acc, second_codes(plane, BIT_OPS), tl.load(x_at + 32, mask=live[None, :], other=0.0),
                weight_words, x_words, 1,
            )  # fmt: skip
            if K % 128 == 0:
                plane = tl.load(code_at + 4096)
                inner = live
            else:
                inner = live & (block * 128 + 64 < K)
                plane = tl.load(code_at + 4096, mask=(row[:, None] >= 0) & (block * 128 + 64 < K), other=0)
            acc = scaled_dot(
                acc, first_codes(plane, BIT_OPS), tl.load(x_at + 64, mask=inner[None, :], other=0.0),
                weight_words, x_words, 2,
            )  # fmt: skip
            acc = scaled_dot(
                acc, second_codes(plane, BIT_OPS), tl.load(x_at + 96, mask=inner[None, :], other=0.0),
                weight_words, x_words, 3,
            )  # fmt: skip
            code_at += 2 * 4096
            scale_at += 128
        else:
            for group in tl.static_range(4):
                if K % 128 == 0:
                    weights = tl.load(code_at + group * 4096)
                    inner = live
                else:
                    inner = live & (block * 128 + group * 32 < K)
                    weights = tl.load(
                        code_at + group * 4096,
                        mask=(row[:, None] >= 0) & (block * 128 + group * 32 < K),
                        other=0.0,
                    )
                x_group = tl.load(x_at + group * 32, mask=inner[None, :], other=0.0)
                acc = scaled_dot(acc, weights, x_group, weight_words, x_words, group)
            code_at += 4 * 4096
            scale_at += 1
        x_at += 128
        x_scale_at += 1
    return acc


@triton.jit
def fp8_scale(amax):
    """float32 -> bits of the power of two that groups of this greatest magnitude are divided by (spec §N.3.2)."""
    wanted = tl.maximum(amax, 1e-4) * 0.002232142857142857
    return (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000


@triton.jit
def fp8_codes(values, scale_bits, BIT_OPS: tl.constexpr):
    """values / scale as float8e4nv; scale_bits of `fp8_scale` broadcast to them."""
    inverse = (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)  # 2**-e, exact
    return to_fp8(tl.minimum(tl.maximum(values * inverse, -448.0), 448.0), BIT_OPS)


@triton.jit
def to_bf16(values, BIT_OPS: tl.constexpr):
    """float32 -> bf16, to nearest even; the interpreter's own conversion cuts off."""
    if BIT_OPS:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = bits.to(tl.float32, bitcast=True)
    return values.to(tl.bfloat16)


@triton.jit
def to_fp8(values, BIT_OPS: tl.constexpr):
    """float32 of at most 448 -> float8e4nv, to nearest even; the interpreter's own conversion cuts off."""
    if BIT_OPS:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
        small = (values + 24576.0) - 24576.0  # 1.5 * 2**14: what is left is a multiple of 2**-9
        values = tl.where(tl.abs(values) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return values.to(tl.float8e4nv)


@triton.jit
def sum_of_splits(acc, partials, place, counter, SPLITS: tl.constexpr, SIZE: tl.constexpr, offsets):
    """Leave this program's acc and, in the last of SPLITS programs to come here, return the sum of all.

    partials float32 [SPLITS, places, SIZE], `place` this program's; counter int32 of that place, zero before and after.
    Returns (acc, is_last). The sum is taken in the order of the splits, whoever is last.
    """
    split, num_places = place[0], place[1]
    number = place[2]
    tl.store(partials + (split * num_places + number).to(tl.int64) * SIZE + offsets, acc)
    tl.debug_barrier()  # every thread's part is out before one of them says so
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    if is_last:
        tl.debug_barrier()
        acc = tl.zeros_like(acc)
        for other in range(SPLITS):
            at = partials + (other * num_places + number).to(tl.int64) * SIZE + offsets
            acc += tl.load(at, cache_modifier=".cg")
        tl.store(counter, 0)
    return acc, is_last


__all__ = [
    "FIRST_CODES",
    "SECOND_CODES",
    "accumulate",
    "first_codes",
    "fp8_codes",
    "fp8_scale",
    "scale_of",
    "scaled_dot",
    "second_codes",
    "sum_of_splits",
    "to_bf16",
    "to_fp8",
]
