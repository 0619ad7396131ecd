"""Weights in the order in which the kernels stream them. Owns the tile layouts and their inverse.

A tile is 128 output rows. What a program reads of it lies in one run of memory, 128 input columns after another, so
that every load is a full line. Packing moves bits and never rounds: `unpack` gives back what was packed. Knows nothing
of which layer a matrix belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine.ops.quant import Fp4Matrix
from deskfleet.errors import EngineError

TILE_ROWS = 128
BLOCK_COLUMNS = 128  # one scale word covers them: four E8M0 bytes, the first in the low byte
GROUP = 32  # columns that share a scale
_HALF = 64  # columns of FP4 that one byte plane covers: a byte holds columns k and k + 32
_GATE_ROWS = TILE_ROWS // 2


def _spread(nibbles: Tensor, sign: int, high: int, low: int, mantissa: int) -> Tensor:
    """Nibbles uint8 (sign, two exponent bits, mantissa) with their four bits moved to the given places."""
    moved = torch.zeros_like(nibbles)
    for source, target in ((3, sign), (2, high), (1, low), (0, mantissa)):
        moved |= ((nibbles >> source) & 1) << target
    return moved


# Where the two codes of a byte keep their bits. An E4M3 number of the value times 2**-6 has its sign in bit 7, the low
# exponent bits in 4 and 3 and the high mantissa bit in 2: the first code is that number under a mask, the second after
# two shifts (tiles.py).
_NIBBLES = torch.arange(16, dtype=torch.uint8)
_FIRST = _spread(_NIBBLES, 7, 4, 3, 2)
_SECOND = _spread(_NIBBLES, 5, 6, 1, 0)
FIRST_MASK = 0x9C


@dataclass(frozen=True, slots=True)
class Fp4Tiles:
    """MXFP4 matrices [E, N, K] for the tensor cores' FP8 mode (spec §2.1).

    codes   uint8 [E, N/128, K/64, 128, 32]: byte j of a row holds columns j and j + 32 of 64
    scales  int32 [E, N/128, ceil(K/128), 128]: four E8M0 bytes a row and 128 columns; missing ones are zero
    exact   steps that decode sum its products in float32, not as the tensor cores' FP8 instructions do, in some 13 bits
    """

    codes: Tensor
    scales: Tensor
    num_rows: int
    num_columns: int
    exact: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.codes.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """One FP8 matrix [N, K] with 32x32 scales (spec §2.1).

    codes   float8_e4m3fn [N/128, K/32, 128, 32]; paired: int16 [N/128, K/64, 128, 32], word j of a row holding columns
            j (low byte) and j + 32 of 64, for the kernel that widens codes to bf16
    scales  int32 [N/32, ceil(K/128)]: four E8M0 bytes for 32 rows and 128 columns
    exact   as of Fp4Tiles
    """

    codes: Tensor
    scales: Tensor
    num_rows: int
    num_columns: int
    exact: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.codes.nbytes + self.scales.nbytes


def pack_fp4(matrix: Fp4Matrix, *, gated: bool = False) -> Fp4Tiles:
    """Codes uint8 [E, N, K/2] and scales uint8 [E, N, K/32] as tiles.

    `gated` takes w1 over w3 (N = 2F) and puts 64 rows of each into a tile, so that a program holds a gate and its up
    value. Raises EngineError for sizes that fill no tile.
    """
    codes, scales = matrix.codes, matrix.scales
    experts, rows, half_columns = codes.shape
    columns = 2 * half_columns
    _check(rows, columns, _HALF)
    order = _tile_order(rows, gated, codes.device)
    codes, scales = codes[:, order], scales[:, order]
    nibbles = torch.stack((codes & 0xF, codes >> 4), -1).view(experts, rows, columns // _HALF, 2, GROUP)
    first, second = _FIRST.to(codes.device), _SECOND.to(codes.device)
    bytes_ = first[nibbles[..., 0, :].int()] | second[nibbles[..., 1, :].int()]
    tiled = bytes_.view(experts, rows // TILE_ROWS, TILE_ROWS, columns // _HALF, GROUP).transpose(2, 3)
    words = scale_words(scales).view(experts, rows // TILE_ROWS, TILE_ROWS, -1).transpose(2, 3)
    return Fp4Tiles(tiled.contiguous(), words.contiguous(), rows, columns)


def unpack_fp4(tiles: Fp4Tiles, *, gated: bool = False) -> Fp4Matrix:
    """The inverse of `pack_fp4`."""
    experts, rows, columns = len(tiles.codes), tiles.num_rows, tiles.num_columns
    codes = tiles.codes
    first = torch.zeros(256, dtype=torch.uint8, device=codes.device)
    second = torch.zeros(256, dtype=torch.uint8, device=codes.device)
    nibbles = _NIBBLES.to(codes.device)
    first[_FIRST.to(codes.device).int()] = nibbles
    second[_SECOND.to(codes.device).int()] = nibbles
    pair = torch.stack((first[(codes & FIRST_MASK).int()], second[(codes & ~FIRST_MASK & 0xFF).int()]), -2)
    flat = pair.transpose(2, 3).reshape(experts, rows, columns)  # tile, row, (64-block, half, j)
    by_row = tiles.scales.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    scales = by_row.view(torch.uint8).view(experts, rows, -1)
    order = _tile_order(rows, gated, codes.device)
    back = torch.empty_like(order)
    back[order] = torch.arange(rows, device=codes.device)
    flat, scales = flat[:, back], scales[:, back, : columns // GROUP]
    return Fp4Matrix((flat[..., 0::2] | (flat[..., 1::2] << 4)).contiguous(), scales.contiguous())


def pack_fp8(codes: Tensor, scales: Tensor, *, gated: bool = False, paired: bool = False) -> Fp8Tiles:
    """Codes uint8 [N, K] and scales uint8 [N/32, K/32] as tiles; rows beyond N up to the next tile are zero.

    `gated` as in `pack_fp4`, `paired` as in `Fp8Tiles`. Raises EngineError for sizes that no
    scale block divides.
    """
    rows, columns = codes.shape
    _check(rows, columns, _HALF if paired else GROUP, whole_tiles=gated)
    if gated:
        order = _tile_order(rows, gated, codes.device)
        codes, scales = codes[order], scales[order.view(-1, GROUP)[:, 0] // GROUP]
    missing = -rows % TILE_ROWS
    codes = torch.nn.functional.pad(codes, (0, 0, 0, missing))
    scales = torch.nn.functional.pad(scales, (0, 0, 0, missing // GROUP))
    words = scale_words(scales).contiguous()
    if paired:
        halves = codes.view(-1, TILE_ROWS, columns // _HALF, 2, GROUP).permute(0, 2, 1, 4, 3)
        return Fp8Tiles(halves.contiguous().view(torch.int16).squeeze(-1), words, rows, columns)
    tiled = codes.view(-1, TILE_ROWS, columns // GROUP, GROUP).transpose(1, 2).contiguous()
    return Fp8Tiles(tiled.view(torch.float8_e4m3fn), words, rows, columns)


def unpack_fp8(tiles: Fp8Tiles) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_fp8` without `gated`: codes uint8 [N, K], scales uint8 [N/32, K/32]."""
    rows, columns = tiles.num_rows, tiles.num_columns
    if tiles.codes.dtype == torch.int16:
        halves = tiles.codes.unsqueeze(-1).view(torch.uint8)  # (tile, 64-block, row, j, half)
        codes = halves.permute(0, 2, 1, 4, 3).reshape(-1, columns)
    else:
        codes = tiles.codes.view(torch.uint8).transpose(1, 2).reshape(-1, columns)
    scales = tiles.scales.view(torch.uint8).view(len(tiles.scales), -1)
    return codes[:rows], scales[: -(-rows // GROUP), : columns // GROUP]


def pack_mixes(weight: Tensor) -> Tensor:
    """float32 [24, 4·M] -> bf16 [M/64, 4, 3, 2, 2, 32, 8], 48 rows for 64 columns of each copy: the upper parts of all
    weights, then what they leave. By 16 rows, 32 columns and one of their two products the operands of 32 lanes:
    columns of rows g and g + 8, then two more of both, as mma.m16n8k16 takes them."""
    upper = weight.to(torch.bfloat16)
    lower = (weight - upper.to(torch.float32)).to(torch.bfloat16)
    # Tile of rows, row or the one 8 below, g; copy, 64 columns; half of them, t, product, first or second two, which.
    both = torch.cat((upper, lower)).view(3, 2, 8, 4, -1, 2, 4, 2, 2, 2)
    return both.permute(4, 3, 0, 5, 7, 2, 6, 8, 1, 9).reshape(-1, 4, 3, 2, 2, 32, 8)


def unpack_mixes(packed: Tensor) -> Tensor:
    """The parts of `pack_mixes`: bf16 [48, 4·M]."""
    places = packed.view(-1, 4, 3, 2, 2, 8, 4, 2, 2, 2)
    return places.permute(2, 8, 5, 1, 0, 3, 6, 4, 7, 9).reshape(48, -1)


def ungate(weight: Tensor) -> Tensor:
    """Rows [2F, ...] of gated tiles, 64 of w1 then 64 of w3, as w1 over w3."""
    order = _tile_order(len(weight), True, weight.device)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(weight), device=weight.device)
    return weight[back]


def scale_words(scales: Tensor) -> Tensor:
    """E8M0 bytes uint8 [..., G] as int32 words [..., ceil(G/4)], the first byte lowest, missing ones zero."""
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)).contiguous()
    return padded.view(torch.int32)


def _tile_order(rows: int, gated: bool, device: torch.device) -> Tensor:
    """int64 [N]: which row of the checkpoint lies at each place of the tiles."""
    order = torch.arange(rows, device=device)
    if gated:
        order = order.view(2, -1, _GATE_ROWS).transpose(0, 1).reshape(-1)
    return order


def _check(rows: int, columns: int, column_unit: int, *, whole_tiles: bool = True) -> None:
    row_unit = TILE_ROWS if whole_tiles else GROUP
    if rows % row_unit or columns % column_unit:
        raise EngineError(
            f"a matrix of {rows} rows and {columns} columns cannot be packed",
            hint=f"the kernels take multiples of {row_unit} rows and {column_unit} columns",
        )


__all__ = [
    "BLOCK_COLUMNS",
    "FIRST_MASK",
    "GROUP",
    "TILE_ROWS",
    "Fp4Tiles",
    "Fp8Tiles",
    "pack_fp4",
    "pack_fp8",
    "pack_mixes",
    "scale_words",
    "ungate",
    "unpack_fp4",
    "unpack_fp8",
    "unpack_mixes",
]
