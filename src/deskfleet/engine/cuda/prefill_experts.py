"""Routed experts for hundreds to thousands of rows (spec §6.2). Owns the list of items, two grouped products and the
order of columns that they read.

FP4 codes with power-of-two scales are exact in bf16, and so are FP8 activations with theirs: both go into the tensor
cores as bf16 with their scales in them, products are exact and their float32 sums need no scaling on the way. An item
is one expert and up to 32, 64 or 128 of its pairs; its weights are decoded once, in registers.

A stored word of FP4 is two bytes, four codes: columns 2j, 2j + 1, 2j + 32 and 2j + 33 of 64. The kernels take one code
of every word at a time, so bf16 activations lie in that order: of every 64 columns first 0, 2, .. 30, then 1, 3, .. 31,
then 32, 34, .. 62, then 33, .. 63. `permuted` says it of a tensor; prefill_linear.py makes rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.experts import ExpertShape, gated_activation
from deskfleet.engine.cuda.packing import TILE_ROWS, Fp4Tiles
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale, to_bf16

UNIT = 64
"""Columns that are permuted among each other."""

MOST_SCALE = 134
"""Greatest E8M0 byte of a weight that the kernels take, 2**7: the next one makes weights infinite, those above wrong.
There is no least; of byte 0, 2**-127, some weights are rounded."""


def _decoder(*moves: tuple[str, int, int], sign: int) -> str:
    """PTX: one code of each of two words as bf16 of its value times 2**-126, times a scale."""
    shift = f"shl.b32 part, $1, {sign};" if sign else "mov.b32 part, $1;"
    lines = ["{ .reg .b32 part, bits, value;", shift, "and.b32 value, part, 0x80008000;"]
    for direction, count, mask in moves:
        lines += [f"{direction}.b32 bits, $1, {count};", f"lop3.b32 value, bits, 0x{mask:x}, value, 0xea;"]
    return " ".join([*lines, "mul.rn.bf16x2 $0, value, $2; }"])


# Where packing.py puts the bits of a byte: of its first code sign 7, exponent and mantissa 4, 3, 2; of its second sign
# 5, exponent 6 and 1, mantissa 0. In bf16 they are 15 and 8, 7, 6.
CODES = (
    _decoder(("shl", 4, 0x01C001C0), sign=8),
    _decoder(("shr", 4, 0x01C001C0), sign=0),
    _decoder(("shl", 2, 0x01000100), ("shl", 6, 0x00C000C0), sign=10),
    _decoder(("shr", 6, 0x01000100), ("shr", 2, 0x00C000C0), sign=2),
)
"""The code of the low byte, of the high byte, the second code of the low byte and of the high one."""

_CODE_0, _CODE_1, _CODE_2, _CODE_3 = (tl.constexpr(code) for code in CODES)


@triton.jit
def code_of(words, scales, NUMBER: tl.constexpr, BIT_OPS: tl.constexpr):
    """int16 words of four FP4 codes, one of the codes times scales bf16: bf16 (float32 in the interpreter)."""
    if BIT_OPS:
        byte = (words.to(tl.int32) >> (8 * (NUMBER % 2))) & 0xFF
        if NUMBER < 2:
            bits = ((byte & 0x80) << 24) | ((byte & 0x1C) << 20)
        else:
            bits = ((byte & 0x20) << 26) | ((byte & 0x40) << 18) | ((byte & 0x3) << 22)
        return bits.to(tl.float32, bitcast=True) * scales.to(tl.float32)
    elif NUMBER == 0:
        return tl.inline_asm_elementwise(
            _CODE_0, "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif NUMBER == 1:
        return tl.inline_asm_elementwise(
            _CODE_1, "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif NUMBER == 2:
        return tl.inline_asm_elementwise(
            _CODE_2, "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _CODE_3, "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def code_scales(words, index):
    """Scale `index` of four in int32 words -> bf16 2**(byte - 7): with the codes' 2**-126, a weight times 2**-6. A
    scale may be as great as MOST_SCALE; the loader refuses others."""
    return ((((words >> (8 * index)) & 0xFF) + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def add_unit(acc, code_at, scale_at, x_at, unit, live, BIT_OPS: tl.constexpr):
    """acc float32 [128, BM] += 2**-6 times 64 columns of a tile of weights times as many of x [BM, ..]."""
    words = tl.load(code_at)
    scales = tl.load(scale_at)
    half = (unit % 2) * 2
    first = tl.broadcast_to(code_scales(scales, half)[:, None], (128, 16))
    second = tl.broadcast_to(code_scales(scales, half + 1)[:, None], (128, 16))
    for number in tl.static_range(4):
        x_part = tl.load(x_at + number * 16, mask=live[None, :], other=0.0)
        if BIT_OPS:
            x_part = x_part.to(tl.float32)
        acc = tl.dot(code_of(words, first if number < 2 else second, number, BIT_OPS), x_part, acc)
    return acc


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def sort_kernel(
    chosen,  # int32 [T * num_chosen]
    items,  # int32 [max items, 2] out: expert of those held here, number of pairs
    item_pairs,  # int32 [max items, BM] out
    num_items,  # int32 [1]: zero before
    num_pairs,
    first_expert,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program an expert: its pairs, ascending, in items of BM of them; experts in an arbitrary order."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + place
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
        count += tl.sum(mine.to(tl.int32), 0)
    if count > 0:
        own = (count + BM - 1) // BM
        first = tl.atomic_add(num_items, own)
        found = 0
        for start in range(0, num_pairs, BLOCK):
            pair = start + place
            mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
            rank = found + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(item_pairs + first * BM + rank, pair, mask=mine)
            found += tl.sum(mine.to(tl.int32), 0)
        for start in range(0, own, 128):
            number = start + tl.arange(0, 128)
            at = items + (first + number) * 2
            tl.store(at, expert + number * 0, mask=number < own)
            tl.store(at + 1, tl.minimum(count - number * BM, BM), mask=number < own)


@triton.jit
def up_item(
    x,
    codes,
    scales,
    own_pairs,
    count,
    route_weights,
    out,
    limit,
    tile,
    K: tl.constexpr,
    F: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Tile `tile` of one expert's matrix, whose first tile `codes` and `scales` are, for `count` of up to BM pairs."""
    NUM_UNITS: tl.constexpr = K // 64
    member = tl.arange(0, BM)
    live = member < count
    pairs = tl.load(own_pairs + member, mask=live, other=0)
    weight = tl.load(route_weights + pairs, mask=live, other=0.0)
    row = tl.arange(0, 128)
    word = tl.arange(0, 16)
    code_at = (
        codes.to(tl.pointer_type(tl.int16)) + tile * (NUM_UNITS * 2048) + row[:, None] * 16 + word[None, :]
    )
    scale_at = scales + tile * ((K + 127) // 128 * 128) + row
    x_at = x + (pairs // NUM_CHOSEN).to(tl.int64)[None, :] * K + word[:, None]
    acc = tl.zeros((128, BM), tl.float32)
    for unit in tl.range(0, NUM_UNITS, num_stages=STAGES):
        own_scales = scale_at + unit // 2 * 128
        acc = add_unit(acc, code_at + unit * 2048, own_scales, x_at + unit * 64, unit, live, BIT_OPS)
    value = gated_activation(acc * 64.0, weight, limit, BM, BIT_OPS)
    groups = tl.reshape(value, (2, 32, BM))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))[:, None, :]
    groups = fp8_codes(groups, bits, BIT_OPS).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    ordered = tl.permute(tl.reshape(groups, (2, 16, 2, BM)), (0, 2, 1, 3))
    at = out + pairs.to(tl.int64)[None, :] * F + tile * 64 + tl.arange(0, 64)[:, None]
    tl.store(at, tl.reshape(ordered, (64, BM)).to(tl.bfloat16), mask=live[None, :])


