"""The bytes of superblocks and blocks, parsed here once more from the written format, and what checking sees."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deskfleet_engram.blocks import check_blocks, current_accelerator, encode_blocks, use_accelerator
from deskfleet_engram.crc32c import advance_rows, crc32c, crc32c_rows
from deskfleet_engram.errors import EngramError, FormatError, IdentityError
from deskfleet_engram.format import (
    ColumnLayout,
    check_superblock,
    decode_superblock,
    encode_superblock,
    fp8_rows,
    nvfp4_rows,
    row_format,
)

IDENTITY = hashlib.sha256(b"some checkpoint").digest()
FORMATS = {"fp8": fp8_rows(256), "nvfp4": nvfp4_rows(256), "narrow": fp8_rows(64), "odd": nvfp4_rows(48)}


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial is defined."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def layout_of(name: str, num_rows: int = 100, column: int = 7) -> ColumnLayout:
    return ColumnLayout(FORMATS[name], IDENTITY, layer=14, column=column, num_rows=num_rows)


def packed(layout: ColumnLayout, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return rows [R, row_bytes] and the blocks [B, 4096] that hold them."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (layout.num_rows, layout.rows.row_bytes), dtype=np.uint8)
    blocks = np.full((layout.num_blocks, 4096), 0xEE, dtype=np.uint8)
    split = layout.rows.weight_bytes
    weight, scale = np.ascontiguousarray(rows[:, :split]), np.ascontiguousarray(rows[:, split:])
    encode_blocks(layout, 0, weight, scale, blocks)
    return rows, blocks


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_crc32c_of_published_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    width=st.integers(0, 41),
    seed=st.integers(0, 2**32 - 1),
    cut=st.integers(0, 41),
)
def test_crc32c_of_rows_equals_the_definition_however_cut(
    count: int, width: int, seed: int, cut: int
) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)
    expected = [slow_crc32c(row.tobytes()) for row in rows]
    assert crc32c_rows(rows).tolist() == expected
    states = np.full(count, 0xFFFFFFFF, dtype=np.uint32)
    states = advance_rows(advance_rows(states, rows[:, :cut]), rows[:, cut:])
    assert (~states).tolist() == expected


def test_crc32c_of_more_rows_than_a_batch() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (9000, 6), dtype=np.uint8)
    found = crc32c_rows(rows)
    for index in (0, 4095, 4096, 8191, 8192, 8999):
        assert found[index] == slow_crc32c(rows[index].tobytes())


@pytest.mark.parametrize(
    ("name", "row_bytes", "per_block"),
    [("fp8", 264, 15), ("nvfp4", 144, 27), ("narrow", 66, 57), ("odd", 27, 130)],
)
def test_rows_per_block(name: str, row_bytes: int, per_block: int) -> None:
    assert (FORMATS[name].row_bytes, FORMATS[name].rows_per_block) == (row_bytes, per_block)
    assert row_format(FORMATS[name].format_id, FORMATS[name].head_dim) == FORMATS[name]


def test_sizes_of_the_published_tables() -> None:
    layout = ColumnLayout(FORMATS["fp8"], IDENTITY, layer=1, column=0, num_rows=16_000_057)
    assert layout.num_blocks == 1_066_671
    assert layout.file_bytes == 4096 * 1_066_672
    assert layout.file_name == "L01/c00.egp"


@pytest.mark.parametrize(
    "make", [lambda: fp8_rows(40), lambda: nvfp4_rows(8), lambda: fp8_rows(4096), lambda: row_format(3, 256)]
)
def test_row_formats_that_cannot_be(make: Any) -> None:
    with pytest.raises(FormatError):
        make()


def test_superblock_bytes() -> None:
    layout = layout_of("fp8", num_rows=16_000_057)
    data = encode_superblock(layout)
    assert len(data) == 4096
    fields = struct.unpack_from("<4sHHHHIQIIQQQ32s", data)
    pack_id = int.from_bytes(IDENTITY[:8], "little")
    assert fields == (b"EGP1", 1, 0, 1, 264, 15, pack_id, 14, 7, 16_000_057, 1_066_671, 16_000_057, IDENTITY)
    assert data[88:4092] == bytes(4004)
    assert struct.unpack_from("<I", data, 4092) == (slow_crc32c(data[:4092]),)
    check_superblock(layout, decode_superblock(data))


@pytest.mark.parametrize("name", list(FORMATS))
def test_block_bytes(name: str) -> None:
    layout = layout_of(name, num_rows=2 * FORMATS[name].rows_per_block + 3)
    rows, blocks = packed(layout)
    per_block, width = layout.rows.rows_per_block, layout.rows.row_bytes
    pack_id = int.from_bytes(IDENTITY[:8], "little")
    for number, block in enumerate(blocks):
        raw = block.tobytes()
        count = 3 if number == 2 else per_block
        header = struct.unpack_from("<4sHHQIIQQI16sI", raw, 4032)
        first = number * per_block
        assert header[:9] == (b"EGPB", 1, layout.rows.format_id, pack_id, 14, 7, number, first, count)
        assert header[9] == bytes(16)
        table = raw[per_block * width : per_block * (width + 4)]
        assert header[10] == slow_crc32c(raw[4032:4092] + table)
        assert raw[per_block * (width + 4) : 4032].strip(b"\0") == b""
        for slot in range(per_block):
            stored = struct.unpack_from("<I", table, 4 * slot)[0]
            row = raw[slot * width : (slot + 1) * width]
            if slot < count:
                assert row == rows[first + slot].tobytes()
                assert stored == slow_crc32c(struct.pack("<QIIQ", pack_id, 14, 7, first + slot) + row)
            else:
                assert (row, stored) == (bytes(width), 0)


@pytest.mark.parametrize("name", list(FORMATS))
def test_blocks_encoded_in_pieces_are_the_same(name: str) -> None:
    layout = layout_of(name, num_rows=300 * FORMATS[name].rows_per_block + 1)
    rows, blocks = packed(layout)
    per_block, split = layout.rows.rows_per_block, layout.rows.weight_bytes
    for first, last in ((0, 1), (1, 299), (299, 301)):
        part = rows[first * per_block : last * per_block]
        out = np.empty((last - first, 4096), dtype=np.uint8)
        weight, scale = np.ascontiguousarray(part[:, :split]), np.ascontiguousarray(part[:, split:])
        encode_blocks(layout, first, weight, scale, out)
        assert np.array_equal(out, blocks[first:last])
    assert check_blocks(layout, 0, blocks) == []
    assert check_blocks(layout, 299, blocks[299:]) == []


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_flipped_bit_of_a_block_is_found_at_its_place(name: str) -> None:
    layout = layout_of(name, num_rows=2 * FORMATS[name].rows_per_block - 2)
    per_block, width = layout.rows.rows_per_block, layout.rows.row_bytes
    _, blocks = packed(layout)
    random = np.random.default_rng(3)
    table, used = per_block * width, per_block * (width + 4)
    positions = [*range(table, 4096), *random.integers(0, table, 200).tolist()]
    for position in positions:
        blocks[1, position] ^= np.uint8(1 << random.integers(8))
        faults = check_blocks(layout, 0, blocks)
        assert len(faults) == 1
        assert faults[0].block == 1
        if position < (per_block - 2) * width:
            assert (faults[0].kind, faults[0].row) == ("checksum", per_block + position // width)
        elif position < table or used <= position < 4032:
            assert (faults[0].kind, faults[0].row) == ("fill", None)
        else:
            assert (faults[0].kind, faults[0].row) == ("checksum", None)
        blocks[1] = packed(layout)[1][1]


def test_sound_blocks_of_another_place_are_misplaced() -> None:
    layout = layout_of("fp8")
    _, blocks = packed(layout)
    others = {
        "block": blocks[[1, 0, 2, 3, 4, 5, 6]],
        "column": packed(layout_of("fp8", column=8))[1],
        "pack": packed(ColumnLayout(FORMATS["fp8"], bytes(32), 14, 7, 100))[1],
        "layer": packed(ColumnLayout(FORMATS["fp8"], IDENTITY, 1, 7, 100))[1],
    }
    for what, other in others.items():
        faults = check_blocks(layout, 0, other)
        expected = [0, 1] if what == "block" else list(range(7))
        assert [(fault.block, fault.kind) for fault in faults] == [
            (number, "misplaced") for number in expected
        ]
    # Even a header forged to fit does not let a row of elsewhere pass.
    forged = others["column"].copy()
    forged[:, 4032:] = blocks[:, 4032:]
    assert {fault.kind for fault in check_blocks(layout, 0, forged)} == {"checksum"}


def test_a_block_of_zeros_is_a_hole() -> None:
    layout = layout_of("nvfp4")
    _, blocks = packed(layout)
    blocks[2] = 0
    assert [(f.block, f.row, f.kind) for f in check_blocks(layout, 0, blocks)] == [(2, None, "hole")]


def test_a_last_block_that_claims_more_rows_is_misplaced() -> None:
    short, long = layout_of("fp8", num_rows=97), layout_of("fp8", num_rows=100)
    _, blocks = packed(long)
    assert [(f.block, f.kind) for f in check_blocks(short, 0, blocks)] == [(6, "misplaced")]


@pytest.mark.parametrize("position", [0, 3, 4, 20, 60, 88, 4000, 4092, 4095])
def test_a_damaged_superblock(position: int) -> None:
    data = bytearray(encode_superblock(layout_of("fp8")))
    data[position] ^= 0x10
    with pytest.raises(FormatError):
        decode_superblock(bytes(data))


def resealed(data: bytearray) -> bytes:
    data[4092:] = struct.pack("<I", crc32c(bytes(data[:4092])))
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (16, "<Q", 5, "belongs to pack 0000000000000005"),
        (56, "<Q", 5, "belongs to pack"),
        (24, "<I", 1, "holds layer 1 column 7; wanted is layer 14 column 7"),
        (28, "<I", 9, "holds layer 14 column 9"),
        (8, "<H", 2, "has row format 2; wanted is 1"),
        (10, "<H", 144, "has bytes per row 144"),
        (12, "<I", 27, "has rows per block 27"),
        (32, "<Q", 101, "has rows 101"),
        (40, "<Q", 8, "has blocks 8"),
        (48, "<Q", 97, "has prime 97"),
    ],
)
def test_a_superblock_of_something_else(offset: int, code: str, value: int, message: str) -> None:
    layout = layout_of("fp8")
    data = bytearray(encode_superblock(layout))
    struct.pack_into(code, data, offset, value)
    superblock = decode_superblock(resealed(data))
    with pytest.raises(IdentityError, match=message):
        check_superblock(layout, superblock)


def test_versions() -> None:
    layout = layout_of("fp8")
    data = bytearray(encode_superblock(layout))
    struct.pack_into("<HH", data, 4, 1, 9)
    check_superblock(layout, decode_superblock(resealed(data)))  # a later minor version
    struct.pack_into("<HH", data, 4, 2, 0)
    with pytest.raises(IdentityError, match=r"format version 2\.0; this reader knows 1\.x"):
        decode_superblock(resealed(data))


@settings(max_examples=200, deadline=None)
@given(data=st.one_of(st.binary(max_size=64), st.binary(min_size=4096, max_size=4096)))
def test_random_bytes_are_no_superblock(data: bytes) -> None:
    with pytest.raises(EngramError):
        check_superblock(layout_of("fp8"), decode_superblock(data))


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 4091), patch=st.binary(min_size=1, max_size=16))
def test_a_superblock_with_any_fields_is_the_right_one_or_refused(start: int, patch: bytes) -> None:
    layout = layout_of("fp8")
    original = encode_superblock(layout)
    data = bytearray(original)
    data[start : start + len(patch)] = patch
    data = bytearray(resealed(data[:4096].ljust(4096, b"\0")))
    try:
        check_superblock(layout, decode_superblock(bytes(data)))
    except EngramError:
        return
    # Accepted: only the minor version and bytes without a meaning may differ.
    assert data[:6] + data[8:88] == original[:6] + original[8:88]


@pytest.mark.parametrize("bad", ["rows", "width", "dtype", "blocks"])
def test_shapes_that_do_not_fit(bad: str) -> None:
    layout = layout_of("fp8")
    rows = 99 if bad == "rows" else 100
    weight = np.zeros((rows, 255 if bad == "width" else 256), dtype=np.int8 if bad == "dtype" else np.uint8)
    out = np.zeros((8 if bad == "blocks" else 7, 4096), dtype=np.uint8)
    with pytest.raises(FormatError):
        encode_blocks(layout, 0, weight, np.zeros((rows, 8), dtype=np.uint8), out)  # type: ignore[arg-type]


class Numpy:
    """An accelerator that is numpy once more, unless told to be wrong."""

    name = "stand-in"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.calls = 0

    def encode_blocks(self, layout: ColumnLayout, first: int, weight: Any, scale: Any, out: Any) -> None:
        self.calls += 1
        use_accelerator(None)
        encode_blocks(layout, first, weight, scale, out)
        if self.wrong == "encode":
            out[-1, -1] ^= 1

    def blocks_are_sound(self, layout: ColumnLayout, first: int, blocks: Any) -> bool:
        self.calls += 1
        use_accelerator(None)
        sound = not check_blocks(layout, first, blocks)
        if self.wrong == "misses fill":
            return sound or bool(blocks[2, 2000])
        return sound if self.wrong != "pessimist" else False


@pytest.mark.parametrize("wrong", ["encode", "misses fill", "pessimist"])
def test_an_accelerator_that_differs_is_not_used(wrong: str) -> None:
    with pytest.raises(FormatError, match="unlike numpy; it is not used"):
        use_accelerator(Numpy(wrong))
    assert current_accelerator() is None


def test_an_accelerator_takes_over() -> None:
    accelerator = Numpy()
    try:
        use_accelerator(accelerator)
        assert current_accelerator() is accelerator
        before = accelerator.calls
        layout = layout_of("fp8")
        _, blocks = packed(layout)
        assert accelerator.calls == before + 1
        use_accelerator(accelerator)
        assert check_blocks(layout, 0, blocks) == []
    finally:
        use_accelerator(None)
