"""Blocks of rows: encoding, checksums, checking, vectorised over the blocks of an extent.

Pure functions of arrays. Native code may take over both loops (`use_accelerator`) and must then give the same
bytes and verdicts; numpy stays the oracle, and the one that names a fault. Knows nothing of files or manifests.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.crc32c import INITIAL, advance, advance_rows, crc32c_rows
from deskfleet_engram.errors import FormatError
from deskfleet_engram.format import (
    BLOCK_BYTES,
    CRC_BYTES,
    HEADER_OFFSET,
    MAJOR,
    ColumnLayout,
    fp8_rows,
    nvfp4_rows,
)

BLOCK_MAGIC = b"EGPB"

_BATCH = 256  # blocks; a mebibyte and its temporaries stay in the cache
_RESERVED = range(44, 60)  # bytes of the header
_SEED = struct.Struct("<QII")  # then the row as u64

HEADER_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("format", "<u2"),
        ("pack_id", "<u8"),
        ("layer", "<u4"),
        ("column", "<u4"),
        ("block_no", "<u8"),
        ("first_row", "<u8"),
        ("row_count", "<u4"),
        ("reserved", "V16"),
        ("crc", "<u4"),
    ]
)
"""The block header, little-endian and without gaps."""

_IDENTITY_FIELDS = ("pack_id", "layer", "column", "block_no", "first_row", "row_count")


@dataclass(frozen=True, slots=True)
class BlockFault:
    """One fault of one block. `row` is None when the whole block is at fault.

    `kind`: "hole" nothing but zero bytes, "checksum" damaged bytes (of the row, or of header and checksum table),
    "misplaced" a sound block of another place, column or pack, "fill" unused bytes that are not zero.
    """

    block: int
    row: int | None
    kind: str
    detail: str


class Accelerator(Protocol):
    """Two loops over blocks. Both get checked shapes and C-contiguous arrays, and should release the GIL."""

    @property
    def name(self) -> str:
        """What reports call it, such as "native (AVX-512)"."""

    def encode_blocks(
        self,
        layout: ColumnLayout,
        first_block: int,
        weight: NDArray[np.uint8],
        scale: NDArray[np.uint8],
        out: NDArray[np.uint8],
    ) -> None:
        """Do what the function `encode_blocks` does, to the byte; `out` holds old bytes."""

    def blocks_are_sound(self, layout: ColumnLayout, first_block: int, blocks: NDArray[np.uint8]) -> bool:
        """Say whether the function `check_blocks` would find nothing at all."""


_accelerator: Accelerator | None = None


def current_accelerator() -> Accelerator | None:
    """Return what encodes and checks now; None is numpy."""
    return _accelerator


def use_accelerator(accelerator: Accelerator | None) -> None:
    """Encode and check with `accelerator` from now on; None goes back to numpy.

    Raises FormatError, and stays with numpy, when its bytes or verdicts differ from numpy's on a sample.
    """
    global _accelerator
    _accelerator = None
    if accelerator is not None:
        _prove(accelerator)
    _accelerator = accelerator


def row_crcs(layout: ColumnLayout, row_ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return uint32 [N]: the checksum of each row of `rows` uint8 [N, row_bytes] at `row_ids` of the column.

    It covers pack, layer, column and row number before the row's bytes, so no row passes in another's place.
    """
    seed = _SEED.pack(layout.pack_id, layout.layer, layout.column)
    states = np.full(len(rows), advance(INITIAL, seed), dtype=np.uint32)
    numbers = np.ascontiguousarray(row_ids, dtype="<u8").view(np.uint8).reshape(len(rows), 8)
    return ~advance_rows(advance_rows(states, numbers), rows)


