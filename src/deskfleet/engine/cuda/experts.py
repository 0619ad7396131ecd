"""Routed and shared experts for 1 to 384 rows (spec §6.2, §6.3). Owns the work list and two matrix kernels.

An item is one expert and up to BLOCK_ROWS of the (row, choice) pairs that it got. The grid has a place for as many
items as there can be, so that a graph can hold it; programs beyond the last item end at once. A pair is named by
row * num_chosen + choice, and everything between the kernels is addressed by pair: no order of items matters.

The activations are FP8 in groups of 32, which is what the reference makes of them (spec §N.4), so that W4A8 rounds
nowhere but where the reference does; only the order of float32 sums differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.linear import block_rows
from deskfleet.engine.cuda.packing import BLOCK_COLUMNS, TILE_ROWS, Fp4Tiles, Fp8Tiles
from deskfleet.engine.cuda.tiles import accumulate, fp8_codes, fp8_scale, sum_of_splits, to_bf16

BLOCK_ROWS = 16
_GATE_ROWS = TILE_ROWS // 2


@triton.jit(do_not_specialize=["num_pairs", "max_rows"])
def list_items_kernel(
    chosen,  # int32 [T, num_chosen]
    items,  # int32 [max items, 2] out: expert, first of its pairs
    pair_lists,  # int32 [E, T] out: the pairs of each expert, ascending
    counts,  # int32 [E] out
    num_items,  # int32 [1]: zero before
    num_pairs,
    max_rows,
    BLOCK_PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """One program an expert: which pairs it got, and an item for each BM of them, in an arbitrary order."""
    expert = tl.program_id(0)
    pair = tl.arange(0, BLOCK_PAIRS)
    mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
    count = tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, count)
    if count > 0:
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pair_lists + expert * max_rows + place, pair, mask=mine)
        own = (count + BM - 1) // BM
        first = tl.atomic_add(num_items, own)
        number = tl.arange(0, BLOCK_ITEMS)
        tl.store(items + (first + number) * 2, expert + number * 0, mask=number < own)
        tl.store(items + (first + number) * 2 + 1, number * BM, mask=number < own)


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


@triton.jit(do_not_specialize=["max_rows", "num_rows"])
def up_kernel(
    x,  # float8e4nv [T, K]
    x_scales,  # int32 [T, ceil(K/128)]
    codes,  # gated tiles of [E, 2F, K]
    scales,
    items,  # int32 [max items, 2]; for one expert of all rows unused
    num_items,  # int32 [1]
    pair_lists,  # int32 [E, max_rows]
    counts,  # int32 [E]
    route_weights,  # float32 [P], by pair
    out,  # float8e4nv [P, F]
    out_scales,  # uint8 [P, 4 * ceil(F/128)]
    partials,  # float32 [SPLITS, max items * tiles, 128 * BM]
    counters,  # int32 [max items * tiles]: zero before and after
    max_rows,
    num_rows,
    limit,
    K: tl.constexpr,
    F: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
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
        if item >= tl.load(num_items):
            return
        expert = tl.load(items + item * 2)
        first = tl.load(items + item * 2 + 1)
        live = first + member < tl.load(counts + expert)
        pairs = tl.load(pair_lists + expert * max_rows + first + member, mask=live, other=0)
        rows = pairs // NUM_CHOSEN
        weight = tl.load(route_weights + pairs, mask=live, other=0.0)
    else:
        expert = 0
        pairs = item * BM + member
        live = pairs < num_rows
        rows = pairs
        weight = tl.full((BM,), 1.0, tl.float32)
    if IS_FP4:
        own_codes = codes + expert.to(tl.int64) * (2 * F * K // 2)
        own_scales = scales + expert * (2 * F * NUM_BLOCKS)
    else:
        own_codes = codes
        own_scales = scales
    PER_SPLIT: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, NUM_BLOCKS)
    acc = accumulate(
        tl.zeros((128, BM), tl.float32), own_codes, own_scales, x, x_scales, tile, rows, live, begin, end,
        K, IS_FP4, 128, BIT_OPS, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        offsets = tl.arange(0, 128)[:, None] * BM + member[None, :]
        number = item * NUM_TILES + tile
        place = (split, tl.num_programs(1) * NUM_TILES, number)
        acc, is_last = sum_of_splits(acc, partials, place, counters + number, SPLITS, 128 * BM, offsets)
        if not is_last:
            return
    if IS_FP4:
        acc *= 64.0
    value = gated_activation(acc, weight, limit, BM, BIT_OPS)
    store_quantized(value, out, out_scales, tile, pairs, live, F, (F + 127) // 128, BM, BIT_OPS)


@triton.jit(do_not_specialize=["max_rows", "num_rows"])
def down_kernel(
    x,  # float8e4nv [P, F], by pair
    x_scales,  # int32 [P, ceil(F/128)]
    codes,  # tiles of [E, N, F]
    scales,
    items,
    num_items,
    pair_lists,
    counts,
    out,  # bf16 [P, N], by pair
    max_rows,
    num_rows,
    F: tl.constexpr,
    N: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 128 outputs of one item. Each pair's output is rounded to bf16, as the reference does."""
    NUM_BLOCKS: tl.constexpr = (F + 127) // 128
    tile = tl.program_id(0)
    item = tl.program_id(1)
    member = tl.arange(0, BM)
    if IS_ROUTED:
        if item >= tl.load(num_items):
            return
        expert = tl.load(items + item * 2)
        first = tl.load(items + item * 2 + 1)
        live = first + member < tl.load(counts + expert)
        pairs = tl.load(pair_lists + expert * max_rows + first + member, mask=live, other=0)
        own_codes = codes + expert.to(tl.int64) * (N * F // 2)
        own_scales = scales + expert * (N * NUM_BLOCKS)
    else:
        pairs = item * BM + member
        live = pairs < num_rows
        own_codes = codes
        own_scales = scales
    acc = accumulate(
        tl.zeros((128, BM), tl.float32), own_codes, own_scales, x, x_scales, tile, pairs, live, 0, NUM_BLOCKS,
        F, IS_FP4, 128, BIT_OPS, STAGES,
    )  # fmt: skip
    if IS_FP4:
        acc *= 64.0
    column = tile * 128 + tl.arange(0, 128)
    at = out + pairs.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(at, to_bf16(acc, BIT_OPS), mask=live[None, :] & (column < N)[:, None])


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one MoE layer of a rank: model width, its expert width, experts held, choices of a row."""

    width: int
    expert_width: int
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one kernel runs: parts of K, software stages, warps, registers a thread at most.

    With 128 registers four programs of four warps share a processor; without a limit the kernel takes 138, and three
    do. That costs four accesses to local memory, outside of the loop.
    """

    splits: int = 1
    stages: int = 3
    warps: int = 4
    registers: int = 128


def up_tuning(num_items: int, num_tiles: int, num_blocks: int) -> Tuning:
    """Enough parts for about four programs on each of 132 processors; [not measured yet]."""
    splits = 1
    while splits < 8 and num_items * num_tiles * splits < 4 * 132 and num_blocks // (2 * splits) >= 4:
        splits *= 2
    return Tuning(splits=splits, stages=4)


class ExpertBuffers:
    """What the kernels of one batch size leave for each other; all layers share it."""

    def __init__(
        self, shape: ExpertShape, num_rows: int, device: torch.device | str, tuning: Tuning | None = None
    ) -> None:
        pairs = num_rows * shape.num_chosen
        self.shape = shape
        self.num_rows = num_rows
        self.num_pairs = pairs
        # Every expert has at most one item that is not full.
        full, distinct = pairs // BLOCK_ROWS, min(shape.num_experts, pairs)
        self.max_items = min(pairs, distinct + full)
        self.tiles = shape.expert_width // _GATE_ROWS
        self.tuning = tuning or up_tuning(self.max_items, self.tiles, -(-shape.width // BLOCK_COLUMNS))
        words = -(-shape.expert_width // BLOCK_COLUMNS)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.items = ints(self.max_items, 2)
        self.num_items = ints(1)
        self.pair_lists = ints(shape.num_experts, num_rows)
        self.counts = ints(shape.num_experts)
        self.counters = ints(self.max_items * self.tiles)
        self.partials = torch.zeros(
            self.tuning.splits if self.tuning.splits > 1 else 0,
            self.max_items * self.tiles,
            TILE_ROWS * BLOCK_ROWS,
            device=device,
        )
        self.activated = torch.zeros(pairs, shape.expert_width, dtype=torch.uint8, device=device).view(
            torch.float8_e4m3fn
        )
        # Bytes of groups beyond the width stay zero, and a zero scale is a zero.
        self.activated_scales = ints(pairs, words)
        self.outputs = torch.zeros(pairs, shape.width, dtype=torch.bfloat16, device=device)


def list_items(chosen: Tensor, buffers: ExpertBuffers) -> None:
    """chosen int32 [T, num_chosen] -> the work list. `buffers.num_items` must be zero (routing.py clears it)."""
    shape = buffers.shape
    list_items_kernel[(shape.num_experts,)](
        chosen,
        buffers.items,
        buffers.pair_lists,
        buffers.counts,
        buffers.num_items,
        buffers.num_pairs,
        buffers.num_rows,
        BLOCK_PAIRS=max(triton.next_power_of_2(buffers.num_pairs), 128),
        BM=BLOCK_ROWS,
        BLOCK_ITEMS=triton.next_power_of_2(max(-(-buffers.num_rows // BLOCK_ROWS), 1)),
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
        buffers.pair_lists,
        buffers.counts,
        route_weights,
        buffers.activated,
        buffers.activated_scales.view(torch.uint8),
        buffers.partials,
        buffers.counters,
        buffers.num_rows,
        buffers.num_rows,
        limit,
        K=shape.width,
        F=shape.expert_width,
        NUM_CHOSEN=shape.num_chosen,
        IS_FP4=True,
        IS_ROUTED=True,
        SPLITS=tuning.splits,
        BM=BLOCK_ROWS,
        BIT_OPS=bit_ops,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
    )


def routed_down(weight: Fp4Tiles, buffers: ExpertBuffers, *, bit_ops: bool) -> None:
    """w2: fills `buffers.outputs` bf16 [P, M], one row a pair; who adds them up is hyper.py."""
    shape = buffers.shape
    down_kernel[(weight.num_rows // TILE_ROWS, buffers.max_items)](
        buffers.activated,
        buffers.activated_scales,
        weight.codes,
        weight.scales,
        buffers.items,
        buffers.num_items,
        buffers.pair_lists,
        buffers.counts,
        buffers.outputs,
        buffers.num_rows,
        buffers.num_rows,
        F=shape.expert_width,
        N=weight.num_rows,
        IS_FP4=True,
        IS_ROUTED=True,
        BM=BLOCK_ROWS,
        BIT_OPS=bit_ops,
        STAGES=3,
        num_warps=4,
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
        self.tuning = up_tuning(self.num_items, self.tiles, -(-width // BLOCK_COLUMNS))
        places = self.num_items * self.tiles
        self.counters = torch.zeros(places, dtype=torch.int32, device=device)
        size = TILE_ROWS * self.block_rows
        self.partials = torch.zeros(self.tuning.splits, places, size, device=device)
        codes = torch.zeros(num_rows, expert_width, dtype=torch.uint8, device=device)
        self.activated = codes.view(torch.float8_e4m3fn)
        words = -(-expert_width // BLOCK_COLUMNS)
        self.activated_scales = torch.zeros(num_rows, words, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)


def shared_up(
    x: Tensor, x_scales: Tensor, weight: Fp8Tiles, buffers: SharedBuffers, limit: float, *, bit_ops: bool
) -> None:
    """w1 and w3 of the shared expert and SwiGLU: fills `buffers.activated`."""
    tuning, unused = buffers.tuning, buffers.counters
    up_kernel[(buffers.tiles * tuning.splits, buffers.num_items)](
        x,
        x_scales,
        weight.codes,
        weight.scales,
        unused,
        unused,
        unused,
        unused,
        buffers.partials,
        buffers.activated,
        buffers.activated_scales.view(torch.uint8),
        buffers.partials,
        buffers.counters,
        0,
        buffers.num_rows,
        limit,
        K=buffers.width,
        F=buffers.expert_width,
        NUM_CHOSEN=1,
        IS_FP4=False,
        IS_ROUTED=False,
        SPLITS=tuning.splits,
        BM=buffers.block_rows,
        BIT_OPS=bit_ops,
        STAGES=3,
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
    )


def shared_down(weight: Fp8Tiles, buffers: SharedBuffers, *, bit_ops: bool) -> None:
    """w2 of the shared expert: fills `buffers.outputs` bf16 [T, M] (oracle: reference.shared_expert)."""
    unused = buffers.counters
    down_kernel[(weight.num_rows // TILE_ROWS, buffers.num_items)](
        buffers.activated,
        buffers.activated_scales,
        weight.codes,
        weight.scales,
        unused,
        unused,
        unused,
        unused,
        buffers.outputs,
        0,
        buffers.num_rows,
        F=buffers.expert_width,
        N=buffers.width,
        IS_FP4=False,
        IS_ROUTED=False,
        BM=buffers.block_rows,
        BIT_OPS=bit_ops,
        STAGES=3,
        num_warps=4,
    )


__all__ = [
    "BLOCK_ROWS",
    "ExpertBuffers",
    "ExpertShape",
    "SharedBuffers",
    "Tuning",
    "down_kernel",
    "gated_activation",
    "list_items",
    "list_items_kernel",
    "routed_down",
    "routed_up",
    "shared_down",
    "shared_up",
    "store_quantized",
    "up_kernel",
    "up_tuning",
]
