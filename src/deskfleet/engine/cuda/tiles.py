"""Device functions that the matrix kernels share: decoding, scales, quantisation, and the accumulation loop.

Weights are the first operand of the tensor core (64 or 128 of their rows), activations the second: a step of one row
wastes no more than the fifteen others of a 16-row operand. A dot covers 32 columns, the length that shares a scale, and
its result is scaled into the accumulator: sums of 32 products of FP8 codes keep some 13 bits in the tensor core's
narrow accumulator, longer ones would keep fewer. EXACT products are of f16, which holds the codes exactly, and their
sums are float32.

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

_SELECT = "lop3.b32 sign, sign, value, 0x80008000, 0xe4; and.b32 sign, sign, 0x87f087f0;"
_SCALE = "mov.b32 value, 0x7b807b80; mul.rn.bf16x2 $0, sign, value;"
LOW_CODES = f"{{ .reg .b32 sign, value; shl.b32 sign, $1, 8; shl.b32 value, $1, 4; {_SELECT} {_SCALE} }}"
HIGH_CODES = f"{{ .reg .b32 sign, value; mov.b32 sign, $1; shr.b32 value, $1, 4; {_SELECT} {_SCALE} }}"
"""E4M3 codes in the low or high bytes of two words as bf16: their bits in place are the value times 2**-120, and the
product with 2**120 is exact."""

_FIRST = tl.constexpr(FIRST_CODES)
_SECOND = tl.constexpr(SECOND_CODES)
_LOW = tl.constexpr(LOW_CODES)
_HIGH = tl.constexpr(HIGH_CODES)


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
def widened(words, HIGH: tl.constexpr, BIT_OPS: tl.constexpr):
    """int16 words of two E4M3 codes -> values of one, bf16 (float32 in the interpreter: it multiplies no bf16)."""
    if BIT_OPS:
        wide = words.to(tl.int32)
        if HIGH:
            wide = wide >> 8
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    elif HIGH:
        return tl.inline_asm_elementwise(_HIGH, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_LOW, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def scales_at(words, index):
    """Scale `index` of four in int32 words, of one shape -> float32 2**(byte - 127); a zero byte gives 0."""
    return (((words >> (8 * index)) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit
def repeated(values, BM: tl.constexpr, GROUPS: tl.constexpr):
    """[BM] -> [GROUPS * BM]."""
    return tl.reshape(tl.broadcast_to(values[None, :], (GROUPS, BM)), (GROUPS * BM,))


@triton.jit
def operands(
    codes,
    scales,
    x,
    x_scales,
    tile,
    block,
    rows,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Where `add_block` finds block `block` of 128 columns of tile `tile` of a weight and of rows int32 [BM] of x.

    codes and scales of one matrix of K columns as Fp4Tiles ("fp4"), Fp8Tiles ("fp8") or paired Fp8Tiles ("wide"); x
    float8e4nv [T, STRIDE] with x_scales int32 [T, ceil(K/128)], for "wide" bf16 without scales.
    Returns pointers (codes, scales, x, x_scales).
    """
    WORDS: tl.constexpr = (K + 127) // 128
    IS_PAIRED: tl.constexpr = FORM != "fp8"
    row = tl.arange(0, 128)
    column = tl.arange(0, 64 if IS_PAIRED and GROUPS == 4 else 32 * GROUPS)
    group = column // 32
    x_rows = repeated(rows, BM, GROUPS)
    code_at = codes + row[:, None] * 32 + group[None, :] * 4096 + (column % 32)[None, :]
    x_at = x + x_rows[None, :] * STRIDE + block * 128
    if IS_PAIRED:
        code_at += (tile * (K // 64) + block * 2) * 4096
        x_at += (group * 64 + column % 32)[:, None]
    else:
        code_at += (tile * (K // 32) + block * 4) * 4096
        x_at += column[:, None]
    if FORM == "fp4":
        scale_at = scales + (tile * WORDS + block) * 128 + row
    else:
        scale_at = scales + (tile * 4 + tl.arange(0, 4)) * WORDS + block  # one for 32 rows
    return code_at, scale_at, x_at, x_scales + x_rows * WORDS + block


@triton.jit
def decoded(elements, SECOND: tl.constexpr, FORM: tl.constexpr, BIT_OPS: tl.constexpr):
    """One of the two codes of stored elements, or the only one."""
    if FORM == "wide":
        return widened(elements, SECOND, BIT_OPS)
    elif FORM == "fp8":
        return elements
    elif SECOND:
        return second_codes(elements, BIT_OPS)
    else:
        return first_codes(elements, BIT_OPS)


@triton.jit
def add_block(
    acc,
    at,
    block,
    live,
    K: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """acc float32 [128, GROUPS * BM] += the product of block `block` of 128 columns; `at` of `operands`.

    A dot takes GROUPS scale groups of 32 columns and keeps them apart: its x has BM columns for each, which are zero in
    the rows of the others. Rows of x that are not `live` [BM] count as zero. For "fp4" the result is 2**-6 times the
    product.
    """
    code_at, scale_at, x_at, x_scale_at = at
    HALVES: tl.constexpr = 1 if FORM == "fp8" else 2
    PLANES: tl.constexpr = 2 if HALVES == 2 and GROUPS == 4 else GROUPS  # of 32 stored columns
    own = tl.arange(0, GROUPS * BM) // BM
    plane = tl.arange(0, 32 * PLANES) // 32
    x_live = repeated(live, BM, GROUPS)
    words = tl.load(scale_at)
    if FORM != "fp4":
        words = tl.reshape(tl.broadcast_to(words[:, None], (4, 32)), (128,))
    if FORM != "wide":
        x_words = tl.load(x_scale_at, mask=x_live, other=0)
    for number in tl.static_range(4 // HALVES // PLANES):
        exists = (block * (4 // HALVES) + number * PLANES + plane) * (32 * HALVES) < K
        elements = load_codes(code_at + number * PLANES * 4096, exists, K)
        for half in tl.static_range(HALVES):
            weights = decoded(elements, half == 1, FORM, BIT_OPS)
            # Of GROUPS == 4 both halves add to the same result, otherwise each has its own groups.
            if GROUPS == 4:
                index = own
                mine = (plane * HALVES + half)[:, None] == own[None, :]
            else:
                index = (number * PLANES + own) * HALVES + half
                mine = plane[:, None] == own[None, :]
            mask = x_live[None, :] & exists[:, None] & mine
            x_part = tl.load(x_at + (number * PLANES * 32 * HALVES + half * 32), mask=mask, other=0.0)
            if FORM == "wide" and BIT_OPS:
                x_part = x_part.to(tl.float32)
            elif FORM != "wide" and EXACT:
                weights = weights.to(tl.float16)
                x_part = x_part.to(tl.float16)
            if GROUPS < 4 or half == 0:
                product = tl.zeros((128, GROUPS * BM), tl.float32)
            product = tl.dot(weights, x_part, product)
            if GROUPS < 4 or half == HALVES - 1:
                factor = scales_at(words[:, None], index[None, :])
                if FORM != "wide":
                    factor *= scales_at(x_words, index)[None, :]
                acc += product * factor
    return acc


@triton.jit
def of_all_groups(acc, BM: tl.constexpr, GROUPS: tl.constexpr):
    """Sums of `add_block` [128, GROUPS * BM] -> [128, BM]."""
    if GROUPS == 1:
        return acc
    else:
        return tl.sum(tl.reshape(acc, (128, GROUPS, BM)), 1)


@triton.jit
def accumulate(
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
    STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tile `tile` of a weight times rows of x, over blocks begin..end of 128 columns -> float32 [128, BM]; arguments as
    of `operands` and `add_block`."""
    code_at, scale_at, x_at, x_scale_at = operands(
        codes, scales, x, x_scales, tile, begin, rows, K, STRIDE, FORM, BM, GROUPS
    )
    acc = tl.zeros((128, GROUPS * BM), tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        at = (code_at, scale_at, x_at, x_scale_at)
        acc = add_block(acc, at, block, live, K, FORM, EXACT, BM, GROUPS, BIT_OPS)
        code_at += (4 if FORM == "fp8" else 2) * 4096
        scale_at += 128 if FORM == "fp4" else 1
        x_at += 128
        x_scale_at += 1
    return of_all_groups(acc, BM, GROUPS)


@triton.jit
def load_codes(at, exists, K: tl.constexpr):
    """Codes [128, columns]; where 128 does not divide K, the last block is a partial one, and its rest is zero."""
    if K % 128 == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=exists[None, :], other=0.0)


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


@triton.jit
def load_parts(at, stride, mask, PARTS: tl.constexpr, BIT_OPS: tl.constexpr):
    """Sum of PARTS float32 parts that lie `stride` apart, rounded to bf16; of one, what lies at `at`. float32."""
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * stride, mask=mask, other=0.0)
    if PARTS > 1:
        total = to_bf16(total, BIT_OPS).to(tl.float32)
    return total


__all__ = [
    "FIRST_CODES",
    "HIGH_CODES",
    "LOW_CODES",
    "SECOND_CODES",
    "accumulate",
    "add_block",
    "first_codes",
    "fp8_codes",
    "fp8_scale",
    "load_parts",
    "of_all_groups",
    "operands",
    "scales_at",
    "second_codes",
    "sum_of_splits",
    "to_bf16",
    "to_fp8",
    "widened",
]