@triton.jit
def grouped_up_kernel(
    x,  # bf16 [T, K], permuted
    codes,  # gated Fp4Tiles of [E, 2F, K]
    scales,
    items,  # int32 [max items, 2]
    num_items,
    item_pairs,  # int32 [max items, BM]
    route_weights,  # float32 [P], by pair
    out,  # bf16 [P, F] out, by pair, permuted
    limit,
    K: tl.constexpr,
    F: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 64 gates and their 64 up values of one item, SwiGLU, route weight, and what the FP8 quantiser would
    make of it (oracle: reference.expert_activation, fake_quant_fp8). An item that is half empty is half the work."""
    tile = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    expert = tl.load(items + item * 2).to(tl.int64)
    count = tl.load(items + item * 2 + 1)
    own_codes = codes + expert * (F * K)
    own_scales = scales + expert * (2 * F * ((K + 127) // 128))
    own_pairs = item_pairs + item * BM
    HALF: tl.constexpr = BM // 2
    if count > HALF:
        up_item(
            x, own_codes, own_scales, own_pairs, count, route_weights, out, limit, tile, K, F, NUM_CHOSEN, BM,
            STAGES, BIT_OPS,
        )  # fmt: skip
    else:
        up_item(
            x, own_codes, own_scales, own_pairs, count, route_weights, out, limit, tile, K, F, NUM_CHOSEN, HALF,
            STAGES, BIT_OPS,
        )  # fmt: skip


@triton.jit
def down_item(
    x,
    codes,
    scales,
    own_pairs,
    count,
    out,
    first,
    F: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """TILES tiles from `first` on of one expert's matrix, for `count` of up to BM pairs."""
    NUM_UNITS: tl.constexpr = F // 64
    WORDS: tl.constexpr = (F + 127) // 128
    member = tl.arange(0, BM)
    live = member < count
    pairs = tl.load(own_pairs + member, mask=live, other=0).to(tl.int64)
    row = tl.arange(0, 128)
    word = tl.arange(0, 16)
    code_at = (
        codes.to(tl.pointer_type(tl.int16)) + first * (NUM_UNITS * 2048) + row[:, None] * 16 + word[None, :]
    )
    scale_at = scales + first * (WORDS * 128) + row
    x_at = x + pairs[None, :] * F + word[:, None]
    out_at = out + pairs[None, :] * N + first * 128 + row[:, None]
    acc = tl.zeros((128, BM), tl.float32)
    for turn in tl.range(0, TILES * NUM_UNITS, num_stages=STAGES):
        tile = turn // NUM_UNITS
        unit = turn % NUM_UNITS
        own_scales = scale_at + (tile * WORDS + unit // 2) * 128
        acc = add_unit(acc, code_at + turn * 2048, own_scales, x_at + unit * 64, unit, live, BIT_OPS)
        if unit == NUM_UNITS - 1:
            tl.store(out_at + tile * 128, to_bf16(acc * 64.0, BIT_OPS), mask=live[None, :])
            acc = tl.zeros((128, BM), tl.float32)


@triton.jit
def grouped_down_kernel(
    x,  # bf16 [P, F], by pair, permuted
    codes,  # Fp4Tiles of [E, N, F]
    scales,
    items,
    num_items,
    item_pairs,
    out,  # bf16 [P, N] out, by pair
    F: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: 128 outputs of one item for each of TILES tiles, in one loop; each rounded to bf16, as the
    reference does."""
    first = tl.program_id(0) * TILES
    item = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    expert = tl.load(items + item * 2).to(tl.int64)
    count = tl.load(items + item * 2 + 1)
    own_codes = codes + expert * (N * F // 2)
    own_scales = scales + expert * (N * ((F + 127) // 128))
    own_pairs = item_pairs + item * BM
    HALF: tl.constexpr = BM // 2
    if count > HALF:
        down_item(x, own_codes, own_scales, own_pairs, count, out, first, F, N, TILES, BM, STAGES, BIT_OPS)
    else:
        down_item(x, own_codes, own_scales, own_pairs, count, out, first, F, N, TILES, HALF, STAGES, BIT_OPS)


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """How the two kernels run: pairs an item, software stages of each, tiles a program of the second, warps."""

    rows: int = 128
    up_stages: int = 4
    down_stages: int = 4
    tiles: int = 4
    warps: int = 4


def grouped_tuning(shape: ExpertShape, num_rows: int) -> GroupedTuning:
    """Items about as large as what an expert gets."""
    pairs = num_rows * shape.num_chosen
    rows = 32 if pairs <= 16 * shape.num_experts else 64 if pairs <= 96 * shape.num_experts else 128
    tiles = next(n for n in (4, 2, 1) if -(-shape.width // TILE_ROWS) % n == 0)
    return GroupedTuning(rows=rows, tiles=tiles)


def most_items(shape: ExpertShape, num_pairs: int, rows: int) -> int:
    """Items that there can be: every expert has at most one that is not full."""
    return min(num_pairs, min(shape.num_experts, num_pairs) + num_pairs // rows)


class GroupedBuffers:
    """What the kernels of one step leave for each other; all layers share it."""

    def __init__(
        self,
        shape: ExpertShape,
        num_rows: int,
        device: torch.device | str,
        tuning: GroupedTuning | None = None,
    ) -> None:
        pairs = num_rows * shape.num_chosen
        self.shape = shape
        self.num_pairs = pairs
        self.tuning = tuning or grouped_tuning(shape, num_rows)
        self.max_items = most_items(shape, pairs, self.tuning.rows)
        self.items = torch.zeros(self.max_items, 2, dtype=torch.int32, device=device)
        self.item_pairs = torch.zeros(self.max_items, self.tuning.rows, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_listed = torch.zeros(1, dtype=torch.int32, device=device)
        self.activated = torch.zeros(pairs, shape.expert_width, dtype=torch.bfloat16, device=device)
        self.outputs = torch.zeros(pairs, shape.width, dtype=torch.bfloat16, device=device)


def sort_pairs(chosen: Tensor, buffers: GroupedBuffers, *, first_expert: int = 0) -> None:
    """chosen int32 [T, num_chosen] -> the items of the experts from `first_expert` on. `num_items` must be zero."""
    sort_kernel[(buffers.shape.num_experts,)](
        chosen,
        buffers.items,
        buffers.item_pairs,
        buffers.num_items,
        buffers.num_pairs,
        first_expert,
        BM=buffers.tuning.rows,
        BLOCK=4096,
        num_warps=8,
    )


def grouped_up(
    x: Tensor,
    weight: Fp4Tiles,
    route_weights: Tensor,
    buffers: GroupedBuffers,
    limit: float,
    *,
    bit_ops: bool,
) -> None:
    """x bf16 [T, M] permuted -> `buffers.activated` bf16 [P, F] permuted."""
    shape, tuning = buffers.shape, buffers.tuning
    grouped_up_kernel[(shape.expert_width // UNIT, buffers.max_items)](
        x,
        weight.codes,
        weight.scales,
        buffers.items,
        buffers.num_items,
        buffers.item_pairs,
        route_weights,
        buffers.activated,
        limit,
        K=shape.width,
        F=shape.expert_width,
        NUM_CHOSEN=shape.num_chosen,
        BM=tuning.rows,
        STAGES=tuning.up_stages,
        BIT_OPS=bit_ops,
        num_warps=tuning.warps,
    )


def grouped_down(weight: Fp4Tiles, buffers: GroupedBuffers, *, bit_ops: bool) -> None:
    """`buffers.activated` -> `buffers.outputs` bf16 [P, M], one row a pair; who adds them up is hyper.py."""
    shape, tuning = buffers.shape, buffers.tuning
    grouped_down_kernel[(weight.num_rows // TILE_ROWS // tuning.tiles, buffers.max_items)](
        buffers.activated,
        weight.codes,
        weight.scales,
        buffers.items,
        buffers.num_items,
        buffers.item_pairs,
        buffers.outputs,
        F=shape.expert_width,
        N=weight.num_rows,
        TILES=tuning.tiles,
        BM=tuning.rows,
        STAGES=tuning.down_stages,
        BIT_OPS=bit_ops,
        num_warps=tuning.warps,
    )


def permuted(x: Tensor) -> Tensor:
    """[..., K] with the columns of every 64 in the order that the kernels read."""
    ordered: Tensor = x.unflatten(-1, (-1, 2, 16, 2)).transpose(-1, -2).flatten(-4)
    return ordered


__all__ = [
    "CODES",
    "MOST_SCALE",
    "UNIT",
    "GroupedBuffers",
    "GroupedTuning",
    "add_unit",
    "code_of",
    "code_scales",
    "grouped_down",
    "grouped_down_kernel",
    "grouped_tuning",
    "grouped_up",
    "grouped_up_kernel",
    "most_items",
    "permuted",
    "sort_kernel",
    "sort_pairs",
]
