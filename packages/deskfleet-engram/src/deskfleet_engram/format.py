"""Layout of a packed column: row formats, the numbers of a column's file, its superblock.

FORMAT.md is the description in prose; `deskfleet_engram.blocks` has the blocks of rows. Knows nothing of open
files, manifests or checkpoints.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from deskfleet_engram.crc32c import crc32c
from deskfleet_engram.errors import FormatError, IdentityError

BLOCK_BYTES = 4096
"""Size of every block, the superblock included; what one direct read of a disk takes."""

HEADER_BYTES = 64
HEADER_OFFSET = BLOCK_BYTES - HEADER_BYTES
CRC_BYTES = 4
MAJOR = 1
MINOR = 0

FILE_MAGIC = b"EGP1"

FP8_FORMAT = 1
NVFP4_FORMAT = 2

_SUPERBLOCK = struct.Struct("<4sHHHHIQIIQQQ32s")
_SUPERBLOCK_CRC_OFFSET = BLOCK_BYTES - CRC_BYTES


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row's bytes are made up: `weight_bytes` of codes, then `scale_bytes` of scales.

    `head_dim` values per row. `format_id` 1 is FP8: one E4M3 code a byte, one E8M0 scale per 32 values.
    `format_id` 2 is NVFP4: two E2M1 codes a byte, the first in the low half, one E4M3 scale per 16 values, and
    one float32 factor for the whole table, which the manifest holds.
    """

    format_id: int
    name: str
    head_dim: int
    weight_bytes: int
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.weight_bytes + self.scale_bytes

    @property
    def rows_per_block(self) -> int:
        """Rows, each with its checksum, that fit a block before its header."""
        return HEADER_OFFSET // (self.row_bytes + CRC_BYTES)

    @property
    def scale_block(self) -> int:
        """Values that share one scale."""
        return self.head_dim // self.scale_bytes


