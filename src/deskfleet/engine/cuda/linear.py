"""Projections for 1 to 384 rows (spec §N.4, §4.2, §4.7). Owns three matrix kernels and how they split K.

    fp8_kernel    FP8 weights, FP8 activations: wq_a over wkv, wq_b with the rotation, wo_b, the indexer's queries
    wide_kernel   FP8 weights, bf16 activations: wo_a, whose input the reference does not quantise
    bf16_kernel   bf16 weights and activations, float32 out: router, compressor, index weights

Matrices that share an input are stacked by row and take one launch. Every kernel may split K: the last program to
finish a tile adds the parts in order, so that a result does not depend on which was last, or the next kernel does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda.native import products
from deskfleet.engine.cuda.packing import TILE_ROWS, Fp8Tiles
from deskfleet.engine.cuda.tiles import (
    accumulate,
    fp8_codes,
    fp8_scale,
    sum_of_splits,
    to_bf16,
)
from deskfleet.errors import EngineError

BF16_TILE_ROWS = 64
BF16_BLOCK_COLUMNS = 64
NUM_PROCESSORS = 132


@triton.jit
def rotation(cos, sin, tile, rows, live, HEAD: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines float32 [64, BM] of a tile's pairs: of every HEAD rows of the whole the last ROPE turn, the
    others have 1 and 0. cos, sin float32 [T, ROPE/2]; HEAD and ROPE are powers of two."""
    pair = (tile * 64 + tl.arange(0, 64)) % (HEAD // 2) - (HEAD - ROPE) // 2
    turns = (pair >= 0)[:, None] & live[None, :]
    at = rows[None, :] * (ROPE // 2) + pair[:, None]
    return tl.load(cos + at, mask=turns, other=1.0), tl.load(sin + at, mask=turns, other=0.0)


@triton.jit
def rotated(value, turn, BM: tl.constexpr):
    """value float32 [128, BM], already rounded to bf16, with adjacent pairs rotated (spec §N.7); turn of `rotation`."""
    c, s = turn
    even, odd = tl.split(tl.permute(tl.reshape(value, (64, 2, BM)), (0, 2, 1)))
    both = tl.join(even * c - odd * s, even * s + odd * c)  # (64, BM, 2)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (128, BM))


@triton.jit
def store_tile(
    acc,
    out,
    out_scales,
    turn,  # of `rotation`, where IS_ROTATED
    tile,
    rows,
    live,
    N: tl.constexpr,
    OUTPUT: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """acc float32 [128, BM] into rows of out [T, N] as bf16, as bf16 rotated or as FP8 with scales."""
    column = tile * 128 + tl.arange(0, 128)
    at = out + rows[None, :] * N + column[:, None]
    mask = live[None, :] & (column < N)[:, None]
    if OUTPUT == "fp8":
        value = tl.reshape(to_bf16(acc, BIT_OPS).to(tl.float32), (4, 32, BM))
        bits = fp8_scale(tl.max(tl.abs(value), 1))  # (4, BM)
        tl.store(at, tl.reshape(fp8_codes(value, bits[:, None, :], BIT_OPS), (128, BM)), mask=mask)
        group = tile * 4 + tl.arange(0, 4)
        scale_at = out_scales + rows[None, :] * (4 * ((N + 127) // 128)) + group[:, None]
        tl.store(scale_at, (bits >> 23).to(tl.uint8), mask=live[None, :] & (group * 32 < N)[:, None])
    else:
        value = to_bf16(acc, BIT_OPS)
        if IS_ROTATED:
            value = to_bf16(rotated(value.to(tl.float32), turn, BM), BIT_OPS)
        tl.store(at, value, mask=mask)


@triton.jit
def store_part(acc, out, split, column, rows, num_rows, N: tl.constexpr):
    """acc float32 [columns, BM], one of several to be added, into out float32 [splits, T, N]."""
    at = out + ((split * num_rows).to(tl.int64) + rows)[None, :] * N + column[:, None]
    tl.store(at, acc, mask=(rows < num_rows)[None, :] & (column < N)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def fp8_kernel(
    x,  # float8e4nv [T, K]
    x_scales,  # int32 [T, ceil(K/128)]
    codes,  # Fp8Tiles of [N, K]
    scales,
    out,  # bf16 or float8e4nv [T, N]; of OUTPUT "parts" float32 [SPLITS, T, N]
    out_scales,  # uint8 [T, 4 * ceil(N/128)], of an FP8 output
    cos,  # float32 [T, ROPE/2], where HEAD > 0
    sin,
    partials,  # float32 [SPLITS, row blocks * tiles, 128 * BM]
    counters,  # int32 [row blocks * tiles]: zero before and after
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    OUTPUT: tl.constexpr,
    HEAD: tl.constexpr,  # elements of a head, of which the last ROPE are rotated; 0: none
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 128 outputs of BM rows over one of SPLITS parts of K (oracle: reference.quantized_linear)."""
    NUM_BLOCKS: tl.constexpr = (K + 127) // 128
    PER_SPLIT: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < num_rows
    begin = split * PER_SPLIT
    if HEAD > 0:  # on its way while the rest is done
        turn = rotation(cos, sin, tile, rows, live, HEAD, ROPE)
    else:
        turn = (cos, sin)
    acc = accumulate(
        codes, scales, x, x_scales, tile, rows, live, begin, tl.minimum(begin + PER_SPLIT, NUM_BLOCKS), K, K, "fp8",
        EXACT, BM, GROUPS, BIT_OPS, STAGES,
    )  # fmt: skip
    if OUTPUT == "parts":
        store_part(acc, out, split, tile * 128 + tl.arange(0, 128), rows, num_rows, N)
        return
    if SPLITS > 1:
        NUM_TILES: tl.constexpr = (N + 127) // 128
        number = tl.program_id(1) * NUM_TILES + tile
        offsets = tl.arange(0, 128)[:, None] * BM + tl.arange(0, BM)[None, :]
        place = (split, tl.num_programs(1) * NUM_TILES, number)
        acc, is_last = sum_of_splits(acc, partials, place, counters + number, SPLITS, 128 * BM, offsets)
        if not is_last:
            return
    store_tile(acc, out, out_scales, turn, tile, rows, live, N, OUTPUT, HEAD > 0, BM, BIT_OPS)


@triton.jit(do_not_specialize=["num_rows"])
def wide_kernel(
    x,  # bf16 [T, G * K]
    codes,  # paired Fp8Tiles of [G * N, K]
    scales,
    out,  # float8e4nv [T, G * N]
    out_scales,  # uint8 [T, 4 * ceil(G * N/128)]
    partials,
    counters,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTPUT: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    DOT_GROUPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One linear per group (oracle: reference.grouped_linear); N a multiple of 128, K of 128."""
    NUM_BLOCKS: tl.constexpr = K // 128
    NUM_TILES: tl.constexpr = GROUPS * N // 128
    PER_SPLIT: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < num_rows
    begin = split * PER_SPLIT
    acc = accumulate(
        codes, scales, x + tile * 128 // N * K, x, tile, rows, live, begin,
        tl.minimum(begin + PER_SPLIT, NUM_BLOCKS), K, GROUPS * K, "wide", False, BM, DOT_GROUPS, BIT_OPS, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        number = tl.program_id(1) * NUM_TILES + tile
        offsets = tl.arange(0, 128)[:, None] * BM + tl.arange(0, BM)[None, :]
        place = (split, tl.num_programs(1) * NUM_TILES, number)
        acc, is_last = sum_of_splits(acc, partials, place, counters + number, SPLITS, 128 * BM, offsets)
        if not is_last:
            return
    store_tile(acc, out, out_scales, out, tile, rows, live, GROUPS * N, OUTPUT, False, BM, BIT_OPS)


@triton.jit(do_not_specialize=["num_rows"])
def bf16_kernel(
    x,  # bf16 [T, K]
    weight,  # bf16 [N/64, K/64, 64, 64]
    out,  # float32 [T, N]
    partials,  # float32 [SPLITS, row blocks * tiles, 64 * BM]
    counters,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """64 outputs of BM rows over a part of K (oracle: reference.linear_f32)."""
    NUM_BLOCKS: tl.constexpr = K // 64
    NUM_TILES: tl.constexpr = (N + 63) // 64
    PER_SPLIT: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    member = tl.arange(0, BM)
    rows = tl.program_id(1) * BM + member
    live = rows < num_rows
    begin = split * PER_SPLIT
    row = tl.arange(0, 64)
    x_at = x + rows[None, :] * K + begin * 64 + row[:, None]
    weight_at = weight + (tile * NUM_BLOCKS + begin) * 4096 + row[:, None] * 64 + row[None, :]
    acc = tl.zeros((64, BM), tl.float32)
    for _ in tl.range(begin, tl.minimum(begin + PER_SPLIT, NUM_BLOCKS), num_stages=STAGES):
        weights = tl.load(weight_at)
        x_part = tl.load(x_at, mask=live[None, :], other=0.0)
        if BIT_OPS:
            acc += tl.dot(weights.to(tl.float32), x_part.to(tl.float32))
        else:
            acc = tl.dot(weights, x_part, acc)
        weight_at += 4096
        x_at += 64
    column = tile * 64 + row
    if SPLITS > 1:
        number = tl.program_id(1) * NUM_TILES + tile
        offsets = row[:, None] * BM + member[None, :]
        place = (split, tl.num_programs(1) * NUM_TILES, number)
        acc, is_last = sum_of_splits(acc, partials, place, counters + number, SPLITS, 64 * BM, offsets)
        if not is_last:
            return
    tl.store(out + rows[None, :] * N + column[:, None], acc, mask=live[None, :] & (column < N)[:, None])


def block_rows(num_rows: int) -> int:
    """Rows of activations that one program takes. 64 would read the weights of 64 rows once, but accumulators of so
    many leave no registers (10 spilled, one program a processor), and a second reading comes from the L2."""
    return 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32


def groups_of(rows: int) -> int:
    """Scale groups of one dot of FP8 weights with a block of `rows` rows (measured on an H200: decision 0021)."""
    return 2 if rows == 8 else 1


def row_blocks(num_rows: int) -> int:
    """Blocks of `block_rows` that so many rows are."""
    return -(-num_rows // block_rows(num_rows))


def padded_rows(num_rows: int) -> int:
    """Rows that those cover."""
    return row_blocks(num_rows) * block_rows(num_rows)


def num_splits(num_tiles: int, num_blocks: int, num_rows: int) -> int:
    """Parts of K that give nearly every one of 132 processors a program, each with two blocks of columns or more.

    A few more programs than processors still pay while the parts are of 16 rows, not when they are larger (measured on
    an H200: decision 0021).
    """
    blocks = row_blocks(num_rows)
    most = 160 if blocks == 1 else NUM_PROCESSORS
    splits = 1
    while num_tiles * blocks * 2 * splits <= most and num_blocks // (2 * splits) >= 2:
        splits *= 2
    return splits


class SplitBuffers:
    """Workspace of split sums, shared by every matrix kernel of a step: they run one after another."""

    def __init__(self, num_floats: int, num_places: int, device: torch.device | str) -> None:
        self.partials = torch.zeros(num_floats, device=device)
        self.counters = torch.zeros(num_places, dtype=torch.int32, device=device)

    def check(self, splits: int, num_places: int, num_floats: int) -> None:
        """Raise EngineError when `num_places` sums of `num_floats` in so many parts do not fit."""
        if splits > 1 and (
            splits * num_places * num_floats > len(self.partials) or num_places > len(self.counters)
        ):
            raise EngineError(
                f"{splits} parts of {num_places} sums of {num_floats} numbers do not fit the workspace of "
                f"{len(self.partials)} numbers and {len(self.counters)} counters",
                hint="step._most_partials must count this product",
            )

    def parts(self, splits: int, num_rows: int, num_outputs: int) -> Tensor:
        """float32 [splits, T, N] of it."""
        return self.partials[: splits * num_rows * num_outputs].view(splits, num_rows, num_outputs)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Fp8Tiles,
    out: Tensor,
    work: SplitBuffers,
    *,
    splits: int,
    bit_ops: bool,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_head: int = 0,
    out_scales: Tensor | None = None,
    stages: int = 4,
    groups: int | None = None,
    unsummed: bool = False,
) -> Tensor:
    """x FP8 [T, K] times weight [N, K] into out [T, N]: bf16, or FP8 when `out_scales`.

    bf16 outputs are heads of `rope_head` elements where that is not 0, and their ends are rotated. Returns `out`, or,
    where `unsummed` and K is split, the parts float32 [splits, T, N] in the workspace: the next kernel adds them up
    (tiles.load_parts), which spares this one to wait for the last of them.
    """
    if fewest(x, bit_ops=bit_ops):
        products.fp8_linear(x, x_scales, weight, out, rope=rope, rope_head=rope_head, out_scales=out_scales)
        return out
    num_rows = len(x)
    tiles = -(-weight.num_rows // TILE_ROWS)
    output = "bf16" if out_scales is None else "fp8"
    if unsummed and splits > 1:
        out, output = work.parts(splits, num_rows, weight.num_rows), "parts"
    else:
        work.check(splits, tiles * row_blocks(num_rows), TILE_ROWS * block_rows(num_rows))
    cos, sin = rope if rope is not None else (work.partials, work.partials)
    fp8_kernel[(tiles * splits, row_blocks(num_rows))](
        x,
        x_scales,
        weight.codes,
        weight.scales,
        out,
        out if out_scales is None else out_scales.view(torch.uint8),
        cos,
        sin,
        work.partials,
        work.counters,
        num_rows,
        K=weight.num_columns,
        N=weight.num_rows,
        OUTPUT=output,
        HEAD=rope_head,
        ROPE=2 * cos.shape[1] if rope_head else 0,
        SPLITS=splits,
        EXACT=weight.exact,
        BM=block_rows(num_rows),
        GROUPS=groups_of(block_rows(num_rows)) if groups is None else groups,
        BIT_OPS=bit_ops,
        STAGES=stages,
        num_warps=4,
    )
    return out


def grouped_linear(
    x: Tensor,
    weight: Fp8Tiles,
    out: Tensor,
    out_scales: Tensor,
    work: SplitBuffers,
    *,
    groups: int,
    splits: int,
    bit_ops: bool,
    stages: int = 3,
    dot_groups: int | None = None,
) -> None:
    """x bf16 [T, G·K], paired weight [G·N, K] -> out FP8 [T, G·N] with scale bytes: what wo_b takes."""
    if fewest(x, bit_ops=bit_ops):
        products.grouped_linear(x, weight, out, out_scales, groups=groups)
        return
    tiles = weight.num_rows // TILE_ROWS
    work.check(splits, tiles * row_blocks(len(x)), TILE_ROWS * block_rows(len(x)))
    wide_kernel[(tiles * splits, row_blocks(len(x)))](
        x,
        weight.codes,
        weight.scales,
        out,
        out_scales.view(torch.uint8),
        work.partials,
        work.counters,
        len(x),
        K=weight.num_columns,
        N=weight.num_rows // groups,
        GROUPS=groups,
        OUTPUT="fp8",
        SPLITS=splits,
        BM=block_rows(len(x)),
        DOT_GROUPS=groups_of(block_rows(len(x))) if dot_groups is None else dot_groups,
        BIT_OPS=bit_ops,
        STAGES=stages,
        num_warps=4,
    )


def bf16_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    work: SplitBuffers,
    *,
    splits: int,
    bit_ops: bool,
    stages: int = 4,
) -> None:
    """x bf16 [T, K], weight of `pack_bf16` -> out float32 [T, N]."""
    if fewest(x, bit_ops=bit_ops):
        products.bf16_linear(x, weight, out)
        return
    tiles, blocks = weight.shape[:2]
    work.check(splits, tiles * row_blocks(len(x)), BF16_TILE_ROWS * block_rows(len(x)))
    bf16_kernel[(tiles * splits, row_blocks(len(x)))](
        x,
        weight,
        out,
        work.partials,
        work.counters,
        len(x),
        K=blocks * BF16_BLOCK_COLUMNS,
        N=out.shape[1],
        SPLITS=splits,
        BM=block_rows(len(x)),
        BIT_OPS=bit_ops,
        STAGES=stages,
        num_warps=4,
    )


def few(x: Tensor, *, bit_ops: bool) -> bool:
    """Whether the kernels of native/ take these rows: not in Triton's interpreter, which has its own."""
    return not bit_ops and len(x) <= products.MOST_ROWS


def fewest(x: Tensor, *, bit_ops: bool) -> bool:
    """Whether products of these rows are native/products.py's as well."""
    return not bit_ops and len(x) <= products.MOST_PRODUCT_ROWS


def summed(output: Tensor) -> Tensor:
    """Parts float32 [splits, T, N] added up as the kernels do and rounded to bf16; [T, N] as it is."""
    if output.dim() == 2:
        return output
    total = output[0]
    for part in output[1:]:
        total = total + part
    return total.to(torch.bfloat16)


def pack_bf16(weight: Tensor) -> Tensor:
    """bf16 [N, K] -> [ceil(N/64), K/64, 64, 64], missing rows zero; K a multiple of 64."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % BF16_TILE_ROWS))
    tiled = padded.view(-1, BF16_TILE_ROWS, weight.shape[1] // BF16_BLOCK_COLUMNS, BF16_BLOCK_COLUMNS)
    return tiled.transpose(1, 2).contiguous()


def unpack_bf16(tiles: Tensor) -> Tensor:
    """bf16 [N, K], missing rows and all."""
    return tiles.transpose(1, 2).reshape(tiles.shape[0] * BF16_TILE_ROWS, -1)


__all__ = [
    "SplitBuffers",
    "bf16_kernel",
    "bf16_linear",
    "block_rows",
    "few",
    "fewest",
    "fp8_kernel",
    "fp8_linear",
    "grouped_linear",
    "groups_of",
    "num_splits",
    "pack_bf16",
    "padded_rows",
    "rotated",
    "rotation",
    "row_blocks",
    "store_part",
    "store_tile",
    "summed",
    "unpack_bf16",
    "wide_kernel",
]
