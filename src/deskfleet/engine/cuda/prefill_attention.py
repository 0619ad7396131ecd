"""Sparse attention of many rows (spec §4.2, §4.3, §4.7). Owns the unpacked records and the kernel that reads them.

    unpack_windows_kernel, unpack_entries_kernel, unpack_picks_kernel
                         records of the pages as bf16 rows, in one memory: the window rows of a layer first, then the
                         entries of a source, then what lone rows picked
    keys_kernel          where the keys of every row lie in it
    attend_rows_kernel   one row: its heads over its window and its picks

A record is unpacked once and read by a hundred rows; what is read lies in the L2. The scores and the sums are taken
transposed, keys and elements as the first operand: sixteen heads are the least that the tensor cores take on the other
side. Entries of a request lie together, block by block of its table; of one that has few rows in the step, only what
they picked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.attention import AttentionShape
from deskfleet.engine.cuda.records import (
    e4m3_scales,
    e8m0_scales,
    fp4_elements,
    fp8_elements,
    load_entries,
    load_window,
    spread,
)
from deskfleet.engine.cuda.tiles import to_bf16

_RECORDS = 16  # that one program unpacks
_KEYS = 64


@triton.jit
def store_elements(at, even, odd, exists, N: tl.constexpr, D: tl.constexpr):
    """Even and odd elements [N, D/2] into rows bf16 [N, D] at `at`."""
    both = tl.reshape(tl.join(even.to(tl.bfloat16), odd.to(tl.bfloat16)), (N, D))
    tl.store(at + tl.arange(0, D)[None, :], both, mask=exists[:, None])


@triton.jit(do_not_specialize=["num_records"])
def unpack_windows_kernel(
    pages,  # uint8 [rows, BYTES]
    rows,  # bf16 [.., D] out
    num_records,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    N: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """All of the pages (oracle: WINDOW.unpack)."""
    record = tl.program_id(0) * N + tl.arange(0, N)
    exists = record < num_records
    codes, scales = load_window(pages, tl.where(exists, record, -1), D, BYTES)
    even, odd = fp8_elements(codes, spread(e8m0_scales(scales), N, D // 32, 16, BIT_OPS), BIT_OPS)
    store_elements(rows + record.to(tl.int64)[:, None] * D, even, odd, exists, N, D)


@triton.jit(do_not_specialize=["per_block"])
def unpack_entries_kernel(
    pages,  # uint8 [rows, BYTES]
    blocks,  # int32 [blocks]: which block of the pages lies at each place, -1: none
    rows,  # bf16 [.., D] out
    per_block,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    N: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """Some entries of one block (oracle: ENTRY.unpack)."""
    place = tl.program_id(1)
    block = tl.load(blocks + place)
    if block < 0:
        return
    number = tl.program_id(0) * N + tl.arange(0, N)
    exists = number < per_block
    codes, scales = load_entries(pages, tl.where(exists, block * per_block + number, -1), D, BYTES)
    even, odd = fp4_elements(codes, spread(e4m3_scales(scales), N, D // 16, 8, BIT_OPS), BIT_OPS)
    at = rows + (place.to(tl.int64) * per_block + number)[:, None] * D
    store_elements(at, even, odd, exists, N, D)


@triton.jit(do_not_specialize=["per_block", "table_width"])
def unpack_picks_kernel(
    pages,
    lone,  # int32 [rows]: which row of the step, -1: none
    picks,  # int32 [T, NUM_PICKS], -1 absent
    slots,  # int32 [T]
    table,  # int32 [S, table_width]
    table_width,
    rows,  # bf16 [.., D] out
    per_block,
    NUM_PICKS: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    N: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """N picks of one lone row."""
    row = tl.load(lone + tl.program_id(1))
    if row < 0:
        return
    place = tl.program_id(0) * N + tl.arange(0, N)
    pick = tl.load(picks + row * NUM_PICKS + place, mask=place < NUM_PICKS, other=-1)
    at = table + tl.load(slots + row) * table_width + pick // per_block
    page = tl.load(at, mask=pick >= 0, other=0)
    codes, scales = load_entries(
        pages, tl.where(pick >= 0, page * per_block + pick % per_block, -1), D, BYTES
    )
    even, odd = fp4_elements(codes, spread(e4m3_scales(scales), N, D // 16, 8, BIT_OPS), BIT_OPS)
    out = rows + (tl.program_id(1).to(tl.int64) * NUM_PICKS + place)[:, None] * D
    store_elements(out, even, odd, place < NUM_PICKS, N, D)


@triton.jit(do_not_specialize=["first_entry", "first_pick", "per_block"])
def keys_kernel(
    picks,  # int32 [T, NUM_PICKS], -1 absent
    places,  # int32 [T]: of the first block of a row's request; of a lone row -1 - its number
    keys,  # int32 [T, WINDOW + NUM_PICKS] out: behind the window
    first_entry,  # rows
    first_pick,
    per_block,
    WINDOW: tl.constexpr,
    NUM_PICKS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    number = tl.arange(0, NUM_PICKS)
    pick = tl.load(picks + row * NUM_PICKS + number)
    place = tl.load(places + row)
    key = tl.where(
        place < 0, first_pick + (-1 - place) * NUM_PICKS + number, first_entry + place * per_block + pick
    )
    key = tl.where(pick < 0, -1, key)
    tl.store(keys + row * (WINDOW + NUM_PICKS) + WINDOW + number, key)


@triton.jit
def attend_rows_kernel(
    query,  # bf16 [T, HEADS, D]
    rows,  # bf16 [.., D]
    keys,  # int32 [T, STRIDE]: which of them, -1 absent
    sink,  # float32 [HEADS]
    cos,  # float32 [T, ROPE/2]
    sin,
    out,  # bf16 [T, HEADS, D] out
    scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One row and BLOCK_HEADS of its heads (oracle: reference.sparse_attention, apply_rope inverse)."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    exists = head < HEADS
    element = tl.arange(0, D)
    place = tl.arange(0, KEYS)
    own = row.to(tl.int64) * (HEADS * D)
    heads = tl.load(query + own + head[None, :] * D + element[:, None], mask=exists[None, :], other=0.0)
    if BIT_OPS:
        heads = heads.to(tl.float32)
    acc = tl.zeros((D, BLOCK_HEADS), tl.float32)
    maximum = tl.full((BLOCK_HEADS,), -1e30, tl.float32)
    total = tl.zeros(
        (KEYS, BLOCK_HEADS), tl.float32
    )  # by place in a block: a sum over keys goes through every warp
    for start in tl.range(0, NUM_KEYS, KEYS, num_stages=STAGES):
        key = tl.load(keys + row * STRIDE + start + place, mask=start + place < NUM_KEYS, other=-1)
        at = rows + key.to(tl.int64)[:, None] * D + element[None, :]
        values = tl.load(at, mask=(key >= 0)[:, None], other=0.0)
        if BIT_OPS:
            values = values.to(tl.float32)
        scores = tl.where((key >= 0)[:, None], tl.dot(values, heads) * scale, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 0))
        rescale = tl.exp(maximum - highest)
        weights = tl.exp(scores - highest[None, :])
        total = total * rescale[None, :] + weights
        weights = to_bf16(weights, BIT_OPS)
        if BIT_OPS:
            weights = weights.to(tl.float32)
        acc = tl.dot(tl.trans(values), weights, acc * rescale[None, :])
        maximum = highest
    sinks = tl.load(sink + head, mask=exists, other=0.0)
    highest = tl.maximum(maximum, sinks)
    share = tl.exp(maximum - highest)
    sums = tl.sum(total, 0) * share + tl.exp(sinks - highest)
    value = to_bf16(acc * (share / sums)[None, :], BIT_OPS).to(tl.float32)
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    turn = row * (ROPE // 2) + pair
    c = tl.load(cos + turn, mask=pair >= 0, other=1.0)[:, None]
    s = tl.load(sin + turn, mask=pair >= 0, other=0.0)[:, None]
    even, odd = tl.split(tl.permute(tl.reshape(value, (D // 2, 2, BLOCK_HEADS)), (0, 2, 1)))
    both = tl.join(even * c + odd * s, odd * c - even * s)
    value = tl.reshape(tl.permute(both, (0, 2, 1)), (D, BLOCK_HEADS))
    tl.store(out + own + head[None, :] * D + element[:, None], to_bf16(value, BIT_OPS), mask=exists[None, :])


@dataclass(frozen=True, slots=True)
class RowsTuning:
    """Keys a block and software stages: with one stage, two programs share a processor and wait in turns."""

    keys: int = _KEYS
    stages: int = 3
    warps: int = 4


class RowBuffers:
    """Unpacked records, and which of them a row attends to; of one size of step.

    `places` int32 [T]: of the first block of a row's request in `blocks` int32 [places], which names blocks of the
    pages, -1 none; or -1 - n of the row that is number n of `lone` int32, -1 none. Place 0 is nobody's, whose block is
    0. Whoever drives the step fills all three.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_rows: int,
        num_picks: int,
        device: torch.device | str,
        *,
        num_windows: int,
        num_places: int,
        num_lone: int,
        block_size: int,
        tuning: RowsTuning | None = None,
    ) -> None:
        """`num_windows` rows of a layer's pages; of a source up to `num_places` blocks of `block_size` entries."""
        self.shape, self.num_picks, self.first_entry = shape, num_picks, num_windows
        self.first_pick = num_windows + num_places * block_size
        self.tuning = tuning or RowsTuning()
        rows = self.first_pick + num_lone * num_picks
        self.rows = torch.zeros(rows, shape.width, dtype=torch.bfloat16, device=device)
        self.keys = torch.zeros(num_rows, shape.window + num_picks, dtype=torch.int32, device=device)
        self.places = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(num_places, dtype=torch.int32, device=device)
        self.lone = torch.zeros(num_lone, dtype=torch.int32, device=device)
        self.out = torch.zeros(num_rows, shape.heads * shape.width, dtype=torch.bfloat16, device=device)


