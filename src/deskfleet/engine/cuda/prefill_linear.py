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
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, to_bf16

WEIGHT_ELEMENTS = 16 << 20
"""bf16 weights that are there at a time: half of what the L2 of an H200 holds. A larger matrix is taken in parts."""


@triton.jit
def source_column(place):
    """Which of 64 columns lies at `place` of the permuted order."""
    return place // 32 * 32 + place % 16 * 2 + place % 32 // 16


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
    place = tl.arange(0, 64)
    first = unit.to(tl.int64)[:, None] * 64
    values = tl.load(codes + first + source_column(place)[None, :], mask=live, other=0.0).to(tl.float32)
    row = (unit // PER_ROW).to(tl.int64)[:, None]
    group = (unit % PER_ROW * 2)[:, None] + place[None, :] // 32
    bits = tl.load(scales + row * (4 * ((K + 127) // 128)) + group, mask=live, other=0).to(tl.int32) << 23
    tl.store(
        out + first + place[None, :], (values * bits.to(tl.float32, bitcast=True)).to(tl.bfloat16), mask=live
    )


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
    place = tl.arange(0, 64)
    at = codes + (tile * NUM_UNITS + unit).to(tl.int64) * (4096 if IS_PAIRED else 8192)
    if IS_PAIRED:
        column = place
        words = tl.load(at + row[:, None] * 32 + (place % 32)[None, :])
        byte = (words >> (place // 32 * 8)[None, :]) & 0xFF
        values = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        column = source_column(place)
        values = tl.load(at + (column // 32 * 4096 + column % 32)[None, :] + row[:, None] * 32).to(tl.float32)
    words = tl.load(scales + (tile * 4 + row // 32) * WORDS + unit // 2)[:, None]
    shift = ((unit % 2) * 2 + column // 32)[None, :] * 8
    scale = (((words >> shift) & 0xFF) << 23).to(tl.float32, bitcast=True)
    out_at = out + (tl.program_id(1) * 128 + row).to(tl.int64)[:, None] * K + unit * 64 + place[None, :]
    tl.store(out_at, (values * scale).to(tl.bfloat16))


@triton.jit
def turn_kernel(
    x,  # bf16 [T, HEADS, D], changed in place
    cos,  # float32 [T, ROPE/2]
    sin,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row: the last ROPE elements of its heads (oracle: reference.apply_rope)."""
    row = tl.program_id(0)
    head = tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, ROPE // 2)
    mask = (head < HEADS)[:, None] & (pair >= 0)[None, :]
    at = x + (row.to(tl.int64) * HEADS + head)[:, None] * D + (D - ROPE) + 2 * pair[None, :]
    even = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * (ROPE // 2) + pair)[None, :]
    s = tl.load(sin + row * (ROPE // 2) + pair)[None, :]
    tl.store(at, to_bf16(even * c - odd * s, BIT_OPS), mask=mask)
    tl.store(at + 1, to_bf16(even * s + odd * c, BIT_OPS), mask=mask)


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
    place = tl.arange(0, 64)
    at = x + rows[:, None] * (2 * F) + tile * 128 + source_column(place)[None, :]
    gate = tl.minimum(tl.load(at, mask=live, other=0.0).to(tl.float32), limit)
    up = tl.load(at + 64, mask=live, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up, BIT_OPS).to(tl.float32)
    groups = tl.reshape(value, (BM, 2, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 2))[:, :, None]
    groups = fp8_codes(groups, bits, BIT_OPS).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    out_at = out + rows[:, None] * F + tile * 64 + place[None, :]
    tl.store(out_at, tl.reshape(groups, (BM, 64)).to(tl.bfloat16), mask=live)


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
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 64 outputs of BM rows (oracle: reference.linear_f32)."""
    NUM_BLOCKS: tl.constexpr = K // 64
    tile = tl.program_id(0)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    live = (rows < num_rows)[:, None]
    column = tl.arange(0, 64)
    x_at = x + rows[:, None] * K + column[None, :]
    weight_at = weight + tile * (NUM_BLOCKS * 4096) + column[None, :] * 64 + column[:, None]
    acc = tl.zeros((BM, 64), tl.float32)
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        x_part = tl.load(x_at + block * 64, mask=live, other=0.0)
        weights = tl.load(weight_at + block * 4096)  # [columns, outputs]
        if BIT_OPS:
            acc += tl.dot(x_part.to(tl.float32), weights.to(tl.float32))
        else:
            acc = tl.dot(x_part, weights, acc)
    output = tile * 64 + column
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


def expand_rows(codes: Tensor, scales: Tensor, buffers: ProductBuffers) -> Tensor:
    """FP8 [T, K] with scale words -> bf16 [T, K], permuted, for as long as nothing else is expanded."""
    num_rows, columns = codes.shape
    out = buffers.rows[: num_rows * columns].view(num_rows, columns)
    num_units = num_rows * columns // UNIT
    rows_kernel[(triton.cdiv(num_units, 32),)](
        codes, scales.view(torch.uint8), out, num_units, K=columns, UNITS=32, num_warps=4
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
        num_warps=4,
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
    turn_kernel[(len(x),)](
        x, *rope, HEADS=heads, BLOCK_HEADS=triton.next_power_of_2(heads), D=head, ROPE=2 * rope[0].shape[1],
        BIT_OPS=bit_ops, num_warps=4,
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


def plain_product(x: Tensor, weight: Tensor, out: Tensor, *, bit_ops: bool) -> None:
    """x bf16 [T, K], weight of `linear.pack_bf16` -> out float32 [T, N]."""
    tiles, blocks = weight.shape[:2]
    plain_kernel[(tiles, triton.cdiv(len(x), 128))](
        x, weight, out, len(x), K=blocks * BF16_BLOCK_COLUMNS, N=out.shape[1], BM=128, STAGES=4, BIT_OPS=bit_ops,
        num_warps=4,
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
