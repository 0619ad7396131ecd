"""Products of many rows (spec §N.4, §4.2, §4.7). Owns what stands between FP8 formats and the vendor's bf16 product.

FP8 codes with power-of-two scales are exact in bf16. Weights of a layer are expanded into one scratch that stays in the
L2, activations into another, and `torch.mm` multiplies: it is the best bf16 product there is, and what expanding costs
is a few percent of it from a thousand rows on. Only bf16 weights, whose results are float32, have a kernel here.

    rows_kernel      FP8 rows as bf16, columns as prefill_experts.py wants them
    weights_kernel   the same of a part of an FP8 weight, so that both agree
    turn_kernel      heads of a product rotated in place
    swiglu_kernel      SwiGLU of the shared expert
    codes_kernel     bf16 rows of output groups to FP8
    plain_kernel     bf16 weights and activations, float32 out: router, compressor, index weights
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.linear import BF16_BLOCK_COLUMNS
from deskfleet.engine.cuda.packing import TILE_ROWS, Fp8Tiles
from deskfleet.engine.cuda.prefill_experts import UNIT
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, scales_at, to_bf16

WEIGHT_ELEMENTS = 16 << 20
"""bf16 weights that are there at a time: half of what the L2 of an H200 holds. A larger matrix is taken in parts."""

_HEADS = 32  # that one program rotates
_WIDE_TILES = 528  # of 64 outputs of 128 rows: from so many on a program takes two


@triton.jit
def parted(values, N: tl.constexpr):
    """Elements of N times 64 neighbouring columns -> the even and the odd ones [N, 2, 16]: of every 32 they follow each
    other in the permuted order. A thread that has 16 columns stores 8 of each at once."""
    return tl.split(tl.reshape(values, (N, 2, 16, 2)))


@triton.jit(do_not_specialize=["num_units"])
def rows_kernel(
    codes,  # float8e4nv [T, K]
    scales,  # uint8 [T, 4 * ceil(K/128)]
    out,  # bf16 [T, K] out, permuted
    num_units,  # T * K/64
    K: tl.constexpr,
    UNITS: tl.constexpr,
):
    """One program: UNITS times 64 columns (oracle: reference.decode_fp8_rows)."""
    PER_ROW: tl.constexpr = K // 64
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    live = (unit < num_units)[:, None]
    first = unit.to(tl.int64)[:, None] * 64
    values = tl.load(codes + first + tl.arange(0, 64)[None, :], mask=live, other=0.0).to(tl.float32)
    half = tl.arange(0, 2)[None, :]
    row = (unit // PER_ROW).to(tl.int64)[:, None]
    group = (unit % PER_ROW * 2)[:, None] + half
    bits = tl.load(scales + row * (4 * ((K + 127) // 128)) + group, mask=live, other=0).to(tl.int32) << 23
    scale = bits.to(tl.float32, bitcast=True)[:, :, None]
    even, odd = parted(values, UNITS)
    at = out + (first + half * 32)[:, :, None] + tl.arange(0, 16)[None, None, :]
    tl.store(at, (even * scale).to(tl.bfloat16), mask=live[:, :, None])
    tl.store(at + 16, (odd * scale).to(tl.bfloat16), mask=live[:, :, None])


@triton.jit(do_not_specialize=["first_tile"])
def weights_kernel(
    codes,  # Fp8Tiles of [N, K]
    scales,
    out,  # bf16 [.., K] out: rows from tile `first_tile` on
    first_tile,
    K: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):
    """One program: 64 columns of a tile; permuted, or in their own order where paired."""
    NUM_UNITS: tl.constexpr = K // 64
    WORDS: tl.constexpr = (K + 127) // 128
    unit = tl.program_id(0)
    tile = tl.program_id(1) + first_tile
    row = tl.arange(0, 128)
    words = tl.load(scales + (tile * 4 + row // 32) * WORDS + unit // 2)
    out_at = out + (tl.program_id(1) * 128 + row).to(tl.int64) * K + unit * 64
    first = (tile * NUM_UNITS + unit).to(tl.int64)
    if IS_PAIRED:
        pairs = tl.reshape(tl.load(codes + first * 4096 + tl.arange(0, 4096)), (128, 32))
        at = out_at[:, None] + tl.arange(0, 32)[None, :]
        for half in tl.static_range(2):
            byte = ((pairs >> (8 * half)) & 0xFF).to(tl.uint8)
            values = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            scale = scales_at(words, unit % 2 * 2 + half)[:, None]
            tl.store(at + 32 * half, (values * scale).to(tl.bfloat16))
    else:
        values = tl.load(codes + first * 8192 + tl.arange(0, 8192)).to(tl.float32)
        even, odd = tl.split(tl.reshape(values, (2, 128, 16, 2)))  # as of `parted`, a half of all rows first
        half = tl.arange(0, 2)[:, None]
        scale = scales_at(words[None, :], unit % 2 * 2 + half)[:, :, None]
        at = (out_at[None, :] + half * 32)[:, :, None] + tl.arange(0, 16)[None, None, :]
        tl.store(at, (even * scale).to(tl.bfloat16))
        tl.store(at + 16, (odd * scale).to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_heads"])
def turn_kernel(
    x,  # bf16 [T, HEADS, D], changed in place
    cos,  # float32 [T, ROPE/2]
    sin,
    num_heads,  # T * HEADS
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: the last ROPE elements of N heads (oracle: reference.apply_rope)."""
    head = tl.program_id(0) * N + tl.arange(0, N)
    live = (head < num_heads)[:, None]
    at = x + head.to(tl.int64)[:, None] * D + (D - ROPE) + tl.arange(0, ROPE)[None, :]
    value = tl.load(at, mask=live, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(value, (N, ROPE // 2, 2)))
    turn = (head // HEADS)[:, None] * (ROPE // 2) + tl.arange(0, ROPE // 2)[None, :]
    c = tl.load(cos + turn, mask=live, other=0.0)
    s = tl.load(sin + turn, mask=live, other=0.0)
    value = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (N, ROPE))
    tl.store(at, to_bf16(value, BIT_OPS), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(
    x,  # bf16 [T, 2F] in the order of gated tiles: 64 gates, then their 64 up values
    out,  # bf16 [T, F] out, permuted
    num_rows,
    limit,
    F: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 64 gates of BM rows (oracle: reference.expert_activation, fake_quant_fp8)."""
    tile = tl.program_id(0)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    live = (rows < num_rows)[:, None]
    at = x + rows[:, None] * (2 * F) + tile * 128 + tl.arange(0, 64)[None, :]
    gate = tl.minimum(tl.load(at, mask=live, other=0.0).to(tl.float32), limit)
    up = tl.load(at + 64, mask=live, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up, BIT_OPS).to(tl.float32)
    groups = tl.reshape(value, (BM, 2, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 2))[:, :, None]
    groups = fp8_codes(groups, bits, BIT_OPS).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    even, odd = parted(groups, BM)
    half = tl.arange(0, 2)[None, :, None]
    out_at = out + rows[:, None, None] * F + tile * 64 + half * 32 + tl.arange(0, 16)[None, None, :]
    tl.store(out_at, even.to(tl.bfloat16), mask=live[:, :, None])
    tl.store(out_at + 16, odd.to(tl.bfloat16), mask=live[:, :, None])


@triton.jit(do_not_specialize=["num_rows"])
def codes_kernel(
    x,  # bf16 [GROUPS, T, N]
    codes,  # float8e4nv [T, GROUPS * N] out
    scales,  # uint8 [T, 4 * ceil(GROUPS * N/128)] out
    num_rows,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 128 columns of BM rows (oracle: reference.quantize_fp8)."""
    WIDTH: tl.constexpr = GROUPS * N
    tile = tl.program_id(0)
    group = tile // (N // 128)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    live = (rows < num_rows)[:, None]
    column = tl.arange(0, 128)
    at = x + (group * num_rows.to(tl.int64) + rows)[:, None] * N + tile * 128 % N + column[None, :]
    value = tl.reshape(tl.load(at, mask=live, other=0.0).to(tl.float32), (BM, 4, 32))
    bits = fp8_scale(tl.max(tl.abs(value), 2))
    quantized = tl.reshape(fp8_codes(value, bits[:, :, None], BIT_OPS), (BM, 128))
    tl.store(codes + rows[:, None] * WIDTH + tile * 128 + column[None, :], quantized, mask=live)
    scale_at = scales + rows[:, None] * (WIDTH // 32) + tile * 4 + tl.arange(0, 4)[None, :]
    tl.store(scale_at, (bits >> 23).to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def plain_kernel(
    x,  # bf16 [T, K]
    weight,  # bf16 [N/64, K/64, 64, 64]
    out,  # float32 [T, N]
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: BN outputs of BM rows, whole tiles of 64 (oracle: reference.linear_f32)."""
    NUM_BLOCKS: tl.constexpr = K // 64
    output = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    live = (rows < num_rows)[:, None]
    column = tl.arange(0, 64)
    x_at = x + rows[:, None] * K + column[None, :]
    tile = tl.minimum(output // 64, (N - 1) // 64)
    weight_at = weight + (tile * (NUM_BLOCKS * 4096) + output % 64 * 64)[None, :] + column[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        x_part = tl.load(x_at + block * 64, mask=live, other=0.0)
        weights = tl.load(weight_at + block * 4096)  # [columns, outputs]
        if BIT_OPS:
            acc += tl.dot(x_part.to(tl.float32), weights.to(tl.float32))
        else:
            acc = tl.dot(x_part, weights, acc)
    tl.store(out + rows[:, None] * N + output[None, :], acc, mask=live & (output < N)[None, :])


class ProductBuffers:
    """The scratches of one size of step."""

    def __init__(self, num_rows: int, width: int, grouped: int, device: torch.device | str) -> None:
        """`width` of the widest input of a product, `grouped` elements that wo_a makes of a row."""
        # Of partial sums, where the product splits K.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.weights = torch.zeros(WEIGHT_ELEMENTS, dtype=torch.bfloat16, device=device)
        self.rows = torch.zeros(num_rows * width, dtype=torch.bfloat16, device=device)
        self.groups = torch.zeros(num_rows * grouped, dtype=torch.bfloat16, device=device)


def expand_rows(codes: Tensor, scales: Tensor, buffers: ProductBuffers, units: int = 32) -> Tensor:
    """FP8 [T, K] with scale words -> bf16 [T, K], permuted, for as long as nothing else is expanded. `units` of 64
    columns a program."""
    num_rows, columns = codes.shape
    out = buffers.rows[: num_rows * columns].view(num_rows, columns)
    num_units = num_rows * columns // UNIT
    rows_kernel[(triton.cdiv(num_units, units),)](
        codes, scales.view(torch.uint8), out, num_units, K=columns, UNITS=units, num_warps=4
    )
    return out


def expand_weight(weight: Fp8Tiles, first_tile: int, num_tiles: int, buffers: ProductBuffers) -> Tensor:
    """bf16 [128 * num_tiles, K]: rows of a weight, permuted as `expand_rows` does, or not where it is paired."""
    columns = weight.num_columns
    out = buffers.weights[: num_tiles * TILE_ROWS * columns].view(-1, columns)
    weights_kernel[(columns // UNIT, num_tiles)](
        weight.codes,
        weight.scales,
        out,
        first_tile,
        K=columns,
        IS_PAIRED=weight.codes.dtype == torch.int16,
        num_warps=8,
    )
    return out


def product(x: Tensor, weight: Fp8Tiles, out: Tensor, buffers: ProductBuffers) -> None:
    """x bf16 [T, K] permuted times weight [N, K] -> out bf16 [T, N]."""
    tiles = -(-weight.num_rows // TILE_ROWS)
    most = WEIGHT_ELEMENTS // (TILE_ROWS * weight.num_columns)
    for first in range(0, tiles, most):
        expanded = expand_weight(weight, first, min(most, tiles - first), buffers)
        columns = slice(first * TILE_ROWS, min((first + most) * TILE_ROWS, weight.num_rows))
        part = out[:, columns]
        torch.mm(x, expanded[: part.shape[1]].T, out=part)


def turn(x: Tensor, rope: tuple[Tensor, Tensor], head: int, *, bit_ops: bool) -> None:
    """Rotate the end of every `head` elements of x bf16 [T, N] in place; rope float32 [T, ROPE/2]."""
    heads = x.shape[1] // head
    turn_kernel[(triton.cdiv(len(x) * heads, _HEADS),)](
        x, *rope, len(x) * heads, HEADS=heads, D=head, ROPE=2 * rope[0].shape[1], N=_HEADS, BIT_OPS=bit_ops,
        num_warps=4,
    )  # fmt: skip


def shared_expert(
    x: Tensor,
    w13: Fp8Tiles,
    w2: Fp8Tiles,
    wide: Tensor,
    activated: Tensor,
    out: Tensor,
    buffers: ProductBuffers,
    limit: float,
    *,
    bit_ops: bool,
) -> None:
    """x bf16 [T, M] permuted -> out bf16 [T, M], by way of wide bf16 [T, 2F] and activated bf16 [T, F]."""
    num_rows, width = activated.shape
    product(x, w13, wide, buffers)
    swiglu_kernel[(width // UNIT, triton.cdiv(num_rows, 32))](
        wide, activated, num_rows, limit, F=width, BM=32, BIT_OPS=bit_ops, num_warps=4
    )
    product(activated, w2, out, buffers)


def grouped_product(
    x: Tensor,
    weight: Fp8Tiles,
    codes: Tensor,
    scales: Tensor,
    buffers: ProductBuffers,
    groups: int,
    *,
    bit_ops: bool,
) -> None:
    """x bf16 [T, G·K], paired weight [G·N, K] -> codes FP8 [T, G·N] with scale bytes: what wo_b takes."""
    num_rows, rows = len(x), weight.num_rows // groups
    tiles, by_group = rows // TILE_ROWS, x.view(num_rows, groups, -1).transpose(0, 1)
    out = buffers.groups[: groups * num_rows * rows].view(groups, num_rows, rows)
    most = max(WEIGHT_ELEMENTS // (rows * weight.num_columns), 1)
    for first in range(0, groups, most):
        some = slice(first, min(first + most, groups))
        expanded = expand_weight(weight, first * tiles, (some.stop - first) * tiles, buffers)
        torch.bmm(by_group[some], expanded.view(-1, rows, weight.num_columns).transpose(1, 2), out=out[some])
    codes_kernel[(weight.num_rows // TILE_ROWS, triton.cdiv(num_rows, 32))](
        out,
        codes,
        scales.view(torch.uint8),
        num_rows,
        N=rows,
        GROUPS=groups,
        BM=32,
        BIT_OPS=bit_ops,
        num_warps=4,
    )


def plain_product(
    x: Tensor, weight: Tensor, out: Tensor, *, bit_ops: bool, tiles_each: int | None = None
) -> None:
    """x bf16 [T, K], weight of `linear.pack_bf16` -> out float32 [T, N]; a program takes `tiles_each` tiles."""
    tiles, blocks = weight.shape[:2]
    if tiles_each is None:  # two, where all processors have some
        tiles_each = 2 if tiles * len(x) >= _WIDE_TILES * 128 else 1
    plain_kernel[(triton.cdiv(tiles, tiles_each), triton.cdiv(len(x), 128))](
        x, weight, out, len(x), K=blocks * BF16_BLOCK_COLUMNS, N=out.shape[1], BM=128, BN=64 * tiles_each, STAGES=4,
        BIT_OPS=bit_ops, num_warps=4 * tiles_each,
    )  # fmt: skip


__all__ = [
    "WEIGHT_ELEMENTS",
    "ProductBuffers",
    "codes_kernel",
    "expand_rows",
    "expand_weight",
    "grouped_product",
    "plain_kernel",
    "plain_product",
    "product",
    "rows_kernel",
    "shared_expert",
    "swiglu_kernel",
    "turn",
    "turn_kernel",
    "weights_kernel",
]