def unpack_windows(pages: Tensor, buffers: RowBuffers, *, bit_ops: bool) -> None:
    """All window records of a layer."""
    num_records, num_bytes = pages.shape
    unpack_windows_kernel[(triton.cdiv(num_records, _RECORDS),)](
        pages, buffers.rows, num_records, D=buffers.shape.width, BYTES=num_bytes, N=_RECORDS, BIT_OPS=bit_ops,
        num_warps=4,
    )  # fmt: skip


def unpack_entries(pages: Tensor, buffers: RowBuffers, per_block: int, *, bit_ops: bool) -> None:
    """The entries of a source, `per_block` in each of `blocks`."""
    unpack_entries_kernel[(triton.cdiv(per_block, _RECORDS), len(buffers.blocks))](
        pages, buffers.blocks, buffers.rows[buffers.first_entry :], per_block, D=buffers.shape.width,
        BYTES=pages.shape[1], N=_RECORDS, BIT_OPS=bit_ops, num_warps=4,
    )  # fmt: skip


def place_keys(
    picks: Tensor,
    pages: Tensor,
    where: tuple[Tensor, Tensor],
    buffers: RowBuffers,
    per_block: int,
    *,
    bit_ops: bool,
) -> None:
    """picks int32 [T, L], entry numbers of a row's request -> the keys behind the window, and the records of `pages`
    that lone rows picked. `where`: slots int32 [T], entry block table int32 [S, B]."""
    num_rows, num_picks = picks.shape
    slots, table = where
    keys_kernel[(num_rows,)](
        picks, buffers.places, buffers.keys, buffers.first_entry, buffers.first_pick, per_block,
        WINDOW=buffers.shape.window, NUM_PICKS=num_picks, num_warps=4,
    )  # fmt: skip
    unpack_picks_kernel[(triton.cdiv(num_picks, _RECORDS), len(buffers.lone))](
        pages, buffers.lone, picks, slots, table, table.stride(0), buffers.rows[buffers.first_pick :], per_block,
        NUM_PICKS=num_picks, D=buffers.shape.width, BYTES=pages.shape[1], N=_RECORDS, BIT_OPS=bit_ops, num_warps=4,
    )  # fmt: skip