def fp8_rows(head_dim: int) -> RowFormat:
    """Return the published row format. Raises FormatError unless `head_dim` is a multiple of 32 that fits."""
    return _checked(RowFormat(FP8_FORMAT, "fp8", head_dim, head_dim, head_dim // 32), 32)


def nvfp4_rows(head_dim: int) -> RowFormat:
    """Return the four-bit row format. Raises FormatError unless `head_dim` is a multiple of 16 that fits."""
    return _checked(RowFormat(NVFP4_FORMAT, "nvfp4", head_dim, head_dim // 2, head_dim // 16), 16)


def row_format(format_id: int, head_dim: int) -> RowFormat:
    """Return the row format of that number. Raises FormatError for an unknown one."""
    if format_id == FP8_FORMAT:
        return fp8_rows(head_dim)
    if format_id == NVFP4_FORMAT:
        return nvfp4_rows(head_dim)
    raise FormatError(
        f"row format {format_id} is unknown; known are {FP8_FORMAT} (fp8), {NVFP4_FORMAT} (nvfp4)"
    )


def _checked(rows: RowFormat, multiple: int) -> RowFormat:
    if rows.head_dim < multiple or rows.head_dim % multiple:
        raise FormatError(f"{rows.name} rows need a multiple of {multiple} values, not {rows.head_dim}")
    if rows.rows_per_block < 1:
        raise FormatError(f"{rows.name} rows of {rows.row_bytes} bytes do not fit a {BLOCK_BYTES}-byte block")
    return rows


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Everything that the bytes of one column's file depend on, except its rows.

    `layer` is the layer's id in the model, `column` counts the layer's hash columns, `num_rows` is the column's
    prime. `pack_id` are the first eight bytes of the identity's SHA-256, read as little-endian.
    """

    rows: RowFormat
    identity_sha256: bytes
    layer: int
    column: int
    num_rows: int

    @property
    def pack_id(self) -> int:
        """The number that ties every block to one checkpoint."""
        return int.from_bytes(self.identity_sha256[:8], "little")

    @property
    def num_blocks(self) -> int:
        """Blocks of rows; the superblock is not counted."""
        return -(-self.num_rows // self.rows.rows_per_block)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return (1 + self.num_blocks) * BLOCK_BYTES

    @property
    def file_name(self) -> str:
        """Path of the file within the pack."""
        return f"L{self.layer:02d}/c{self.column:02d}.egp"

    def block_of(self, row: int) -> int:
        """Return the block that holds a row of this column."""
        return row // self.rows.rows_per_block

    def rows_in_block(self, block: int) -> int:
        """Return the number of rows in a block; only the last one may be short."""
        return min(self.rows.rows_per_block, self.num_rows - block * self.rows.rows_per_block)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first block of a file, as it stands there."""

    major: int
    minor: int
    format_id: int
    row_bytes: int
    rows_per_block: int
    pack_id: int
    layer: int
    column: int
    num_rows: int
    num_blocks: int
    prime: int
    identity_sha256: bytes


def encode_superblock(layout: ColumnLayout) -> bytes:
    """Return the 4,096 bytes that begin the column's file."""
    rows = layout.rows
    fields = _SUPERBLOCK.pack(
        FILE_MAGIC,
        MAJOR,
        MINOR,
        rows.format_id,
        rows.row_bytes,
        rows.rows_per_block,
        layout.pack_id,
        layout.layer,
        layout.column,
        layout.num_rows,
        layout.num_blocks,
        layout.num_rows,
        layout.identity_sha256,
    )
    body = fields.ljust(_SUPERBLOCK_CRC_OFFSET, b"\0")
    return body + crc32c(body).to_bytes(CRC_BYTES, "little")


def decode_superblock(data: bytes) -> Superblock:
    """Return the fields of a superblock.

    Raises FormatError when the bytes are damaged or none, and IdentityError for another major version.
    """
    if len(data) != BLOCK_BYTES or data[:4] != FILE_MAGIC:
        raise FormatError(
            f"no packed column: it begins with {data[:4].hex(' ') or 'nothing'}, not {FILE_MAGIC!r}"
        )
    found = crc32c(data[:_SUPERBLOCK_CRC_OFFSET])
    stored = int.from_bytes(data[_SUPERBLOCK_CRC_OFFSET:], "little")
    if found != stored:
        raise FormatError(f"superblock is damaged: its CRC32C is {found:08x} where {stored:08x} is stored")
    superblock = Superblock(*_SUPERBLOCK.unpack_from(data)[1:])
    if superblock.major != MAJOR:
        raise IdentityError(
            f"packed with format version {superblock.major}.{superblock.minor}; this reader knows {MAJOR}.x",
            hint="pack again, or use the version of deskfleet-engram that packed it",
        )
    return superblock


def check_superblock(layout: ColumnLayout, superblock: Superblock) -> None:
    """Raise IdentityError unless the superblock is the one that `layout` asks for, naming what differs.

    The minor version may differ.
    """
    if superblock.identity_sha256 != layout.identity_sha256 or superblock.pack_id != layout.pack_id:
        raise IdentityError(
            f"belongs to pack {superblock.pack_id:016x} of another checkpoint; wanted is {layout.pack_id:016x}"
        )
    place = (superblock.layer, superblock.column)
    if place != (layout.layer, layout.column):
        raise IdentityError(
            f"holds layer {place[0]} column {place[1]}; wanted is layer {layout.layer} column {layout.column}"
        )
    rows = layout.rows
    for name, found, wanted in (
        ("row format", superblock.format_id, rows.format_id),
        ("bytes per row", superblock.row_bytes, rows.row_bytes),
        ("rows per block", superblock.rows_per_block, rows.rows_per_block),
        ("rows", superblock.num_rows, layout.num_rows),
        ("prime", superblock.prime, layout.num_rows),
        ("blocks", superblock.num_blocks, layout.num_blocks),
    ):
        if found != wanted:
            raise IdentityError(f"has {name} {found}; wanted is {wanted}")


__all__ = [
    "BLOCK_BYTES",
    "CRC_BYTES",
    "FP8_FORMAT",
    "HEADER_BYTES",
    "HEADER_OFFSET",
    "MAJOR",
    "MINOR",
    "NVFP4_FORMAT",
    "ColumnLayout",
    "RowFormat",
    "Superblock",
    "check_superblock",
    "decode_superblock",
    "encode_superblock",
    "fp8_rows",
    "nvfp4_rows",
    "row_format",
]