def encode_blocks(
    layout: ColumnLayout,
    first_block: int,
    weight: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    """Fill `out` uint8 [B, 4096], C-contiguous, with the blocks from `first_block` on.

    `weight` uint8 [R, weight_bytes] and `scale` uint8 [R, scale_bytes], both C-contiguous, are exactly the rows of
    those B blocks. Raises FormatError when the shapes do not fit together.
    """
    _check_shapes(layout, first_block, weight, scale, out)
    native = _accelerator
    if native is not None:
        native.encode_blocks(layout, first_block, weight, scale, out)
        return
    per_block = layout.rows.rows_per_block
    for start in range(0, len(out), _BATCH):
        part = slice(start * per_block, (start + _BATCH) * per_block)
        _encode_batch(layout, first_block + start, weight[part], scale[part], out[start : start + _BATCH])


def check_blocks(layout: ColumnLayout, first_block: int, blocks: NDArray[np.uint8]) -> list[BlockFault]:
    """Return every fault of `blocks` uint8 [B, 4096], C-contiguous, which should be those from `first_block` on.

    Everything is checked: header, place, checksum table, each row, and that unused bytes are zero.
    """
    native = _accelerator
    if native is not None and native.blocks_are_sound(layout, first_block, blocks):
        return []
    faults: list[BlockFault] = []
    for start in range(0, len(blocks), _BATCH):
        batch = blocks[start : start + _BATCH]
        numbers = first_block + start + np.arange(len(batch), dtype=np.int64)
        found, sound = check_headers(layout, numbers, batch)
        faults += found
        faults += _check_rows(layout, first_block + start, batch, sound)
    faults.sort(key=lambda fault: (fault.block, -1 if fault.row is None else fault.row))
    return faults


def check_headers(
    layout: ColumnLayout, numbers: NDArray[np.int64], blocks: NDArray[np.uint8]
) -> tuple[list[BlockFault], NDArray[np.bool_]]:
    """Return the faults of the headers of `blocks` uint8 [B, 4096], and bool [B]: which blocks have none.

    `numbers` int64 [B] says which blocks they should be. Only where the header is sound can the checksum table be
    trusted. Row bytes and fill are not looked at.
    """
    headers = blocks[:, HEADER_OFFSET:].view(HEADER_DTYPE)[:, 0]
    whole = headers["crc"] == _header_crcs(layout, blocks)
    whole &= (headers["magic"] == BLOCK_MAGIC) & (headers["version"] == MAJOR)
    wanted = _expected_headers(layout, numbers)
    placed = headers["format"] == layout.rows.format_id
    for name in _IDENTITY_FIELDS:
        placed &= headers[name] == wanted[name]
    faults = []
    for index in np.flatnonzero(~(whole & placed)).tolist():
        block = int(numbers[index])
        if whole[index]:
            faults.append(BlockFault(block, None, "misplaced", _describe_header(headers[index])))
        elif not blocks[index].any():
            faults.append(BlockFault(block, None, "hole", "nothing but zero bytes"))
        else:
            faults.append(BlockFault(block, None, "checksum", "header or checksum table is damaged"))
    return faults, whole & placed


def stored_crcs(layout: ColumnLayout, blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return uint32 [B, rows_per_block]: the checksum tables of `blocks` uint8 [B, 4096]."""
    body = layout.rows.rows_per_block * layout.rows.row_bytes
    table = blocks[:, body : body + layout.rows.rows_per_block * CRC_BYTES]
    return np.ascontiguousarray(table).view("<u4")


def block_rows(layout: ColumnLayout, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return uint8 [B, rows_per_block, row_bytes]: the row slots of `blocks` uint8 [B, 4096]."""
    per_block, row_bytes = layout.rows.rows_per_block, layout.rows.row_bytes
    return blocks[:, : per_block * row_bytes].reshape(len(blocks), per_block, row_bytes)


def _encode_batch(
    layout: ColumnLayout,
    first_block: int,
    weight: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    rows, per_block = layout.rows, layout.rows.rows_per_block
    num_blocks, num_rows = len(out), len(weight)
    out[...] = 0
    joined = np.empty((num_rows, rows.row_bytes), dtype=np.uint8)
    joined[:, : rows.weight_bytes] = weight
    joined[:, rows.weight_bytes :] = scale
    ids = first_block * per_block + np.arange(num_rows, dtype=np.int64)
    table = np.zeros(num_blocks * per_block, dtype="<u4")
    table[:num_rows] = row_crcs(layout, ids, joined)
    # All but the last block are full, so rows and blocks correspond by reshaping.
    full = num_rows // per_block
    body = per_block * rows.row_bytes
    out[:full, :body] = joined[: full * per_block].reshape(full, body)
    rest = joined[full * per_block :].reshape(-1)
    if rest.size:
        out[full, : rest.size] = rest
    out[:, body : body + per_block * CRC_BYTES] = table.view(np.uint8).reshape(num_blocks, -1)
    headers = out[:, HEADER_OFFSET:].view(HEADER_DTYPE)[:, 0]
    headers[...] = _expected_headers(layout, first_block + np.arange(num_blocks, dtype=np.int64))
    headers["crc"] = _header_crcs(layout, out)


def _check_rows(
    layout: ColumnLayout, first_block: int, blocks: NDArray[np.uint8], sound: NDArray[np.bool_]
) -> list[BlockFault]:
    """Return the faults of rows and fill in the blocks whose header is sound."""
    per_block = layout.rows.rows_per_block
    ids = first_block * per_block + np.arange(len(blocks) * per_block, dtype=np.int64)
    slots = block_rows(layout, blocks).reshape(len(ids), layout.rows.row_bytes)
    exists = ids < layout.num_rows
    wrong = np.zeros(len(ids), dtype=np.bool_)
    stored = stored_crcs(layout, blocks).reshape(-1)
    wrong[exists] = row_crcs(layout, ids[exists], slots[exists]) != stored[exists]
    wrong &= np.repeat(sound, per_block)
    faults = [
        BlockFault(row // per_block, row, "checksum", "the row's bytes do not match its checksum")
        for row in ids[wrong].tolist()
    ]
    used = per_block * (layout.rows.row_bytes + CRC_BYTES)
    filled = blocks[:, used:HEADER_OFFSET].any(axis=1)
    filled |= blocks[:, HEADER_OFFSET + _RESERVED.start : HEADER_OFFSET + _RESERVED.stop].any(axis=1)
    unused = slots.any(axis=1) | (stored != 0)
    filled |= (unused & ~exists).reshape(len(blocks), per_block).any(axis=1)
    faults.extend(
        BlockFault(first_block + index, None, "fill", "unused bytes are not zero")
        for index in np.flatnonzero(filled & sound).tolist()
    )
    return faults


def _expected_headers(layout: ColumnLayout, numbers: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the headers of blocks that are in their place, without checksums."""
    headers = np.zeros(len(numbers), dtype=HEADER_DTYPE)
    headers["magic"] = BLOCK_MAGIC
    headers["version"] = MAJOR
    headers["format"] = layout.rows.format_id
    headers["pack_id"] = layout.pack_id
    headers["layer"] = layout.layer
    headers["column"] = layout.column
    headers["block_no"] = numbers
    headers["first_row"] = numbers * layout.rows.rows_per_block
    headers["row_count"] = np.minimum(
        layout.rows.rows_per_block, layout.num_rows - numbers * layout.rows.rows_per_block
    )
    return headers


def _header_crcs(layout: ColumnLayout, blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return uint32 [B]: checksums over header (without its own) and checksum table."""
    per_block = layout.rows.rows_per_block
    body = per_block * layout.rows.row_bytes
    header = blocks[:, HEADER_OFFSET : BLOCK_BYTES - CRC_BYTES]
    table = blocks[:, body : body + per_block * CRC_BYTES]
    return crc32c_rows(np.concatenate([header, table], axis=1))


def _describe_header(header: np.void) -> str:
    return (
        f"a sound block {header['block_no']} of layer {header['layer']} column {header['column']}, rows "
        f"{header['first_row']} to {int(header['first_row']) + int(header['row_count']) - 1}, row format "
        f"{header['format']}, pack {int(header['pack_id']):016x}"
    )


def _check_shapes(
    layout: ColumnLayout,
    first_block: int,
    weight: NDArray[np.uint8],
    scale: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    per_block = layout.rows.rows_per_block
    last = first_block + len(out)
    num_rows = min(last * per_block, layout.num_rows) - first_block * per_block
    for name, array, shape in (
        ("weight", weight, (num_rows, layout.rows.weight_bytes)),
        ("scale", scale, (num_rows, layout.rows.scale_bytes)),
        ("out", out, (len(out), BLOCK_BYTES)),
    ):
        if array.shape != shape or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise FormatError(
                f"blocks {first_block} to {last - 1} of {layout.file_name}: {name} must be contiguous uint8 of "
                f"shape {shape}, got {array.dtype} of shape {array.shape}"
            )
    if not 0 <= first_block < last <= layout.num_blocks:
        raise FormatError(
            f"{layout.file_name} has blocks 0 to {layout.num_blocks - 1}, not {first_block} to {last - 1}"
        )


def _prove(accelerator: Accelerator) -> None:
    """Compare with numpy on one column per row format, each with a short last block."""
    random = np.random.default_rng(11)
    for rows in (fp8_rows(256), nvfp4_rows(256)):
        num_rows = 2 * rows.rows_per_block + 3
        layout = ColumnLayout(rows, bytes(range(100, 132)), layer=14, column=23, num_rows=num_rows)
        weight = random.integers(0, 256, (num_rows, rows.weight_bytes), dtype=np.uint8)
        scale = random.integers(0, 256, (num_rows, rows.scale_bytes), dtype=np.uint8)
        wanted = np.empty((layout.num_blocks, BLOCK_BYTES), dtype=np.uint8)
        encode_blocks(layout, 0, weight, scale, wanted)
        found = np.full_like(wanted, 0xA5)
        accelerator.encode_blocks(layout, 0, weight, scale, found)
        if not np.array_equal(found, wanted):
            raise FormatError(f"{accelerator.name} encodes {rows.name} blocks unlike numpy; it is not used")
        verdicts = [accelerator.blocks_are_sound(layout, 0, wanted)]
        for block, position in ((0, 9), (1, 4000), (1, 4031), (1, 4040), (2, 4095), (2, 2000)):
            wanted[block, position] ^= 1  # a row, checksum table, fill, header, its checksum, an unused slot
            verdicts.append(not accelerator.blocks_are_sound(layout, 0, wanted))
            wanted[block, position] ^= 1
        if not all(verdicts):
            raise FormatError(f"{accelerator.name} judges {rows.name} blocks unlike numpy; it is not used")


__all__ = [
    "BLOCK_MAGIC",
    "HEADER_DTYPE",
    "Accelerator",
    "BlockFault",
    "block_rows",
    "check_blocks",
    "check_headers",
    "current_accelerator",
    "encode_blocks",
    "row_crcs",
    "stored_crcs",
    "use_accelerator",
]