def attend_rows(
    query: Tensor,
    sink: Tensor,
    rope: tuple[Tensor, Tensor],
    buffers: RowBuffers,
    *,
    with_picks: bool,
    bit_ops: bool,
) -> None:
    """query bf16 [T, H·D] over its window and, `with_picks`, what it picked -> buffers.out, unrotated."""
    shape, tuning = buffers.shape, buffers.tuning
    attend_rows_kernel[(len(query), triton.cdiv(shape.heads, 16))](
        query,
        buffers.rows,
        buffers.keys,
        sink,
        *rope,
        buffers.out,
        shape.width**-0.5,
        HEADS=shape.heads,
        BLOCK_HEADS=16,
        D=shape.width,
        ROPE=shape.rope,
        NUM_KEYS=shape.window + (buffers.num_picks if with_picks else 0),
        STRIDE=shape.window + buffers.num_picks,
        KEYS=tuning.keys,
        STAGES=tuning.stages,
        BIT_OPS=bit_ops,
        num_warps=tuning.warps,
    )


__all__ = [
    "RowBuffers",
    "RowsTuning",
    "attend_rows",
    "attend_rows_kernel",
    "keys_kernel",
    "place_keys",
    "unpack_entries",
    "unpack_entries_kernel",
    "unpack_picks_kernel",
    "unpack_windows",
    "unpack_windows_kernel",
]
