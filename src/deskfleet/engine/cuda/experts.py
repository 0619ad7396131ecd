"""Routed and shared experts for 1 to 384 rows (spec §6.2, §6.3). Owns the work list and two matrix kernels.

An item is one expert and up to 8 or 16 of the (row, choice) pairs that it got. The grid has a place for as many
items as there can be, so that a graph can hold it; programs beyond the last item end at once. A pair is named by
row * num_chosen + choice, and everything between the kernels is addressed by pair: no order of items matters.

The activations are FP8 in groups of 32, which is what the reference makes of them (spec §N.4), so that W4A8 rounds
nowhere but where the reference does; only sums differ: float32 where weights are `exact`, otherwise of some 13 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.linear import block_rows, groups_of, num_splits
from deskfleet.engine.cuda.native import mixture
from deskfleet.engine.cuda.packing import BLOCK_COLUMNS, TILE_ROWS, Fp4Tiles, Fp8Tiles
from deskfleet.engine.cuda.tiles import (
    accumulate,
    add_block,
    fp8_codes,
    fp8_scale,
    of_all_groups,
    operands,
    sum_of_splits,
    to_bf16,
)

_GATE_ROWS = TILE_ROWS // 2


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def list_items_kernel(
    chosen,  # int32 [T, num_chosen]
    items,  # int32 [max items, 2] out: expert of those held here, number of pairs
    item_pairs,  # int32 [max items, BM] out
    num_items,  # int32 [1]: zero before
    num_pairs,
    first_expert,
    BLOCK_PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """One program an expert: its pairs, ascending, in items of BM of them; items in an arbitrary order."""
    expert = tl.program_id(0)
    pair = tl.arange(0, BLOCK_PAIRS)
    mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
    count = tl.sum(mine.to(tl.int32), 0)
    if count > 0:
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
        own = (count + BM - 1) // BM
        first = tl.atomic_add(num_items, own)
        tl.store(item_pairs + first * BM + place, pair, mask=mine)
        number = tl.arange(0, BLOCK_ITEMS)
        at = items + (first + number) * 2
        tl.store(at, expert + number * 0, mask=number < own)
        tl.store(at + 1, tl.minimum(count - number * BM, BM), mask=number < own)


@triton.jit
def list_few(
    chosen,
    items,
    item_pairs,
    num_items,
    num_pairs,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BM: tl.constexpr,
):
    """What list_items_kernel does, by one program that compares every pair with every other; items in the order of
    their first pairs."""
    pair = tl.arange(0, BLOCK_PAIRS)
    expert = tl.load(chosen + pair, mask=pair < num_pairs, other=-1, cache_modifier=".cg") - first_expert
    held = (pair < num_pairs) & (expert >= 0) & (expert < NUM_EXPERTS)
    same = (expert[:, None] == expert[None, :]) & held[:, None]
    rank = tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), 0)
    count = tl.sum(same.to(tl.int32), 0)
    leads = held & (rank % BM == 0)
    number = tl.cumsum(leads.to(tl.int32), 0) - 1  # of a leader's item
    leader = same & leads[:, None] & ((rank // BM)[:, None] == (rank // BM)[None, :])
    item = tl.sum(tl.where(leader, number[:, None], 0), 0)
    tl.store(item_pairs + item * BM + rank % BM, pair, mask=held)
    tl.store(items + number * 2, expert, mask=leads)
    tl.store(items + number * 2 + 1, tl.minimum(count - rank, BM), mask=leads)
    tl.store(num_items, tl.sum(leads.to(tl.int32), 0))


@triton.jit
def load_item(items, num_items, item_pairs, item, BM: tl.constexpr):
    """Item `item` -> its expert, pairs int32 [BM], which of them it has, and whether there is such an item. The loads
    do not wait for each other."""
    exists = item < tl.load(num_items)
    expert = tl.load(items + item * 2)
    count = tl.load(items + item * 2 + 1)
    member = tl.arange(0, BM)
    pairs = tl.load(item_pairs + item * BM + member)
    live = member < count
    return expert, tl.where(live, pairs, 0), live, exists


@triton.jit
def gated_activation(acc, route_weight, limit, BM: tl.constexpr, BIT_OPS: tl.constexpr):
    """acc float32 [128, BM], 64 gate rows over 64 up rows -> float32 [64, BM] rounded to bf16 (spec §6.2)."""
    rounded = to_bf16(acc, BIT_OPS).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(rounded, (2, 64, BM)), (1, 2, 0)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up * route_weight[None, :]
    return to_bf16(value, BIT_OPS).to(tl.float32)


@triton.jit
def store_quantized(
    value, codes, scales, tile, pairs, live, width, num_scale_words, BM: tl.constexpr, BIT_OPS: tl.constexpr
):
    """value float32 [64, BM] as FP8 in groups of 32: columns tile * 64.. of `codes` [P, width], and scale bytes."""
    groups = tl.reshape(value, (2, 32, BM))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))  # (2, BM)
    quantized = tl.reshape(fp8_codes(groups, bits[:, None, :], BIT_OPS), (64, BM))
    column = tile * 64 + tl.arange(0, 64)
    # 64-bit: a chunk of prefill has more than 2**31 of them
    row_at = pairs.to(tl.int64)
    tl.store(codes + row_at[None, :] * width + column[:, None], quantized, mask=live[None, :])
    group = tile * 2 + tl.arange(0, 2)
    scale_at = scales + row_at[None, :] * (4 * num_scale_words) + group[:, None]
    tl.store(scale_at, (bits >> 23).to(tl.uint8), mask=live[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def up_kernel(
    x,  # float8e4nv [T, K]
    x_scales,  # int32 [T, ceil(K/128)]
    codes,  # gated tiles of [E, 2F, K]
    scales,
    items,  # int32 [max items, 2]; for one expert of all rows unused
    num_items,  # int32 [1]
    item_pairs,  # int32 [max items, BM]
    route_weights,  # float32 [P], by pair
    out,  # float8e4nv [P, F]
    out_scales,  # uint8 [P, 4 * ceil(F/128)]
    partials,  # float32 [SPLITS, max items * tiles, 128 * BM]
    counters,  # int32 [max items * tiles]: zero before and after
    num_rows,
    limit,
    K: tl.constexpr,
    F: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    FORM: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 64 gates and their 64 up values of one item, over one of SPLITS parts of K.

    The last of the parts to finish adds them, applies the clamped SwiGLU and the route weight, and quantises.
    """
    NUM_TILES: tl.constexpr = F // 64
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    item = tl.program_id(1)
    member = tl.arange(0, BM)
    if IS_ROUTED:
        expert, pairs, live, exists = load_item(items, num_items, item_pairs, item, BM)
        if not exists:
            return
        rows = pairs // NUM_CHOSEN
        weight = tl.load(route_weights + pairs, mask=live, other=0.0)
    else:
        expert = 0
        pairs = item * BM + member
        live = pairs < num_rows
        rows = pairs
        weight = tl.full((BM,), 1.0, tl.float32)
    if FORM == "fp4":
        own_codes = codes + expert.to(tl.int64) * (2 * F * K // 2)
        own_scales = scales + expert * (2 * F * NUM_BLOCKS)
    else:
        own_codes = codes
        own_scales = scales
    PER_SPLIT: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, NUM_BLOCKS)
    acc = accumulate(
        own_codes, own_scales, x, x_scales, tile, rows, live, begin, end, K, K, FORM, EXACT, BM, GROUPS, BIT_OPS,
        STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        offsets = tl.arange(0, 128)[:, None] * BM + member[None, :]
        number = item * NUM_TILES + tile
        place = (split, tl.num_programs(1) * NUM_TILES, number)
        acc, is_last = sum_of_splits(acc, partials, place, counters + number, SPLITS, 128 * BM, offsets)
        if not is_last:
            return
    if FORM == "fp4":
        acc *= 64.0
    value = gated_activation(acc, weight, limit, BM, BIT_OPS)
    store_quantized(value, out, out_scales, tile, pairs, live, F, (F + 127) // 128, BM, BIT_OPS)


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    x,  # float8e4nv [P, F], by pair
    x_scales,  # int32 [P, ceil(F/128)]
    codes,  # tiles of [E, N, F]
    scales,
    items,
    num_items,
    item_pairs,
    out,  # bf16 [P, N], by pair
    num_rows,
    F: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    TILES: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 128 outputs of one item for each of TILES tiles, in one loop that loads the next tile's weights
    while it finishes one. Each pair's output is rounded to bf16, as the reference does."""
    NUM_BLOCKS: tl.constexpr = (F + 127) // 128
    first = tl.program_id(0) * TILES
    item = tl.program_id(1)
    if IS_ROUTED:
        expert, pairs, live, exists = load_item(items, num_items, item_pairs, item, BM)
        if not exists:
            return
        own_codes = codes + expert.to(tl.int64) * (N * F // 2)
        own_scales = scales + expert * (N * NUM_BLOCKS)
    else:
        pairs = item * BM + tl.arange(0, BM)
        live = pairs < num_rows
        own_codes = codes
        own_scales = scales
    at = out + pairs.to(tl.int64)[None, :] * N + tl.arange(0, 128)[:, None]
    acc = tl.zeros((128, GROUPS * BM), tl.float32)
    for turn in tl.range(0, TILES * NUM_BLOCKS, num_stages=STAGES):
        tile = first + turn // NUM_BLOCKS
        block = turn % NUM_BLOCKS
        where = operands(own_codes, own_scales, x, x_scales, tile, block, pairs, F, F, FORM, BM, GROUPS)
        acc = add_block(acc, where, block, live, F, FORM, EXACT, BM, GROUPS, BIT_OPS)
        if block == NUM_BLOCKS - 1:
            total = of_all_groups(acc, BM, GROUPS)
            if FORM == "fp4":
                total *= 64.0
            mask = live[None, :] & (tile * 128 + tl.arange(0, 128) < N)[:, None]
            tl.store(at + tile * 128, to_bf16(total, BIT_OPS), mask=mask)
            acc = tl.zeros((128, GROUPS * BM), tl.float32)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one MoE layer of a rank: model width, its expert width, experts held, choices of a row."""

    width: int
    expert_width: int
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the two kernels of the experts run: rows an item, scale groups a dot (tiles.add_block), then of each kernel
    software stages and registers a thread at most; parts of K of the first, tiles a program of the second.

    With 128 registers four programs of four warps share a processor.
    """

    rows: int = 8
    groups: int = 2
    splits: int = 1
    up_stages: int = 4
    up_registers: int = 128
    tiles: int = 1
    down_stages: int = 4
    down_registers: int = 128


def tuned(shape: ExpertShape, num_rows: int) -> Tuning:
    """Items of 8 rows while an expert gets about 4 pairs or fewer; parts of K while there are fewer than two programs
    for each of 132 processors; several tiles a program where there are many (measured on an H200: decision 0021).

    None of it may depend on which item has which number: the list's order is arbitrary.
    """
    pairs = num_rows * shape.num_chosen
    rows = 8 if pairs <= 4 * shape.num_experts else 16
    items, tiles, blocks = (
        most_items(shape, pairs, rows),
        shape.expert_width // _GATE_ROWS,
        -(-shape.width // 128),
    )
    splits = 1
    while splits < 8 and items * tiles * 2 * splits <= 2 * 132 and blocks // (2 * splits) >= 4:
        splits *= 2
    down_tiles = 1 if items < 64 else 2 if items < 192 else 4
    return Tuning(
        rows=rows, groups=16 // rows, splits=splits, tiles=gcd(down_tiles, -(-shape.width // TILE_ROWS))
    )


def most_items(shape: ExpertShape, num_pairs: int, rows: int) -> int:
    """Items that there can be: every expert has at most one that is not full."""
    return min(num_pairs, min(shape.num_experts, num_pairs) + num_pairs // rows)


class ExpertBuffers:
    """What the kernels of one batch size leave for each other; all layers share it."""

    def __init__(
        self, shape: ExpertShape, num_rows: int, device: torch.device | str, tuning: Tuning | None = None
    ) -> None:
        pairs = num_rows * shape.num_chosen
        self.shape = shape
        self.num_rows = num_rows
        self.num_pairs = pairs
        self.tuning = tuning or tuned(shape, num_rows)
        self.max_items = most_items(shape, pairs, self.tuning.rows)
        self.tiles = shape.expert_width // _GATE_ROWS
        words = -(-shape.expert_width // BLOCK_COLUMNS)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.items = ints(self.max_items, 2)
        self.item_pairs = ints(self.max_items, self.tuning.rows)
        self.num_items = ints(1)
        self.num_listed = ints(1)  # rows that have chosen; zero before and after
        self.counters = ints(self.max_items * self.tiles)
        self.partials = torch.zeros(
            self.tuning.splits if self.tuning.splits > 1 else 0,
            self.max_items * self.tiles,
            TILE_ROWS * self.tuning.rows,
            device=device,
        )
        self.activated = torch.zeros(pairs, shape.expert_width, dtype=torch.uint8, device=device).view(
            torch.float8_e4m3fn
        )
        # Bytes of groups beyond the width stay zero, and a zero scale is a zero.
        self.activated_scales = ints(pairs, words)
        self.outputs = torch.zeros(pairs, shape.width, dtype=torch.bfloat16, device=device)


def list_items(chosen: Tensor, buffers: ExpertBuffers, *, first_expert: int = 0) -> None:
    """chosen int32 [T, num_chosen] -> the work list of experts from `first_expert` on. `num_items` must be zero."""
    shape, rows = buffers.shape, buffers.tuning.rows
    list_items_kernel[(shape.num_experts,)](
        chosen,
        buffers.items,
        buffers.item_pairs,
        buffers.num_items,
        buffers.num_pairs,
        first_expert,
        BLOCK_PAIRS=max(triton.next_power_of_2(buffers.num_pairs), 128),
        BM=rows,
        BLOCK_ITEMS=triton.next_power_of_2(-(-buffers.num_rows // rows)),
    )


def routed_up(
    x: Tensor,
    x_scales: Tensor,
    weight: Fp4Tiles,
    route_weights: Tensor,
    buffers: ExpertBuffers,
    limit: float,
    *,
    bit_ops: bool,
) -> None:
    """w1 and w3, SwiGLU, route weight: fills `buffers.activated` (oracle: reference.expert_activation)."""
    shape, tuning = buffers.shape, buffers.tuning
    up_kernel[(buffers.tiles * tuning.splits, buffers.max_items)](
        x,
        x_scales,
        weight.codes,
        weight.scales,
        buffers.items,
        buffers.num_items,
        buffers.item_pairs,
        route_weights,
        buffers.activated,
        buffers.activated_scales.view(torch.uint8),
        buffers.partials,
        buffers.counters,
        buffers.num_rows,
        limit,
        K=shape.width,
        F=shape.expert_width,
        NUM_CHOSEN=shape.num_chosen,
        FORM="fp4",
        IS_ROUTED=True,
        SPLITS=tuning.splits,
        EXACT=weight.exact,
        BM=tuning.rows,
        GROUPS=tuning.groups,
        BIT_OPS=bit_ops,
        STAGES=tuning.up_stages,
        num_warps=4,
        maxnreg=tuning.up_registers,
    )


def routed_down(weight: Fp4Tiles, buffers: ExpertBuffers, *, bit_ops: bool) -> None:
    """w2: fills `buffers.outputs` bf16 [P, M], one row a pair; who adds them up is hyper.py."""
    shape, tuning = buffers.shape, buffers.tuning
    down_kernel[(weight.num_rows // TILE_ROWS // tuning.tiles, buffers.max_items)](
        buffers.activated,
        buffers.activated_scales,
        weight.codes,
        weight.scales,
        buffers.items,
        buffers.num_items,
        buffers.item_pairs,
        buffers.outputs,
        buffers.num_rows,
        F=shape.expert_width,
        N=weight.num_rows,
        FORM="fp4",
        IS_ROUTED=True,
        TILES=tuning.tiles,
        EXACT=weight.exact,
        BM=tuning.rows,
        GROUPS=tuning.groups,
        BIT_OPS=bit_ops,
        STAGES=tuning.down_stages,
        num_warps=4,
        maxnreg=tuning.down_registers,
    )


class SharedBuffers:
    """The same of the shared expert, which takes every row."""

    def __init__(self, width: int, expert_width: int, num_rows: int, device: torch.device | str) -> None:
        self.width = width
        self.expert_width = expert_width
        self.num_rows = num_rows
        self.block_rows = block_rows(num_rows)
        self.num_items = -(-num_rows // self.block_rows)
        self.tiles = expert_width // _GATE_ROWS
        self.splits = min(num_splits(self.tiles, -(-width // BLOCK_COLUMNS), num_rows), 8)
        places = self.num_items * self.tiles
        self.counters = torch.zeros(places, dtype=torch.int32, device=device)
        size = TILE_ROWS * self.block_rows
        self.partials = torch.zeros(self.splits if self.splits > 1 else 0, places, size, device=device)
        codes = torch.zeros(num_rows, expert_width, dtype=torch.uint8, device=device)
        self.activated = codes.view(torch.float8_e4m3fn)
        words = -(-expert_width // BLOCK_COLUMNS)
        self.activated_scales = torch.zeros(num_rows, words, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)


def shared_up(
    x: Tensor, x_scales: Tensor, weight: Fp8Tiles, buffers: SharedBuffers, limit: float, *, bit_ops: bool
) -> None:
    """w1 and w3 of the shared expert and SwiGLU: fills `buffers.activated`."""
    unused = buffers.counters
    up_kernel[(buffers.tiles * buffers.splits, buffers.num_items)](
        x,
        x_scales,
        weight.codes,
        weight.scales,
        unused,
        unused,
        unused,
        buffers.partials,
        buffers.activated,
        buffers.activated_scales.view(torch.uint8),
        buffers.partials,
        buffers.counters,
        buffers.num_rows,
        limit,
        K=buffers.width,
        F=buffers.expert_width,
        NUM_CHOSEN=1,
        FORM="fp8",
        IS_ROUTED=False,
        SPLITS=buffers.splits,
        EXACT=weight.exact,
        BM=buffers.block_rows,
        GROUPS=groups_of(buffers.block_rows),
        BIT_OPS=bit_ops,
        STAGES=3,
        num_warps=4,
    )


def shared_down(weight: Fp8Tiles, buffers: SharedBuffers, *, bit_ops: bool) -> None:
    """w2 of the shared expert: fills `buffers.outputs` bf16 [T, M] (oracle: reference.shared_expert)."""
    unused = buffers.counters
    down_kernel[(-(-weight.num_rows // TILE_ROWS), buffers.num_items)](
        buffers.activated,
        buffers.activated_scales,
        weight.codes,
        weight.scales,
        unused,
        unused,
        unused,
        buffers.outputs,
        buffers.num_rows,
        F=buffers.expert_width,
        N=buffers.width,
        FORM="fp8",
        IS_ROUTED=False,
        TILES=1,
        EXACT=weight.exact,
        BM=buffers.block_rows,
        GROUPS=groups_of(buffers.block_rows),
        BIT_OPS=bit_ops,
        STAGES=3,
        num_warps=4,
    )


def all_experts(
    x: Tensor, x_scales: Tensor, w13: Fp4Tiles, w2: Fp4Tiles, shared_w13: Fp8Tiles, shared_w2: Fp8Tiles,
    route_weights: Tensor, buffers: ExpertBuffers, shared: SharedBuffers, limit: float,
) -> None:  # fmt: skip
    """The routed experts and the shared one in two launches, for rows that linear.few says."""
    work = mixture.Items(buffers.items, buffers.num_items, buffers.item_pairs)
    activated = buffers.activated, buffers.activated_scales
    shared_activated = shared.activated, shared.activated_scales
    mixture.expert_up(
        x, x_scales, w13, shared_w13, work, route_weights, activated, shared_activated,
        num_chosen=buffers.shape.num_chosen, limit=limit,
    )  # fmt: skip
    mixture.expert_down(activated, w2, shared_activated, shared_w2, work, buffers.outputs, shared.outputs)


__all__ = [
    "ExpertBuffers",
    "ExpertShape",
    "SharedBuffers",
    "Tuning",
    "all_experts",
    "down_kernel",
    "gated_activation",
    "list_few",
    "list_items",
    "list_items_kernel",
    "load_item",
    "routed_down",
    "routed_up",
    "shared_down",
    "shared_up",
    "store_quantized",
    "tuned",
    "up_kernel",
]
